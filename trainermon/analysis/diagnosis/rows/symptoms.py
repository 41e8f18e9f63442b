"""What exploded, died or diverged from its peers: by the run's alerts, else by the default rules over its stored rows.

The rules decide that something is wrong, and since when; which series of which rank was first on that step is decided
here, by how far each is from what it was on the steps before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from trainermon.alerts.log import AlertLog
from trainermon.alerts.rules import load_rules
from trainermon.analysis.diagnosis.domains import Places
from trainermon.analysis.diagnosis.evidence import open_store
from trainermon.analysis.diagnosis.findings import Symptom
from trainermon.analysis.diagnosis.rows.rule_replay import rehearse
from trainermon.analysis.diagnosis.wording import counted, rank_list
from trainermon.core.catalogue import LEARNING_RATE_SERIES
from trainermon.core.errors import StoreError
from trainermon.core.values import Alert, AlertCondition, AlertDirection, AlertState, Kind

if TYPE_CHECKING:
    import duckdb

MAX_REHEARSED = 20_000  # steps of single ranks: half a minute
_BY_CONDITION: Mapping[AlertCondition, Symptom | None] = MappingProxyType(
    {
        AlertCondition.NONFINITE: None,  # the first bad step is found from the rows
        AlertCondition.THRESHOLD: None,  # a limit says nothing about what is usual
        AlertCondition.FLAT: None,
        AlertCondition.FROZEN: None,
        AlertCondition.NOT_DECREASING: None,
        AlertCondition.STRAGGLER: None,
        AlertCondition.REPORTED: None,
        AlertCondition.LAW: None,
        AlertCondition.SPREAD: Symptom.DIVERGED,
        AlertCondition.DIFFERS: Symptom.DIVERGED,
        AlertCondition.DEAD: Symptom.DIED,
    }
)
"""What needs no direction; of all other conditions it decides."""

_KINDS = frozenset(Kind) - {Kind.COMM, Kind.STEP}
_USUAL_STEPS = 50
_RATE_STEPS, _RATE_FACTOR = 4, 5.0
_LEAST_USUAL = 3
_SHARE = 0.5  # of the logarithm of the largest ratio: what has moved by less is a bystander
_ROWS = ("kind", "name", "slot", "call", "micro_step", "stage", "rank")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A span of steps on which values were abnormal: exploded, dead or unlike their peers'.

    Attributes:
        symptom: What was wrong.
        first_step: Where it began.
        seen_step: Where it was noticed.
        last_step: Where it ended; None: it lasted until the run's end.
        ranks: The ranks that were found wrong.
        series: The worst series, as (kind, name, slot, stage).
        is_cut: Whether there are more than those: an alert lists the worst of them.
        rule: The rule that found it.
        messages: What it said.
        source: The files that tell.
        between: For copies of parameters that parted: the last step on which they are known to have been equal, and the
            first on which they were not; None of anything else.
        condition: What the rule looks for; None: it is no rule.
    """

    symptom: Symptom
    first_step: int
    seen_step: int
    last_step: int | None
    ranks: tuple[int, ...]
    series: frozenset[tuple[str, str, str, int]]
    rule: str
    messages: tuple[str, ...]
    source: str
    between: tuple[int, int] | None = None
    condition: AlertCondition | None = None
    is_cut: bool = False


class Moved(NamedTuple):
    """A series (one tensor's statistics) on one step, beside its usual size.

    Attributes:
        kind: What it is a statistic of: `grad_reduced`, `actv` …
        name: Module or parameter.
        slot: Which tensor of a call: `output.0`.
        call: Number of the module's call.
        micro_step: Number of the forward and backward within the step; None: once per step.
        stage: The virtual pipeline stage.
        rank: The rank.
        value: Root mean square of the elements.
        usual: The same on the steps before; NaN: there are none.
    """

    kind: str
    name: str
    slot: str
    call: int
    micro_step: int | None
    stage: int
    rank: int
    value: float
    usual: float

    @property
    def fingerprint(self) -> object:
        """A key that is equal for two series if their elements are."""
        return self.value

    @property
    def ratio(self) -> float:
        """`value` over `usual`; 1e-12 for a series that has become zero."""
        return max(self.value / self.usual, 1e-12)


class RateJump(NamedTuple):
    """A sudden rise of a learning rate.

    Attributes:
        step: The step on which it was many times that of the step before.
        before: The rate before.
        after: The rate on `step`.
    """

    step: int
    before: float
    after: float


