"""Alerts made by hand, for what comes after the engine."""

from __future__ import annotations

from typing import Any

from trainermon.core.values import Alert, AlertCondition, AlertDirection, AlertState, Finding, Kind, SeriesKey, Severity


def alert(identity: str = "a1", **changes: Any) -> Alert:
    fields: dict[str, Any] = {
        "id": identity,
        "rule": "loss-spike",
        "severity": Severity.WARNING,
        "state": AlertState.FIRING,
        "attempt": 0,
        "rank": 0,
        "step": 100,
        "first_step": 98,
        "time_s": 1700000000.25,
        "kind": Kind.LOSS,
        "value": 9.5,
        "baseline": 2.0,
        "num_series": 1,
        "findings": (Finding(series=SeriesKey(Kind.LOSS, "loss", micro_step=3), value=9.5, baseline=2.0),),
        "message": "loss-spike: the loss rose",
        "condition": AlertCondition.SPIKE,
        "direction": AlertDirection.UP,
    }
    return Alert(**(fields | changes))
