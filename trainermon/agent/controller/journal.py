"""Every escalation that was accepted, on disk before anybody is told so, and what has become of it.

A file that is only appended to, one JSON object per line. An escalation is on disk before its sender hears that it was
accepted, and its plan, with the common step, before the first agent hears of it. Whoever reads the file after a kill
therefore knows everything that was promised, and repeats only what agents recognise by its id.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainermon.agent.orders.webhook import DumpRequest
from trainermon.core.errors import ConfigError
from trainermon.core.ledger import Ledger
from trainermon.core.strict import build
from trainermon.core.values import as_plain

JOURNAL_FILE = "escalations.jsonl"
LOCK_FILE = "lock"
MAX_KEPT = 1000
MIN_KEPT_S = 86400.0
"""What is closed is kept for so long: longer than an alert can come back as news."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EscalationPlan:
    """How the controller carries out an escalation: which ranks dump, and from which common step.

    Attributes:
        id: Name of the command on every rank: the escalation's, with a number after the first issue.
        issue: From 1; a later one was made because the earlier one came too late everywhere.
        attempt: The start of the run in which the step is meant.
        first_step: The step on which all ranks begin to dump.
        ranks: The ranks, ascending.
    """

    id: str
    issue: int
    attempt: int
    first_step: int
    ranks: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class EscalationRecord:
    """A dump that was requested, and what has become of it.

    Attributes:
        request: What was requested.
        accepted_s: Unix time of its acceptance.
        plan: The newest plan, or None.
        outcome: How it ended, or None while it is open: `done`, `partial`, `suppressed` or `failed`.
        detail: Why, in words.
        coverage: By rank, what became of its dump.
    """

    request: DumpRequest
    accepted_s: float
    plan: EscalationPlan | None = None
    outcome: str | None = None
    detail: str = ""
    coverage: dict[int, str] = dataclasses.field(default_factory=dict)


