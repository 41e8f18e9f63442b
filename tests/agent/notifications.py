"""Bodies as a real Alertmanager 0.25 posts them (version 4), for tests."""

from __future__ import annotations

import datetime
import hashlib
import time


def rfc3339(unix_s):
    """Return the time as Go writes it."""
    whole = datetime.datetime.fromtimestamp(int(unix_s), datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{whole}.{round(unix_s % 1 * 1e9):09d}Z".replace(".1000000000", ".999999999")


def alert(rule="TrainermonGradSpike", *, status="firing", starts_s=None, run="run", **labels):
    """Return one alert of the body; a label that is None is left out."""
    labels = {"alertname": rule, "run": run, "escalate": "statistics", "severity": "critical", **labels}
    labels = {key: str(value) for key, value in labels.items() if value is not None}
    fingerprint = hashlib.sha256(repr(sorted(labels.items())).encode()).hexdigest()[:16]
    return {
        "status": status,
        "labels": labels,
        "annotations": {"summary": f"{rule} on {labels.get('run')}", "description": "text"},
        "startsAt": rfc3339(time.time() if starts_s is None else starts_s),
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "http://127.0.0.1:19090/graph?g0.expr=x",
        "fingerprint": fingerprint,
    }


def notification(*alerts, **changes):
    """Return a body with these alerts."""
    return {
        "receiver": "trainermon",
        "status": "firing",
        "alerts": list(alerts),
        "groupLabels": {"run": "run"},
        "commonLabels": {},
        "commonAnnotations": {},
        "externalURL": "http://127.0.0.1:19093",
        "version": "4",
        "groupKey": '{}:{run="run"}',
        "truncatedAlerts": 0,
        **changes,
    }
