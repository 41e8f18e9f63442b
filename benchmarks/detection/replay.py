"""What rules say about recorded runs, and how good that is: recall, delay, false alerts.

A run is recorded once and judged as often as the rules change: its journals are read by the agent's own follower, and
its steps are evaluated by the agent's own engine. Alerts that one incident raises on several ranks count as one: they
are grouped per rule and step.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.detection.cases import FAULTS, Case
from benchmarks.detection.faults import BAD_RANK
from trainermon.agent.follower import Follower
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import Rule
from trainermon.monitor.journal import BlockRecord, Header
from trainermon.monitor.values import AlertState, StatBlock


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
    """

    case: Case
    fired: tuple[Fired, ...]
    num_steps: int

    @property
    def num_clean_steps(self) -> int:
        """Steps before the fault."""
        return self.case.first_bad if self.case.first_bad >= 0 else self.num_steps

    @property
    def false(self) -> list[Fired]:
        """Alerts on clean steps."""
        return [fired for fired in self.fired if self.case.first_bad < 0 or fired.step < self.case.first_bad]

    @property
    def answers(self) -> list[Fired]:
        """Alerts that find the fault, earliest first; empty in a clean run."""
        fault = FAULTS.get(self.case.name)
        if fault is None:
            return []
        return [
            fired
            for fired in self.fired
            if fired.step >= self.case.first_bad
            and any(fnmatch.fnmatchcase(fired.rule, pattern) for pattern in fault.rules)
            and (not fault.blames or fired.ranks == (BAD_RANK,))
        ]

    @property
    def delay(self) -> int | None:
        """Steps from the first bad one to the first alert that finds the fault; None if none does in time."""
        answers = self.answers
        delay = answers[0].step - self.case.first_bad if answers else None
        return delay if delay is not None and delay <= FAULTS[self.case.name].within else None


def judge(case: Case, folder: Path, rules: Sequence[Rule]) -> Judged:
    """Return what `rules` say about the run of `case` that was recorded in `folder`."""
    engine = RuleEngine(rules)
    groups: dict[tuple[str, int], set[int]] = {}
    known: set[str] = set()
    steps: set[int] = set()
    for header, block in blocks_of(folder / "spool" / case.run_id):
        steps.add(block.step)
        for alert in engine.evaluate(header, header.series, block):
            if alert.state is AlertState.FIRING and alert.id not in known:
                known.add(alert.id)
                groups.setdefault((alert.rule, alert.step), set()).add(alert.rank)
    fired = [Fired(rule, step, tuple(sorted(ranks))) for (rule, step), ranks in groups.items()]
    return Judged(case, tuple(sorted(fired, key=lambda each: each.step)), len(steps))


def blocks_of(spool: Path) -> Iterable[tuple[Header, StatBlock]]:
    """Return all steps of a recorded run by attempt and step, the ranks of a step next to each other."""
    follower = Follower(spool)
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


def by_rule(judged: Sequence[Judged], rules: Sequence[Rule]) -> Mapping[str, RuleScore]:
    """Return what each rule did."""
    return {rule.name: _rule_score(rule.name, judged) for rule in rules}


def _rule_score(rule: str, judged: Sequence[Judged]) -> RuleScore:
    asked = other = false = 0
    delays = []
    for each in judged:
        false += sum(fired.rule == rule for fired in each.false)
        fault = FAULTS.get(each.case.name)
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
