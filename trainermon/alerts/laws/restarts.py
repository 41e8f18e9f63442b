"""Laws of restarts: a job that goes on from a checkpoint goes on with its weights, its moments and its data.

Each compares the first steps of an attempt with what an earlier attempt stored of the step before them.
"""

from __future__ import annotations

import abc
import itertools
from collections import deque
from collections.abc import Mapping

import numpy as np

from trainermon.alerts.conditions.condition import Mask, grown
from trainermon.alerts.laws.inputs import DataColumns
from trainermon.alerts.laws.law import Law, LawRelation, LawStep, LawVerdict
from trainermon.alerts.laws.updates import half_units
from trainermon.core.derived import COUNT, SUM, SUM_SQ, Array
from trainermon.core.values import Coordinates, Kind

_MOST_LAST, _MOST_ROUND, _EVERY = 128, 256, 50
"""The last steps are kept, and of those before them the ones beside a multiple of 50: there checkpoints are made."""

_MOST_INPUTS = 4096
_ROUNDED = 4.0  # half units of the model's type, where the optimizer's copy is made of it anew
_EXACT = 1e-6  # the order of sums
_NEAR = 1  # steps that two starts may count apart
_FIRST_STEPS = 4
_LEAST_BETA = 0.9
_SLACK = 1.02  # of moments that are kept in 16 bits
_LARGER = 16.0  # what the optimizer may use in place of the reduced gradient: unscaled, summed instead of averaged


class _KeptSteps:
    """Rows of the steps of all ranks, by step and rank, the oldest thinned out."""

    def __init__(self) -> None:
        self._rows: dict[int, Mapping[tuple[int, ...], Array]] = {}
        self._last: deque[int] = deque()
        self._round: deque[int] = deque()

    def keep(self, step: LawStep, rows: Array) -> None:
        """Keep `rows` `[ranks, numbers, tensors]` as those of a step."""
        self._keep(step.step, {_layout(place): rows[n] for n, place in enumerate(step.places)})

    def take(self, other: _KeptSteps) -> None:
        """Add the steps of a later attempt, in place of those of the same number."""
        for number in sorted(other._rows):
            self._keep(number, other._rows[number])

    def _keep(self, number: int, rows: Mapping[tuple[int, ...], Array]) -> None:
        if number not in self._rows:
            self._last.append(number)
        self._rows[number] = rows
        if len(self._last) > _MOST_LAST:
            old = self._last.popleft()
            if min(old % _EVERY, -old % _EVERY) <= _NEAR:
                self._round.append(old)
            else:
                del self._rows[old]
        if len(self._round) > _MOST_ROUND:
            del self._rows[self._round.popleft()]

    def of(self, step: LawStep, number: int) -> Array | None:
        """Return the rows of a step, in the order of the ranks and tensors of `step`.

        NaN where there are none: of ranks that stood elsewhere in the job, which may have held other parts.
        """
        known = self._rows.get(number)
        if known is None:
            return None
        shape = (len(step.places), len(next(iter(known.values()))), len(step.tensors))
        rows = np.full(shape, np.nan)
        for n, place in enumerate(step.places):
            found = known.get(_layout(place))
            if found is not None:
                rows[n, :, : found.shape[1]] = found
        return rows


class RestartRelation(LawRelation):
    """Judges the first step of an attempt by the step before it, of an earlier attempt; base class."""

    kind: Kind
    """What is kept of a step."""
    now: Kind
    """What is compared with that."""

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._attempt = -1
        self._earlier, self._kept = _KeptSteps(), _KeptSteps()

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        verdict = None
        if step.attempt != self._attempt:
            self._attempt = step.attempt
            self._earlier.take(self._kept)
            self._kept = _KeptSteps()
            before = self._earlier.of(step, step.step - 1)
            if before is not None:
                resized = before[:, 0] != step.rows[self.now][:, COUNT]
                verdict = self.beside(step, np.where(resized[:, None], np.nan, before))
        self._kept.keep(step, step.rows[self.kind][:, [COUNT, SUM, SUM_SQ]])
        return verdict

    @abc.abstractmethod
    def beside(self, step: LawStep, before: Array) -> LawVerdict:
        """Return the verdict on the first step of an attempt.

        `before`: count, sum and sum of squares of its tensors on the step before, `[ranks, 3, tensors]`, NaN where
        there are none, or where a part has another size.
        """


