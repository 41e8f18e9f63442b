"""What people say about alerts over HTTP: that one is known, that a rule be quiet for a while.

    POST /api/acknowledgements {"alert": ["5f…"], "by": "mia", "note": "known bad node"}
    POST /api/silences {"rule": "step-time-slow", "minutes": 60, "series": "", "by": "mia", "note": "upgrade"}

`minutes` 0 ends a silence.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any

from trainermon.agent.alert_page import PlainAlerts
from trainermon.agent.alerting import AlertBook
from trainermon.agent.orders.answers import OrderAnswer, OrderStatus
from trainermon.agent.orders.commands import ConflictError
from trainermon.alerts.handling import Acknowledgement, AlertHandling, Silence
from trainermon.core.strict import build, require
from trainermon.core.values import Alert, well_formed

MAX_ALERTS = 2000

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _AcknowledgeOrder:
    alert: tuple[str, ...]
    by: str
    note: str = ""

    def __post_init__(self) -> None:
        require(0 < len(self.alert) <= MAX_ALERTS, "alert", len(self.alert), f"1 to {MAX_ALERTS} ids of alerts")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _SilenceOrder:
    rule: str
    minutes: float
    by: str
    series: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        require(self.minutes >= 0, "minutes", self.minutes, "0 or more; 0 ends the silence")


class HandlingDesk:
    """Takes acknowledgements and silences, and shows them to open pages.

    Args:
        handling: Keeps them.
        book: The alerts of the run.
        plain: Turns alerts into JSON for the page.
        publish: Sends an event to open pages.
        rules: The names of all rules.
        executor: Writes to the run directory.
    """

    def __init__(  # noqa: PLR0913 - what an alert touches
        self,
        handling: AlertHandling,
        book: AlertBook,
        *,
        plain: PlainAlerts,
        publish: Callable[[str, Any], None],
        rules: frozenset[str],
        executor: Executor,
    ) -> None:
        self._handling = handling
        self._book = book
        self._plain = plain
        self._publish = publish
        self._rules = rules
        self._executor = executor

    async def acknowledge(self, body: Any) -> OrderAnswer:
        """Record who knows of some alerts.

        Raises:
            ConfigError: The body is wrong.
            ConflictError: One of them is no alert of this node.
            OSError: It cannot be written down; nothing has changed for those that follow.
        """
        require(isinstance(body, Mapping), "the body", body, "an object")
        order = build(_AcknowledgeOrder, body)
        unknown = [identity for identity in order.alert if identity not in self._book.latest]
        if unknown:
            raise ConflictError(f"alert: {unknown[0][:100]!r} is no alert of this node")
        for identity in order.alert:
            said = Acknowledgement(
                alert=identity, by=well_formed(order.by), time_s=time.time(), note=well_formed(order.note)
            )
            await self._record(said)
        self._show(lambda alert: alert.id in order.alert)
        return OrderAnswer(status=OrderStatus.ACCEPTED)

    async def silence(self, body: Any) -> OrderAnswer:
        """Mute a rule for a while, or end that.

        Raises:
            ConfigError: The body is wrong.
            ConflictError: There is no such rule.
            OSError: It cannot be written down; nothing has changed.
        """
        require(isinstance(body, Mapping), "the body", body, "an object")
        order = build(_SilenceOrder, body)
        if order.rule not in self._rules:
            raise ConflictError(f"rule: there is no {order.rule[:100]!r}; `trainermon rules list` shows all")
        now_s = time.time()
        said = Silence(
            rule=order.rule,
            series=well_formed(order.series),
            until_s=now_s + 60 * order.minutes,
            by=well_formed(order.by),
            time_s=now_s,
            note=well_formed(order.note),
        )
        await self._record(said)
        self._show(lambda alert: alert.rule == order.rule)
        return OrderAnswer(status=OrderStatus.ACCEPTED)

    async def _record(self, said: Acknowledgement | Silence) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, self._handling.write, said)
        self._handling.take(said)
        _log.info("%s", said)

    def _show(self, concerns: Callable[[Alert], bool]) -> None:
        for alert in self._book.latest.values():
            if concerns(alert):
                self._publish("alert", self._plain.plain(alert))
