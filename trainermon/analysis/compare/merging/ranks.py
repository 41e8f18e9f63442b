"""The dumps of the ranks of one side, read under the names that calls have in the whole model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from trainermon.analysis.compare.items import (
    INPUT,
    MODULE,
    OUTPUT,
    DumpCall,
    DumpRow,
    DumpRows,
    Value,
    read_rows,
    value_of,
)
from trainermon.analysis.compare.merging.merge_items import Sources
from trainermon.analysis.compare.merging.places import DumpLocation, DumpShard
from trainermon.analysis.compare.merging.stage_names import numbered_on
from trainermon.analysis.compare.noise import takes_weight
from trainermon.dump.files.records import FORWARD, RankLayout

Name = tuple[str, str]
"""What a call is called, and its direction."""
Key = tuple[str, str, int]
"""The same, and the number of the call among those of that name."""
COLLECTIVE = "Distributed"


class RankCalls(NamedTuple):
    """The calls of one rank, under the names of the whole model.

    Attributes:
        layout: The rank's position, and which part of the model it has.
        rows: Its calls.
    """

    layout: RankLayout
    rows: DumpRows

    def place(self, axis: str) -> int:
        """Return the rank's position, from 0, on the axis `axis` (`tp`, `cp` …); 0 if its dump does not tell."""
        return self.layout.axes.get(axis, (0, 1))[0]


class MergedSide(NamedTuple):
    """All ranks of one side of a comparison, to be merged as if one rank had the whole model.

    Attributes:
        place: Where the side's dumps are.
        ranks: The calls of each rank.
        numbered: The paths of what holds layers whose numbers in the whole model no dump tells.
    """

    place: DumpLocation
    ranks: tuple[RankCalls, ...]
    numbered: tuple[str, ...] = ()

    def size(self, axis: str) -> int:
        """Return how many positions of the axis `axis` (`tp`, `cp` …) this side has."""
        return len({rank.place(axis) for rank in self.ranks})


def scoped_name(call: DumpCall) -> str:
    """Return the name that finds a call on ranks with other parts of the model.

    A function's includes the module that calls it.
    """
    return f"{MODULE}.{call.name}" if call.family == MODULE else f"{call.scope}/{call.family}.{call.name}"


def read_side(place: DumpLocation) -> MergedSide:
    """Read the dumps of one side, of one rank or of several that make up a whole; return its ranks.

    Raises:
        DumpError: a dump is damaged.
    """
    parts = place.parts or (DumpShard(directory=place.directory, layout=RankLayout()),)
    rows = [read_rows(part.directory) for part in parts]
    named, numbered = numbered_on(parts, rows)
    ranks = (RankCalls(part.layout.in_whole(), _in_whole(part, own)) for part, own in zip(named, rows, strict=True))
    return MergedSide(place, tuple(ranks), numbered)


def own_functions(side: MergedSide) -> frozenset[Name]:
    """Return the functions outside of all modules that say something of one rank's part alone, such as its norms.

    These are the ones that ranks of `tp` do not make equally often, or that more than one stage of `pp` makes. None
    are told where no module was dumped: then no function's is known.
    """
    counts: dict[Name, set[int]] = defaultdict(set)
    stages: dict[Name, set[int]] = defaultdict(set)
    for rank in side.ranks:
        calls = rank.rows.calls
        is_known = any(call.family == MODULE for call in calls)
        outside = Counter(_function(call) for call in calls if is_known and _is_outside(call))
        for name, count in outside.items():
            counts[name].add(count)
            stages[name].add(rank.place("pp"))
    return frozenset(name for name in counts if len(counts[name]) > 1 or len(stages[name]) > 1)


def without_functions(side: MergedSide, names: Collection[Name]) -> tuple[MergedSide, int]:
    """Return a side without its calls of the functions `names` outside of all modules, and how many rows these had."""
    ranks, number = [], 0
    for rank in side.ranks:
        left = tuple(call for call in rank.rows.calls if not (_is_outside(call) and _function(call) in names))
        number += sum(len(call.items) for call in rank.rows.calls) - sum(len(call.items) for call in left)
        ranks.append(rank._replace(rows=rank.rows._replace(calls=left)))
    return side._replace(ranks=tuple(ranks)), number


def _is_outside(call: DumpCall) -> bool:
    return call.family != MODULE and not call.scope


def _function(call: DumpCall) -> Name:
    return f"{call.family}.{call.name}", call.direction


def _in_whole(part: DumpShard, rows: DumpRows) -> DumpRows:
    """Return the rows of a rank under the names of the whole model, tensors by their paths."""
    stage, size = part.layout.axes.get("pp", (0, 1))
    layout = part.layout
    keys = {call.key: _key_in_whole(call, layout, stage if size > 1 else 0) for call in rows.calls}
    sources: Sources = {}
    calls = []
    for call in rows.calls:
        if call.family == COLLECTIVE:  # other layouts have other ones
            continue
        items = tuple(_with_path(item, rows, sources, call.direction) for item in call.items)
        name = call.name if call.family != MODULE else layout.name_in_whole(call.name)
        scope = layout.name_in_whole(call.scope)
        calls.append(call._replace(key=keys[call.key], name=name, scope=scope, items=items))
    return rows._replace(
        calls=tuple(calls),
        parents={keys.get(key, key): keys.get(parent, parent) for key, parent in rows.parents.items()},
        stacks={keys.get(key, key): stack for key, stack in rows.stacks.items()},
        sources=sources,
    )


def _with_path(item: DumpRow, rows: DumpRows, sources: Sources, direction: str) -> DumpRow:
    path = rows.tensor_path(item)
    if isinstance(path, Path):
        sources[str(path)] = path
    is_gradient = item.is_tensor and direction != FORWARD  # one that another stage has sent requires a gradient
    return item._replace(
        data_name=str(path) if path else None, requires_grad=False if is_gradient else item.requires_grad
    )


def _key_in_whole(call: DumpCall, layout: RankLayout, stage: int) -> str:
    if call.family == MODULE:
        path = layout.name_in_whole(call.name)
        return f"{call.key.partition('.')[0]}.{path}.{call.direction}.{call.number}"
    return f"{call.key} (stage {stage})" if stage else call.key


def keyed(calls: Iterable[DumpCall]) -> Iterator[tuple[Key, DumpCall]]:
    """Yield each call with a key that finds it on other ranks.

    The key is (scoped name, direction, how many calls with these came before).
    """
    counts: Counter[Name] = Counter()
    for call in calls:
        name = scoped_name(call), call.direction
        yield (*name, counts[name]), call
        counts[name] += 1


def given_from_outside(rank: RankCalls) -> dict[tuple[Key, str], Value]:
    """Return the values that forwards of a rank were given and none of its calls made, by call and place.

    Weights are none of these, and neither is what takes a gradient or has one value throughout.
    """
    made: set[Value] = set()
    found: dict[tuple[Key, str], Value] = {}
    for key, call in keyed(rank.rows.calls):
        for item in call.items if call.direction == FORWARD else ():
            value = value_of(item)
            if value is None or value in made:
                continue
            if item.state == OUTPUT:
                made.add(value)
            elif item.state == INPUT and not item.requires_grad and not takes_weight(call, item.place):
                found[key, item.place] = value
    return found
