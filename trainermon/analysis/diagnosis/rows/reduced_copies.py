"""Whether copies of parameters parted because their gradients did: after the reduction, before the optimizer's step."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from trainermon.alerts.laws.replicas import SUM_ORDER
from trainermon.analysis.diagnosis.domains import Places
from trainermon.analysis.diagnosis.rows.copies import OF_COPIES, CopyParting
from trainermon.analysis.diagnosis.rows.symptoms import Episode
from trainermon.core.values import Kind

if TYPE_CHECKING:
    import duckdb

_DATA = frozenset({"dp", "cp"})
_WEIGHTS = (Kind.CHECKSUM, Kind.PARAM_USED, Kind.PARAM_ORIGIN)
_WHOLE = (Kind.PARAM_USED, Kind.GRAD_UNREDUCED)
Parameter: TypeAlias = tuple[str, int]
"""Name and virtual stage."""


class UnequalGradients(NamedTuple):
    """Copies of parameters that were equal and got gradients that were not.

    Attributes:
        step: The first step on which they did.
        name: The first such parameter, by name.
        stage: Its virtual pipeline stage.
        num_others: How many others there are.
        norms: The norm of its reduced gradient, by rank.
        ranks: Those that differ from most; all of them if there is no majority.
    """

    step: int
    name: str
    stage: int
    num_others: int
    norms: Mapping[int, float]
    ranks: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class _Copy:
    """What one rank shows of a parameter on one step."""

    weight: tuple[object, ...] | None = None
    gradient: tuple[float, float] | None = None  # norm, and sum over root n
    num_elements: float = 0.0
    num_whole: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether the gradient is that of all elements which the model has on this rank, as far as rows tell."""
        return self.gradient is not None and self.num_whole in (0.0, self.num_elements)


Copies: TypeAlias = Mapping[Parameter, Mapping[int, _Copy]]


def find_unequal_gradients(
    connection: duckdb.DuckDBPyConnection, attempt: int, episode: Episode, parting: CopyParting | None, places: Places
) -> UnequalGradients | None:
    """Return the gradients that parted the copies of an episode; None if they were equal, or are not known to be it.

    Gradients that differ once the weights do may be a consequence. They are the cause if the weights are known to be
    equal on that step, or if the ranks differ by their data alone: what is reduced over these is equal whatever the
    weights. Cost: reads weights and gradients of the episode's parameters since they were equal last; of all where the
    alerts list some of them.
    """
    kinds = {kind for kind, *_ in episode.series}
    names = sorted({name for kind, name, *_ in episode.series if kind in OF_COPIES})
    if not names:
        return None
    first = parting.last_equal if parting else episode.first_step
    last = parting.found if parting and Kind.PARAM_UPDATED in kinds else max(first, episode.first_step - 1)
    steps = dict(_read(connection, attempt, None if episode.is_cut else names, first, last))
    groups = [(parameter, group) for parameter, ranks in steps.get(first, {}).items() for group in _equal(ranks)]
    for step, shown in sorted(steps.items()):
        apart = [(name, group) for name, group in groups if name in shown and _are_apart(shown[name], group)]
        if apart:
            is_cause = all(_were_equal(shown[name], group) or _differ_by_data(places, group) for name, group in apart)
            return _unequal(step, apart, shown) if is_cause else None
    return None


def _unequal(step: int, apart: Sequence[tuple[Parameter, frozenset[int]]], shown: Copies) -> UnequalGradients:
    (name, stage), group = min(apart, key=lambda one: one[0])
    norms = {rank: gradient[0] for rank in sorted(group) if (gradient := shown[name, stage][rank].gradient) is not None}
    like = {
        rank: sum(math.isclose(norm, other, rel_tol=SUM_ORDER) for other in norms.values())
        for rank, norm in norms.items()
    }
    most = max(like.values())
    odd = tuple(rank for rank, number in like.items() if number < most or 2 * most <= len(norms))
    return UnequalGradients(step, name, stage, len({parameter for parameter, _ in apart}) - 1, norms, odd)


def _read(
    connection: duckdb.DuckDBPyConnection, attempt: int, names: Collection[str] | None, first: int, last: int
) -> Iterator[tuple[int, Copies]]:
    kinds = [str(kind) for kind in (*_WEIGHTS, *_WHOLE, Kind.GRAD_REDUCED)]
    query = """
        SELECT step, name, stage, rank, kind, count, sum, sum_sq, min, max FROM all_stats
        WHERE attempt = $attempt AND step BETWEEN $first AND $last AND ($names IS NULL OR list_contains($names, name))
            AND list_contains($kinds, kind) AND micro_step IS NULL ORDER BY step
    """
    asked = {
        "attempt": attempt,
        "first": first,
        "last": last,
        "names": None if names is None else list(names),
        "kinds": kinds,
    }
    rows = connection.execute(query, asked).fetchall()
    for step, of_step in itertools.groupby(rows, key=lambda row: int(row[0])):
        found: dict[Parameter, dict[int, _Copy]] = defaultdict(lambda: defaultdict(_Copy))
        weights: dict[tuple[Parameter, int], int] = {}
        for _, name, stage, rank, kind, count, total, squares, *extremes in of_step:
            copy = found[name, stage][rank]
            if kind == Kind.GRAD_REDUCED:
                copy.gradient, copy.num_elements = (math.sqrt(squares), total / math.sqrt(count)), count
            if kind in _WHOLE:
                copy.num_whole = max(copy.num_whole, count)
            if kind in _WEIGHTS and _WEIGHTS.index(kind) <= weights.get(((name, stage), rank), len(_WEIGHTS)):
                weights[(name, stage), rank] = _WEIGHTS.index(kind)
                copy.weight = (kind, count, total, squares, *extremes)
        yield step, found


def _equal(ranks: Mapping[int, _Copy]) -> Iterator[frozenset[int]]:
    """Yield the groups of ranks whose weights are known to be equal, and whose gradients are whole."""
    groups: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for rank, found in ranks.items():
        if found.weight is not None and found.is_whole:
            groups[found.weight].add(rank)
    yield from (frozenset(group) for group in groups.values() if len(group) > 1)


def _were_equal(ranks: Mapping[int, _Copy], group: frozenset[int]) -> bool:
    return any(group <= equal for equal in _equal(ranks))


def _are_apart(ranks: Mapping[int, _Copy], group: Iterable[int]) -> bool:
    shown = [ranks[rank].gradient for rank in group if rank in ranks]
    known = [gradient for gradient in shown if gradient is not None]
    largest = max((norm for norm, _ in known), default=0.0)
    return any(
        abs(a - b) > SUM_ORDER * largest
        for one, other in itertools.combinations(known, 2)
        for a, b in zip(one, other, strict=True)
    )


def _differ_by_data(places: Places, ranks: Iterable[int]) -> bool:
    others = [{axis: at for axis, at in places[rank].items() if axis not in _DATA} for rank in ranks if rank in places]
    return len(others) > 1 and all(other == others[0] for other in others)