def find_rate_jump(connection: duckdb.DuckDBPyConnection, attempt: int, step: int) -> RateJump | None:
    """Return the last jump of a learning rate within a few steps up to `step`; None without one.

    A warm-up from zero is none.
    """
    query = f"""
        WITH rates AS (
            SELECT slot, step, max(max) AS rate FROM all_stats
            WHERE attempt = $attempt AND kind = '{Kind.STEP}' AND name = '{LEARNING_RATE_SERIES}'
                AND step BETWEEN $step - {_RATE_STEPS} AND $step
            GROUP BY slot, step
        ), changes AS (SELECT step, rate, lag(rate) OVER (PARTITION BY slot ORDER BY step) AS before FROM rates)
        SELECT step, before, rate FROM changes WHERE before > 0 AND rate >= {_RATE_FACTOR} * before
        ORDER BY step DESC LIMIT 1
    """  # noqa: S608  # our own names
    row = connection.execute(query, {"attempt": attempt, "step": step}).fetchone()
    return None if row is None else RateJump._make(row)


def find_episodes(run_dir: Path, attempt: int, places: Places) -> list[Episode]:
    """Return, in the order in which they began, the episodes in which values exploded, died or diverged."""
    alerts = [alert for log in sorted(run_dir.glob("nodes/*/alerts.jsonl")) for alert in AlertLog(log).read()]
    fired: dict[str, Alert] = {}
    ends: dict[str, int] = {}
    for alert in alerts:
        if alert.state is AlertState.RESOLVED:
            ends[alert.id] = alert.step
        else:
            fired[alert.id] = alert
    if alerts:
        chosen = [alert for alert in fired.values() if alert.attempt == attempt]
        return sorted(_episodes(chosen, ends, "alerts"), key=_beginning)
    found = list(_copies_that_differ(run_dir, attempt, places))
    with contextlib.suppress(StoreError):
        rehearsal = rehearse(load_rules(None), run_dir, max_steps=MAX_REHEARSED)
        chosen = [alert for alert in rehearsal.alerts if alert.attempt == attempt]
        found += _episodes(chosen, rehearsal.ends, "stored rows by the default rules, as the run has no alerts")
    return sorted(found, key=_beginning)


def _beginning(episode: Episode) -> tuple[int, str]:
    return episode.first_step, episode.rule


def _episodes(alerts: Iterable[Alert], ends: Mapping[str, int], source: str) -> Iterator[Episode]:
    """Yield one episode for all that one rule says of one step."""
    groups: dict[tuple[int, str], list[Alert]] = {}
    for alert in alerts:
        if symptom_of(alert) is not None:
            groups.setdefault((alert.first_step, alert.rule), []).append(alert)
    for (step, rule), members in groups.items():
        symptom = symptom_of(members[0])
        assert symptom is not None
        over = [ends[one.id] for one in members if one.id in ends]
        keys = (finding.series for one in members for finding in one.findings)
        yield Episode(
            symptom=symptom,
            first_step=step,
            seen_step=min(one.step for one in members),
            last_step=max(over) if len(over) == len(members) else None,
            ranks=tuple(sorted({one.rank for one in members})),
            series=frozenset((str(key.kind), key.name, key.slot, key.stage) for key in keys),
            rule=rule,
            messages=tuple(one.message for one in members),
            source=source,
            condition=members[0].condition,
            is_cut=any(one.num_series > len(one.findings) for one in members),
        )


def _copies_that_differ(run_dir: Path, attempt: int, places: Places) -> Iterator[Episode]:
    """Yield the first step on which copies of a parameter have different checksums; the fewest ranks are wrong.

    Copies are what ranks of one place hold, but for the places in data and context parallelism.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in places.items():
        groups.setdefault(tuple(place.get(axis, 0) for axis in ("tp", "pp", "ep")), []).append(rank)
    with open_store(run_dir) as connection:
        for ranks in groups.values() if connection is not None else ():
            assert connection is not None
            found = connection.execute(_DIFFERENT_COPIES, {"attempt": attempt, "ranks": ranks}).fetchall()
            wrong = tuple(sorted({rank for *_, rank in found}))
            if wrong:
                step, name = found[0][:2]
                names = {other for _, other, *_ in found}
                which = f"{name} and of {counted(len(names) - 1, 'other parameter')}" if len(names) > 1 else name
                who = "all ranks" if len(wrong) == len(ranks) else f"{rank_list(wrong)} and the others"
                yield Episode(
                    symptom=Symptom.DIVERGED,
                    first_step=step,
                    seen_step=step,
                    last_step=None,
                    ranks=wrong,
                    series=frozenset((str(Kind.CHECKSUM), *series) for _, *series, _ in found),
                    rule="checksums of copies",
                    messages=(f"the copies of {which} are not equal on {who}",),
                    source="stored rows",
                )


# On the first step with different copies: every copy that fewer ranks have than another one, or as many.
_DIFFERENT_COPIES = f"""
    WITH copies AS (
        SELECT step, name, slot, stage, rank, (count, min, max, sum, sum_sq, zeros, nans, infs) AS copy FROM all_stats
        WHERE attempt = $attempt AND kind = '{Kind.CHECKSUM}' AND list_contains($ranks, rank)
    ), counted AS (
        SELECT *, count(*) OVER (PARTITION BY step, name, slot, stage, copy) AS votes,
            count(*) OVER (PARTITION BY step, name, slot, stage) AS number
        FROM copies
    ), odd AS (SELECT * FROM counted WHERE votes < number)
    SELECT step, name, slot, stage, rank FROM odd
    WHERE step = (SELECT min(step) FROM odd) AND 2 * votes <= number ORDER BY name, slot, rank
