"""What people have said about alerts: that one is known, and that a rule be quiet until a time. It survives a restart.

A silence mutes what an alert sets in motion: dumps that follow from it, and the metrics by which Prometheus, and after
it Alertmanager and whoever is on call, hear of it. The alert itself is still found, logged and shown.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainermon.core.ledger import Ledger
from trainermon.core.strict import build, require
from trainermon.core.values import Alert, Finding

FILE = "alerts.handled.jsonl"
"""Beside the log of a node's alerts; one JSON object per line, `{"acknowledged": …}` or `{"silenced": …}`."""

MAX_NAME = 100
MAX_NOTE = 500
MAX_SILENCE_S = 30 * 24 * 3600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """Somebody knows of an alert and looks after it.

    Attributes:
        alert: Its id.
        by: Who says so.
        time_s: When, Unix time.
        note: What else there is to say.
    """

    alert: str
    by: str
    time_s: float
    note: str = ""

    def __post_init__(self) -> None:
        require(self.alert, "alert", self.alert, "the id of an alert")
        _check_words(self.by, self.note)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A rule is quiet until a time.

    Attributes:
        rule: Its name.
        until_s: Until when, Unix time; one that has passed ends the silence.
        by: Who wants so.
        time_s: Since when, Unix time.
        series: Shell pattern: only alerts all of whose series have such a label (`h.3.*`); "": every alert of the rule.
        note: Why.
    """

    rule: str
    until_s: float
    by: str
    time_s: float
    series: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        require(self.rule, "rule", self.rule, "the name of a rule")
        require(self.until_s - self.time_s <= MAX_SILENCE_S, "until_s", self.until_s, "at most 30 days from now")
        require(len(self.series) <= MAX_NOTE, "series", self.series, f"at most {MAX_NOTE} characters")
        _check_words(self.by, self.note)

    def mutes(self, alert: Alert, now_s: float) -> bool:
        """Return whether the alert is one of those that are quiet now."""
        if alert.rule != self.rule or now_s >= self.until_s:
            return False
        return not self.series or (bool(alert.findings) and all(map(self._names, alert.findings)))

    def _names(self, finding: Finding) -> bool:
        names = (finding.series.label, finding.series.name)
        return any(fnmatch.fnmatchcase(name, self.series) for name in names)


class AlertHandling:
    """Keeps what was said about alerts of a node, and writes it down.

    Args:
        path: The file; it is created, with mode 0600, by the first word. One process writes to it.
    """

    def __init__(self, path: Path) -> None:
        self._ledger = Ledger(path)
        self._acknowledged: dict[str, Acknowledgement] = {}
        self._silences: dict[tuple[str, str], Silence] = {}
        self._ledger.read(self._read)

    def write(self, said: Acknowledgement | Silence) -> None:
        """Write it down; it counts once it is passed to `take`. Another thread may call this. Raises OSError."""
        name = "acknowledged" if isinstance(said, Acknowledgement) else "silenced"
        self._ledger.append({name: dataclasses.asdict(said)})

    def take(self, said: Acknowledgement | Silence) -> None:
        """Let it count from now on."""
        if isinstance(said, Acknowledgement):
            self._acknowledged[said.alert] = said
        else:
            self._silences[said.rule, said.series] = said

    def acknowledgement(self, alert_id: str) -> Acknowledgement | None:
        """Return who knows of this alert; None if nobody has said so."""
        return self._acknowledged.get(alert_id)

    def silence(self, alert: Alert, now_s: float) -> Silence | None:
        """Return what mutes the alert now, the longest of several; None: nothing does. `now_s` is Unix time."""
        found = [silence for silence in self._silences.values() if silence.mutes(alert, now_s)]
        return max(found, key=lambda silence: silence.until_s, default=None)

    def muted(self, alerts: Iterable[Alert], now_s: float) -> frozenset[str]:
        """Return the ids of those alerts that are quiet now."""
        if not any(silence.until_s > now_s for silence in self._silences.values()):
            return frozenset()
        return frozenset(alert.id for alert in alerts if self.silence(alert, now_s))

    def silences(self, now_s: float) -> list[Silence]:
        """Return what is in force now, in the order in which it ends."""
        found = (silence for silence in self._silences.values() if silence.until_s > now_s)
        return sorted(found, key=lambda silence: silence.until_s)

    def _read(self, entry: Mapping[str, Any]) -> None:
        if "acknowledged" in entry:
            self.take(build(Acknowledgement, entry["acknowledged"]))
        else:
            self.take(build(Silence, entry["silenced"]))


def _check_words(by: str, note: str) -> None:
    require(by.strip() and len(by) <= MAX_NAME, "by", by, f"a name of at most {MAX_NAME} characters")
    require(len(note) <= MAX_NOTE, "note", note, f"at most {MAX_NOTE} characters")
