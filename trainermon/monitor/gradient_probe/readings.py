"""What one step's reduced gradients say: signs, distribution, extremes, norm, of what this rank's optimizer holds."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from trainermon.core.gradient_signs import GradientPart, SignBitmaps, SignCounts
from trainermon.core.values import STATISTICS, Coordinates
from trainermon.hooks.names import chosen
from trainermon.monitor.frameworks.boxes import boxes_of
from trainermon.monitor.gradient_probe.records import GradientReading
from trainermon.monitor.taps.training import Training
from trainermon.statistics.crc32 import moments_and_crc32
from trainermon.statistics.layout import plain
from trainermon.statistics.signs import TensorSigns, signs_of


class GradientReader:
    """Reads the gradients of chosen parameters at the entry of an optimizer step.

    Args:
        training: What is watched.
        coordinates: Where this rank stands.
        params: Names, name prefixes or `*` patterns; none: all parameters.
        bounds: What elements are counted by.
        signs: Whether signs are read.
        checksum: Whether the CRC-32 is computed.
    """

    def __init__(  # noqa: PLR0913  # what is read of what
        self,
        training: Training,
        coordinates: Coordinates,
        *,
        params: Sequence[str] = (),
        bounds: Sequence[float] = (),
        signs: bool = True,
        checksum: bool = False,
    ) -> None:
        self._training = training
        self._indices = [i for i, p in enumerate(training.parameters) if chosen(p.name, params, p.stage)]
        self._bounds = tuple(bounds)
        self._takes_signs, self._takes_checksum = signs, checksum
        self._boxes = {i: boxes_of(training.parameters[i], training.roots, coordinates) for i in self._indices}

    @property
    def names(self) -> list[str]:
        """The names of the chosen parameters."""
        return [self._training.parameters[i].name for i in self._indices]

    @torch.no_grad()
    def read(self) -> list[GradientReading]:
        """Return a reading of every chosen parameter that has a gradient here.

        One pass over the gradients, on a CPU (a second one for signs and checksums both); nothing is changed, no
        collective. On an accelerator it waits for the device.
        """
        gradients = self._training.reduced_gradients()
        present = [i for i in self._indices if gradients[i] is not None and plain(gradients[i]).numel()]  # type: ignore[arg-type]
        tensors = [plain(gradients[i]) for i in present]  # type: ignore[arg-type]
        if not tensors:
            return []
        signs: Sequence[TensorSigns | None] = [None] * len(tensors)
        checksums: Sequence[int | None] = [None] * len(tensors)
        if self._takes_checksum:
            rows, checksums = moments_and_crc32(tensors)
        if self._takes_signs:
            signs = found = signs_of(tensors, self._bounds)
            rows = [each.moments.tolist() for each in found]
        return [self._reading(*one) for one in zip(present, rows, signs, checksums, strict=True)]

    def _reading(
        self, index: int, row: Sequence[float], signs: TensorSigns | None, checksum: int | None
    ) -> GradientReading:
        named = dict(zip(STATISTICS, row, strict=True))
        has_numbers = named["min"] <= named["max"]
        return GradientReading(
            self._part(index, int(named["count"])),
            SignCounts(int(named["zeros"]), int(named["nans"]), () if signs is None else tuple(signs.at_most.tolist())),
            None if signs is None else SignBitmaps(signs.positive, signs.negative),
            max=named["max"] if has_numbers else math.nan,
            min=named["min"] if has_numbers else math.nan,
            norm=math.sqrt(named["sum_sq"]),
            checksum=checksum,
            num_infs=int(named["infs"]),
        )

    @functools.cache  # noqa: B019  # a reader lives as long as the training
    def _part(self, index: int, length: int) -> GradientPart:
        parameter, held = self._training.parameters[index], self._boxes[index]
        return GradientPart(
            name=parameter.name,
            shape=parameter.owned.shape,
            boxes=held.boxes,
            dim=held.dim,
            offset=held.offset,
            length=length,
            is_counted=parameter.owned.in_global_norm,
        )