"""  # noqa: S608  # our own name


def symptom_of(alert: Alert) -> Symptom | None:
    """Return the symptom that an alert stands for: exploded, died, diverged; None if it is not about such values.

    That follows from what the rule looks for, on which side of the usual the value is, and what it is a value of: a
    loss that falls is no fault. How the rule is called does not matter.
    """
    if alert.kind not in _KINDS:
        return None
    if alert.kind is Kind.CHECKSUM:
        return Symptom.DIVERGED
    if alert.condition is not None and alert.condition in _BY_CONDITION:
        return _BY_CONDITION[alert.condition]
    if alert.direction is AlertDirection.NONE:
        return None
    smaller = None if alert.kind is Kind.LOSS else Symptom.DIED
    return Symptom.EXPLODED if _has_grown(alert) else smaller


def _has_grown(alert: Alert) -> bool:
    if min(alert.value, alert.baseline) < 0:  # of a statistic with a sign, the side is not the size
        return abs(alert.value) > abs(alert.baseline)
    return alert.direction is AlertDirection.UP


def moved_series(rows: Sequence[Moved], episode: Episode) -> list[Moved]:
    """Return those of `rows` that became larger or smaller as the symptom of `episode` says.

    What diverged from its peers need not have: there these are the series that the alerts name.
    """
    if episode.symptom is Symptom.DIVERGED:
        named = [row for row in rows if (row.kind, row.name, row.slot, row.stage) in episode.series]
        return [row for row in named if row.rank in episode.ranks]
    sign = 1 if episode.symptom is Symptom.EXPLODED else -1
    strengths = {row: sign * math.log(row.ratio) for row in rows if row.usual > 0 and math.isfinite(row.value)}
    kinds = {kind for kind, *_ in episode.series}
    largest = max((strength for row, strength in strengths.items() if row.kind in kinds), default=0.0)
    return [row for row, strength in strengths.items() if largest > 0 and strength >= _SHARE * largest]


def read_series(connection: duckdb.DuckDBPyConnection, attempt: int, episode: Episode) -> Iterator[Moved]:
    """Yield every series of the first step of an episode beside what it was on the steps before."""
    kinds = ", ".join(f"'{kind}'" for kind in sorted(_KINDS))
    names = ", ".join(_ROWS)
    query = f"""
        WITH chosen AS (
            SELECT DISTINCT step FROM all_stats WHERE attempt = $attempt AND step <= $step
            ORDER BY step DESC LIMIT {_USUAL_STEPS + 1}
        ), near AS (
            SELECT {names}, step, coalesce(rms, 0) AS value FROM all_stats
            WHERE attempt = $attempt AND step IN (SELECT step FROM chosen) AND kind IN ({kinds})
        )
        SELECT {names}, any_value(value) FILTER (step = $step) AS value,
            coalesce(median(value) FILTER (step < $step), 'NaN') AS usual, count(*) FILTER (step < $step) AS number
        FROM near GROUP BY ALL HAVING value IS NOT NULL
    """  # noqa: S608  # our own names
    found = connection.execute(query, {"attempt": attempt, "step": episode.first_step}).fetchall()
    for *key, value, usual, number in found:
        is_known = number >= _LEAST_USUAL or episode.symptom is Symptom.DIVERGED
        if is_known:
            yield Moved._make((*key, value, usual))


def first_episode(episodes: Sequence[Episode], bad_step: int | None) -> Episode | None:
    """Return the episode that began first; before a step that was not finite, only one that can have caused it.

    There values exploded, were seen to before that step, and did so until then. What is dead, collapsed or unlike its
    peers makes nothing non-finite.
    """
    if bad_step is None:
        return episodes[0] if episodes else None
    return next((one for one in episodes if _lasts(one, bad_step)), None)


def _lasts(episode: Episode, bad_step: int) -> bool:
    """Return whether values had exploded before `bad_step`, and still did on it."""
    is_before = episode.first_step < bad_step and episode.seen_step <= bad_step
    is_of_values = episode.symptom is Symptom.EXPLODED and episode.condition is not AlertCondition.RATIO
    return is_of_values and is_before and (episode.last_step or bad_step) >= bad_step