class WeightsGoOn(RestartRelation):
    """The first step after a restart begins with the parameters that the step before it had left.

    The size is how far apart sums or norms are, as a share of the norm. Nothing is said of parameters that the script
    has written to between two steps, as averages, lookahead and clamping do: these it may save, too.
    """

    kind, now = Kind.PARAM_UPDATED, Kind.PARAM_ORIGIN

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._is_written: Mask = np.zeros(0, np.bool_)

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102
        before = self._kept.of(step, step.step - 1) if step.attempt == self._attempt else None
        self._is_written = grown(self._is_written, len(step.tensors), fill=False)
        if before is not None:
            now = step.rows[self.now][:, [SUM, SUM_SQ]]
            self._is_written |= ((now != before[:, 1:]) & ~np.isnan(now) & ~np.isnan(before[:, 1:])).any(axis=(0, 1))
        verdict = super().judge(step)
        return None if verdict is None else verdict._replace(judged=verdict.judged & ~self._is_written)

    def beside(self, step: LawStep, before: Array) -> LawVerdict:  # noqa: D102
        now = step.rows[Kind.PARAM_ORIGIN]
        with np.errstate(all="ignore"):
            norm = np.sqrt(np.fmax(before[:, 2], now[:, SUM_SQ]))
            norms_apart = np.abs(np.sqrt(now[:, SUM_SQ]) - np.sqrt(before[:, 2])) / norm
            sums_apart = np.abs(now[:, SUM] - before[:, 1]) / norm
        size = np.where(norm == 0, 0.0, np.fmax(norms_apart, sums_apart))
        rounded = _ROUNDED * half_units(step.placements[Kind.PARAM_USED])
        return LawVerdict(size, np.fmax(rounded, _EXACT), ~np.isnan(size))


class MomentsGoOn(RestartRelation):
    """After a restart Adam's second moment is at least `beta2` times what it was, and at most that and the gradient.

    It is a sum of squares, so it falls by `beta2` in a step and no faster, however small the gradient is
    (Kingma and Ba, 2015, algorithm 1). The size is the factor by which it is smaller, or larger, than it can be.
    """

    kind = now = Kind.EXP_AVG_SQ

    def beside(self, step: LawStep, before: Array) -> LawVerdict:  # noqa: D102
        now, gradient = step.rows[Kind.EXP_AVG_SQ][:, SUM], step.rows[Kind.GRAD_REDUCED][:, SUM_SQ]
        beta = _beta2(step)[:, None]
        least, grown = beta * before[:, 1], (1.0 - beta) * _LARGER * gradient
        with np.errstate(all="ignore"):
            size = np.fmax(least / now, now / (before[:, 1] + grown))
        size = np.where((least > 0) & (now == 0), np.inf, size)
        return LawVerdict(size, np.full(size.shape, _SLACK), ~np.isnan(size))


class BuffersGoOn(LawRelation):
    """After a restart no buffer is again, bit for bit, what it was when the run began, if it has changed since.

    Compared are all moments. The size is 1 where it is.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._attempt = -1
        self._start: dict[tuple[int, ...], Array] = {}
        self._last: dict[tuple[int, ...], Array] = {}

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        rows = step.rows[Kind.BUFFER]
        if np.isnan(rows[:, COUNT]).all():
            return None
        is_first = self._attempt not in (-1, step.attempt) and step.step > 0
        self._attempt = step.attempt
        size = np.full(rows[:, COUNT].shape, np.nan)
        for place, layout in enumerate(map(_layout, step.places)):
            if is_first and layout in self._last:
                known = self._start[layout].shape[1]
                has_changed = (self._start[layout] != self._last[layout][:, :known]).any(axis=0)
                is_as_at_start = (self._start[layout] == rows[place][:, :known]).all(axis=0)
                size[place, :known] = np.where(has_changed, is_as_at_start, np.nan)
            self._start.setdefault(layout, rows[place])
            self._last[layout] = rows[place]
        return LawVerdict(size, np.zeros(size.shape), ~np.isnan(size))


class DataGoOn(LawRelation):
    """After a restart come other inputs than those of steps long before it.

    A step that is made again, after a restart from a checkpoint before it, has the input that it had. The size is the
    number of steps in a row, of the first few since the restart, whose input is that of another step. Judged are steps
    that an earlier attempt had made, too, with an input that was new then: where it had ended, an epoch may have.
    Nothing is said where inputs come again within an attempt, as in epochs over a small set.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._data = DataColumns()
        self._attempt = -1
        self._earlier: dict[int, dict[bytes, int]] = {}
        self._made: dict[int, int] = {}
        self._own: dict[int, dict[bytes, int]] = {}
        self._again: dict[int, list[bool]] = {}
        self._repeats: set[int] = set()

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        if step.attempt != self._attempt:
            self._attempt = step.attempt
            for rank, own in self._own.items():
                self._earlier.setdefault(rank, {}).update(own)
                self._made[rank] = max(own.values(), default=-1)
            self._own, self._again = {}, {}
        size = np.full((len(step.places), len(step.tensors)), np.nan)
        for place, given in self._data.of(step).items():
            rank = step.places[place].rank
            is_again = self._note(rank, step.step, given)
            made = self._made.get(rank, -1)
            if step.step <= made and rank in self._earlier and rank not in self._repeats:
                size[place, list(given)] = self._in_a_row(rank, is_again=is_again)
        return None if np.isnan(size).all() else LawVerdict(size, np.zeros(size.shape), ~np.isnan(size))

    def _note(self, rank: int, number: int, given: Mapping[int, bytes]) -> bool:
        own, earlier = self._own.setdefault(rank, {}), self._earlier.get(rank, {})
        for digest in given.values():
            if own.setdefault(digest, number) != number:
                self._repeats.add(rank)
        while len(own) > _MOST_INPUTS:
            del own[next(iter(own))]
        return all(abs(earlier.get(digest, number) - number) > _NEAR for digest in given.values())

    def _in_a_row(self, rank: int, *, is_again: bool) -> float:
        seen = self._again.setdefault(rank, [])
        if len(seen) < _FIRST_STEPS:
            seen.append(is_again)
        return float(len(list(itertools.takewhile(bool, reversed(seen)))))


