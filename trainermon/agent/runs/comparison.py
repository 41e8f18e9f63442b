"""Several runs in one answer: their curves over one axis, thinned for a chart, and the series that they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainermon.agent.runs.curves import Curves, Floats, RunCurves, describe_series
from trainermon.core.errors import QueryError, TrainermonError
from trainermon.core.values import measured_as_plain

AXES = ("step", "time", "tokens")
MAX_SERIES = 200


def compare(
    runs: Sequence[RunCurves], names: Sequence[str], columns: int, axis: str, span: tuple[float, float] | None = None
) -> dict[str, Any]:
    """Return {"runs": [{"key", "steps", "x", "series"}]}: curves of each run, ready for JSON.

    Of more steps than a chart of `columns` pixels shows, the least, the largest and what is not finite of every pixel
    stay. A run that cannot be read has an `error` instead. In `series`, None is not recorded, "NaN" not finite.

    Args:
        runs: The runs.
        names: As for `RunCurves.read`.
        columns: Width of the chart, in pixels.
        axis: What `x` is: the step, seconds since the run's first step, or tokens up to the step.
        span: Only what lies between these places of the axis, and one more on either side.

    Raises:
        QueryError: The axis or a name is unknown.
    """
    if axis not in AXES:
        raise QueryError(f"unknown axis {axis!r}; expected one of: {', '.join(AXES)}")
    return {"axis": axis, "runs": [_answer(run, names, columns, axis, span) for run in runs]}


def matching_series(runs: Sequence[RunCurves], text: str) -> dict[str, Any]:
    """Return {"series": [...], "total": n}: the series of any of the runs that have all words of `text` in their name.

    At most 200 of them, in the order of their names.
    """
    words = text.lower().split()
    known = sorted(frozenset().union(*(run.offered() for run in runs)))
    found = [series for series in known if all(word in " ".join(series).lower() for word in words)]
    return {"series": [describe_series(*series) for series in found[:MAX_SERIES]], "total": len(found)}


def thin(columns: Sequence[Floats], buckets: int) -> npt.NDArray[np.intp]:
    """Return, ascending, the places to keep of columns of one length, so that a chart of them looks the same.

    These are, of every bucket of neighbours and every column, the smallest and the largest finite value, the first and
    last that is infinite, and both ends; all of them where there are no more than two for each bucket.
    """
    size = len(columns[0]) if columns else 0
    if size <= 2 * buckets:
        return np.arange(size)
    width = -(-size // buckets)
    begins = np.arange(0, size, width)
    kept = [np.array([0, size - 1])]
    for column in columns:
        cells = np.pad(column, (0, len(begins) * width - size), constant_values=np.nan).reshape(-1, width)
        finite, infinite = np.isfinite(cells), np.isinf(cells)
        lowest, highest = np.where(finite, cells, np.inf).argmin(1), np.where(finite, cells, -np.inf).argmax(1)
        kept += [(begins + place)[finite.any(1)] for place in (lowest, highest)]
        last = width - 1 - infinite[:, ::-1].argmax(1)
        kept += [(begins + place)[infinite.any(1)] for place in (infinite.argmax(1), last)]
    return np.unique(np.concatenate(kept))


def _answer(
    run: RunCurves, names: Sequence[str], columns: int, axis: str, span: tuple[float, float] | None
) -> dict[str, Any]:
    try:
        curves = run.read(names)
    except QueryError:
        raise
    except (TrainermonError, OSError) as error:
        return {"key": run.place.key, "error": str(error), "steps": [], "x": [], "series": {}}
    x = _along(curves, axis)
    chosen = np.flatnonzero(np.isfinite(x))
    if span is not None and len(chosen):
        begin, end = np.searchsorted(x[chosen], span[0]), np.searchsorted(x[chosen], span[1], side="right")
        chosen = chosen[max(0, begin - 1) : end + 1]
    wanted: Mapping[str, Floats] = {name: column[chosen] for name, column in curves.columns.items()}
    kept = thin(list(wanted.values()), columns) if wanted else np.arange(0)
    return {
        "key": run.place.key,
        "steps": curves.steps[chosen][kept].tolist(),
        "x": x[chosen][kept].tolist(),
        "series": {name: _told(column[kept]) for name, column in wanted.items()},
    }


def _along(curves: Curves, axis: str) -> Floats:
    """Return the place of each step on the axis; NaN where it has none."""
    if axis == "step":
        return curves.steps.astype(np.float64)
    if axis == "time":
        return np.maximum.accumulate(curves.time_s - curves.time_s[:1]) if len(curves.steps) else curves.time_s
    # A step that was not collected had as many tokens as the next that was.
    return np.cumsum(curves.tokens * np.diff(curves.steps, prepend=curves.steps[:1] - 1))


def _told(values: Floats) -> list[float | str | None]:
    return [measured_as_plain(float(f"{value:.7g}")) for value in values.tolist()]
