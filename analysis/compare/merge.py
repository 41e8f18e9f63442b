"""The dumps of all ranks of a model as the dump of one: tensor parallel parts, data parallel replicas, pipeline stages.

Decides which calls of the ranks are the same call, and in which order the whole made them; what becomes of their rows
is decided in `merge_items.py`. The other side is looked at for shapes, for the order, and to tell sums from copies.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainermon.analysis.compare.items import INPUT, MODULE, OUTPUT, PARAMETERS, Call, Item, Rows, read_rows
from trainermon.analysis.compare.merge_items import Counts, Reference, Row, Sources, merge_row, scaled
from trainermon.analysis.compare.places import Part, Place
from trainermon.analysis.compare.splits import MERGED
from trainermon.dump.records import BACKWARD, FORWARD, PARAMETERS_GRAD, Layout

_Name = tuple[str, str]
_Key = tuple[str, str, int]
_NAMES_TOLD = 3
COLLECTIVE = "Distributed"


class Rank(NamedTuple):
    """The calls of one rank, under the names of the whole model, and what of it the rank has."""

    layout: Layout
    rows: Rows

    def place(self, axis: str) -> int:
        """Return the rank's place on an axis."""
        return self.layout.axes.get(axis, (0, 1))[0]


class Side(NamedTuple):
    """All ranks of one side; `sizes` says how many the merged axes have."""

    place: Place
    ranks: tuple[Rank, ...]

    def size(self, axis: str) -> int:
        """Return how many places of an axis were brought together."""
        return len({rank.place(axis) for rank in self.ranks})


def read_sides(target: Place, golden: Place) -> tuple[Rows, Rows, tuple[str, ...]]:
    """Return the rows of both places, each as of one rank, and what a reader should know of how it was merged.

    Raises:
        DumpError: a dump is damaged.
    """
    if not target.parts and not golden.parts:
        return read_rows(target.directory), read_rows(golden.directory), ()
    ours, theirs = _read_side(target), _read_side(golden)
    mergers = _Merger(ours, theirs), _Merger(theirs, ours)
    rows = mergers[0].rows(), mergers[1].rows()
    notes = [*_notes(ours, mergers[0].counts), *_notes(theirs, mergers[1].counts)]
    return *rows, tuple(notes)


def scoped_name(call: Call) -> str:
    """Return the name by which calls of different layouts are matched: a function's has the module around it."""
    return f"{MODULE}.{call.name}" if call.family == MODULE else f"{call.scope}/{call.family}.{call.name}"


def _read_side(place: Place) -> Side:
    parts = place.parts or (Part(directory=place.directory, layout=Layout()),)
    return Side(
        place,
        tuple(Rank(_layout_in_whole(part.layout), _in_whole(part, read_rows(part.directory))) for part in parts),
    )


def _layout_in_whole(layout: Layout) -> Layout:
    return dataclasses.replace(
        layout,
        splits={_path_in_whole(name, layout.renamed): split for name, split in layout.splits.items()},
        partial=tuple(_path_in_whole(name, layout.renamed) for name in layout.partial),
    )


def _in_whole(part: Part, rows: Rows) -> Rows:
    """Return the rows of a rank under the names of the whole model, tensors by their paths."""
    stage, size = part.layout.axes.get("pp", (0, 1))
    renamed = part.layout.renamed
    keys = {call.key: _key_in_whole(call, renamed, stage if size > 1 else 0) for call in rows.calls}
    sources: Sources = {}
    calls = []
    for call in rows.calls:
        if call.family == COLLECTIVE:  # other layouts have other ones
            continue
        items = tuple(_with_path(item, rows, sources, call.direction) for item in call.items)
        name = call.name if call.family != MODULE else _path_in_whole(call.name, renamed)
        scope = _path_in_whole(call.scope, renamed)
        calls.append(call._replace(key=keys[call.key], name=name, scope=scope, items=items))
    return rows._replace(
        calls=tuple(calls),
        parents={keys.get(key, key): keys.get(parent, parent) for key, parent in rows.parents.items()},
        stacks={keys.get(key, key): stack for key, stack in rows.stacks.items()},
        sources=sources,
    )


