"""Laws of how a training begins: layers are initialised alike, stages hold each layer once, and modules are alive."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from trainermon.alerts.conditions.condition import Mask, grown
from trainermon.alerts.laws.groups import data_groups, merged
from trainermon.alerts.laws.law import LawRelation, LawStep, LawVerdict
from trainermon.core.derived import COUNT, INFS, NANS, SUM_SQ, Array
from trainermon.core.values import Kind

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")
"""The number of a layer in the name of a parameter: the first part of it that is one."""

_BY_DESIGN = "expert"
_FEWEST, _NEIGHBOURS = 4, 4
_LEAST_ELEMENTS = 64


class AlikeAtStart(LawRelation):
    """Matrices of the same role and shape in other layers begin with the same spread.

    Looked at is the first step of the first attempt. The size is the factor between the standard deviation of a matrix
    and the middle one of its four nearest siblings. Only where there are four, of 64 elements each.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._judged: Mask | None = None

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        shape = len(step.places), len(step.tensors)
        limit = np.full(shape, self.settings["factor"])
        if step.step or step.attempt > 1:
            known = self._judged
            return None if known is None or known.shape != shape else LawVerdict(np.ones(shape), limit, known)
        size = np.full(shape, np.nan)
        for members in data_groups(step.places):
            whole = merged(step, Kind.PARAM_ORIGIN, members)
            with np.errstate(all="ignore"):
                variance = whole.sum_sq / whole.num_elements - (whole.sum / whole.num_elements) ** 2
            spread = np.sqrt(np.maximum(variance, 0.0))
            spread[whole.num_elements < _LEAST_ELEMENTS] = np.nan
            for columns in _siblings(step, members[0]):
                size[np.ix_(members, np.array(columns))] = _factors(spread[columns])
        self._judged = ~np.isnan(size)
        return LawVerdict(size, limit, self._judged)


class EachLayerOnce(LawRelation):
    """Pipeline stages hold layers without a gap, each of them in one stage.

    The size is the number of stages that hold the layer, or that of the layers missing right below it plus one. Layers
    below the first one may be frozen. Nothing is said where each stage counts its layers from 0, and of ranks on
    several nodes. Computed anew only where the ranks show other series than before.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._of: tuple[int, int, int] | None = None
        self._verdict: LawVerdict | None = None

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        now = step.attempt, len(step.places), len(step.tensors)
        if now != self._of:
            self._of, self._verdict = now, self._judge(step)
        return self._verdict

    def _judge(self, step: LawStep) -> LawVerdict | None:
        num_stages = max(place.pp_size for place in step.places)
        if num_stages < 2 or {place.pp for place in step.places} != set(range(num_stages)):
            return None
        layers = [self._layers(step, place) for place in range(len(step.places))]
        held: dict[str, dict[int, set[int]]] = {}
        for where, of_rank in zip(step.places, layers, strict=True):
            for prefix, number in of_rank.values():
                held.setdefault(prefix, {}).setdefault(number, set()).add(where.pp)
        size = np.full((len(step.places), len(step.tensors)), np.nan)
        for place, of_rank in enumerate(layers):
            for column, (prefix, number) in of_rank.items():
                stages = held[prefix]
                if len(set().union(*stages.values())) < 2 or len(stages.get(0, ())) > 1:
                    continue
                below = max((other for other in stages if other < number), default=number - 1)
                size[place, column] = max(len(stages[number]), number - below)
        return LawVerdict(size, np.ones(size.shape), ~np.isnan(size))

    def _layers(self, step: LawStep, place: int) -> Mapping[int, tuple[str, int]]:
        """Return, by column, what a rank holds of layers: the name up to the layer's number, and that."""
        held = step.placements[Kind.GRAD_REDUCED][place]
        found = {
            column: _NUMBER.search(step.tensors[column].name)
            for column, placement in enumerate(held)
            if placement is not None and _BY_DESIGN not in step.tensors[column].name
        }
        return {column: (match.string[: match.start()], int(match[0])) for column, match in found.items() if match}


class AliveModules(LawRelation):
    """What a module returns has been another number than zero, on some rank, within its first `steps` steps.

    The size is the number of steps on which all of it was zero.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._alive: Mask = np.zeros(0, np.bool_)
        self._steps = np.zeros(0)

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        rows, num_tensors = step.rows[Kind.ACTV], len(step.tensors)
        self._alive, self._steps = grown(self._alive, num_tensors, fill=False), grown(self._steps, num_tensors, 0.0)
        with np.errstate(all="ignore"):
            self._alive |= ((rows[:, SUM_SQ] > 0) | (rows[:, NANS] + rows[:, INFS] > 0)).any(axis=0)
        shown = rows[:, COUNT] > 1  # a single zero may be a loss that is switched off
        if self._alive.all():
            return LawVerdict(np.zeros(shown.shape), np.ones(shown.shape), shown)
        self._steps += shown.any(axis=0) & ~self._alive
        by_design = np.array([_BY_DESIGN in tensor.name for tensor in step.tensors])
        size = np.where(self._alive | by_design, 0.0, self._steps)
        limit = np.full(shown.shape, self.settings["steps"])
        return LawVerdict(np.broadcast_to(size, shown.shape), limit, shown)


def _siblings(step: LawStep, place: int) -> Iterator[Sequence[int]]:
    """Yield the columns of matrices whose names differ in the number of the layer only, by that number."""
    found: dict[object, list[tuple[int, int]]] = {}
    for column, (tensor, placement) in enumerate(
        zip(step.tensors, step.placements[Kind.PARAM_ORIGIN][place], strict=True)
    ):
        match = _NUMBER.search(tensor.name)
        if match and placement is not None and len(placement.shape) > 1 and _BY_DESIGN not in tensor.name:
            role = tensor.name[: match.start()], tensor.name[match.end() :], placement.shape
            found.setdefault(role, []).append((int(match[0]), column))
    yield from ([column for _, column in sorted(group)] for group in found.values() if len(group) >= _FEWEST)


def _factors(spread: Array) -> Array:
    """Return by how much each is larger, or smaller, than the middle one of its nearest neighbours."""
    factors = np.full(len(spread), np.nan)
    for place, own in enumerate(spread):
        near = sorted((n for n in range(len(spread)) if n != place), key=lambda n: abs(n - place))[:_NEIGHBOURS]
        middle = float(np.median(spread[near]))
        if middle > 0 and not np.isnan(own):
            factors[place] = max(own / middle, middle / own) if own > 0 else np.inf
    return factors
