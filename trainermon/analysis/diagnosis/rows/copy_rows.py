"""Compares the stored rows of ranks that hold copies of a module.

Values are taken to be the same if their eight moments are equal to the bit.
"""

# ruff: noqa: S608  (the SQL consists of our own names)

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from trainermon.analysis.diagnosis.evidence import WEIGHT_KINDS
from trainermon.analysis.diagnosis.rows.order import OF_PARAMETERS
from trainermon.analysis.diagnosis.rows.symptoms import Moved
from trainermon.core.values import Kind

if TYPE_CHECKING:
    import duckdb

MAX_STEPS = 8
_VALUE = "(count, min, max, sum, sum_sq, zeros, nans, infs)"
_BEFORE_STEP = ", ".join(f"'{kind}'" for kind in (Kind.CHECKSUM, *WEIGHT_KINDS))

SeriesName: TypeAlias = tuple[str, str, str, int]
"""Kind, name, slot and stage."""
Copies: TypeAlias = Mapping[SeriesName, Mapping[int, object]]
"""By series and rank, what is equal if all elements are."""


def read_copies(
    connection: duckdb.DuckDBPyConnection, attempt: int, series: Sequence[SeriesName], last: int
) -> dict[int, Copies]:
    """Return the values of copied `series` by step, series and rank: of the last few steps up to `last`.

    `series` must not be empty. At most `MAX_STEPS` steps are read.
    """
    query = f"""
        WITH chosen AS (
            SELECT unnest($kinds) AS kind, unnest($names) AS name, unnest($slots) AS slot, unnest($stages) AS stage
        ), copies AS (
            SELECT step, kind, name, slot, stage, rank, {_VALUE} AS value FROM all_stats
            JOIN chosen USING (kind, name, slot, stage) WHERE attempt = $attempt AND step <= $last
        ), latest AS (SELECT DISTINCT step FROM copies ORDER BY step DESC LIMIT {MAX_STEPS})
        SELECT * FROM copies WHERE step IN (SELECT step FROM latest)
    """
    columns = zip(("kinds", "names", "slots", "stages"), map(list, zip(*series, strict=True)), strict=True)
    values = {"attempt": attempt, "last": last, **dict(columns)}
    found: dict[int, dict[SeriesName, dict[int, object]]] = defaultdict(lambda: defaultdict(dict))
    for step, kind, name, slot, stage, rank, value in connection.execute(query, values).fetchall():
        found[step][kind, name, slot, stage][rank] = tuple(value.values()) if isinstance(value, dict) else value
    return {step: dict(copies) for step, copies in found.items()}


class CopiedCall(NamedTuple):
    """A module's call on one step, made alike by several ranks that should have the same values.

    Attributes:
        step: The step.
        name: The module.
        call: Number of the module's call.
        micro_step: Number of the forward and backward within the step; None: not known.
        stage: The virtual pipeline stage.
        given_differs: Whether its inputs are not the same on all ranks.
        returned_differs: Whether its results are not.
    """

    step: int
    name: str
    call: int
    micro_step: int | None
    stage: int
    given_differs: bool
    returned_differs: bool

    @property
    def departs(self) -> bool:
        """Whether the ranks were given the same values and returned different ones."""
        return self.returned_differs and not self.given_differs

    def row(self, rank: int, slot: str = "output", rms: float = math.nan) -> Moved:
        """Return the call's result as a `Moved` series of a rank; `rms` is both its value and its usual one."""
        return Moved(Kind.ACTV, self.name, slot, self.call, self.micro_step, self.stage, rank, rms, rms)


