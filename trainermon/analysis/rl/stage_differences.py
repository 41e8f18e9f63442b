"""Which stage of which step is the first in which two runs of reinforcement learning differ.

A step goes from prompts to responses, rewards, log-probabilities, advantages and a loss: what differs first in this
order is the cause, what differs after it may be a consequence. Steps are compared in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainermon.core.errors import DumpError
from trainermon.rl.stages import StageFile, stage_files

ORDER = (
    "prompt",
    "response",
    "reward",
    "ref_log_prob",
    "old_log_prob",
    "log_prob",
    "value",
    "return",
    "advantage",
    "kl",
    "loss",
)
"""Stages in the order of a step; a key belongs to the first whose name it contains, and to none: after all of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageDifference:
    """An array that both runs have, compared element by element.

    Attributes:
        key: The stage.
        step: The step.
        rank: The rank.
        micro_step: The micro step.
        part: Which array of the stage, where it has several.
        shapes: Of both.
        equal: Share of the elements that both have and that are equal, 0 to 1.
        first: Position of the first element that is not, in the part that both have; None: all are equal.
        values: The two values there.
        max_abs: The largest difference; NaN where NaN stands on one side only.
        max_relative: The largest difference over the larger of the two magnitudes.
        within_thousandth: Share of elements whose difference is at most a thousandth of the larger magnitude.
        within_hundredth: The same for a hundredth.
    """

    key: str
    step: int
    rank: int
    micro_step: int
    part: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    equal: float
    first: tuple[int, ...] | None
    values: tuple[float, float] | None
    max_abs: float
    max_relative: float
    within_thousandth: float
    within_hundredth: float

    @property
    def is_equal(self) -> bool:
        """Whether shapes and all elements are equal."""
        return self.first is None and self.shapes[0] == self.shapes[1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageComparison:
    """Two runs' stages.

    Attributes:
        sentence: The first difference, in words.
        arrays: Every array that both have, in the order of a run.
        only_first: Those that only the first run has, as `key step 3 rank 0`.
        only_second: Those of the second.
    """

    sentence: str
    arrays: tuple[StageDifference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]

    @property
    def differing(self) -> tuple[StageDifference, ...]:
        """The arrays that are not equal."""
        return tuple(each for each in self.arrays if not each.is_equal)


def compare_stages(run: Path, other: Path) -> StageComparison:
    """Return how the stages of two runs differ; of one array of each is in memory at a time.

    Raises:
        DumpError: A folder has no stages, or a file cannot be read.
    """
    sides = [{file[:5]: file for file in stage_files(folder)} for folder in (run, other)]
    for folder, found in zip((run, other), sides, strict=True):
        if not found:
            raise DumpError(f"{folder}: found no data/KEY/step*/rank*/**/*.npy, expected the stages of a run")
    both = sorted(sides[0].keys() & sides[1].keys(), key=_place)
    arrays = tuple(_difference(sides[0][key], sides[1][key]) for key in both)
    return StageComparison(
        sentence=_sentence(arrays),
        arrays=arrays,
        only_first=tuple(_label(sides[0][key]) for key in sorted(sides[0].keys() - sides[1].keys(), key=_place)),
        only_second=tuple(_label(sides[1][key]) for key in sorted(sides[1].keys() - sides[0].keys(), key=_place)),
    )


def differences(one: np.ndarray, other: np.ndarray) -> dict[str, object]:
    """Return what two arrays differ in, over the part that both have; NaN equals NaN.

    Arrays of other numbers of dimensions are flattened first. The measures are those of msprobe's SingleComparator.
    """
    if one.ndim != other.ndim:
        one, other = one.ravel(), other.ravel()
    shared = tuple(slice(0, min(a, b)) for a, b in zip(one.shape, other.shape, strict=True))
    a, b = one[shared].astype(np.float64), other[shared].astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        unequal = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        size = np.where(unequal, np.abs(a - b), 0.0)
        larger = np.maximum(np.abs(a), np.abs(b))
        relative = np.where(unequal, size / np.where(larger > 0, larger, 1.0), 0.0)
    where = np.argwhere(unequal)
    first = tuple(int(place) for place in where[0]) if len(where) else None
    count = max(1, a.size)
    return {
        "equal": 1.0 - len(where) / count,
        "first": first,
        "values": None if first is None else (float(a[first]), float(b[first])),
        "max_abs": float(size.max()) if a.size else 0.0,
        "max_relative": float(relative.max()) if a.size else 0.0,
        "within_thousandth": float(np.count_nonzero(relative <= 1e-3)) / count,
        "within_hundredth": float(np.count_nonzero(relative <= 1e-2)) / count,
    }


def _difference(one: StageFile, other: StageFile) -> StageDifference:
    arrays = [_loaded(file.path) for file in (one, other)]
    return StageDifference(
        key=one.key, step=one.step, rank=one.rank, micro_step=one.micro_step, part=one.part,
        shapes=(arrays[0].shape, arrays[1].shape), **differences(*arrays),  # type: ignore[arg-type]  # by name
    )  # fmt: skip


def _loaded(path: Path) -> np.ndarray:
    try:
        array: np.ndarray = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DumpError(f"{path}: expected an array as numpy.save writes it; {error}") from error
    return array


def _sentence(arrays: Sequence[StageDifference]) -> str:
    differing = [each for each in arrays if not each.is_equal]
    if not differing:
        return f"All {len(arrays)} arrays that both runs have are equal."
    first = differing[0]
    in_step = [each for each in arrays if each.step == first.step]
    before = sorted(
        {each.key for each in in_step} - {each.key for each in differing if each.step == first.step}, key=_rank_of
    )
    equal = f"; {', '.join(before)} are equal" if before else ""
    return f"The first difference is in {_label(first)}: {_what(first)}{equal}."


def _what(found: StageDifference) -> str:
    if found.first is None:
        return f"shape {list(found.shapes[0])} against {list(found.shapes[1])}, equal in what both have"
    values = f"{found.values[0]:g} against {found.values[1]:g}" if found.values else ""
    place = (
        f"token {found.first[1]} of sample {found.first[0]}"
        if len(found.first) == 2
        else f"element {list(found.first)}"
    )
    return f"from {place} on, {values}; {1 - found.equal:.1%} of the elements differ"


def _label(found: StageFile | StageDifference) -> str:
    part = f".{found.part}" if found.part else ""
    micro = f", micro step {found.micro_step}" if found.micro_step else ""
    return f"{found.key}{part} of step {found.step}, rank {found.rank}{micro}"


def _place(key: tuple[str, int, int, int, str]) -> tuple[int, int, str, int, int, str]:
    name, step, rank, micro_step, part = key
    return step, _rank_of(name), name, rank, micro_step, part


def _rank_of(name: str) -> int:
    return next((number for number, stage in enumerate(ORDER) if stage in name.lower()), len(ORDER))
