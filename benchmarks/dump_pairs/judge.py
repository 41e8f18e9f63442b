"""Whether `trainermon compare` says of a pair of dumps what was done to it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.dump_pairs.cases import LEVELS, Case, cases_of
from benchmarks.dump_pairs.faults import Truth
from benchmarks.dump_pairs.record import folder_of, label_of
from trainermon.analysis.compare import CompareOptions, Mode, compare
from trainermon.analysis.compare.answer.remarks import first_unequal
from trainermon.analysis.compare.answer.summary import headline
from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.mappings import NameMappings
from trainermon.dump.files.reader import split_key
from trainermon.dump.files.records import BACKWARD, FORWARD, PARAMETERS_GRAD

MODES = (Mode.STATISTICS, Mode.TENSOR)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A pair and what was said of it: whether the first difference is right, and which healthy calls were blamed."""

    family: str
    case: str
    level: str
    mode: str
    truth: Truth
    is_right: bool
    healthy: tuple[str, ...]
    headline: str

    @property
    def is_clean(self) -> bool:
        """Whether there is nothing to blame."""
        return self.truth.kind in ("", "input")


def judge(families: Sequence[str], folder: Path, levels: Sequence[str] = LEVELS, what: str = "") -> Iterator[Judged]:
    """Yield what is said of every pair in `folder`, at each level and by statistics and tensors."""
    for family in families:
        for case in cases_of(family):
            for level in levels if what in case.what else ():
                for mode in MODES:
                    yield _judge(family, case, folder, level, mode)


def _judge(family: str, case: Case, folder: Path, level: str, mode: Mode) -> Judged:
    target, golden = (folder_of(folder, family, variant, level) for variant in (case.target, case.golden))
    label = label_of(target)
    options = CompareOptions(mode=mode, mappings=NameMappings(cell=label.mapping))
    (comparison,) = compare(target, golden, options=options)
    is_input = label.truth.kind == "input"
    blamed = [call.key for call in comparison.blamed if not (is_input and call.origin.startswith("input"))]
    sound = _acceptable(label.truth, folder_of(folder, family, case.target, "mix"))
    healthy = tuple(key for key in blamed if key not in sound)
    is_right = not healthy if label.truth.kind in ("", "input") else _named_first(comparison, blamed) in sound
    return Judged(
        family=family,
        case=case.what,
        level=level,
        mode=mode.value,
        truth=label.truth,
        is_right=is_right,
        healthy=healthy,
        headline=headline(comparison),
    )


def _named_first(comparison: Comparison, blamed: Sequence[str]) -> str:
    """Return the call that is named first: of what is within rounding, the first that is not equal; "" if none is."""
    unequal = None if blamed else first_unequal(comparison)
    return next(iter(blamed), unequal.call.key if unequal is not None else "")


@functools.lru_cache(maxsize=64)
def _acceptable(truth: Truth, mix: Path) -> frozenset[str]:
    """Return the calls that may be blamed, modules and functions; `mix` is the dump that has both."""
    if not truth.module:
        return frozenset()
    (path,) = mix.glob("step0/*/construct.json")
    parents = json.loads(path.read_text())
    directions = {BACKWARD, PARAMETERS_GRAD} if truth.kind == "backward" else {FORWARD}
    gradients = {
        f"{key.rpartition('.backward.')[0]}.{PARAMETERS_GRAD}.0": None for key in parents if ".backward." in key
    }
    return frozenset(key for key, parent in (parents | gradients).items() if _is_at(key, parent, truth, directions))


def _is_at(key: str, parent: str | None, truth: Truth, directions: set[str]) -> bool:
    name, _, direction, _ = split_key(key)
    if direction not in directions:
        return False
    places = truth.module, *truth.sharing
    if key.startswith("Module."):
        return name in places
    word = truth.name.strip("_")
    is_same = truth.kind == "weight" or name in (word, f"{word}_", f"__{word}__", f"__r{word}__", f"__i{word}__")
    return is_same and parent is not None and split_key(parent)[0] in places
