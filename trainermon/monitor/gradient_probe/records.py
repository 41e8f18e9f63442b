"""What is known of one gradient, whatever framework it is of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

from trainermon.core.gradient_signs import GradientPart, SignBitmaps, SignCounts


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GradientReading:
    """One parameter's gradient as this rank's optimizer is about to use it.

    Attributes:
        part: What is held of which parameter.
        counts: How many of its elements are what.
        signs: The two bitmaps; None where they were not asked for.
        max: Largest element that is finite; NaN if there is none.
        min: Smallest.
        norm: L2 norm, of the elements that are finite.
        checksum: CRC-32 of the elements as float32; None where it was not asked for.
        num_infs: Infinite elements.
    """

    part: GradientPart
    counts: SignCounts
    signs: SignBitmaps | None
    max: float
    min: float
    norm: float
    checksum: int | None
    num_infs: int = 0

    @property
    def written(self) -> tuple[GradientPart, SignCounts, SignBitmaps]:
        """What a file of signs has of it.

        Raises:
            ValueError: Its signs were not asked for.
        """
        if self.signs is None:
            raise ValueError(f"{self.part.name}: found no signs, expected a reading with signs")
        return self.part, self.counts, self.signs


def infinite_in(readings: Iterable[GradientReading]) -> tuple[str, ...]:
    """Return the names of the parameters that have an infinite element."""
    return tuple(reading.part.name for reading in readings if reading.num_infs)


class SignsReader(Protocol):
    """Interface of what reads the gradients of a step."""

    def read(self) -> Sequence[GradientReading]:
        """Return a reading of every chosen parameter that has a gradient here."""


class SignsReaderFactory(Protocol):
    """Interface of what makes a reader; see `GradientReader`."""

    def __call__(self, *, params: Sequence[str], bounds: Sequence[float]) -> SignsReader:
        """Return a reader of the signs of these parameters, whose elements are counted by these bounds."""
