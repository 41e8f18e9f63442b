"""The numbers of a tensor's form: taken at once, over finite elements, non-finite ones counted."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensor

from trainermon.core.values import STATISTICS
from trainermon.dump.files.numbers import ElementKind, numbers_texts
from trainermon.dump.forms import TensorLeaf, TensorReading
from trainermon.statistics.kernel import write, write_single
from trainermon.statistics.layout import (
    CODED,
    PLAIN_TYPES,
    is_strided,
    is_whole,
    outside_transforms,
    readable,
    stored_elements,
    untransformed,
)
from trainermon.statistics.native import ROW_BYTES

# Beyond this many remembered tensors the memory starts afresh; most of them are long gone then.
MAX_REMEMBERED = 4096
# Tensors of one device whose numbers wait there at a time.
MAX_ROWS = 4096
# Neither complex, nor booleans, nor quantized.
REAL = frozenset(
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    ]
)

_CPU = torch.device("cpu")
_T = TypeVar("_T")


class TensorMemory(Generic[_T]):
    """Remembers a note for each tensor it has seen, until the tensor changes (another object, or another version).

    A module's output is the next one's input and often its parent's output: it need not be read again. Tensors are not
    kept alive.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, _T]] = {}

    def recall(self, tensor: Tensor) -> _T | None:
        """Return the note on `tensor`, None if there is none that still holds."""
        known = self._seen.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != tensor._version:
            return None
        return known[2]

    def remember(self, tensor: Tensor, note: _T) -> None:
        """Remember `note` for `tensor`; an inference tensor has no version and is never remembered."""
        try:
            version = tensor._version
        except RuntimeError:
            return
        if len(self._seen) >= MAX_REMEMBERED:
            self._seen.clear()
        self._seen[id(tensor)] = (weakref.ref(tensor), version, note)


class TensorReadings(TensorMemory[TensorReading]):
    """Computes the statistics of a dump's tensors, and numbers the values in the order in which they became known.

    A tensor that was read before and is unchanged keeps its statistics and its number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._order = 0
        self._statistics = TensorStatistics()
        self._take = self._statistics.take

    @property
    def waits_for_device(self) -> bool:
        """Whether `resolve` would have to wait for an accelerator to finish its work."""
        return self._statistics.waits_for_device

    def next_order(self) -> int:
        """Return the next number, from 1, in the order in which values became known."""
        self._order += 1
        return self._order

    def read(self, leaves: Sequence[TensorLeaf]) -> list[Exception]:
        """Start the statistics of each leaf's tensor as it is now, and set them as its form's reading.

        `resolve` fills in the numbers.

        Returns:
            Errors of tensors whose statistics cannot be computed.
        """
        others: list[tuple[Tensor, TensorReading]] = []
        seen = self._seen
        for _, tensor, form in leaves:
            known = seen.get(id(tensor))  # as `recall` does, whose call would cost as much again
            if known is not None and known[0]() is tensor and known[1] == tensor._version:  # type: ignore[union-attr]
                form.reading = known[2]
                continue
            self._order += 1
            form.reading = reading = TensorReading(self._order)
            self.remember(tensor, reading)
            if not self._take(tensor, reading):
                others.append((tensor, reading))
                if (behind := untransformed(tensor)) is not tensor:
                    self._seen.pop(id(tensor), None)  # writes to what is behind it are not counted on it
                    form.show_batch(behind.shape)
        return self._fill(others) if others else []

    def reread(self, tensors: Sequence[Tensor]) -> None:
        """Drop the statistics remembered for `tensors`, which were changed without torch's version counter noticing."""
        for tensor in tensors:
            self._seen.pop(id(tensor), None)

    def resolve(self) -> None:
        """Fill the numbers of all started statistics into the readings; waits for the device."""
        self._statistics.resolve()

    def _fill(self, fresh: Sequence[tuple[Tensor, TensorReading]]) -> list[Exception]:
        """Take statistics; a tensor that cannot be read costs its own, not the entry."""
        try:
            self._statistics.fill(fresh)
        except (RuntimeError, TypeError, ValueError) as error:
            return [error] if len(fresh) == 1 else [found for each in fresh for found in self._fill([each])]
        return []


