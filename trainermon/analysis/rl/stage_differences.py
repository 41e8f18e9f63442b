"""Which stage of which step is the first in which two runs of reinforcement learning differ.

A step goes from prompts to responses, rewards, log-probabilities, advantages and a loss: what differs first in this
order is the cause, what differs after it may be a consequence. Steps are compared in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainermon.analysis.tensor.files import UnreadTensor, open_tensors
from trainermon.core.errors import DumpError
from trainermon.rl.stages import StageFile, stage_files

Place = tuple[str, int, int, int, str]
"""Key, step, rank, micro step and part."""
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
        dtypes: Of both, as the files have them: msprobe stores everything as float32, we bfloat16.
        equal: Share of the elements that both have and that are equal, 0 to 1; NaN equals NaN.
        first: Position of the first element that is not, in the part that both have; None: all are equal.
        values: The two values there.
        max_abs: The largest difference (of complex numbers, its magnitude); NaN where NaN stands on one side only.
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
    dtypes: tuple[str, str]
    equal: float
    first: tuple[int, ...] | None
    values: tuple[str, str] | None
    max_abs: float
    max_relative: float
    within_thousandth: float
    within_hundredth: float

    @property
    def is_equal(self) -> bool:
        """Whether shapes and all elements are equal, of whatever types."""
        return self.first is None and self.shapes[0] == self.shapes[1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageComparison:
    """Two runs' stages.

    Attributes:
        sentence: The first difference, in words; what is in one run alone, and what could not be read.
        arrays: Every array that both have, in the order of a run.
        only_first: Those that only the first run has, as `key step 3 rank 0`.
        only_second: Those of the second.
        unread: Why files could not be read; the arrays in them are in none of the others.
    """

    sentence: str
    arrays: tuple[StageDifference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    unread: tuple[str, ...] = ()

    @property
    def differing(self) -> tuple[StageDifference, ...]:
        """The arrays that are not equal."""
        return tuple(each for each in self.arrays if not each.is_equal)

    @property
    def is_equal(self) -> bool:
        """Whether both runs have the same arrays, and all of them could be read and are equal."""
        return not (self.differing or self.only_first or self.only_second or self.unread)


def compare_stages(run: Path, other: Path) -> StageComparison:
    """Return how the stages of two runs differ; of one array of each is in memory at a time.

    Raises:
        DumpError: A folder has no stages.
    """
    sides = [_by_place(folder) for folder in (run, other)]
    both = sorted(sides[0].keys() & sides[1].keys(), key=_place)
    found = [_compared(sides[0][key], sides[1][key]) for key in both]
    arrays = tuple(each for each in found if isinstance(each, StageDifference))
    unread = tuple(each for each in found if isinstance(each, str))
    only = [
        tuple(_label(mine[key]) for key in sorted(mine.keys() - others.keys(), key=_place))
        for mine, others in (sides, sides[::-1])
    ]
    return StageComparison(
        sentence=_sentence(arrays, only, unread),
        arrays=arrays,
        only_first=only[0],
        only_second=only[1],
        unread=unread,
    )


def _by_place(folder: Path) -> dict[Place, StageFile]:
    """Return the files in a folder by key, step, rank, micro step and part.

    Raises:
        DumpError: There are none, or two of the same place.
    """
    found: dict[Place, StageFile] = {}
    for file in stage_files(folder):
        same = found.setdefault(file[:5], file)
        if same is not file:
            raise DumpError(f"found {same.path} and {file.path}, expected one file of {_label(file)}: move one away")
    if not found:
        raise DumpError(f"{folder}: found no data/KEY/step*/rank*/**/*.npy, expected the stages of a run")
    return found


def differences(one: np.ndarray, other: np.ndarray) -> dict[str, object]:
    """Return what two arrays differ in, over the part that both have; NaN equals NaN.

    Arrays of other numbers of dimensions are flattened first. Elements are held against each other as they are stored:
    integers that one float64 stands for are not equal. The measures are those of msprobe's SingleComparator.
    """
    if one.ndim != other.ndim:
        one, other = one.ravel(), other.ravel()
    shared = tuple(slice(0, min(a, b)) for a, b in zip(one.shape, other.shape, strict=True))
    a, b = one[shared], other[shared]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        unequal = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        size = np.where(unequal, _distances(a, b), 0.0)
        larger = np.maximum(np.abs(_wide(a)), np.abs(_wide(b)))
        relative = np.where(unequal, size / np.where(larger > 0, larger, 1.0), 0.0)
    where = np.argwhere(unequal)
    first = tuple(int(place) for place in where[0]) if len(where) else None
    count = max(1, a.size)
    return {
        "equal": 1.0 - len(where) / count,
        "first": first,
        "values": None if first is None else _shown(a[first].item(), b[first].item()),
        "max_abs": float(size.max()) if a.size else 0.0,
        "max_relative": float(relative.max()) if a.size else 0.0,
        "within_thousandth": float(np.count_nonzero(relative <= 1e-3)) / count,
        "within_hundredth": float(np.count_nonzero(relative <= 1e-2)) / count,
    }


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the distances as float64; those of integers are taken before they are rounded."""
    if {a.dtype.kind, b.dtype.kind} <= set("biu"):
        one, other = a.astype(np.uint64), b.astype(np.uint64)  # modulo 2⁶⁴, as the difference of the larger one is
        return np.asarray(np.where(a > b, one - other, other - one).astype(np.float64))
    return np.asarray(np.abs(_wide(a) - _wide(b)))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _shown(*values: Any) -> tuple[str, str]:
    """Return two values that differ in six digits, or in as many as they need."""
    short = tuple(str(value) if isinstance(value, int) else f"{value:g}" for value in values)
    return short if short[0] != short[1] else tuple(map(repr, values))  # type: ignore[return-value]  # two of them


