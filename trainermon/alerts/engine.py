"""Alert rules over the statistics of all ranks of a node, step by step.

One `evaluate` takes one step of one rank through every rule: the condition on all series at once (`batch`), how long it
has held (`state`), which alerts are consequences of another one and therefore held back (`rank_rules`), and, when the
step is complete, how the ranks compare (`across`). Evaluating the same records again gives the same alerts
with the same ids.

Where each decision belongs: alerts/README.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from trainermon.alerts.across_ranks.across import AcrossRanks, ComparedStep
from trainermon.alerts.batch import StepBatches, TakenStep
from trainermon.alerts.conditions.criteria import Differs, Straggler
from trainermon.alerts.conditions.watchers import history_of
from trainermon.alerts.rank_rules import RankRules, RuleSet
from trainermon.alerts.reported import AgentStatement, ReportedAlerts
from trainermon.alerts.rules import AlertRule
from trainermon.core.values import Alert, AlertState, Kind, SeriesKey, StatBlock

if TYPE_CHECKING:
    from trainermon.core.journal import Header


@dataclasses.dataclass(slots=True)
class BegunStep:
    """A step of one rank that is being evaluated.

    Attributes:
        header: Who wrote it.
        time_s: Unix time of the step.
        rank: The rank's rules.
        changes: The alerts that it has changed so far.
        taken: The step; None if there is nothing to evaluate.
    """

    header: Header
    time_s: float
    rank: RankRules
    changes: list[Alert]
    taken: TakenStep | None = None


class RuleEngine:
    """Evaluates rules over any number of ranks, each with its own state.

    Baselines of a rank live as long as the engine; states are reset when the rank begins a new attempt, and alerts
    that were on are then resolved. A rule whose `inhibits` names others holds their alerts back from the moment it
    fires until it is over: on the same rank, or on all of them if it compares ranks or is reported. What still holds
    then is reported late, with its true first step.

    Cost: see benchmarks/bench_rules.py; the ranks of a node cost less together (`take`, `settle`). A spike rule keeps
    four bytes for each place in the window of each series.

    Args:
        rules: From `load_rules`.
    """

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self._rules = tuple(rules)
        self._shared = RuleSet(self._rules)
        self._across = AcrossRanks(self._rules, self._shared.faults)
        self._reported = ReportedAlerts(self._rules)
        self._batches = StepBatches()
        self._ranks: dict[int, RankRules] = {}
        self._begun: dict[int, BegunStep] = {}

    @property
    def history_steps(self) -> int:
        """How many steps of every series `prime` needs so that no window is shorter than without a restart."""
        return max((history_of(rule) for rule in self._rules), default=0)

    @property
    def faults(self) -> Mapping[str, str]:
        """By name, the rules whose condition has failed, and how; they are switched off."""
        return self._shared.faults.by_rule

    @property
    def slowness(self) -> Mapping[int, float]:
        """By rank, the time of its own work over the median of its peers'; empty where waiting times are not known."""
        return self._across.slowness

    @property
    def stragglers(self) -> Collection[int]:
        """The ranks that hold up the others now, by the rules that look for stragglers."""
        names = [rule.name for rule in self._rules if isinstance(rule.when, Straggler)]
        return {rank for name in names for rank in self._shared.firing_anywhere.get(name, ())}

    @property
    def checksum_mismatches(self) -> Mapping[int, int]:
        """By rank, parameters of all steps whose checksum was not that of most copies."""
        return self._across.num_odd(self._of_checksums)

    @property
    def checksum_comparisons(self) -> int:
        """Steps on which checksums of copies were compared."""
        return self._across.num_compared(self._of_checksums)

    @property
    def _of_checksums(self) -> list[str]:
        return [rule.name for rule in self._rules if isinstance(rule.when, Differs) and Kind.CHECKSUM in rule.on.kinds]

    def evaluate(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> list[Alert]:
        """Return what changed on this step of this rank: alerts that begin, grow (same id) or are resolved.

        If the step is complete with it, also what changed on other ranks by the rules that compare ranks.

        Args:
            header: Says which rank and attempt, where it stands, and how its series are placed.
            keys: The rank's whole series table, as long as it is known; `block.series` are indices into it.
            block: One step. A step that is not newer than the last one of the attempt changes nothing, and neither
                does an attempt older than the last one.

        Returns:
            At most one alert per rule and rank, and none for a healthy step.
        """
        self.take(header, keys, block)
        return self.settle()

    def take(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """Begin to evaluate a step of one rank, as `evaluate` does; `settle` ends it.

        Steps of several ranks cost less together. After an error the step is passed over.

        Raises:
            ValueError: A step of this rank waits for `settle`.
        """
        number = header.coordinates.rank
        earlier = self._begun.get(number)
        if earlier is not None and earlier.taken is not None:
            raise ValueError(f"found a second step of rank {number}, expected one of each rank before settle()")
        rank = self._rank(number)
        changes = (earlier.changes if earlier else []) + self._begin_attempt(rank, header, block)
        begun = self._begun[number] = BegunStep(header, block.time_s, rank, changes)
        begun.taken = rank.take(header, keys, block)

    def settle(self) -> list[Alert]:
        """Return what has changed by all steps begun, in their order; of each as `evaluate` returns it."""
        return [
            alert for rank, changes in self._settle() for found in (rank.ended_unseen(), changes) for alert in found
        ]

    def meet(self, header: Header) -> None:
        """Note that a rank has begun, so that the others wait for its steps."""
        self._across.meet(header)

    def leave(self, over: Collection[int]) -> list[Alert]:
        """Return what has changed as nothing more comes of the ranks in `over`: other ranks no longer wait for them."""
        return self._compare(self._across.leave(over))

    def prime(self, header: Header, keys: Sequence[SeriesKey], blocks: Iterable[StatBlock]) -> None:
        """Replay steps that were evaluated before a restart, in order, without reporting anything.

        With all steps of the attempt the engine is afterwards what it was before; with the last `history_steps` the
        usual ranges are. Steps of several ranks are primed in the order in which they were evaluated.
        """
        for block in blocks:
            self.take(header, keys, block)
            for alert in (alert for _, changes in self._settle() for alert in changes):
                self._rank(alert.rank).keep_unreported([alert])

    def resume(self, alerts: Iterable[Alert]) -> None:
        """Register the alerts that were firing before a restart; call it before `prime`.

        An alert that is found still on keeps its id, although the step on which it began may not be among the primed
        ones. One that is no longer on is reported as resolved by the first `evaluate` that has come as far. One that
        was reported stays on until a statement ends it.
        """
        for alert in alerts:
            if self._reported.knows(alert.rule):
                self.adopt(alert)
            else:
                self._rank(alert.rank).resume(alert)

    def report(self, statement: AgentStatement) -> list[Alert]:
        """Evaluate what the agent says about a rank (`reported` rules, as `hang`).

        Return the alert that begins or ends, if any. A statement that says what is known changes nothing, and neither
        does one about a rule that there is not.
        """
        changes = self._reported.observe(statement)
        for alert in changes:
            self._shared.note_firing(alert.rule, alert.rank, is_firing=alert.state is AlertState.FIRING)
        return changes

    def adopt(self, alert: Alert) -> None:
        """Register an alert of a `reported` rule that another part has made, so that it holds its consequences back."""
        self._reported.adopt(alert)
        self._shared.note_firing(alert.rule, alert.rank, is_firing=alert.state is AlertState.FIRING)

    def firing(self) -> list[Alert]:
        """Return the alerts that fire and are not held back, as of the last step of their rank."""
        return self._alerts(AlertState.FIRING, held=False) + self._reported.firing

    def inhibited(self) -> list[Alert]:
        """Return the alerts that fire but are held back as consequences of others."""
        return self._alerts(AlertState.FIRING, held=True)

    def pending(self) -> list[Alert]:
        """Return the alerts that will fire if their condition holds for some more steps."""
        return self._alerts(AlertState.PENDING, held=False)

    def _begin_attempt(self, rank: RankRules, header: Header, block: StatBlock) -> list[Alert]:
        if header.attempt <= rank.moment.attempt:
            return []
        ended = self._reported.begin_attempt(rank.moment.rank, header.attempt, block.time_s)
        for alert in ended:
            self._shared.note_firing(alert.rule, alert.rank, is_firing=False)
        return ended + rank.begin_attempt(header.attempt)

    def _settle(self) -> list[tuple[RankRules, list[Alert]]]:
        begun, self._begun = list(self._begun.values()), {}
        taken = [(step.rank, step.taken) for step in begun if step.taken is not None]
        restless = {taken[place][0].moment.rank for place in self._batches.observe([each for _, each in taken])}
        for step in begun:
            if step.taken is not None:
                step.changes += step.rank.changes(is_calm=step.rank.moment.rank not in restless)
                step.changes += self._compare(self._across.add(step.header, step.time_s, step.taken))
        return [(step.rank, step.changes) for step in begun]

    def _compare(self, complete: Iterable[ComparedStep]) -> list[Alert]:
        changes = []
        for compared in complete:
            for found in compared.found:
                found.apply()
                part = found.part
                changes += self._rank(part.rank).take_comparison(part.watch, found.step, part.time_s)
            for number in compared.ranks:
                self._rank(number).note_compared(compared.rules, compared.step)
        return changes

    def _alerts(self, state: AlertState, *, held: bool) -> list[Alert]:
        return [alert for number in sorted(self._ranks) for alert in self._ranks[number].alerts(state, held=held)]

    def _rank(self, number: int) -> RankRules:
        if number not in self._ranks:
            self._ranks[number] = RankRules(number, self._shared)
        return self._ranks[number]
