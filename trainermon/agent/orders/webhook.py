"""What Alertmanager posts: which of its alerts ask for a dump, of which run, on which ranks, of which kind.

An alert asks for a dump by the label `escalate` (`statistics` or `tensor`); `run` says of which run and `rank` on which
rank, without `rank` on all. Alertmanager repeats by design and cannot sign, so an alert is known by its fingerprint,
the time at which it began and what it asks for, and one that began long ago is not news.

Source: Alertmanager documentation, configuration, `<webhook_config>`: version 4 of the body.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from trainermon.core.errors import ConfigError
from trainermon.core.strict import require
from trainermon.core.values import DumpTask

VERSION = "4"
MAX_STEPS = 100
MAX_REASON = 500
MAX_AGE_S = 900.0
"""An alert that began longer ago, or will begin later than so, is not followed by a dump."""

_NAMESPACE = uuid.UUID("9bb9b1a2-6a0c-5c0e-9d26-5f1f3b6f3f6c")
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)", re.ASCII)
_RANK = re.compile(r"[0-9]{1,7}")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FiredAlert:
    """One alert that asks for a dump.

    Attributes:
        key: Fingerprint, beginning and action: equal for every repetition.
        rule: Label `rule`, else `alertname`.
        run: Label `run`; empty if there is none.
        rank: Label `rank`; None for all ranks.
        task: `statistics` or `tensor`.
        num_steps: Label `escalate_steps`; 1 if there is none.
        starts_s: Unix time at which it began to fire.
        summary: Annotation `summary`.
    """

    key: str
    rule: str
    run: str
    rank: int | None
    task: DumpTask
    num_steps: int
    starts_s: float
    summary: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlertNotification:
    """A notification of Alertmanager, parsed.

    Attributes:
        alerts: The firing alerts that ask for a dump.
        ignored: Why each of the others has no consequence.
        truncated: Alerts of the group were left out: whatever is asked for is meant for all ranks.
    """

    alerts: tuple[FiredAlert, ...]
    ignored: tuple[str, ...]
    truncated: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DumpRequest:
    """A dump that follows from the new alerts of one run in one notification.

    Attributes:
        id: Made of the alerts' keys: the same alerts give the same id.
        run: Of which run.
        ranks: Which ranks, ascending; None for all.
        task: `statistics` or `tensor`, the most that one of the alerts asks for.
        num_steps: For how many steps, the most that one of the alerts asks for.
        reason: Rule and summary of the first one.
        alerts: Keys of the alerts, sorted.
    """

    id: str
    run: str
    ranks: tuple[int, ...] | None
    task: DumpTask
    num_steps: int
    reason: str
    alerts: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EscalationOrder:
    """A dump that a controller orders from an agent.

    Attributes:
        id: Name of the escalation and of its dump.
        run: Of which run; an agent of another run refuses it.
        attempt: In which attempt; the steps of another one are other steps.
        first_step: The common step.
        num_steps: For how many steps.
        task: `statistics` or `tensor`.
        ranks: Local ranks; None for all that live.
        reason: What it is for.
    """

    id: str
    run: str
    attempt: int
    first_step: int
    num_steps: int = 1
    task: DumpTask = DumpTask.STATISTICS
    ranks: tuple[int, ...] | None = None
    reason: str = ""


def parse_notification(body: Any, *, now_s: float, max_age_s: float = MAX_AGE_S) -> AlertNotification:
    """Parse Alertmanager's webhook JSON `body` at Unix time `now_s`; keys that are not needed are ignored.

    Alerts that began more than `max_age_s` seconds ago are left out.

    Raises:
        ConfigError: It is no notification of version 4; the message names the key.
    """
    require(isinstance(body, Mapping), "the body", _short(body), "a JSON object as Alertmanager posts it")
    require(body.get("version") == VERSION, "version", _short(body.get("version")), f"{VERSION!r}")
    alerts = body.get("alerts")
    require(isinstance(alerts, list), "alerts", _short(alerts), "a list")
    truncated = body.get("truncatedAlerts", 0)
    require(
        type(truncated) is int and truncated >= 0, "truncatedAlerts", _short(truncated), "a whole number, 0 or more"
    )
    parsed = [
        _parse_alert(alert, f"alerts[{number}]", now_s=now_s, max_age_s=max_age_s)
        for number, alert in enumerate(alerts or ())
    ]
    return AlertNotification(
        alerts=tuple(alert for alert in parsed if isinstance(alert, FiredAlert)),
        ignored=tuple(reason for reason in parsed if isinstance(reason, str)),
        truncated=truncated > 0,
    )


def make_requests(alerts: Sequence[FiredAlert], *, truncated: bool) -> list[DumpRequest]:
    """Return one request for a dump for each run that `alerts` name, in the order in which they name it.

    `truncated`: alerts were left out, so all ranks are meant.
    """
    by_run: dict[str, list[FiredAlert]] = {}
    for alert in alerts:
        by_run.setdefault(alert.run, []).append(alert)
    return [_request(run, members, truncated=truncated) for run, members in by_run.items()]


def _request(run: str, members: Sequence[FiredAlert], *, truncated: bool) -> DumpRequest:
    keys = tuple(sorted({member.key for member in members}))
    ranks = {member.rank for member in members}
    named = sorted(rank for rank in ranks if rank is not None)
    first = members[0]
    name = _UNSAFE.sub("_", first.rule).strip("_-")[:64] or "alert"
    summary = f"{first.rule}: {first.summary}" if first.summary else first.rule
    others = f" (and {len(keys) - 1} more alerts)" if len(keys) > 1 else ""
    return DumpRequest(
        id=f"{name}-{uuid.uuid5(_NAMESPACE, ' '.join((run, *keys))).hex[:16]}",
        run=run,
        ranks=None if truncated or None in ranks else tuple(named),
        task=max((member.task for member in members), key=list(DumpTask).index),
        num_steps=max(member.num_steps for member in members),
        reason=summary[:MAX_REASON] + others,
        alerts=keys,
    )


def _parse_alert(alert: Any, path: str, *, now_s: float, max_age_s: float) -> FiredAlert | str:
    """Return what the alert asks for, or why it has no consequence."""
    require(isinstance(alert, Mapping), path, _short(alert), "an object")
    status = alert.get("status")
    require(status in ("firing", "resolved"), f"{path}.status", _short(status), "'firing' or 'resolved'")
    labels = _texts(alert, path, "labels")
    summary = _texts(alert, path, "annotations").get("summary", "")
    fingerprint = alert.get("fingerprint")
    good = isinstance(fingerprint, str) and re.fullmatch(r"[0-9a-f]{1,64}", fingerprint)
    require(good, f"{path}.fingerprint", _short(fingerprint), "a hexadecimal number")
    starts_s = _unix_time(alert.get("startsAt"), f"{path}.startsAt")
    objection = _objection(labels, status=str(status), age_s=now_s - starts_s, max_age_s=max_age_s)
    if objection:
        return f"{_rule(labels)}: {objection}"
    task, rank = DumpTask(labels["escalate"]), labels.get("rank")
    return FiredAlert(
        key=f"{fingerprint}/{starts_s:.3f}/dump-{task}",
        rule=_rule(labels),
        run=labels.get("run", ""),
        rank=None if rank is None else int(rank),
        task=task,
        num_steps=int(labels.get("escalate_steps", "1")),
        starts_s=starts_s,
        summary=summary,
    )


def _objection(labels: Mapping[str, str], *, status: str, age_s: float, max_age_s: float) -> str:
    if status == "resolved":
        return "resolved"
    if "escalate" not in labels:
        return "it has no label escalate"
    if abs(age_s) > max_age_s:
        return f"it began {age_s:.0f} s ago, more than {max_age_s:g} s"
    steps = labels.get("escalate_steps", "1")
    checks = (
        ("escalate", labels["escalate"] in list(DumpTask), " or ".join(DumpTask)),
        ("rank", "rank" not in labels or _RANK.fullmatch(labels["rank"]), "a number"),
        ("escalate_steps", _RANK.fullmatch(steps) and 1 <= int(steps) <= MAX_STEPS, f"1 to {MAX_STEPS}"),
    )
    wrong = (
        f"label {name}: found {labels[name][:40]!r}, expected {wanted}" for name, good, wanted in checks if not good
    )
    return next(wrong, "")


def _rule(labels: Mapping[str, str]) -> str:
    return (labels.get("rule") or labels.get("alertname") or "alert")[:100]


def _texts(alert: Mapping[str, Any], path: str, key: str) -> Mapping[str, str]:
    texts: Any = alert.get(key, {})
    good = isinstance(texts, Mapping) and all(isinstance(value, str) for value in texts.values())
    require(good, f"{path}.{key}", _short(texts), "an object of texts")
    return dict(texts)


def _unix_time(text: Any, path: str) -> float:
    """Return the time of an RFC 3339 text, which Go writes with up to nine digits and 'Z'."""
    match = _TIME.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"{path}: found {_short(text)!r}, expected a time such as 2025-01-31T12:00:00.5Z")
    zone = "+00:00" if match[3] == "Z" else match[3]
    try:
        whole = datetime.datetime.fromisoformat(match[1] + zone).timestamp()
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    return whole + float(f"0.{match[2] or 0}")


def _short(value: Any) -> Any:
    """Return `value` for a message, cut off if it is long."""
    shown = repr(value)
    return value if len(shown) <= 100 else f"{shown[:100]}…"
