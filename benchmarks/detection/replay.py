"""What rules say about recorded runs, and how good that is: recall, delay, false alerts.

A run is recorded once and judged as often as the rules change: its journals are read by the agent's own follower, and
its steps are evaluated by the agent's own engine. Alerts that one incident raises on several ranks count as one: they
are grouped per rule and step.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.detection import cases, family_cases, faults
from benchmarks.detection.cases import Case, Fault
from benchmarks.detection.record import segments, spool_of_case
from benchmarks.families.catalogue import FAMILIES
from trainermon.agent.follower import JournalFollower
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import AlertRule
from trainermon.core.journal import BlockRecord, Header
from trainermon.core.values import AlertState, StatBlock


def fault_of(case: Case) -> Fault | None:
    """Return what must be said of a run; None if it is healthy."""
    return (family_cases if case.size in FAMILIES else cases).FAULTS.get(case.name)


def bad_rank(case: Case) -> int:
    """Return which rank has a fault that only one has."""
    return family_cases.BAD_RANK if case.size in FAMILIES else faults.BAD_RANK


@dataclasses.dataclass(frozen=True, slots=True)
class Fired:
    """A grouped alert: the rule, the step on which it fired, the ranks it was about."""

    rule: str
    step: int
    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """A recorded run and what rules said about it.

    Attributes:
        case: The run; its `first_bad` is the monitor's number of the step on which the fault began.
        fired: Grouped alerts, by step.
        num_steps: Steps that were judged.
        num_clean_steps: Those before the fault that no other run has shown.
    """

    case: Case
    fired: tuple[Fired, ...]
    num_steps: int
    num_clean_steps: int

    @property
    def false(self) -> list[Fired]:
        """Alerts on clean steps."""
        return [fired for fired in self.fired if self.case.first_bad < 0 or fired.step < self.case.first_bad]

    @property
    def answers(self) -> list[Fired]:
        """Alerts that find the fault, earliest first; empty in a clean run."""
        fault = fault_of(self.case)
        if fault is None:
            return []
        return [
            fired
            for fired in self.fired
            if fired.step >= self.case.first_bad
            and any(fnmatch.fnmatchcase(fired.rule, pattern) for pattern in fault.rules)
            and (not fault.blames or fired.ranks == (bad_rank(self.case),))
        ]

    @property
    def delay(self) -> int | None:
        """Steps from the first bad one to the first alert that finds the fault; None if none does in time."""
        fault, answers = fault_of(self.case), self.answers
        delay = answers[0].step - self.case.first_bad if answers else None
        return delay if fault and delay is not None and delay <= fault.within else None


def judge(case: Case, folder: Path, rules: Sequence[AlertRule]) -> Judged:
    """Return what `rules` say about the run of `case` that was recorded in `folder`."""
    listener = _Listener(rules)
    for header, block in blocks_of(spool_of_case(case, folder)):
        listener.hear(header, block)
    num_steps = len(listener.steps)
    return Judged(case, listener.fired(), num_steps, case.first_bad if case.first_bad >= 0 else num_steps)


def judge_family(case: Case, folder: Path, rules: Sequence[AlertRule]) -> list[Judged]:
    """Return what `rules` say about a training of a family: its healthy steps, then each of its faults.

    A fault is judged by rules that have seen what was healthy before it, and none of the other faults.
    """
    listener, found = _Listener(rules), []
    blocks: dict[int, list[tuple[Header, StatBlock]]] = {}
    for header, block in blocks_of(spool_of_case(case, folder)):
        blocks.setdefault(block.step, []).append((header, block))
    for segment in segments(case, folder):
        hearing = copy.deepcopy(listener) if segment.name else listener
        for age in range(segment.steps):
            for header, block in blocks.get(segment.first + age, ()):
                hearing.hear(header, dataclasses.replace(block, step=segment.at + age))
        if segment.name:
            name, num_steps = segment.name, segment.at + segment.steps
            broken = dataclasses.replace(case, name=name, first_bad=segment.at, steps=num_steps)
            after = tuple(fired for fired in hearing.fired() if fired.step >= segment.at)
            found.append(Judged(broken, after, segment.steps, 0))
    num_steps = len(listener.steps)
    return [Judged(case, listener.fired(), num_steps, num_steps), *found]


class _Listener:
    """A rule engine, and the grouped alerts that it has raised."""

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self.steps: set[int] = set()
        self._engine = RuleEngine(rules)
        self._groups: dict[tuple[str, int], set[int]] = {}
        self._known: set[str] = set()

    def hear(self, header: Header, block: StatBlock) -> None:
        """Show it a step of a rank."""
        self.steps.add(block.step)
        for alert in self._engine.evaluate(header, header.series, block):
            if alert.state is AlertState.FIRING and alert.id not in self._known:
                self._known.add(alert.id)
                self._groups.setdefault((alert.rule, alert.step), set()).add(alert.rank)

    def fired(self) -> tuple[Fired, ...]:
        """Return the alerts by step."""
        fired = [Fired(rule, step, tuple(sorted(ranks))) for (rule, step), ranks in self._groups.items()]
        return tuple(sorted(fired, key=lambda each: each.step))


def blocks_of(spool: Path) -> Iterable[tuple[Header, StatBlock]]:
    """Return all steps of a recorded run by attempt and step, the ranks of a step next to each other."""
    follower = JournalFollower(spool)
    found = []
    while news := follower.poll():
        found += [(header, record.block) for header, record in news if isinstance(record, BlockRecord)]
    follower.close()
    return sorted(found, key=lambda pair: (pair[0].attempt, pair[1].step, pair[0].coordinates.rank))


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """How often something was found, and how soon: `late` is the longest delay in steps."""

    runs: int
    found: int
    median_delay: float
    late: int


def by_fault(judged: Iterable[Judged]) -> Mapping[str, Score]:
    """Return recall and delay of each fault."""
    delays: dict[str, list[int | None]] = {}
    for each in judged:
        if each.case.first_bad >= 0:
            delays.setdefault(each.case.name, []).append(each.delay)
    return {name: _score(values) for name, values in delays.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class RuleScore:
    """What one rule did.

    Attributes:
        found: Runs whose fault it found.
        asked: Runs with a fault that it is meant to find.
        other: Runs in which it fired after the beginning of a fault that it is not meant to find.
        false: Grouped alerts on clean steps.
        delays: Of the runs it found, steps to its first alert.
    """

    found: int
    asked: int
    other: int
    false: int
    delays: tuple[int, ...]

    @property
    def precision(self) -> float:
        """Share of the runs with a fault among these and its false alerts; NaN if it never fired."""
        fired = self.found + self.other + self.false
        return (self.found + self.other) / fired if fired else float("nan")


def by_rule(judged: Sequence[Judged], rules: Sequence[AlertRule]) -> Mapping[str, RuleScore]:
    """Return what each rule did."""
    return {rule.name: _rule_score(rule.name, judged) for rule in rules}


def _rule_score(rule: str, judged: Sequence[Judged]) -> RuleScore:
    asked = other = false = 0
    delays = []
    for each in judged:
        false += sum(fired.rule == rule for fired in each.false)
        fault = fault_of(each.case)
        if fault is None:
            continue
        is_asked = any(fnmatch.fnmatchcase(rule, pattern) for pattern in fault.rules)
        asked += is_asked
        answers = [fired.step for fired in each.answers if fired.rule == rule]
        if answers:
            delays.append(answers[0] - each.case.first_bad)
        else:
            other += any(fired.rule == rule and fired.step >= each.case.first_bad for fired in each.fired)
    return RuleScore(len(delays), asked, other, false, tuple(sorted(delays)))


def _score(delays: Sequence[int | None]) -> Score:
    known = sorted(delay for delay in delays if delay is not None)
    median = float(known[len(known) // 2]) if known else float("nan")
    return Score(len(delays), len(known), median, known[-1] if known else -1)
