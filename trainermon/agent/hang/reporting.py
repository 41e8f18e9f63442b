"""Tells of a hang or a death: the alert, and the post-mortem that is written for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor

from trainermon.agent.hang.crash import memory_hint
from trainermon.agent.hang.evidence import DEAD, RankEvidence
from trainermon.agent.hang.open_alerts import HANG, RANK_DEAD
from trainermon.agent.hang.process import oom_kills
from trainermon.agent.hang.records import LastRecords
from trainermon.agent.hang.report import FOLDER, PostMortem, read_tail, report_name, write_report
from trainermon.agent.hang.verdict import HangVerdict
from trainermon.agent.place import AgentPlace
from trainermon.alerts.state import alert_id
from trainermon.core.values import Alert, AlertCondition, AlertState, Finding, Kind, SeriesKey, Severity

WRITE_LIMIT_S = 20.0

_SERIES = {HANG: SeriesKey(Kind.STEP, "silence_seconds"), RANK_DEAD: SeriesKey(Kind.STEP, "lost_ranks")}

_log = logging.getLogger(__name__)


class HangReporter:
    """Makes the alerts `hang` and `rank-dead`, and writes their post-mortems into the run directory.

    Args:
        place: The agent's folders; the end of its log is part of a report.
        records: The ranks' last steps, which are part of it too.
        report: Called with each alert.
        severities: By rule (`hang`, `rank-dead`), how urgent it is.
        executor: Writes the report.
    """

    def __init__(
        self,
        place: AgentPlace,
        *,
        records: LastRecords,
        report: Callable[[Alert], None],
        severities: Mapping[str, Severity],
        executor: Executor,
    ) -> None:
        self.send = report
        self._place = place
        self._records = records
        self._severities = severities
        self._executor = executor
        self._oom_kills = oom_kills() or 0

    def make_alert(  # noqa: PLR0913 - what the alerts differ in
        self, rule: str, text: str, *, attempt: int, rank: int, step: int, value: float, baseline: float
    ) -> Alert:
        """Return a new alert of `rule` (`hang`, `rank-dead`) that begins now; `text` is its message.

        `value` is what was found, as the seconds of silence, and `baseline` what is normal, as the seconds allowed.
        """
        return Alert(
            id=alert_id(rule, rank=rank, attempt=attempt, first_step=step),
            rule=rule,
            severity=self._severities.get(rule, Severity.CRITICAL),
            state=AlertState.FIRING,
            attempt=attempt,
            rank=rank,
            step=step,
            first_step=step,
            time_s=time.time(),
            kind=Kind.STEP,
            value=value,
            baseline=baseline,
            num_series=1,
            findings=(Finding(series=_SERIES[rule], value=value, baseline=baseline),),
            message=f"{rule}: {text}",
            condition=AlertCondition.REPORTED,
        )

    async def write(self, alert: Alert, found: HangVerdict, evidence: Sequence[RankEvidence]) -> None:
        """Write the post-mortem of an alert, within a limit; a failure is logged."""
        place = self._place
        name = report_name(alert, place.node)
        report = PostMortem(
            rule=alert.rule,
            run_id=place.run_id,
            host=place.node,
            attempt=alert.attempt,
            step=alert.step,
            time_s=alert.time_s,
            verdict=found,
            ranks=tuple(evidence),
            records={one.rank: self._records.steps(one.rank) for one in evidence},
            hints=self._hints(evidence),
            log=read_tail(place.log),
        )
        job = self._executor.submit(write_report, place.run_dir / FOLDER, name, report)
        try:
            await asyncio.wait_for(asyncio.wrap_future(job), WRITE_LIMIT_S)
        except (OSError, asyncio.TimeoutError) as error:
            _log.warning("the post-mortem %s is not written: %s", name, str(error) or "the file system does not answer")
        else:
            _log.info("post-mortem: %s", place.run_dir / FOLDER / f"{name}.md")

    def _hints(self, evidence: Sequence[RankEvidence]) -> tuple[str, ...]:
        kills = (oom_kills() or 0) - self._oom_kills
        hints = (memory_hint(one, oom_kills=kills) for one in evidence if one.life == DEAD)
        return tuple(dict.fromkeys(hint for hint in hints if hint))
