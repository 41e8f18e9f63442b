"""Whether what the ranks report adds up: the monitor's check on itself, by comparing rows, without any collective.

On every step that all ranks of the job have reported to this agent:

* the elements of each parameter's reduced gradient that count in the global norm must be as many as the parameter has;
* the root of their summed squares must be the gradient norm that the framework itself returned.

A wrong slice, a shard that is counted twice or never, or a gradient that was read too early fails one of the two. So
does a framework that leaves gradients out of its norm: where the elements add up and the squares of some parameters are
the difference on all these steps, it is that, and they are named (`alerts.laws.norms`). In jobs on several nodes an
agent sees its own ranks only and checks nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.agent.consumers import RecordConsumer
from trainermon.alerts.laws.norms import NormExplanation, SquaredGradient, explain_norm
from trainermon.alerts.reported import AgentStatement
from trainermon.core.catalogue import GLOBAL_NORM_SERIES, LOSS_SCALE_SERIES, SKIPPED_SERIES
from trainermon.core.derived import COUNT, INFS, NANS, SUM, SUM_SQ
from trainermon.core.journal import Header
from trainermon.core.journal.patterns import ByPattern
from trainermon.core.values import STATISTICS, Coordinates, Kind, Placement, SeriesKey, StatBlock

RULE = "monitor-integrity"
TOLERANCE = 1e-3
"""Relative; frameworks sum squares in float32, in an order of their own."""

STEPS_TO_FIRE = 3
"""Consecutive steps: one odd step may be the framework's (a gradient that was missing on one rank)."""

MAX_OPEN_STEPS = 64
MAX_EXPLANATIONS = 2


class _Mismatch(NamedTuple):
    """What does not fit: what was found, what was expected, the message, and the series concerned."""

    found: float
    expected: float
    message: str
    series: tuple[SeriesKey, ...]


class _RankReport(NamedTuple):
    """One rank's part of one step: names and elements of its gradients, their squares, and the framework's scalars."""

    names: tuple[str, ...]
    elements: NDArray[np.float64]
    counted: Sequence[tuple[str, Placement]]
    squares: NDArray[np.float64]
    place: Coordinates
    is_finite: bool
    scalars: Mapping[str, float]


class _SummedSeries(NamedTuple):
    """What one rank's series table says about the rows to add up, aligned with it."""

    placed: tuple[tuple[str, Placement] | None, ...]
    weights: NDArray[np.float64]
    scalars: Mapping[int, str]

    def rows_of(self, series: NDArray[Any]) -> _SummedRows:
        """Return which rows of a block are added up, by the ids of its series."""
        counted = np.flatnonzero(self.weights[series])
        placed = [found for number in series[counted].tolist() if (found := self.placed[number]) is not None]
        of_name = {name: row for (name, _), row in zip(placed, counted.tolist(), strict=True)}
        return _SummedRows(
            names=tuple(of_name),
            named=np.array(list(of_name.values()), np.intp),
            placed=placed,
            counted=counted,
            weights=self.weights[series[counted]],
            scalars=tuple(
                (row, self.scalars[number]) for row, number in enumerate(series.tolist()) if number in self.scalars
            ),
        )


class _SummedRows(NamedTuple):
    """Which rows of a block are added up: a row of each parameter for elements, all for squares; scalars by name."""

    names: tuple[str, ...]
    named: NDArray[np.intp]
    placed: Sequence[tuple[str, Placement]]
    counted: NDArray[np.intp]
    weights: NDArray[np.float64]
    scalars: tuple[tuple[int, str], ...]


def _num_counted(placement: Placement) -> int:
    """Return how many elements the rows of all parts of a tensor count: of a complex one both of its numbers."""
    return math.prod(placement.shape) * (2 if placement.dtype.startswith("complex") else 1)