class EscalationJournal:
    """Keeps the controller's escalations in a file, so that they survive its restart.

    One process at a time; calls must not overlap.

    Args:
        folder: Folder of the file, made if it is not there.
        now_s: Unix time.

    Attributes:
        escalations: By id of the request, oldest first.
        suppressed: By key of an alert that was not followed, the reason.

    Raises:
        ConfigError: The folder cannot be used, or another controller uses it.
    """

    def __init__(self, folder: Path, *, now_s: float) -> None:
        self.escalations: dict[str, EscalationRecord] = {}
        self.suppressed: dict[str, str] = {}
        self._path = folder / JOURNAL_FILE
        self._ledger = Ledger(self._path, sync=True)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock(folder / LOCK_FILE)
            entries = self._ledger.read()
            for entry in entries:
                self._apply(entry)
            self._compact(entries, now_s)
        except OSError as error:
            raise ConfigError(f"state_dir {folder} cannot be used: {error}") from error

    @property
    def open(self) -> list[EscalationRecord]:
        """The escalations that have not ended yet, oldest first."""
        return [escalation for escalation in self.escalations.values() if escalation.outcome is None]

    def knows(self, alert_key: str) -> bool:
        """Return whether an alert has led to an escalation before, or was suppressed."""
        followed = any(alert_key in escalation.request.alerts for escalation in self.escalations.values())
        return followed or alert_key in self.suppressed

    def num_recent(self, run: str, *, since_s: float) -> int:
        """Return how many escalations of the run `run` were accepted since the Unix time `since_s`."""
        accepted = self.escalations.values()
        return sum(entry.request.run == run and entry.accepted_s >= since_s for entry in accepted)

    def accept(self, request: DumpRequest, *, now_s: float) -> EscalationRecord:
        """Write `request` to the file and return it as a new, open escalation; `now_s` is Unix time.

        Raises:
            OSError: It is not certain to be on disk; it counts as never accepted.
        """
        return self.record([request], {}, now_s=now_s)[0]

    def record(
        self, requests: Sequence[DumpRequest], suppressed: Mapping[tuple[str, ...], str], *, now_s: float
    ) -> list[EscalationRecord]:
        """Write `requests` to the file, all at once, and return them as new, open escalations.

        `suppressed` are keys of alerts that are not followed, and why; they are written too. Raises OSError as `accept`
        does.
        """
        entries: list[dict[str, Any]] = [
            {"suppressed": {"alerts": list(keys), "reason": reason, "time_s": now_s}}
            for keys, reason in suppressed.items()
        ]
        entries += [{"accepted": {**as_plain(request), "accepted_s": now_s}} for request in requests]
        self._append(*entries)
        return [self.escalations[request.id] for request in requests]

    def suppress(self, alert_keys: Sequence[str], reason: str, *, now_s: float) -> None:
        """Write to the file that alerts are not followed, and why. Raises OSError as `accept` does."""
        self.record((), {tuple(alert_keys): reason}, now_s=now_s)

    def plan(self, escalation: EscalationRecord, plan: EscalationPlan) -> None:
        """Write to the file how an escalation will be carried out. Raises OSError as `accept` does."""
        self._append({"planned": {**as_plain(plan), "escalation": escalation.request.id}})

    def record_end(self, escalation: EscalationRecord, outcome: str, detail: str) -> None:
        """Write to the file how an escalation ended (`outcome`, why, by rank). Raises OSError as `accept` does."""
        coverage = {str(rank): status for rank, status in escalation.coverage.items()}
        entry = {"id": escalation.request.id, "outcome": outcome, "detail": detail, "coverage": coverage}
        self._append({"closed": entry})

    def close(self) -> None:
        """Release the folder, so that another controller can use it."""
        os.close(self._lock)

    def _append(self, *entries: Mapping[str, Any]) -> None:
        self._ledger.append(*entries)
        for entry in entries:
            self._apply(entry)

    def _apply(self, entry: Any) -> None:
        """Take over one line; a line of another version that cannot be understood is an error that names it."""
        try:
            ((kind, body),) = entry.items()
            _APPLY[kind](self, body)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{self._path}: a line that is not understood: {str(entry)[:200]} ({error!r})") from error

    def _apply_accepted(self, body: Mapping[str, Any]) -> None:
        plain = dict(body)
        accepted_s = float(plain.pop("accepted_s"))
        request = build(DumpRequest, plain)
        self.escalations.setdefault(request.id, EscalationRecord(request=request, accepted_s=accepted_s))

    def _apply_suppressed(self, body: Mapping[str, Any]) -> None:
        self.suppressed |= dict.fromkeys(body["alerts"], str(body["reason"]))

    def _apply_planned(self, body: Mapping[str, Any]) -> None:
        plain = dict(body)
        escalation = self.escalations[plain.pop("escalation")]
        escalation.plan = build(EscalationPlan, plain)
        escalation.coverage = {}

    def _apply_closed(self, body: Mapping[str, Any]) -> None:
        escalation = self.escalations[body["id"]]
        escalation.outcome, escalation.detail = body["outcome"], body["detail"]
        escalation.coverage = {int(rank): status for rank, status in body["coverage"].items()}

    def _compact(self, entries: Sequence[Any], now_s: float) -> None:
        """Write the file anew without what is over for long."""
        closed = [entry for entry in self.escalations.values() if entry.outcome is not None]
        old = [entry for number, entry in enumerate(reversed(closed)) if number >= MAX_KEPT or _is_old(entry, now_s)]
        for entry in old:
            del self.escalations[entry.request.id]
        self._ledger.replace(entry for entry in entries if self._is_needed(entry, now_s))

    def _is_needed(self, entry: Any, now_s: float) -> bool:
        ((kind, body),) = entry.items()
        if kind == "suppressed":
            return bool(now_s - body["time_s"] <= MIN_KEPT_S)
        return body["escalation" if kind == "planned" else "id"] in self.escalations


_APPLY = {
    "accepted": EscalationJournal._apply_accepted,
    "suppressed": EscalationJournal._apply_suppressed,
    "planned": EscalationJournal._apply_planned,
    "closed": EscalationJournal._apply_closed,
}


def _is_old(escalation: EscalationRecord, now_s: float) -> bool:
    return now_s - escalation.accepted_s > MIN_KEPT_S


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(f"state_dir {path.parent}: another controller uses it; give each its own") from None
    return descriptor
