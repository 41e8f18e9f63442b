"""Laws of the data: no two ranks, and no two micro steps, are given the same, and nothing comes twice in a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from trainermon.alerts.conditions.condition import Mask
from trainermon.alerts.laws.groups import data_groups
from trainermon.alerts.laws.law import LawRelation, LawStep, LawVerdict
from trainermon.alerts.laws.updates import of_step
from trainermon.core.catalogue import BATCH_REUSED
from trainermon.core.derived import COUNT, MAX, MIN, SUM, Array
from trainermon.core.values import Coordinates, Kind

_WINDOW = 32
_FEW_VALUES = 3


class DistinctInputs(LawRelation):
    """What the model is given differs between data-parallel ranks, and between the micro steps of a step.

    Looked at is the first input of a module that is not what it was in the step before, as positions are: all of its
    moments, bit for bit. The size is the number of other ranks and micro steps that were given the same.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._data = DataColumns()

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        given = self._data.of(step)
        size = np.full((len(step.places), len(step.tensors)), np.nan)
        for members in data_groups(step.places):
            shown = [(rank, column, digest) for rank in members for column, digest in given.get(rank, {}).items()]
            digests = [digest for _, _, digest in shown]
            for rank, column, digest in shown:
                size[rank, column] = digests.count(digest) - 1 if len(shown) > 1 else np.nan
        return LawVerdict(size, np.zeros(size.shape), ~np.isnan(size))


class NewInputs(LawRelation):
    """What the model is given is new: not what one of the last `lag` batches was, while others are new.

    A training that goes over few batches again and again means to. What is not meant is that part of the batches comes
    twice and the rest does not, as from workers that draw the same numbers. The size is the share of the last 32
    batches that were among the last few before them; it is judged where at least a quarter of them was new. A step that
    is given the very tensors of the step before does not count: the script has kept them.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._data = DataColumns()
        self._columns: dict[int, int | None] = {}
        self._last: dict[int, deque[bytes]] = {}
        self._repeats: dict[int, deque[bool]] = {}

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        size = np.full((len(step.places), len(step.tensors)), np.nan)
        is_kept = of_step(step, BATCH_REUSED) > 0
        for rank, given in self._data.of(step).items():
            self._begin_anew(step.places[rank].rank)
            if is_kept[rank]:
                continue
            share = self._share(step.places[rank], given.values())
            for column in given:
                size[rank, column] = share
        return LawVerdict(size, np.full(size.shape, self.settings["share"]), ~np.isnan(size))

    def _begin_anew(self, rank: int) -> None:
        """Forget what was taken for the data of a rank until an earlier column turned out to be."""
        if (column := self._data.column(rank)) != self._columns.get(rank):
            self._columns[rank] = column
            self._last.pop(rank, None)
            self._repeats.pop(rank, None)

    def _share(self, place: Coordinates, digests: Iterable[bytes]) -> float:
        last = self._last.setdefault(place.rank, deque(maxlen=int(self.settings["lag"])))
        repeats = self._repeats.setdefault(place.rank, deque(maxlen=_WINDOW))
        for digest in digests:
            repeats.append(digest in last)
            last.append(digest)
        share = sum(repeats) / _WINDOW
        return share if len(repeats) == _WINDOW and share <= 1.0 - self.settings["share"] else np.nan


class DataColumns:
    """Finds, on each rank, which columns are the data: the first input that has ever differed from the step before."""

    def __init__(self) -> None:
        self._before: dict[int, dict[int, bytes]] = {}
        self._data: dict[int, int] = {}  # by rank, the first column that has changed

    def column(self, rank: int) -> int | None:
        """Return which column, the first if there are several, is taken for the data of a rank; None for none."""
        return self._data.get(rank)

    def of(self, step: LawStep) -> Mapping[int, Mapping[int, bytes]]:
        """Return, by position of the rank, the moments of the data by column: one column for each micro step."""
        return {place: found for place in range(len(step.places)) if (found := self._of_rank(step, place))}

    def _of_rank(self, step: LawStep, place: int) -> Mapping[int, bytes]:
        rank, rows = step.places[place].rank, step.rows[Kind.ACTV][place]
        shown = np.flatnonzero((rows[COUNT] > 1) & (rows[MIN] < rows[MAX]) & ~_have_few_values(rows)).tolist()
        known, before = self._data.get(rank, len(step.tensors)), self._before.setdefault(rank, {})
        for column in (column for column in shown if column < known):  # later ones may change because weights do
            digest = rows[:, column].tobytes()
            if before.setdefault(column, digest) != digest:
                known = self._data[rank] = column
                break
        if rank not in self._data:
            return {}
        return {c: rows[:, c].tobytes() for c in shown if _module_input(step, c) == _module_input(step, known)}


def _have_few_values(rows: Array) -> Mask:
    """Return which rows are of a few whole numbers, as bits: other data may have the very same moments."""
    is_whole: Mask = (np.mod(rows[[MIN, MAX, SUM]], 1.0) == 0.0).all(axis=0)
    few: Mask = is_whole & (rows[MAX] - rows[MIN] <= _FEW_VALUES)
    return few


def _module_input(step: LawStep, column: int) -> tuple[str, int, str, int]:
    tensor = step.tensors[column]
    return tensor.name, tensor.stage, tensor.slot, tensor.call
