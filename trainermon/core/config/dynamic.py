"""What `dynamic_on` and the variable `DYNAMIC_MONITOR` of msprobe's monitor mean together.

| `DYNAMIC_MONITOR` | `dynamic_on` | |
|---|---|---|
| not true | false | collects as configured, and is not changed any more |
| not true | true | collects as configured; edits of the file are followed |
| true | false | waits: collects nothing, until the file is edited to say `dynamic_on: true` |
| true | true | as without the variable |
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainermon.core.config.schema import MonitorConfig

VARIABLE = "DYNAMIC_MONITOR"


def is_followed(config: MonitorConfig, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether edits of the configuration file during the run are applied (`dynamic_on`, or the environment)."""
    return config.dynamic_on or _is_set(environ)


def is_waiting(config: MonitorConfig, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether nothing is collected until an edit of the configuration file turns collection on."""
    return _is_set(environ) and not config.dynamic_on


def _is_set(environ: Mapping[str, str]) -> bool:
    return environ.get(VARIABLE, "").strip().lower() in ("true", "1")
