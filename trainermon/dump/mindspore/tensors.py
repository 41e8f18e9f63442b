"""The tensors of MindSpore, as a dump asks about them: read, sliced, copied, saved."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore import Tensor

from trainermon.core.private_files import open_private
from trainermon.core.values import STATISTICS
from trainermon.dump.debugger_config import TensorSlice
from trainermon.dump.files.numbers import ElementKind, numbers_text
from trainermon.dump.forms import TensorLeaf, TensorReading
from trainermon.statistics.mindspore.moments import MomentsOfTensors

MAX_REMEMBERED = 4096
_INTEGERS = tuple(getattr(mindspore, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))


class MindSporeTensors:
    """What `FrameworkTensors` asks, of MindSpore's tensors in the host's memory."""

    framework = "mindspore"

    def reader(self) -> MindSporeReader:
        """Return what reads the tensors of one dump."""
        return MindSporeReader()

    def num_bytes(self, tensor: Tensor) -> int:
        """Return how many bytes the elements take."""
        return int(tensor.nbytes)

    def suffix(self, tensor: Tensor, file_format: str) -> str:  # noqa: ARG002  # there is no file of MindSpore's own
        """Return `.npy`, as msprobe has for MindSpore, whatever the user asked for."""
        return ".npy"

    def save(self, tensor: Tensor | npt.NDArray[Any], path: Path | str) -> int:
        """Write a tensor to a file of numpy, of mode 0600; bfloat16 as float32, which holds each of them exactly.

        Raises:
            OSError: The file cannot be written.
        """
        array = as_array(tensor)
        with open(path, "wb", opener=open_private) as file:
            np.save(file, array, allow_pickle=False)
        return int(array.nbytes)

    def sliced(self, tensor: Tensor, slices: Sequence[TensorSlice]) -> npt.NDArray[Any]:
        """Return the part of the tensor that `slices` leave; one that does not fit its shape changes nothing."""
        array = as_array(tensor)
        for part in slices:
            if part.dim < array.ndim and array.shape[part.dim] == part.size:
                array = np.asarray(np.take(array, range(part.begin, min(part.end, part.size)), axis=part.dim))
        return array

    def copied(self, tensor: Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a copy in the host's memory."""
        copied: npt.NDArray[Any] = as_array(tensor).copy()
        return copied

    def checksum(self, tensor: Tensor) -> str:
        """Return the CRC-32 of the elements' bytes in order, 8 hexadecimal digits; of bfloat16 those of its 16 bits."""
        array = np.ascontiguousarray(tensor.asnumpy())
        return f"{zlib.crc32(array.view(np.uint8).reshape(-1)):08x}"  # type: ignore[arg-type]  # of a buffer


class MindSporeReader:
    """Computes statistics at once, and numbers values; see `files.framework.TensorReader`.

    MindSpore counts no writes to a tensor: the same value is the same object with the same statistics.
    """

    waits_for_device = False

    def __init__(self) -> None:
        self._order = 0
        self._moments = MomentsOfTensors()
        self._known: dict[int, tuple[weakref.ref[Tensor], bytes, TensorReading]] = {}

    def next_order(self) -> int:
        """Return the next number, from 1, in the order in which values became known."""
        self._order += 1
        return self._order

    def read(self, leaves: Sequence[TensorLeaf]) -> Sequence[Exception]:
        """Set the statistics of each leaf's tensor as its form's reading; return the errors of those that have none."""
        return [error for leaf in leaves if (error := self._read(leaf)) is not None]

    def reread(self, tensors: Sequence[Any]) -> None:
        """Do nothing: tensors are read each time."""

    def resolve(self) -> None:
        """Do nothing: statistics are there at once."""

    def _read(self, leaf: TensorLeaf) -> Exception | None:
        try:
            leaf.form.reading = self._reading_of(leaf.tensor)
        except (TypeError, ValueError, RuntimeError) as error:
            leaf.form.reading = TensorReading(self.next_order())
            return error
        return None

    def _reading_of(self, tensor: Tensor) -> TensorReading:
        row = np.empty((1, len(STATISTICS)))
        self._moments.write([tensor], row)
        elements, known = row.tobytes(), self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == elements:
            return known[2]
        reading = TensorReading(self.next_order(), numbers_text(row[0].tolist(), element_kind(tensor)))
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[id(tensor)] = (weakref.ref(tensor), elements, reading)
        return reading


def element_kind(tensor: Tensor) -> ElementKind:
    """Return what the elements of a tensor are; a complex number counts as a fraction."""
    if tensor.dtype == mindspore.bool_:
        return ElementKind.BOOLEAN
    return ElementKind.INTEGER if tensor.dtype in _INTEGERS else ElementKind.FRACTION


def as_array(tensor: Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the elements as numpy has them, without a copy where it can; bfloat16 as float32."""
    if isinstance(tensor, np.ndarray):
        return tensor
    is_bfloat16 = tensor.dtype == mindspore.bfloat16
    array: npt.NDArray[Any] = (tensor.astype(mindspore.float32) if is_bfloat16 else tensor).asnumpy()
    return array
