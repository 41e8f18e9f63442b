"""Which settings of two runs differ: the first place to look at, before any tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from trainermon.analysis.diagnosis.evidence import open_store
from trainermon.analysis.environment.apart import RATE, meaning_of, settings_apart, text_of

if TYPE_CHECKING:
    import duckdb

_SAME = 1e-6  # what float32 keeps of a rate
_RATES = """
    SELECT step, max(learning_rate), min(learning_rate) FROM step_values
    WHERE learning_rate IS NOT NULL GROUP BY attempt, step ORDER BY attempt, step
"""


def setting_differences(run: Path, reference: Path, step: int | None = None) -> tuple[str, ...]:
    """Return the settings that differ and may change numbers, the gravest first, as texts: here, then in the reference.

    Of one gravity hyperparameters come first, then settings of the model, each once: an option of the script, and not
    what the optimizer has of it. The stored learning rates tell where no setting does, if they differ by `step`, the
    first on which values do: what comes later may follow from these. Empty if nothing differs, or is known.
    """
    rows = settings_apart(run, reference)
    rate = _rate_difference(run, reference, step) if RATE not in map(meaning_of, rows) else None
    return (*([rate] if rate else []), *map(text_of, rows))


def _rate_difference(run: Path, reference: Path, step: int | None) -> str | None:
    """Return the first step on which the smallest or largest learning rates of two runs differ, and both; else None."""
    with open_store(run) as ours, open_store(reference) as theirs:
        if ours is None or theirs is None:
            return None
        rates, others = (_rates(side) for side in (ours, theirs))
    apart = [key for key in rates if key in others and not math.isclose(rates[key], others[key], rel_tol=_SAME)]
    if not apart or (step is not None and apart[0][0] > step):
        return None
    return f"learning rate is {rates[apart[0]]:.6g} on step {apart[0][0]}, in the reference {others[apart[0]]:.6g}"


def _rates(connection: duckdb.DuckDBPyConnection) -> dict[tuple[int, str], float]:
    """Return the largest and the smallest learning rate of all ranks by step, in order."""
    rows = connection.execute(_RATES).fetchall()
    return {(step, which): rate for step, *both in rows for which, rate in zip(("max", "min"), both, strict=True)}
