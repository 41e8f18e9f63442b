"""What a rank reports in its journal beside its rows: one value per type of event, and its form in JSON.

A journal may be of another version, or damaged on purpose: reading never fails. A type that is not known becomes an
`UnknownEvent`, a field that is missing or of another type the empty value of its own, a status `unknown`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

from trainermon.core.environment.secrets import Redactor
from trainermon.core.values import TextEnum

_LARGEST = 1e300  # a whole number of JSON may have more digits than a float


class EventType(TextEnum):
    """The kinds of events that a rank reports in its journal: the `type` in their JSON."""

    WARNING = "warning"
    DETACHED = "detached"
    GAP = "gap"
    FAILED = "failed"
    CONFIGURATION = "configuration"
    REPLAY = "replay"
    DUMP = "dump"


class DumpStatus(TextEnum):
    """What became of a dump on one rank, ordered or of a replay; the most informative one first.

    `nonfinite`: a replay with NaN or Inf in it. `written`: an ordered dump. `clean`: a replay in which all was finite.
    `over quota`: written in part. `late`: the rank was past the step. `refused`, `failed`: not written. `unknown`: of
    another version.
    """

    NONFINITE = "nonfinite"
    WRITTEN = "written"
    CLEAN = "clean"
    OVER_QUOTA = "over quota"
    LATE = "late"
    REFUSED = "refused"
    FAILED = "failed"
    UNKNOWN = "unknown"


class ConfigurationStatus(TextEnum):
    """What became of an edited configuration on one rank: applied, too late for the rank, refused, or not known."""

    APPLIED = "applied"
    LATE = "late"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WarningEvent:
    """Reports that the rank cannot do a part of what it was asked; the run goes on and is monitored."""

    type: ClassVar[EventType] = EventType.WARNING
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DetachedEvent:
    """Reports that the monitor has detached after an error of its own; the run goes on unmonitored."""

    type: ClassVar[EventType] = EventType.DETACHED
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GapEvent:
    """Reports steps of which nothing is collected, as the monitor does not see them, or something is not looked for.

    Attributes:
        first: The first of them.
        last: The last one; None: it is not over.
        message: Why, in words.
        what: What is not looked for, in words, while all else is collected; "": nothing is collected.
    """

    type: ClassVar[EventType] = EventType.GAP
    first: int | None
    last: int | None
    message: str
    what: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailedEvent:
    """Reports that an exception ended the script.

    Attributes:
        step: The step on which it did; None: not known.
        message: Its traceback, as Python prints it.
        time_s: When it came to the monitor, Unix time by the rank's clock; 0: not known.
    """

    type: ClassVar[EventType] = EventType.FAILED
    step: int | None
    message: str
    time_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationEvent:
    """Reports, in the journal, what became of an edited configuration.

    Attributes:
        step: The step from which it was to apply; None: not known.
        command: Id of the command that brought it.
        status: Applied, late or refused.
        reason: Why, in words.
    """

    type: ClassVar[EventType] = EventType.CONFIGURATION
    step: int | None
    command: str
    status: ConfigurationStatus
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayEvent:
    """Reports, in the journal, what became of a replay of `step`.

    Attributes:
        step: The step; None: not known.
        status: `nonfinite`, `clean`, `refused` or `failed`.
        dump: Its folder in the run directory; None: nothing was written.
        reason: Why, in words.
        seconds: How long it took.
        micro_steps: How many were replayed; None: not known.
        bytes: Bytes written.
    """

    type: ClassVar[EventType] = EventType.REPLAY
    step: int | None
    status: DumpStatus
    dump: str | None
    reason: str
    seconds: float
    micro_steps: int | None
    bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DumpEvent:
    """Reports, in the journal, what became of an ordered dump of one step; fields that do not apply are None.

    Attributes:
        step: The step.
        command: Id of the command that ordered it.
        status: Written, late, refused …
        dump: Its folder in the run directory.
        bytes: Bytes written.
        reason: Why, in words.
    """

    type: ClassVar[EventType] = EventType.DUMP
    step: int | None
    command: str
    status: DumpStatus
    dump: str | None = None
    bytes: int | None = None
    reason: str | None = None


_OUTCOME = re.compile(r"rank (\d+) replay of step (\d+): (refused|failed) \((.*)\)$")


class Unreplayed(NamedTuple):
    """A replay that left no dump: of which rank and step, whether it was `refused` or `failed`, and why."""

    rank: int
    step: int
    status: str
    reason: str


def outcome_line(event: ReplayEvent | DumpEvent, rank: int) -> str:
    """Return what the agent's log says of a dump or a replay, on one line."""
    why = f" ({' '.join(event.reason.split())})" if event.reason else ""
    return f"rank {rank} {event.type} of step {event.step}: {event.status}{why}"


