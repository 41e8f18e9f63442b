"""What the gradients say that MindSpore's optimizer is called with: signs, distribution, extremes, norm."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from mindspore import Tensor

from trainermon.core.gradient_signs import WORD_BITS, GradientPart, IndexBox, SignBitmaps, SignCounts
from trainermon.core.values import STATISTICS
from trainermon.dump.mindspore.tensors import as_array
from trainermon.hooks.names import chosen
from trainermon.monitor.gradient_probe.records import GradientReading
from trainermon.monitor.mindspore.training import CellTraining
from trainermon.statistics.mindspore.moments import MomentsOfTensors


class CellGradientReader:
    """Reads the gradients of chosen parameters of a step; what `GradientReader` is for torch.

    Args:
        training: What is watched.
        params: Names, name prefixes or `*` patterns; none: all parameters.
        bounds: What elements are counted by.
        signs: Whether signs are read.
        checksum: Whether the CRC-32 is computed.

    Attributes:
        gradients: Those of the step, in the order of the optimizer's parameters.
    """

    def __init__(
        self,
        training: CellTraining,
        *,
        params: Sequence[str] = (),
        bounds: Sequence[float] = (),
        signs: bool = True,
        checksum: bool = False,
    ) -> None:
        self.gradients: Sequence[Tensor] = ()
        self._training = training
        self._indices = [i for i, p in enumerate(training.parameters) if chosen(p.name, params, p.stage)]
        self._bounds = tuple(bounds)
        self._takes_signs, self._takes_checksum = signs, checksum
        self._moments = MomentsOfTensors()

    @property
    def names(self) -> list[str]:
        """The names of the chosen parameters."""
        return [self._training.parameters[i].name for i in self._indices]

    def read(self) -> list[GradientReading]:
        """Return a reading of every chosen parameter; waits for the gradients, and changes nothing."""
        chosen_ones = [i for i in self._indices if i < len(self.gradients) and self.gradients[i].size]
        tensors = [self.gradients[i] for i in chosen_ones]
        rows = np.empty((len(tensors), len(STATISTICS)))
        self._moments.write(tensors, rows)
        return [self._reading(*one) for one in zip(chosen_ones, tensors, rows.tolist(), strict=True)]

    def _reading(self, index: int, tensor: Tensor, row: Sequence[float]) -> GradientReading:
        named = dict(zip(STATISTICS, row, strict=True))
        has_numbers = named["min"] <= named["max"]
        values = as_array(tensor).reshape(-1)
        values = values.astype(np.float32) if values.dtype == np.float16 else values
        at_most = tuple(int(np.count_nonzero(values <= values.dtype.type(bound))) for bound in self._bounds)
        signs = SignBitmaps(_bitmap(values > 0), _bitmap(values < 0)) if self._takes_signs else None
        return GradientReading(
            self._part(index),
            SignCounts(int(named["zeros"]), int(named["nans"]), at_most),
            signs,
            max=named["max"] if has_numbers else math.nan,
            min=named["min"] if has_numbers else math.nan,
            norm=math.sqrt(named["sum_sq"]),
            checksum=zlib.crc32(values.astype(np.float32).tobytes()) if self._takes_checksum else None,
            num_infs=int(named["infs"]),
        )

    @functools.cache  # noqa: B019  # a reader lives as long as the training
    def _part(self, index: int) -> GradientPart:
        shape = tuple(self._training.parameters[index].tensor.shape)
        box = IndexBox(starts=(0,) * len(shape), sizes=shape)
        return GradientPart(
            name=self._training.parameters[index].name, shape=shape, boxes=(box,), length=math.prod(shape)
        )


def _bitmap(is_set: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64]:
    """Return booleans as words, element i in bit i % 64 of word i // 64."""
    packed = np.packbits(is_set, bitorder="little")
    words = np.zeros(-(-is_set.size // WORD_BITS), np.uint64)
    words.view(np.uint8)[: packed.size] = packed
    return words