def _with_path(item: Item, rows: Rows, sources: Sources, direction: str) -> Item:
    path = rows.tensor_path(item)
    if isinstance(path, Path):
        sources[str(path)] = path
    is_gradient = item.is_tensor and direction != FORWARD  # one that another stage has sent requires a gradient
    return item._replace(
        data_name=str(path) if path else None, requires_grad=False if is_gradient else item.requires_grad
    )


def _key_in_whole(call: Call, renamed: Mapping[str, str], stage: int) -> str:
    if call.family == MODULE:
        path = _path_in_whole(call.name, renamed)
        return f"{call.key.partition('.')[0]}.{path}.{call.direction}.{call.number}"
    return f"{call.key} (stage {stage})" if stage else call.key


def _path_in_whole(path: str, renamed: Mapping[str, str]) -> str:
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        other = renamed.get(".".join(parts[:length]))
        if other is not None:
            return ".".join([*([other] if other else []), *parts[length:]])
    return path


class _References:
    """What the other side has of each row, by the names that both share."""

    def __init__(self, side: Side) -> None:
        self._sizes = {axis: side.size(axis) for axis in ("tp", "dp", "pp")}
        self._items: dict[tuple[_Key, str], Item] = {}
        self._order: dict[_Key, int] = {}
        self.counts: Counter[_Name] = Counter()
        for rank in side.ranks:
            if rank.place("tp") or rank.place("dp"):
                continue
            for key, call in _keyed(rank.rows.calls):
                self.counts[key[:2]] += 1
                self._order.setdefault(key, len(self._order))
                for item in call.items:
                    self._items.setdefault((key, item.place), item)

    def of(self, key: _Key, place: str, axis: str) -> Reference | None:
        """Return what is known of a row; of a call that the other side did not make, what its first call had."""
        item = self._items.get((key, place)) or self._items.get(((*key[:2], 0), place))
        if item is None:
            return None
        is_same = (key, place) in self._items and self._sizes["tp"] == self._sizes["dp"] == 1
        return Reference(shape=item.shape, parts=self._sizes[axis], item=item if is_same else None)

    def has_smaller_gradients(self, rank: Rank, replicas: int, *, is_part: bool) -> bool:
        """Return whether gradients are smaller than those of a replica, by a factor near the number of `replicas`.

        They are where each replica's loss is the mean over its own batch. `is_part`: it has a part of a tensor.
        """
        ratios = []
        for key, call in _keyed(rank.rows.calls):
            for item in call.items if call.direction == BACKWARD else ():
                other = self._items.get((key, item.place))
                if other and isinstance(item.norm, float) and isinstance(other.norm, float) and other.norm:
                    ratios.append(item.norm * (math.sqrt(replicas) if is_part else 1.0) / other.norm)
        return bool(ratios) and statistics.median(ratios) > math.sqrt(replicas)

    def in_order(self, calls: Sequence[Call]) -> list[Call]:
        """Return calls in the order in which the other side made them; the others stay behind those before them."""
        if self._sizes["pp"] > 1:
            return list(calls)
        position, positions = 0, []
        for key, _ in _keyed(calls):
            position = self._order.get(key, position)
            positions.append(position)
        return [calls[i] for i in sorted(range(len(calls)), key=positions.__getitem__)]


def _keyed(calls: Iterable[Call]) -> Iterator[tuple[_Key, Call]]:
    counts: Counter[_Name] = Counter()
    for call in calls:
        name = scoped_name(call), call.direction
        yield (*name, counts[name]), call
        counts[name] += 1