class IntegrityCheck(RecordConsumer):
    """Checks that what all ranks report of a step fits together, as the sum of gradient squares with the gradient norm.

    Ranks that each hold all of the same parameter, and of which no framework says how they hang together, have nothing
    to add up: each may train on its own.

    Args:
        report: Receives statements for the rule `monitor-integrity`.
        checks_norm: Whether every parameter of the model is watched; with some left out no norm can be compared.

    Attributes:
        num_checked: Steps that were added up.
        num_mismatches: Those of them that did not fit.
    """

    def __init__(self, report: Callable[[AgentStatement], None], *, checks_norm: bool = True) -> None:
        self.num_checked = self.num_mismatches = 0
        self._report = report
        self._checks_norm = checks_norm
        self._attempt = 0
        self._tables: dict[int, tuple[int, ByPattern[_SummedRows]]] = {}
        self._sizes: dict[str, int] = {}
        self._owners: dict[str, int] = {}  # ranks that hold all of a parameter, and know nothing of other ranks
        self._are_on_their_own = False
        self._steps: dict[int, dict[int, _RankReport]] = {}
        self._bad_steps = 0
        self._first_bad = -1
        self._explained: tuple[NormExplanation, ...] | None = None  # what has explained every bad step so far

    def on_block(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """Record one rank's step; check the step when that was the last rank's."""
        if header.attempt < self._attempt:
            return
        if header.attempt > self._attempt:
            self._begin(header.attempt)
        rank = header.coordinates.rank
        report = _read(self._table(rank, header, keys).of(np.asarray(block.series)), block, header.coordinates)
        if not report.names and not report.scalars:
            return
        reports = self._steps.setdefault(block.step, {})
        reports.setdefault(rank, report)
        if len(reports) == header.coordinates.world_size:
            del self._steps[block.step]
            if not self._are_on_their_own:
                self._judge(block, reports)
        while len(self._steps) > MAX_OPEN_STEPS:
            del self._steps[min(self._steps)]

    def _begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._tables.clear()
        self._sizes.clear()
        self._owners.clear()
        self._are_on_their_own = False
        self._steps.clear()
        self._bad_steps, self._first_bad, self._explained = 0, -1, None

    def _table(self, rank: int, header: Header, keys: Sequence[SeriesKey]) -> ByPattern[_SummedRows]:
        known = self._tables.get(rank)
        if known is None or known[0] != len(keys):
            known = self._tables[rank] = (len(keys), ByPattern(self._read_table(header, keys).rows_of))
        return known[1]

    def _read_table(self, header: Header, keys: Sequence[SeriesKey]) -> _SummedSeries:
        placed: list[tuple[str, Placement] | None] = [None] * len(keys)
        weights = np.zeros(len(keys))
        scalars = {}
        for number, (key, placement) in enumerate(zip(keys, header.placements, strict=True)):
            if key.kind is Kind.STEP:
                scalars[number] = key.name
            elif key.kind is Kind.GRAD_REDUCED and placement is not None and placement.in_global_norm:
                placed[number] = key.name, placement
                weights[number] = 1.0 / placement.scale**2
                self._sizes[key.name] = _num_counted(placement)
                if not placement.replicated_over and not placement.partitioned_over:
                    owner = self._owners.setdefault(key.name, header.coordinates.rank)
                    self._are_on_their_own |= owner != header.coordinates.rank
        return _SummedSeries(tuple(placed), weights, MappingProxyType(scalars))

    def _judge(self, block: StatBlock, reports: Mapping[int, _RankReport]) -> None:
        problem = self._missing(reports) or (self._wrong_norm(reports) if self._checks_norm else None)
        self.num_checked += 1
        self.num_mismatches += problem is not None
        if problem is None:
            self._bad_steps, self._explained = 0, None
            self._report(self._statement(block, holds=False))
            return
        self._bad_steps += 1
        if self._bad_steps == 1:
            self._first_bad = block.step
        if self._bad_steps >= STEPS_TO_FIRE:
            statement = self._statement(block, holds=True)
            self._report(
                dataclasses.replace(
                    statement,
                    first_step=self._first_bad,
                    detail=problem.message,
                    value=problem.found,
                    usual=problem.expected,
                    series=problem.series,
                )
            )

    def _statement(self, block: StatBlock, *, holds: bool) -> AgentStatement:
        return AgentStatement(
            rule=RULE, holds=holds, rank=0, attempt=self._attempt, step=block.step, time_s=block.time_s
        )

    def _missing(self, reports: Mapping[int, _RankReport]) -> _Mismatch | None:
        of_names: dict[tuple[str, ...], NDArray[np.float64]] = {}
        for report in reports.values():  # most ranks have the same names: they are added at once
            known = of_names.get(report.names)
            of_names[report.names] = report.elements if known is None else known + report.elements
        total: dict[str, float] = {}
        for names, elements in of_names.items():
            for name, count in zip(names, elements.tolist(), strict=True):
                total[name] = total.get(name, 0.0) + count
        wrong = [name for name, count in total.items() if count != self._sizes[name]]
        if not wrong:
            return None
        name = wrong[0]
        text = (
            f"the ranks' shards of {len(wrong)} of {len(total)} gradients do not add up: "
            f"{name} has {self._sizes[name]} elements, the shards have {total[name]:.0f}; do not trust what trainermon "
            "says about gradients"
        )
        return _Mismatch(total[name], float(self._sizes[name]), text, (SeriesKey(Kind.GRAD_REDUCED, name),))

    def _wrong_norm(self, reports: Mapping[int, _RankReport]) -> _Mismatch | None:
        told = [report.scalars for report in reports.values()]
        known = next((scalars for scalars in told if GLOBAL_NORM_SERIES in scalars), None)
        if known is None or known.get(SKIPPED_SERIES) or not all(report.is_finite for report in reports.values()):
            return None
        expected = known[GLOBAL_NORM_SERIES]
        scale = known.get(LOSS_SCALE_SERIES, 1.0)
        found = math.sqrt(sum(float(report.squares.sum()) for report in reports.values())) / scale
        if not math.isfinite(expected) or math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=1e-12):
            return None
        self._explained = explain_norm(list(_squared(reports)), (expected * scale) ** 2, self._explained)
        names = self._explained[0].names if self._explained else ()
        how = " or ".join(f"with {explanation}" for explanation in self._explained[:MAX_EXPLANATIONS])
        text = (
            f"the norm of the collected gradients is {found:.6g}, the framework's own is {expected:.6g}, which is "
            f"{f'the norm {how}' if how else 'explained by no parameter and no class of them'}: either the framework "
            "computes another norm, and clips by it, or the monitor reads other gradients than it"
        )
        keys = (SeriesKey(Kind.STEP, GLOBAL_NORM_SERIES), *(SeriesKey(Kind.GRAD_REDUCED, name) for name in names))
        return _Mismatch(found, expected, text, keys)


def _squared(reports: Mapping[int, _RankReport]) -> Iterator[SquaredGradient]:
    for report in reports.values():
        for (name, placement), squares in zip(report.counted, report.squares.tolist(), strict=True):
            yield SquaredGradient(name, squares, report.place, placement)


def _read(rows: _SummedRows, block: StatBlock, place: Coordinates) -> _RankReport:
    values = np.asarray(block.values, np.float64).reshape(len(STATISTICS), -1)
    own = values[:, rows.counted]
    told = ((name, values[:, row].tolist()) for row, name in rows.scalars)
    return _RankReport(
        names=rows.names,
        elements=values[COUNT, rows.named],
        counted=rows.placed,
        squares=own[SUM_SQ] * rows.weights,
        place=place,
        is_finite=not own[NANS : INFS + 1].any(),
        scalars={name: math.nan if moments[NANS] or moments[INFS] else moments[SUM] for name, moments in told},
    )