class TensorStatistics:
    """Starts the statistics of tensors on their device, and later copies all their numbers to the host together.

    Up to 4 096 tensors of a device wait; on an accelerator they are taken in stream order, and one copy brings them.

    Attributes:
        take: Does what `fill` does with one tensor and its reading, and returns whether it could: see `write_single`.
    """

    def __init__(self) -> None:
        host = _WrittenRows(_CPU)
        self._rows: dict[torch.device, _WrittenRows] = {_CPU: host}
        self.take = host.take

    def fill(self, fresh: Sequence[tuple[Tensor, TensorReading]]) -> None:
        """Start the statistics of tensors as they are now; `resolve` fills them into the readings.

        Empty tensors have none.
        """
        groups: dict[torch.device, list[tuple[Tensor, TensorReading]]] = {}
        for each in fresh:
            tensor = each[0]
            if tensor.numel() and has_elements(tensor):
                groups.setdefault(tensor.device, []).append(each)
        for device, group in groups.items():
            rows = self._rows.get(device)
            if rows is None:
                rows = self._rows[device] = _WrittenRows(device)
            rows.add(group)

    @property
    def waits_for_device(self) -> bool:
        """Whether `resolve` would have to wait for an accelerator to finish its work."""
        return any(rows.waits and device.type != "cpu" for device, rows in self._rows.items())

    def resolve(self) -> None:
        """Fill the numbers of all started statistics into their readings; waits for the device."""
        for rows in self._rows.values():
            rows.bring()


class _WrittenRows:
    """The rows of one device that were written and not brought to their readings yet."""

    def __init__(self, device: torch.device) -> None:
        self._rows = torch.empty(MAX_ROWS, len(STATISTICS), dtype=torch.float64, device=device)
        self._begin = self._rows.data_ptr()
        self._waiting: list[tuple[TensorReading, torch.dtype | None]] = []  # None: of the parts of complex numbers

    def take(self, tensor: Tensor, reading: TensorReading) -> bool:
        waiting = self._waiting
        if len(waiting) == MAX_ROWS:
            self.bring()
        try:
            if not write_single(tensor, self._begin + ROW_BYTES * len(waiting)):
                return False
        except RuntimeError:  # whoever reads it in the other way tells why
            return False
        waiting.append((reading, tensor.dtype))
        return True

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    def add(self, group: Sequence[tuple[Tensor, TensorReading]]) -> None:
        most = MAX_ROWS // 2  # complex ones have two rows
        for first in range(0, len(group), most):
            part = group[first : first + most]
            if len(self._waiting) + 2 * len(part) > MAX_ROWS:
                self.bring()
            tensors = [_real(tensor) for tensor, _ in part]
            waiting: list[tuple[TensorReading, torch.dtype | None]] = [(one, tensor.dtype) for tensor, one in part]
            for tensor, reading in part:
                if tensor.is_complex():
                    tensors.append(_parts(tensor))
                    waiting.append((reading, None))
            write(tensors, self._rows, len(self._waiting))
            self._waiting += waiting

    def bring(self) -> None:
        if not self._waiting:
            return
        # a flush may come where a function mode is on, and records what is called, or a function transform
        with DisableTorchFunction(), outside_transforms():
            rows = self._rows[: len(self._waiting)].cpu().numpy()
        texts = numbers_texts(rows, [element_kind(dtype) for _, dtype in self._waiting])
        for (reading, dtype), text in zip(self._waiting, texts, strict=True):
            reading.numbers = f'{reading.numbers}, "parts": {{{text}}}' if dtype is None else text
        self._waiting.clear()


@functools.cache
def element_kind(dtype: torch.dtype | None) -> ElementKind:
    """Return what the elements of a dtype are; a complex number counts as a fraction, and so do its parts (None)."""
    if dtype is None:
        return ElementKind.FRACTION
    if dtype is torch.bool:
        return ElementKind.BOOLEAN
    is_fraction = dtype.is_floating_point or dtype.is_complex or (dtype in CODED and not is_whole(dtype))
    return ElementKind.FRACTION if is_fraction else ElementKind.INTEGER


def has_elements(tensor: Tensor) -> bool:
    """Return whether `tensor` has memory and at least one element to read; a meta or a fake tensor has only a shape."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor with the elements of `tensor` that the kernels can read; mostly `tensor` itself."""
    tensor = untransformed(tensor)
    if type(tensor) in PLAIN_TYPES and tensor.dtype in REAL and is_strided(tensor):
        return tensor
    return _unwrapped(tensor)


@torch.no_grad()
def _unwrapped(tensor: Tensor) -> Tensor:
    tensor = _own(tensor)
    if tensor.is_complex():
        tensor = (tensor.to(torch.complex64) if tensor.dtype is torch.complex32 else tensor).abs()
    return untransformed(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor)


@torch.no_grad()
def _parts(tensor: Tensor) -> Tensor:
    return untransformed(torch.view_as_real(_own(tensor).resolve_conj()))


def _own(tensor: Tensor) -> Tensor:
    """Return a dense tensor with the elements of `tensor`; of a sparse one those that are stored, or a zero."""
    tensor = readable(tensor.detach())
    if not is_strided(tensor):
        stored = readable(stored_elements(tensor).detach())
        tensor = stored if stored.numel() else stored.new_zeros(1)
    return tensor