class _Merger:
    """Merges the ranks of one side, axis by axis."""

    def __init__(self, side: Side, other: Side) -> None:
        self._side = side
        self._references = _References(other)
        self.counts = Counts()
        self._sources: Sources = {name: source for rank in side.ranks for name, source in rank.rows.sources.items()}

    def rows(self) -> Rows:
        """Return the rows of the whole."""
        stages = [
            self._replicas([self._same_calls(ranks, "tp") for ranks in _by_place(stage, "dp")])
            for stage in _by_place(self._side.ranks, "pp")
        ]
        calls: Sequence[Call] = stages[0].rows.calls
        if len(stages) > 1:
            calls = self._references.in_order(_one_pipeline([stage.rows.calls for stage in stages]))
        return Rows(
            directory=self._side.place.directory,
            task=stages[0].rows.task,
            calls=tuple(calls),
            parents={key: parent for stage in stages for key, parent in stage.rows.parents.items()},
            stacks={key: stack for stage in stages for key, stack in stage.rows.stacks.items()},
            sources=self._sources,
            scoped=True,
        )

    def _same_calls(self, ranks: Sequence[Rank], axis: str) -> Rank:
        """Return ranks that made the same calls as one rank."""
        if len(ranks) == 1:
            return ranks[0]
        ranks = sorted(ranks, key=lambda rank: rank.place(axis))
        by_key = [dict(_keyed(rank.rows.calls)) for rank in ranks]
        layout = ranks[0].layout
        merged = [
            self._one_call(key, [calls[key] for calls in by_key if key in calls], layout, axis)
            for key in dict.fromkeys(key for calls in by_key for key in calls)
        ]
        return Rank(layout, ranks[0].rows._replace(calls=tuple(merged)))

    def _one_call(self, key: _Key, calls: Sequence[Call], layout: Layout, axis: str) -> Call:
        first = calls[0]
        rows = [{item.place: item for item in call.items} for call in calls]
        items: list[Item] = []
        is_own = False
        for item in first.items:
            row = Row(
                name=f"{first.key}.{item.place}",
                items=[row[item.place] for row in rows if item.place in row],
                reference=self._references.of(key, item.place, axis),
                split=_split_of(first, item, layout) if axis == "tp" else None,
                sums=_may_be_sums(first, item, layout, axis),
                is_function=first.family != MODULE,
                is_own=is_own,
            )
            merged = merge_row(row, self._sources, self.counts)
            is_own |= merged is None
            items += [merged] if merged is not None else []
        return first._replace(items=tuple(items))

    def _replicas(self, ranks: Sequence[Rank]) -> Rank:
        """Return data parallel replicas as one rank, of more micro batches or of larger ones, as the other side has."""
        if len(ranks) == 1:
            return ranks[0]
        names = Counter(key[:2] for key, _ in _keyed(ranks[0].rows.calls))
        more = Counter(self._references.counts[name] == count * len(ranks) for name, count in names.items())
        has_more = more[True] > more[False]
        if self._references.has_smaller_gradients(ranks[0], len(ranks), is_part=not has_more):
            ranks = [self._averaged(rank, len(ranks)) for rank in ranks]
        return _interleaved(ranks, names) if has_more else self._same_calls(ranks, "dp")

    def _averaged(self, rank: Rank, replicas: int) -> Rank:
        """Return a replica with its gradients divided by the number of replicas."""
        self.counts.averaged = replicas
        calls = tuple(
            call
            if call.direction == FORWARD
            else call._replace(items=tuple(scaled(item, 1 / replicas, self._sources) for item in call.items))
            for call in rank.rows.calls
        )
        return rank._replace(rows=rank.rows._replace(calls=calls))


def _by_place(ranks: Sequence[Rank], axis: str) -> list[list[Rank]]:
    groups: dict[int, list[Rank]] = defaultdict(list)
    for rank in ranks:
        groups[rank.place(axis)].append(rank)
    return [groups[place] for place in sorted(groups)]


def _split_of(call: Call, item: Item, layout: Layout) -> tuple[int, int] | None:
    """Return how a parameter or its gradient is dealt out, and of a gated module's result how its blocks alternate."""
    path, name = call.name.rpartition(".")[0], item.place.rpartition(".")[2]
    if item.state == PARAMETERS or call.direction == PARAMETERS_GRAD:
        return layout.splits.get(f"{path}.{name}")
    _, stride = layout.splits.get(f"{path}.weight", (0, 1))
    is_result = item.state == (OUTPUT if call.direction == FORWARD else INPUT)
    return (len(item.shape or ()) - 1, stride) if is_result and stride > 1 else None