def _layout(place: Coordinates) -> tuple[int, ...]:
    """Return what says which part of a tensor a rank holds; over data-parallel ranks its size does."""
    axes = place.tp, place.tp_size, place.pp, place.pp_size, place.cp, place.cp_size, place.ep, place.ep_size
    return place.rank, *axes


def _beta2(step: LawStep) -> Array:
    """Return, by rank, the least `beta2` of the optimizer's groups."""
    columns = [n for n, tensor in enumerate(step.tensors) if tensor.name == "beta2"]
    shown = step.rows[Kind.STEP][:, SUM][:, columns]
    least: Array = np.min(np.where(np.isnan(shown), np.inf, shown), axis=1, initial=np.inf)
    return np.where(np.isfinite(least), least, _LEAST_BETA)


RESTART_LAWS = (
    Law(
        name="weights-go-on",
        sentence="A restart begins with the weights that the step before it had left.",
        broken="A restart began with other weights than the step before it had left",
        rows=(Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED),
        also=(Kind.PARAM_USED,),
        phase="before_step",
        relation=WeightsGoOn,
        tolerance="1e-6 of the norm, and two units in the last place of the model's type where it is another one",
        exceptions=(
            "restarts at a step whose predecessor was not collected, or is long past",
            "weights that are meant to be others: a new head, an average, another checkpoint under the same run",
        ),
        causes=(
            "an older checkpoint was loaded than the step number says, or none",
            "parts were loaded into other layers or ranks than they were saved from",
            "what was saved is not what was trained: a copy, an average, a part that was not gathered",
        ),
        look_at="which file each rank loaded, and which names were missing or unexpected in it",
    ),
    Law(
        name="moments-go-on",
        sentence="After a restart Adam's second moments are those of the step before it, and a little of the gradient.",
        broken="After a restart Adam's second moments are not those of the step before it",
        rows=(Kind.EXP_AVG_SQ,),
        also=(Kind.GRAD_REDUCED, Kind.STEP),
        phase="optimizer",
        relation=MomentsGoOn,
        tolerance="2 in a hundred, for moments that are kept in 16 bits",
        exceptions=("optimizers without a second moment", "an optimizer that is meant to begin anew"),
        causes=(
            "the optimizer's state was not saved or not loaded: it began with moments of zero",
            "the state was loaded into other parameters: their order or their parts have changed",
        ),
        look_at="whether optimizer.load_state_dict() was called, after the model was moved, wrapped and sharded",
    ),
    Law(
        name="buffers-go-on",
        sentence="After a restart the buffers of a model are not those that it began with.",
        broken="After the restart buffers are what they were when the run began",
        rows=(Kind.BUFFER,),
        phase="forward",
        relation=BuffersGoOn,
        tolerance="none: compared are all moments, bit for bit",
        exceptions=("buffers that had not changed before the restart", "restarts from step 0"),
        causes=(
            "the checkpoint holds parameters alone: named_parameters() in place of state_dict()",
            "names did not fit, and load_state_dict(strict=False) passed them over",
        ),
        look_at="which keys of the checkpoint were missing when it was loaded, and whether they are in it",
    ),
    Law(
        name="data-go-on",
        sentence="After a restart come other data than those that were trained on long before.",
        broken="After a restart the same data came again as long before",
        rows=(Kind.ACTV,),
        phase="input",
        names=("*.input.*",),
        relation=DataGoOn,
        tolerance="none: compared are all moments, bit for bit",
        exceptions=(
            "trainings that go over the same batches again and again",
            "restarts at the step at which the job had ended: an epoch may have ended there, too",
        ),
        causes=(
            "the sampler or the iterator begins anew: its position was not saved",
            "the seed of the data is set again",
        ),
        look_at="what the checkpoint holds of the data: epoch, position, state of the sampler and of its generator",
    ),
)
