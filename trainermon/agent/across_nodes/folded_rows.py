"""Rows of gradients folded into few, for a controller that judges laws over all nodes; see its `laws`.

A rank has hundreds of gradients, and what laws say of them is linear: that a reduced one is the scaled sum of what the
ranks had, that copies are equal, that ranks have different ones. So it holds for sums over gradients too. Each
gradient is added to one of a few folds, with a sign, by the hash of its name; signs keep equal ones from hiding.
A gradient a hundred times smaller than others of its fold hides behind them: an agent that sees all ranks sees it:

    kept = FoldedRows()          # a consumer
    kept.rows(after=99)          # {"attempt": 1, "steps": {"100": {"3": {"place": {...}, "folds": [...]}}}}
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.agent.consumers import RecordConsumer
from trainermon.alerts.across_ranks.uneven import are_uneven
from trainermon.alerts.laws.groups import DATA_AXES, is_plain
from trainermon.core.derived import COUNT, MAX, MIN, SUM, SUM_SQ
from trainermon.core.journal import Header
from trainermon.core.values import STATISTICS, Coordinates, Kind, Placement, SeriesKey, StatBlock

EVERY_STEPS = 20
"""Of each step that this divides, so that all ranks of a job tell of the same ones."""

MAX_STEPS = 16
"""So many of them an agent keeps."""

KINDS = (Kind.GRAD_REDUCED, Kind.GRAD_UNREDUCED)
_PARTS = 8
"""Folds for gradients that lie alike over the ranks."""


class Fold(NamedTuple):
    """What gradients that are added up have in common: how they lie over the ranks.

    Attributes:
        part: Which of the folds of such gradients.
        dtype: Their type.
        replicated_over: The axes of `Coordinates` along which ranks hold copies.
        partitioned_over: Those along which ranks hold parts.
    """

    part: int
    dtype: str
    replicated_over: tuple[str, ...]
    partitioned_over: tuple[str, ...]

    def placement(self, place: Coordinates) -> Placement:
        """Return how a rank's part of the fold lies: ranks at other places along the split axes hold other elements."""
        offset = 0
        for axis in self.partitioned_over:
            offset = offset * getattr(place, f"{axis}_size") + getattr(place, axis)
        return Placement(
            dtype=self.dtype,
            shape=(),
            offset=offset,
            length=1 if self.partitioned_over else None,
            replicated_over=self.replicated_over,
            partitioned_over=self.partitioned_over,
        )


class FoldedRows(RecordConsumer):
    """Keeps the folded gradients of this node's ranks: of the last `MAX_STEPS` told steps of the newest attempt.

    Cost: 0.2 ms for a rank of a hundred parameters on a step that is told, a comparison on all others.
    """

    def __init__(self) -> None:
        self._attempt = -1
        self._tables: dict[int, _FoldedSeries] = {}
        self._steps: dict[int, dict[int, Mapping[str, Any]]] = {}

    def on_block(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """Keep what one rank has of a step that is told."""
        del keys
        if block.step % EVERY_STEPS or header.attempt < self._attempt:
            return
        if header.attempt > self._attempt:
            self._attempt = header.attempt
            self._tables.clear()
            self._steps.clear()
        rank = header.coordinates.rank
        folds = self._tables.setdefault(rank, _FoldedSeries()).read(header, block)
        if not folds:
            return
        self._steps.setdefault(block.step, {})[rank] = {
            "place": dataclasses.asdict(header.coordinates),
            "folds": folds,
        }
        if len(self._steps) > MAX_STEPS:
            del self._steps[min(self._steps)]

    def rows(self, after: int = -1) -> dict[str, Any]:
        """Return {"attempt", "steps"}: for each step after `after` and rank, its place and its folds.

        A fold is [kind, part, dtype, replicated axes, partitioned axes, the eight moments]. Steps and ranks are texts,
        as keys of JSON are.
        """
        told = {step: self._steps[step] for step in sorted(self._steps) if step > after}
        steps = {str(step): {str(rank): rows for rank, rows in sorted(ranks.items())} for step, ranks in told.items()}
        return {"attempt": self._attempt, "steps": steps}


class _FoldedSeries:
    """Of one rank's series: which gradients there are, and to which fold each is added, with which sign."""

    def __init__(self) -> None:
        self._num_known = 0
        self._folds: list[tuple[Kind, Fold]] = []
        self._fold_of = np.zeros(0, np.intp)
        self._signs = np.zeros(0)

    def read(self, header: Header, block: StatBlock) -> list[list[Any]]:
        """Return the folds of a step; none where their sums are not finite."""
        if self._num_known < len(header.series):
            self._meet(header)
        series = np.asarray(block.series)
        columns = np.flatnonzero(self._fold_of[series] >= 0)
        chosen, rows = series[columns], np.asarray(block.values, np.float64).reshape(len(STATISTICS), -1)[:, columns]
        folds, signs = self._fold_of[chosen], self._signs[chosen]
        if not columns.size or not np.isfinite(rows[[SUM, SUM_SQ]]).all():
            return []
        return [
            [str(kind), *fold, _folded(rows[:, folds == number], signs[folds == number]).tolist()]
            for number, (kind, fold) in enumerate(self._folds)
            if (folds == number).any()
        ]

    def _meet(self, header: Header) -> None:
        """Place all series anew: how a gradient lies after its reduction may be told after what it was before."""
        reduced = {
            key.label: placement
            for key, placement in zip(header.series, header.placements, strict=True)
            if key.kind is Kind.GRAD_REDUCED
        }
        if are_uneven(header.series):
            reduced.clear()  # ranks of one step number are not at the same step
        numbers: dict[tuple[Kind, Fold], int] = {}
        self._fold_of = np.full(len(header.series), -1, np.intp)
        self._signs = np.ones(len(header.series))
        for place, key in enumerate(header.series):
            placement = reduced.get(key.label)
            if key.kind not in KINDS or key.micro_step is not None or placement is None or not _is_foldable(placement):
                continue
            digest = int.from_bytes(hashlib.blake2b(key.label.encode(), digest_size=2).digest(), "little")
            axes = tuple(sorted(placement.replicated_over)), tuple(sorted(placement.partitioned_over))
            fold = Fold(digest // 2 % _PARTS, placement.dtype, *axes)
            self._fold_of[place] = numbers.setdefault((key.kind, fold), len(numbers))
            self._signs[place] = 1.0 if digest % 2 else -1.0
        self._folds = list(numbers)
        self._num_known = len(header.series)


def _is_foldable(placement: Placement) -> bool:
    """Return whether ranks along the data axes hold all of a tensor, or each another part: not some of either."""
    return is_plain(placement) and not (
        DATA_AXES & {*placement.replicated_over} and DATA_AXES & {*placement.partitioned_over}
    )


def _folded(rows: NDArray[np.float64], signs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the moments `[8]` of tensors `[8, tensors]` that are added up with signs."""
    whole: NDArray[np.float64] = rows.sum(axis=1)
    whole[SUM] = rows[SUM] @ signs
    filled = rows[:, rows[COUNT] > 0]  # of an empty tensor they are infinite
    whole[MIN], whole[MAX] = (filled[MIN].min(), filled[MAX].max()) if filled.size else (0.0, 0.0)
    return whole