class CopyRows:
    """Reads what is stored, in one attempt of a run, of `ranks` that should have equal values."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, attempt: int, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._connection = connection
        self._common = {"attempt": attempt, "ranks": list(ranks)}

    def departing(self, first: int, last: int) -> list[CopiedCall]:
        """Return all calls, on steps `first` to `last`, of modules that once gave different results for equal inputs.

        Only calls that all ranks have stored in full.
        """
        query = f"""
            WITH calls AS ({_CALLS})
            SELECT * FROM calls WHERE (stage, name) IN
                (SELECT (stage, name) FROM calls WHERE returned_differs AND NOT given_differs)
        """
        return self._read(query, {"first": first, "last": last})

    def of_modules(self, names: Collection[str], step: int) -> list[CopiedCall]:
        """Return the calls of the modules `names` on a step; only calls that all ranks have stored in full."""
        query = f"WITH calls AS ({_CALLS}) SELECT * FROM calls WHERE list_contains($names, name)"
        return self._read(query, {"first": step, "last": step, "names": list(names)})

    def _read(self, query: str, values: Mapping[str, object]) -> list[CopiedCall]:
        return [CopiedCall(*row) for row in self._connection.execute(query, {**self._common, **values}).fetchall()]

    def parameters(self, first: int, last: int) -> tuple[set[str], bool]:
        """Return the names of parameters stored on these steps, and whether more than checksums is stored."""
        kinds = ", ".join(f"'{kind}'" for kind in sorted(OF_PARAMETERS))
        query = f"""
            SELECT DISTINCT name, kind <> '{Kind.CHECKSUM}' FROM all_stats WHERE attempt = $attempt
                AND step BETWEEN $first AND $last AND list_contains($ranks, rank) AND kind IN ({kinds})
        """
        rows = self._connection.execute(query, {**self._common, "first": first, "last": last}).fetchall()
        return {name for name, _ in rows}, any(is_told for _, is_told in rows)

    def weights_equal(self, steps: Collection[int]) -> dict[str, dict[int, bool]]:
        """Return, by parameter and step, whether all ranks have the same values before the optimizer's step."""
        query = f"""
            WITH copies AS (
                SELECT name, step, count(DISTINCT {_VALUE}) = 1 AND count(DISTINCT rank) = len($ranks) AS is_equal
                FROM all_stats WHERE attempt = $attempt AND list_contains($steps, step)
                    AND list_contains($ranks, rank) AND kind IN ({_BEFORE_STEP})
                GROUP BY name, step, kind, slot, stage
            )
            SELECT name, step, bool_and(is_equal) FROM copies GROUP BY name, step
        """
        found: dict[str, dict[int, bool]] = defaultdict(dict)
        for name, step, is_equal in self._connection.execute(query, {**self._common, "steps": list(steps)}).fetchall():
            found[name][step] = is_equal
        return found

    def departed(self, call: CopiedCall) -> tuple[list[Moved], bool]:
        """Return what a call returned on the ranks that differ from the majority, and False.

        Without one, all and True.
        """
        query = f"""
            SELECT slot, rank, {_VALUE}, coalesce(rms, 0) FROM all_stats
            WHERE attempt = $attempt AND list_contains($ranks, rank) AND kind = '{Kind.ACTV}' AND step = $step
                AND name = $name AND call = $call AND stage = $stage AND micro_step IS NOT DISTINCT FROM $micro_step
                AND starts_with(slot, 'output') ORDER BY slot, rank
        """
        of_call = {key: getattr(call, key) for key in ("step", "name", "call", "stage", "micro_step")}
        slots: dict[str, dict[int, tuple[str, float]]] = defaultdict(dict)
        for slot, rank, value, rms in self._connection.execute(query, {**self._common, **of_call}).fetchall():
            slots[slot][rank] = repr(value), rms
        slot, values = next(
            (slot, known) for slot, known in slots.items() if len({one for one, _ in known.values()}) > 1
        )
        (usual, votes), *_ = Counter(value for value, _ in values.values()).most_common(1)
        is_tied = 2 * votes <= len(values)
        odd = [rank for rank, (value, _) in values.items() if is_tied or value != usual]
        return [call.row(rank, slot, values[rank][1]) for rank in odd], is_tied


_CALLS = f"""
    WITH slots AS (
        SELECT step, name, call, micro_step, stage, slot, starts_with(slot, 'output') AS is_output,
            count(DISTINCT {_VALUE}) > 1 AS differs, count(DISTINCT rank) = len($ranks) AS is_whole
        FROM all_stats WHERE attempt = $attempt AND kind = '{Kind.ACTV}' AND step BETWEEN $first AND $last
            AND list_contains($ranks, rank)
        GROUP BY step, name, call, micro_step, stage, slot
    )
    SELECT step, name, call, micro_step, stage, bool_or(differs) FILTER (NOT is_output) AS given_differs,
        bool_or(differs) FILTER (is_output) AS returned_differs
    FROM slots GROUP BY step, name, call, micro_step, stage
    HAVING bool_and(is_whole) AND given_differs IS NOT NULL AND returned_differs IS NOT NULL
"""
