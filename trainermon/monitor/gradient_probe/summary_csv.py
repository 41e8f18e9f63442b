"""msprobe's files of a gradient probe: `grad_summary_<step>.csv`, and one numpy file of booleans for each parameter."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainermon.core.private_files import make_private_folder, replace_file, replacing
from trainermon.core.values import GradientLevel
from trainermon.monitor.gradient_probe.records import GradientReading

_STATISTICS = ("max", "min", "norm", "shape")


def write_summary(
    path: Path, readings: Sequence[GradientReading], level: GradientLevel, bounds: Sequence[float]
) -> None:
    """Write one row for each parameter: checksum (L0) or distribution (L2), then max, min, norm and shape.

    A share of the distribution counts zeros in its interval and in `=0`, NaNs in none. The checksum is the CRC-32 of
    the elements as float32, as 8 hexadecimal digits.

    Raises:
        OSError: It cannot be written.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\r\n")
    intervals = [*_intervals(bounds), "=0"] if level is GradientLevel.L2 else []
    checksum = ["MD5"] if level is GradientLevel.L0 else []
    table.writerow(["param_name", *checksum, *intervals, *_STATISTICS])
    for reading in readings:
        first = [f"{reading.checksum:08x}"] if checksum else list(_shares(reading)) if intervals else []
        shape = list(reading.part.shape)
        table.writerow([reading.part.name, *first, reading.max, reading.min, reading.norm, shape])
    make_private_folder(path.parent)
    replace_file(path, b"\xef\xbb\xbf" + text.getvalue().encode())


def write_booleans(folder: Path, readings: Sequence[GradientReading]) -> None:
    """Write `<folder>/<parameter>.npy`: which elements of what this rank holds are greater than zero.

    In the shape of the parameter if the rank holds all of it, else flat.

    Raises:
        OSError: One cannot be written.
    """
    make_private_folder(folder)
    for reading in readings:
        if reading.signs is None:
            continue
        bits = np.unpackbits(reading.signs.positive.view(np.uint8), bitorder="little", count=reading.part.length)
        shape: Any = reading.part.shape if reading.part.is_whole else (-1,)
        with replacing(folder / f"{reading.part.name}.npy") as file:
            np.save(file, bits.view(np.bool_).reshape(shape))


def _intervals(bounds: Sequence[float]) -> Iterator[str]:
    edges = ["-inf", *(f"{bound:g}" for bound in bounds), "inf"]
    for low, high in itertools.pairwise(edges):
        yield f"({low}, {high}{')' if high == 'inf' else ']'}"


def _shares(reading: GradientReading) -> Iterator[float]:
    length, counts, below = reading.part.length, reading.counts, 0
    for count in (*counts.at_most, length - counts.num_nans):
        yield (count - below) / length
        below = count
    yield counts.num_zeros / length
