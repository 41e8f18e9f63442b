"""Blocks, headers and rules for tests of the alerts, built from the contracts alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings

from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import AlertRule, load_rules
from trainermon.core.journal import Header
from trainermon.core.values import Alert, Coordinates, Kind, SeriesKey, StatBlock

NAN, INF = float("nan"), float("inf")

PATIENT = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], max_examples=50
)
"""For property tests: a loaded machine is no failure, and a temporary folder may be shared by the examples."""


def header(rank: int = 0, attempt: int = 0) -> Header:
    place = Coordinates(rank=rank, world_size=8)
    return Header(run_id="run", attempt=attempt, coordinates=place, host="node", pid=1, started_s=0.0)


def grad(name: str) -> SeriesKey:
    return SeriesKey(Kind.GRAD_REDUCED, name)


def row(elements: npt.ArrayLike) -> list[float]:
    """Return the moments of a few elements by numpy in float64."""
    values = np.atleast_1d(np.asarray(elements, np.float64))
    finite = values[np.isfinite(values)]
    least, most = (finite.min(), finite.max()) if finite.size else (INF, -INF)
    zeros, nans, infs = (values == 0).sum(), np.isnan(values).sum(), np.isinf(values).sum()
    return [float(x) for x in (values.size, least, most, finite.sum(), (finite**2).sum(), zeros, nans, infs)]


def block(step: int, rows: Mapping[int, Any]) -> StatBlock:
    """Return a block in which series `id` holds the elements `rows[id]`."""
    values = np.ascontiguousarray(np.array([row(elements) for elements in rows.values()]).reshape(-1, 8).T)
    return StatBlock(step=step, time_s=1000.0 + step, series=np.array(list(rows), np.uint32), values=values)


def rules(folder: Path, text: str) -> tuple[AlertRule, ...]:
    path = folder / "rules.yaml"
    path.write_text(text)
    return load_rules(path)


def feed(
    engine: RuleEngine, keys: Sequence[SeriesKey], blocks: Iterable[StatBlock], *, rank: int = 0, attempt: int = 0
) -> list[Alert]:
    found = []
    for each in blocks:
        found += engine.evaluate(header(rank, attempt), keys, each)
    return found
