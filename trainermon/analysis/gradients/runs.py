"""The signs that a run or a probe has left: our files of bitmaps, or msprobe's numpy files of booleans."""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.core.errors import DumpError
from trainermon.core.gradient_signs import (
    FOLDER,
    WORD_BITS,
    GradientPart,
    IndexBox,
    SignBitmaps,
    StoredSigns,
    parse_signs_name,
    read_signs,
)

_RANK, _STEP = re.compile(r"rank(\d+)"), re.compile(r"step(\d+)")
Steps = Mapping[int, Mapping[int, Callable[[], "RankSigns"]]]


class NonFiniteKinds(NamedTuple):
    """Whether a gradient has an element that is NaN, or infinite; None: nothing that is stored tells."""

    has_nan: bool | None = None
    has_inf: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RankSigns:
    """What one rank held in one step: by parameter its part, and the bitmaps.

    `is_signed` is false where only positive elements are known, as in msprobe's files. `stored` is the file, if it is
    one of ours. `nonfinite` says by parameter what is stored of NaN and infinities; of others nothing is.
    """

    parts: Mapping[str, GradientPart]
    bitmaps: Mapping[str, SignBitmaps]
    is_signed: bool = True
    stored: StoredSigns | None = None
    nonfinite: Mapping[str, NonFiniteKinds] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class GradientRun:
    """A folder with signs.

    Attributes:
        path: The folder.
        steps: By step and rank what reads the signs of that rank.
        is_by_rank: Nothing says how the parts of several ranks make up a parameter (msprobe's files).
    """

    path: Path
    steps: Steps
    is_by_rank: bool


def open_gradients(path: Path) -> GradientRun:
    """Find the signs in a folder: of a run, of a probe (`dump_path`), or of msprobe's probe.

    Cost: lists the folders; nothing is read yet.

    Raises:
        DumpError: There are none.
    """
    if not path.is_dir():
        raise DumpError(f"{path}: found no folder, expected one with signs of gradients, or the run directory")
    for folder in (path / FOLDER, path):
        found = _bitmap_files(folder)
        if found:
            return GradientRun(path, found, is_by_rank=False)
    found = _boolean_files(path)
    if not found:
        runs = sorted(one.parent.name for one in path.glob(f"*/{FOLDER}"))
        if runs:
            raise DumpError(f"{path}: found a folder of runs, expected one of them: {path / runs[-1]}")
        raise DumpError(
            f"{path}: found neither signs/step<N>.rank<R>.bits nor rank<R>/step<N>/*.npy; a run has signs only "
            "with gradient_signs in the configuration of TrainerMon, or by task grad_probe (levels L1 and L2); of "
            "others, `trainermon diagnose RUN --against OTHER` compares what is stored"
        )
    return GradientRun(path, found, is_by_rank=True)


def _bitmap_files(folder: Path) -> Steps:
    steps: dict[int, dict[int, Callable[[], RankSigns]]] = {}
    attempts = sorted(folder.glob("attempt*/*/*.bits"), key=lambda file: _number(file.parents[1].name))
    for file in (*sorted(folder.glob("*.bits")), *attempts):
        place = parse_signs_name(file.name)
        if place is not None and file.is_file():
            steps.setdefault(place[0], {})[place[1]] = _reader(_read_bitmaps, file)
    return steps


def _number(name: str) -> int:
    digits = name.removeprefix("attempt")
    return int(digits) if digits.isdecimal() else -1


def _boolean_files(path: Path) -> Steps:
    steps: dict[int, dict[int, Callable[[], RankSigns]]] = {}
    for ranked in sorted(path.glob("rank*")):
        rank = _RANK.fullmatch(ranked.name)
        for folder in sorted(ranked.glob("step*")) if rank else ():
            step = _STEP.fullmatch(folder.name)
            if rank and step and next(folder.glob("*.npy"), None) is not None:
                steps.setdefault(int(step[1]), {})[int(rank[1])] = _reader(_read_booleans, folder)
    return steps


def _reader(read: Callable[[Path], RankSigns], path: Path) -> Callable[[], RankSigns]:
    return lambda: read(path)


class _Bitmaps(Mapping[str, SignBitmaps]):
    """The bitmaps of a file by name, told apart when the first is asked for: files that are alike need none."""

    def __init__(self, stored: StoredSigns) -> None:
        self._stored = stored

    @functools.cached_property
    def _found(self) -> dict[str, SignBitmaps]:
        return self._stored.bitmaps()

    def __getitem__(self, name: str) -> SignBitmaps:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored.layout.parts)

    def __len__(self) -> int:
        return len(self._stored.layout.parts)


def _read_bitmaps(path: Path) -> RankSigns:
    stored = read_signs(path)
    infinite = stored.header.infinite
    nans = zip(stored.layout.parts, (stored.counts[:, 1] > 0).tolist(), strict=True)
    nonfinite = {name: NonFiniteKinds(has, None if infinite is None else name in infinite) for name, has in nans}
    return RankSigns(stored.layout.parts, _Bitmaps(stored), stored=stored, nonfinite=nonfinite)


def _read_booleans(folder: Path) -> RankSigns:
    parts, bitmaps = {}, {}
    extremes = _extremes(folder.parent / f"grad_summary_{folder.name.removeprefix('step')}.csv")
    for file in _in_order(folder, extremes):
        array = _load(file)
        name, shape = file.name.removesuffix(".npy"), tuple(map(int, array.shape))
        parts[name] = GradientPart(
            name=name, shape=shape, boxes=(IndexBox((0,) * len(shape), shape),), length=int(array.size)
        )
        bitmaps[name] = SignBitmaps(pack(array.ravel()), np.zeros(0, np.uint64))
    nonfinite = {name: _nonfinite(*two) for name, two in extremes.items()}
    return RankSigns(parts, bitmaps, is_signed=False, nonfinite=nonfinite)


def _extremes(summary: Path) -> dict[str, tuple[float, float]]:
    """Return by name, in its order, the largest and the least element that a step's summary has."""
    try:
        with summary.open(encoding="utf-8-sig", newline="") as text:
            return {row["param_name"]: (float(row["max"]), float(row["min"])) for row in csv.DictReader(text)}
    except (OSError, ValueError, KeyError, TypeError, csv.Error):  # without it, or damaged: nothing is known
        return {}


def _nonfinite(largest: float, least: float) -> NonFiniteKinds:
    """Return what the extremes of all elements tell: they are NaN if one is."""
    if math.isnan(largest) or math.isnan(least):
        return NonFiniteKinds(has_nan=True)
    return NonFiniteKinds(has_nan=False, has_inf=math.isinf(largest) or math.isinf(least))


def _in_order(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return a step's files in the order of the model's parameters, where the summary of that step tells it."""
    files = {file.name.removesuffix(".npy"): file for file in sorted(folder.glob("*.npy"))}
    return [files.pop(name) for name in names if name in files] + list(files.values())


def _load(file: Path) -> npt.NDArray[np.bool_]:
    try:
        array: npt.NDArray[Any] = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DumpError(f"{file}: cannot be read: {error}") from error
    if array.dtype != np.bool_:
        raise DumpError(f"{file}: found {array.dtype}, expected booleans: which elements are greater than zero")
    return array


def pack(bits: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return flat booleans as words of 64 bits, the first in the lowest bit, padded with zeros."""
    packed = np.packbits(bits.astype(np.bool_, copy=False), bitorder="little")
    return np.pad(packed, (0, -len(packed) % (WORD_BITS // 8))).view(np.uint64)