def _compared(one: StageFile, other: StageFile) -> StageDifference | str:
    """Return how two stored arrays differ, or why a file cannot be read."""
    try:
        mine, theirs = (open_tensors(file.path)[0] for file in (one, other))
    except DumpError as error:
        return str(error)
    if isinstance(mine, UnreadTensor):
        return f"{mine.label}: {mine.reason}"
    if isinstance(theirs, UnreadTensor):
        return f"{theirs.label}: {theirs.reason}"
    return StageDifference(
        key=one.key, step=one.step, rank=one.rank, micro_step=one.micro_step, part=one.part,
        shapes=(mine.shape, theirs.shape), dtypes=(mine.dtype, theirs.dtype),
        **differences(mine.raw, theirs.raw),  # type: ignore[arg-type]  # by name
    )  # fmt: skip


def _sentence(arrays: Sequence[StageDifference], only: Sequence[Sequence[str]], unread: Sequence[str]) -> str:
    """Return the first difference, then what is on one side alone or could not be read."""
    parts = [_first_difference(arrays)]
    for run, names in zip(("first", "second"), only, strict=True):
        parts += [f"Only in the {run} run: {_counted(names)}."] if names else []
    return " ".join([*parts, *([f"Not compared: {_counted(unread)}."] if unread else [])])


def _counted(names: Sequence[str]) -> str:
    return f"1 array, {names[0]}" if len(names) == 1 else f"{len(names):,} arrays, as {names[0]}"


def _first_difference(arrays: Sequence[StageDifference]) -> str:
    differing = [each for each in arrays if not each.is_equal]
    others = [each for each in arrays if each.is_equal and each.dtypes[0] != each.dtypes[1]]
    types = ""
    if others:
        one, other = others[0].dtypes
        types = f"of other types: {_counted(list(map(_label, others)))} ({one} against {other})"
    if not arrays:
        return "Not one array could be compared."
    if not differing:
        number = (
            "The 1 array that both runs have is"
            if len(arrays) == 1
            else f"All {len(arrays):,} arrays that both runs have are"
        )
        return f"{number} equal in value; {types}." if types else f"{number} equal."
    first = differing[0]
    in_step = [each for each in arrays if each.step == first.step]
    before = sorted(
        {each.key for each in in_step} - {each.key for each in differing if each.step == first.step}, key=_rank_of
    )
    equal = f"; {', '.join(before)} are equal" if before else ""
    return f"The first difference is in {_label(first)}: {_what(first)}{equal}{types and f'; {types}'}."


def _what(found: StageDifference) -> str:
    if found.values is None:
        compared = "with no element in common" if 0 in found.shapes[0] + found.shapes[1] else "equal in what both have"
        return f"shape {list(found.shapes[0])} against {list(found.shapes[1])}, {compared}"
    values = f"{found.values[0]} against {found.values[1]}"
    shapes = (
        "" if found.shapes[0] == found.shapes[1] else f"; shape {list(found.shapes[0])} against {list(found.shapes[1])}"
    )
    if not found.first:
        return values + shapes
    place = (
        f"token {found.first[1]} of sample {found.first[0]}"
        if len(found.first) == 2
        else f"element {list(found.first)}"
    )
    return f"from {place} on, {values}; {1 - found.equal:.1%} of the elements differ{shapes}"


def _label(found: StageFile | StageDifference) -> str:
    part = f".{found.part}" if found.part else ""
    micro = f", micro step {found.micro_step}" if found.micro_step else ""
    return f"{found.key}{part} of step {found.step}, rank {found.rank}{micro}"


def _place(key: Place) -> tuple[int, int, str, int, int, str]:
    name, step, rank, micro_step, part = key
    return step, _rank_of(name), name, rank, micro_step, part


def _rank_of(name: str) -> int:
    return next((number for number, stage in enumerate(ORDER) if stage in name.lower()), len(ORDER))
