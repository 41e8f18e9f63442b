"""SQL of the views that have one row per step: `steps` over all ranks, `step_values` for each rank."""

# ruff: noqa: S608  (the SQL consists of our own names)

from __future__ import annotations

from trainermon.core.catalogue import (
    CLIP_RATIO_SERIES,
    GLOBAL_NORM_SERIES,
    LEARNING_RATE_SERIES,
    LOSS_SCALE_SERIES,
    LOSS_SERIES,
    SKIPPED_SERIES,
    STEP_TIME_SERIES,
    TOKENS_PER_SECOND_SERIES,
    TOKENS_SERIES,
)
from trainermon.core.values import Kind

_IS_LOSS = f"kind = '{Kind.LOSS}' AND name = '{LOSS_SERIES}'"
_IS_DURATION = f"kind = '{Kind.STEP}' AND name = '{STEP_TIME_SERIES}'"
_IS_COUNTED_GRAD = f"kind = '{Kind.GRAD_REDUCED}' AND in_global_norm"


def _unless_nonfinite(rows: str, value: str) -> str:
    """Return the SQL of `value`, or of NaN or else infinity if the chosen rows count any; their sign is not stored."""
    return (
        f"CASE WHEN sum(nans) FILTER ({rows}) > 0 THEN 'nan'::DOUBLE"
        f" WHEN sum(infs) FILTER ({rows}) > 0 THEN 'inf'::DOUBLE ELSE {value} END"
    )


def _norm(rows: str) -> str:
    """Return the SQL of a norm; a row that was merged over n steps holds the sum over them: that of the mean step."""
    return _unless_nonfinite(rows, f"sqrt(sum(sum_sq / scale ** 2 / num_steps) FILTER ({rows}))")


_LOSS = f"sum(sum) FILTER ({_IS_LOSS}) / nullif(sum(finite) FILTER ({_IS_LOSS}), 0)"

# What a step is over all ranks: from few of the rows.
TOLD = f"""
    SELECT
        attempt,
        step,
        {_unless_nonfinite(_IS_LOSS, _LOSS)} AS loss,
        {_norm(_IS_COUNTED_GRAD)} AS grad_norm,
        max(max) FILTER ({_IS_DURATION} AND finite > 0) AS duration_s,
        max(time_s) AS told_s
    FROM stats
    WHERE {_IS_LOSS} OR {_IS_DURATION} OR {_IS_COUNTED_GRAD}
    GROUP BY attempt, step
"""

# All rows say which ranks there were, few say the rest: apart they take half the time.
STEPS = f"""
    WITH present AS (
        SELECT attempt, step, max(num_steps) AS num_steps, max(time_s) AS time_s, count(*) AS num_ranks
        FROM (SELECT attempt, step, rank, max(num_steps) AS num_steps, max(time_s) AS time_s FROM stats GROUP BY ALL)
        GROUP BY attempt, step
    ), told AS (SELECT * EXCLUDE (told_s) FROM ({TOLD}))
    FROM present LEFT JOIN told USING (attempt, step) ORDER BY attempt, step
"""

_COLUMNS = {
    "duration_s": STEP_TIME_SERIES,
    "loss": LOSS_SERIES,
    GLOBAL_NORM_SERIES: GLOBAL_NORM_SERIES,
    CLIP_RATIO_SERIES: CLIP_RATIO_SERIES,
    LOSS_SCALE_SERIES: LOSS_SCALE_SERIES,
    SKIPPED_SERIES: SKIPPED_SERIES,
    TOKENS_PER_SECOND_SERIES: TOKENS_PER_SECOND_SERIES,
}
_KNOWN = ", ".join(f"'{name}'" for name in (*_COLUMNS.values(), TOKENS_SERIES))
_RATES = f"FILTER (name = '{LEARNING_RATE_SERIES}' AND slot <> '')"

STEP_VALUES = f"""
    WITH each AS (
        SELECT
            attempt, step, rank, name, slot, max(num_steps) AS num_steps, max(time_s) AS time_s,
            {_unless_nonfinite("true", "sum(sum) / nullif(sum(finite), 0)")} AS value,
            {_unless_nonfinite("true", "sum(sum / num_steps)")} AS total
        FROM stats WHERE kind IN ('{Kind.LOSS}', '{Kind.STEP}') GROUP BY attempt, step, rank, name, slot
    ), numbers AS (
        SELECT
            attempt, step, rank, max(num_steps) AS num_steps, max(time_s) AS time_s,
            {", ".join(f"any_value(value) FILTER (name = '{name}') AS {column}" for column, name in _COLUMNS.items())},
            any_value(total) FILTER (name = '{TOKENS_SERIES}') AS tokens,
            max(value) {_RATES} AS learning_rate,
            list(value ORDER BY try_cast(slot AS INTEGER)) {_RATES} AS learning_rates,
            map_from_entries(list((name, value) ORDER BY name)
                FILTER (slot = '' AND name NOT IN ({_KNOWN}))) AS recorded
        FROM each GROUP BY attempt, step, rank
    ), norms AS (
        SELECT
            attempt, step, rank, max(num_steps) AS num_steps, max(time_s) AS time_s,
            {_norm(f"kind = '{Kind.GRAD_UNREDUCED}'")} AS local_grad_norm,
            {_norm(f"kind = '{Kind.GRAD_REDUCED}'")} AS grad_norm
        FROM stats
        WHERE kind IN ('{Kind.GRAD_UNREDUCED}', '{Kind.GRAD_REDUCED}') AND micro_step IS NULL
        GROUP BY attempt, step, rank
    )
    SELECT
        attempt, step, rank,
        coalesce(numbers.num_steps, norms.num_steps) AS num_steps, coalesce(numbers.time_s, norms.time_s) AS time_s,
        duration_s, loss, local_grad_norm, grad_norm, {GLOBAL_NORM_SERIES}, {CLIP_RATIO_SERIES},
        {LOSS_SCALE_SERIES}, {SKIPPED_SERIES}, tokens, {TOKENS_PER_SECOND_SERIES},
        learning_rate, learning_rates, recorded
    FROM numbers FULL JOIN norms USING (attempt, step, rank) ORDER BY attempt, step, rank
"""
