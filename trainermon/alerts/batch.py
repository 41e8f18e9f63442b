"""All rules over one step of several ranks at once: what a call of numpy costs is paid once for all of them.

Each rank keeps its own state, and nothing is said of it that would not be said of it alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trainermon.alerts.conditions.condition import ConditionVerdict, Indices, Slots
from trainermon.alerts.conditions.contained import ContainedWatcher
from trainermon.alerts.rows import RowPlan, RuleRows
from trainermon.alerts.watch import RuleWatch
from trainermon.core.derived import Array
from trainermon.core.journal.patterns import compact

_MAX_PLANS = 32  # ranks that keep pace come together, in a few combinations
_MAX_ROWS = 16384  # judged at once: more gain nothing, and their moments would leave the cache


class TakenStep(NamedTuple):
    """One step of one rank, as its rules look at it.

    Attributes:
        step: Its number.
        plan: Which rows the rules look at.
        values: The moments of all rows, [8, n].
        is_excused: Whether the framework skipped the step by design.
    """

    step: int
    plan: RowPlan
    values: Array
    is_excused: bool

    @property
    def looks(self) -> Sequence[RuleRows]:
        """What the rules look at that look at one rank alone."""
        return self._concerned(self.plan.looks)

    @property
    def compared(self) -> Sequence[RuleRows]:
        """What the rules look at that compare ranks."""
        return self._concerned(self.plan.compared)

    def _concerned(self, looks: Sequence[RuleRows]) -> Sequence[RuleRows]:
        return [look for look in looks if look.watch.rule.on.skipped] if self.is_excused else looks


class BatchPart(NamedTuple):
    """One rank's series in what a rule looks at.

    Attributes:
        place: Position of the rank in the batch.
        watch: The rule, as it watches the rank.
        slots: The series, as positions among those of the rule.
        columns: Where they are among those of all ranks.
    """

    place: int
    watch: RuleWatch
    slots: Indices
    columns: slice


class BatchLook(NamedTuple):
    """What one rule looks at in a batch.

    Attributes:
        watcher: Evaluates the condition on all of it.
        slots: The series in the watcher.
        parts: Whose they are, in order.
        gather: Number of the moments that it needs.
    """

    watcher: ContainedWatcher
    slots: Slots
    parts: tuple[BatchPart, ...]
    gather: int

    def observe(self, moments: Array, steps: Sequence[TakenStep]) -> list[int]:
        """Judge the series by their moments [8, n]; return the positions of the ranks that are not calm."""
        verdict = self.watcher.judge(self.slots, moments)
        if not np.count_nonzero(verdict.bad) and all(part.watch.is_calm for part in self.parts):
            self.watcher.learn(self.slots, None)
            return []
        for part in self.parts:
            own = verdict if len(self.parts) == 1 else verdict.of(part.columns)
            part.watch.take_verdict(part.slots, own, moments[:, part.columns], steps[part.place].step)
        restless = [part for part in self.parts if not part.watch.is_calm]
        self.watcher.learn(self.slots, self._mask(restless, verdict) if restless else None)
        return [part.place for part in self.parts]

    @staticmethod
    def _mask(restless: Sequence[BatchPart], verdict: ConditionVerdict) -> np.ndarray:
        mask = np.zeros(len(verdict.bad), np.bool_)
        for part in restless:
            marked = part.watch.group.restless
            assert marked is not None
            mask[part.columns] = marked[part.slots]
        return mask


class BatchPlan(NamedTuple):
    """What all rules look at in a batch; the same for all batches of the same ranks that show the same series.

    Attributes:
        looks: For each rule, in order.
        gathers: The moments that rules need: of which rank (its position) which rows, in order.
    """

    looks: tuple[BatchLook, ...]
    gathers: tuple[tuple[tuple[int, RuleRows], ...], ...]


class StepBatches:
    """Evaluates the rules that look at one rank alone, on one step of each of several ranks."""

    def __init__(self) -> None:
        self._plans: dict[tuple[tuple[int, bool], ...], BatchPlan] = {}

    def observe(self, steps: Sequence[TakenStep]) -> set[int]:
        """Judge one step of each rank, and update its rules; return the positions of the ranks that are not calm.

        Calm is a rank on which no condition holds and no alert is on.
        """
        stirred: set[int] = set()
        with np.errstate(all="ignore"):
            for begin, end in _pieces([step.values.shape[1] for step in steps]):
                piece = steps[begin:end]
                plan = self._plan(piece)
                gathered = [_moments(parts, piece) for parts in plan.gathers]
                for look in plan.looks:
                    stirred.update(begin + place for place in look.observe(gathered[look.gather], piece))
        return stirred

    def _plan(self, steps: Sequence[TakenStep]) -> BatchPlan:
        name = tuple((step.plan.number, step.is_excused) for step in steps)
        if name not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[name] = _planned(steps)
        return self._plans[name]


def _pieces(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return where pieces of consecutive ranks begin and end that have `_MAX_ROWS` rows together, or are one rank."""
    begins, num_rows = [0], 0
    for place, size in enumerate(sizes):
        if num_rows and num_rows + size > _MAX_ROWS:
            begins.append(place)
            num_rows = 0
        num_rows += size
    return list(itertools.pairwise([*begins, len(sizes)]))


def _planned(steps: Sequence[TakenStep]) -> BatchPlan:
    looks_of: dict[ContainedWatcher, list[tuple[int, RuleRows]]] = {}
    for place, step in enumerate(steps):
        for look in step.looks:
            looks_of.setdefault(look.watch.watcher, []).append((place, look))
    gathers: dict[tuple[tuple[int, int], ...], tuple[int, tuple[tuple[int, RuleRows], ...]]] = {}
    looks = []
    for watcher, placed in looks_of.items():
        name = tuple((place, look.source) for place, look in placed)
        number, _ = gathers.setdefault(name, (len(gathers), tuple(placed)))
        slots = np.concatenate([look.watch.places[look.slots] for _, look in placed])
        looks.append(BatchLook(watcher, compact(slots), tuple(_parts(placed)), number))
    return BatchPlan(tuple(looks), tuple(placed for _, placed in gathers.values()))


def _parts(placed: Sequence[tuple[int, RuleRows]]) -> list[BatchPart]:
    ends = np.cumsum([len(look.slots) for _, look in placed]).tolist()
    return [
        BatchPart(place, look.watch, look.slots, slice(end - len(look.slots), end))
        for (place, look), end in zip(placed, ends, strict=True)
    ]


def _moments(placed: Sequence[tuple[int, RuleRows]], steps: Sequence[TakenStep]) -> Array:
    own = [look.moments(steps[place].values) for place, look in placed]
    return own[0] if len(own) == 1 else np.concatenate(own, axis=1)