def _may_be_sums(call: Call, item: Item, layout: Layout, axis: str) -> bool | None:
    """Return whether rows of one shape are parts of a sum: surely, surely not, or None: the values decide."""
    is_gradient = call.direction == PARAMETERS_GRAD
    if axis == "dp":
        return True if is_gradient else False if call.family == MODULE else None
    if call.family != MODULE or not layout.splits:
        return None if call.family != MODULE or call.direction != FORWARD else False
    if is_gradient:
        return f"{call.name.rpartition('.')[0]}.{item.place}" in layout.partial
    return None if call.direction == BACKWARD and layout.partial else False


def _interleaved(ranks: Sequence[Rank], names: Mapping[_Name, int]) -> Rank:
    """Return replicas as one rank that takes their micro batches in turn, as Megatron deals them out."""
    forward = [count for (name, direction), count in names.items() if direction == FORWARD and name.startswith(MODULE)]
    micro_batches = Counter(forward).most_common(1)[0][0] if forward else 1
    blocks: dict[tuple[int, int], list[Call]] = defaultdict(list)
    parents: dict[str, str] = {}
    for replica, rank in enumerate(ranks):
        changed: dict[str, str] = {}
        for (name, direction, index), call in _keyed(rank.rows.calls):
            each = max(1, names.get((name, direction), 1) // micro_batches)
            block, rest = divmod(index, each)
            number = (block * len(ranks) + replica) * each + rest
            changed[call.key] = _numbered_key(call, number, replica)
            blocks[block, replica].append(call._replace(key=changed[call.key], number=number))
        parents |= {
            changed[key]: changed.get(parent, parent) for key, parent in rank.rows.parents.items() if key in changed
        }
    calls = tuple(call for place in sorted(blocks) for call in blocks[place])
    return Rank(ranks[0].layout, ranks[0].rows._replace(calls=calls, parents=parents))


def _numbered_key(call: Call, number: int, replica: int) -> str:
    if call.family == MODULE:
        return f"{call.key.partition('.')[0]}.{call.name}.{call.direction}.{number}"
    return f"{call.key} (replica {replica})" if replica else call.key


def _one_pipeline(stages: Sequence[Sequence[Call]]) -> list[Call]:
    """Return the calls of all stages, forwards from the first to the last stage, then backwards the other way.

    A module that is on several stages (what holds the layers, and the model itself) is one: it takes what the first
    stage takes and gives what the last one gives, the other way round in the backward.
    """
    found: dict[str, list[Call]] = {}
    for is_forward in (True, False):
        for calls in stages if is_forward else reversed(stages):
            for call in calls:
                if (call.direction == FORWARD) == is_forward:
                    found.setdefault(call.key, []).append(call)
    return [_joined(calls) for calls in found.values()]


def _joined(calls: Sequence[Call]) -> Call:
    """Return the parts of one call, in the order in which they ran, as that call."""
    if len(calls) == 1:
        return calls[0]
    items = [item for item in calls[0].items if item.state == INPUT]
    items += {item.place: item for call in calls for item in call.items if item.state == PARAMETERS}.values()
    items += [item for item in calls[-1].items if item.state == OUTPUT]
    if calls[0].direction == PARAMETERS_GRAD:
        items = list({item.place: item for call in calls for item in call.items}.values())
    return calls[0]._replace(items=tuple(items))


def _notes(side: Side, counts: Counts) -> Iterator[str]:
    if len(side.ranks) == 1:
        return
    axes = " × ".join(f"{axis} {side.size(axis)}" for axis in MERGED if side.size(axis) > 1)
    yield (
        f"{side.place.directory} is merged from {len(side.ranks)} ranks ({axes}): {counts.split:,} rows are parts, "
        f"{counts.copies:,} copies, {counts.sums:,} sums"
    )
    if counts.averaged:
        yield f"gradients of {counts.averaged} replicas were averaged: each one's loss is the mean over its own batch"
    if counts.own:
        yield f"{counts.own:,} rows of functions are each rank's own and were left out: look at the modules around them"
    for names, what in (
        (counts.diverged, "should be copies but differ"),
        (counts.unclear, "have shapes that do not fit"),
    ):
        if names:
            more = f" and {len(names) - _NAMES_TOLD:,} more" if len(names) > _NAMES_TOLD else ""
            yield f"rows of its ranks {what}: {', '.join(names[:_NAMES_TOLD])}{more}"