def read_outcome_line(line: str) -> Unreplayed | None:
    """Return what a line of the agent's log says of a replay that was refused or failed; None for any other."""
    found = _OUTCOME.search(line.rstrip())
    return None if found is None else Unreplayed(int(found[1]), int(found[2]), found[3], found[4])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent:
    """An event whose type this version does not know; "" if it has none."""

    type: str


_Status = TypeVar("_Status", DumpStatus, ConfigurationStatus)
RankEvent = (
    WarningEvent | DetachedEvent | GapEvent | FailedEvent | ConfigurationEvent | ReplayEvent | DumpEvent | UnknownEvent
)


def encode(event: RankEvent) -> dict[str, Any]:
    """Return the event as JSON has it: its type and its fields, without secrets.

    Left out are optional fields that are None, or what they are by default.

    >>> encode(WarningEvent(message="no room"))
    {'type': 'warning', 'message': 'no room'}
    """
    plain: dict[str, Any] = {"type": str(event.type)}
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if field.default is dataclasses.MISSING or value not in (None, field.default):
            plain[field.name] = Redactor().text(value) if field.name in ("message", "reason") and value else value
    return plain


def decode(plain: Mapping[str, Any]) -> RankEvent:
    """Return the event of a JSON object; never fails.

    >>> decode({"type": "dump", "step": "4", "command": "look", "status": "eaten"}).status
    <DumpStatus.UNKNOWN: 'unknown'>
    """
    name = _text(plain, "type")
    decoder = _DECODERS.get(name)
    return UnknownEvent(type=name) if decoder is None else decoder(plain)


def _warning(plain: Mapping[str, Any]) -> WarningEvent:
    return WarningEvent(message=_text(plain, "message"))


def _detached(plain: Mapping[str, Any]) -> DetachedEvent:
    return DetachedEvent(message=_text(plain, "message"))


def _gap(plain: Mapping[str, Any]) -> GapEvent:
    return GapEvent(
        first=_whole(plain, "first"),
        last=_whole(plain, "last"),
        message=_text(plain, "message"),
        what=_text(plain, "what") if "what" in plain else "",
    )


def _failed(plain: Mapping[str, Any]) -> FailedEvent:
    return FailedEvent(
        step=_whole(plain, "step"),
        message=_text(plain, "message"),
        time_s=_number(plain, "time_s") if "time_s" in plain else 0.0,
    )


def _configuration(plain: Mapping[str, Any]) -> ConfigurationEvent:
    return ConfigurationEvent(
        step=_whole(plain, "step"),
        command=_text(plain, "command"),
        status=_member(ConfigurationStatus, plain, "status"),
        reason=_text(plain, "reason"),
    )


def _replay(plain: Mapping[str, Any]) -> ReplayEvent:
    return ReplayEvent(
        step=_whole(plain, "step"),
        status=_member(DumpStatus, plain, "status"),
        dump=_text(plain, "dump") or None,
        reason=_text(plain, "reason"),
        seconds=_number(plain, "seconds"),
        micro_steps=_whole(plain, "micro_steps"),
        bytes=_whole(plain, "bytes"),
    )


def _dump(plain: Mapping[str, Any]) -> DumpEvent:
    return DumpEvent(
        step=_whole(plain, "step"),
        command=_text(plain, "command"),
        status=_member(DumpStatus, plain, "status"),
        dump=_text(plain, "dump") or None,
        bytes=_whole(plain, "bytes"),
        reason=_text(plain, "reason") or None,
    )


_DECODERS: Mapping[str, Callable[[Mapping[str, Any]], RankEvent]] = MappingProxyType(
    {
        EventType.WARNING.value: _warning,
        EventType.DETACHED.value: _detached,
        EventType.GAP.value: _gap,
        EventType.FAILED.value: _failed,
        EventType.CONFIGURATION.value: _configuration,
        EventType.REPLAY.value: _replay,
        EventType.DUMP.value: _dump,
    }
)


def _text(plain: Mapping[str, Any], key: str) -> str:
    value = plain.get(key)
    return value if isinstance(value, str) else ""


def _whole(plain: Mapping[str, Any], key: str) -> int | None:
    value = plain.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(plain: Mapping[str, Any], key: str) -> float:
    value = plain.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _LARGEST:
        return math.nan
    return float(value)


def _member(kind: type[_Status], plain: Mapping[str, Any], key: str) -> _Status:
    try:
        return kind(_text(plain, key))
    except ValueError:
        return kind.UNKNOWN
