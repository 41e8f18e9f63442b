"""The first step at which two runs differ in one of their curves: at all, and by more than rounding."""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

import numpy as np

from trainermon.agent.runs.curves import NUMBERS, Floats, RunCurves, StatisticName

ROUNDING = 1e-5
"""Relative: what float32 sums in another order leave, of a million terms; what is further apart is no rounding."""

_WORDS = {
    "loss": "The loss",
    "grad_norm": "The gradient norm",
    "step_time": "The step time",
    "tokens_per_second": "Tokens per second",
}


class Difference(NamedTuple):
    """Where two curves differ.

    Attributes:
        step: The first such step.
        one: Value of the first run; infinity: not finite.
        other: Value of the second run.
        relative: How far they are apart, as a share of the larger one; 1 where one of them is not finite.
    """

    step: int
    one: float
    other: float
    relative: float


def first_difference(one: RunCurves, other: RunCurves, name: str) -> dict[str, Any]:
    """Return, ready for JSON, the first step at which two runs differ in a curve, and a sentence that says so.

    Only steps that both have recorded are compared. {"name", "num_steps", "first_step", "last_step", "any": difference
    or None, "beyond_rounding": likewise, "sentence", "command"}.

    Raises:
        QueryError: The name is none, see `RunCurves.read`.
        StoreError: A store cannot be read.
    """
    left, right = one.read([name]), other.read([name])
    empty = np.full(0, np.nan)
    steps, at_left, at_right = np.intersect1d(left.steps, right.steps, assume_unique=True, return_indices=True)
    values = left.columns.get(name, empty)[at_left], right.columns.get(name, empty)[at_right]
    both = ~np.isnan(values[0]) & ~np.isnan(values[1])
    steps, ones, others = steps[both], values[0][both], values[1][both]
    relative = _relative(ones, others)
    at_all, beyond = (
        next(
            (Difference(int(steps[at]), float(ones[at]), float(others[at]), float(relative[at])) for at in places), None
        )
        for places in (np.flatnonzero(ones != others), np.flatnonzero(relative > ROUNDING))
    )
    paths = [shlex.quote(str(run.place.path)) for run in (one, other)]
    return {
        "name": name,
        "num_steps": len(steps),
        "first_step": int(steps[0]) if len(steps) else None,
        "last_step": int(steps[-1]) if len(steps) else None,
        "any": at_all._asdict() if at_all else None,
        "beyond_rounding": beyond._asdict() if beyond else None,
        "sentence": _sentence(name, steps, at_all, beyond),
        "command": f"trainermon diagnose {paths[0]} --against {paths[1]}",
    }


def _relative(ones: Floats, others: Floats) -> Floats:
    size = np.maximum(np.abs(ones), np.abs(others))
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = np.where(size > 0, np.abs(ones - others) / size, 0.0)
    return np.where(np.isfinite(ones) & np.isfinite(others), apart, np.where(ones == others, 0.0, 1.0))


def _sentence(name: str, steps: np.ndarray, at_all: Difference | None, beyond: Difference | None) -> str:
    what = _WORDS[name] if name in NUMBERS else _of(StatisticName.parse(name))
    if not len(steps):
        return f"{what} was recorded by both runs on no common step."
    span = (
        f"step {steps[0]:,}" if len(steps) == 1 else f"all {len(steps):,} common steps, {steps[0]:,} to {steps[-1]:,}"
    )
    if at_all is None:
        return f"{what} is the same on {span}."
    if beyond is None:
        return f"{what} differs from step {at_all.step:,} on, by rounding only ({_values(at_all)}), on {span}."
    if beyond.step == at_all.step:
        return f"{what} differs from step {beyond.step:,} on: {_values(beyond)}."
    return (
        f"{what} differs by more than rounding from step {beyond.step:,} on: {_values(beyond)}; at all from step "
        f"{at_all.step:,} on, there by {at_all.relative:.1e} of its size."
    )


def _of(series: StatisticName) -> str:
    label = f"{series.name}.{series.slot}" if series.slot else series.name
    return f"{series.statistic} of {label} ({series.kind})"


def _values(found: Difference) -> str:
    return f"{_text(found.one)} against {_text(found.other)}"


def _text(value: float) -> str:
    return f"{value:.9g}" if np.isfinite(value) else "not finite"
