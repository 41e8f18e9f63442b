"""The dumps of all ranks of a model as the dump of one: tensor parallel parts, data parallel replicas, pipeline stages.

Decides which calls of the ranks are the same call, and in which order the whole made them; what becomes of their rows
is decided in `merge_items.py`. The other side is looked at for shapes, for the order, and to tell sums from copies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from trainermon.analysis.compare.items import INPUT, MODULE, OUTPUT, PARAMETERS, DumpCall, DumpRow, DumpRows, read_rows
from trainermon.analysis.compare.merging.layouts import MERGED
from trainermon.analysis.compare.merging.merge_items import MergeCounts, MergedRow, Sources, is_copy, merge_row, scaled
from trainermon.analysis.compare.merging.places import DumpLocation
from trainermon.analysis.compare.merging.ranks import (
    Key,
    MergedSide,
    Name,
    RankCalls,
    given_from_outside,
    keyed,
    own_functions,
    read_side,
    without_functions,
)
from trainermon.analysis.compare.merging.references import SharedReferences
from trainermon.dump.files.records import BACKWARD, FORWARD, PARAMETERS_GRAD, RankLayout


def read_sides(target: DumpLocation, golden: DumpLocation) -> tuple[DumpRows, DumpRows, tuple[str, ...]]:
    """Read the dumps of both sides, and merge the ranks of each, as if one rank had the whole model.

    Returns:
        The rows of the target, those of the golden dump, and sentences on how they were merged.

    Raises:
        DumpError: a dump is damaged.
    """
    if not target.parts and not golden.parts:
        return read_rows(target.directory), read_rows(golden.directory), ()
    ours, theirs = read_side(target), read_side(golden)
    own = own_functions(ours) | own_functions(theirs)
    (ours, our_rows), (theirs, their_rows) = without_functions(ours, own), without_functions(theirs, own)
    mergers = _AxisMerger(ours, theirs), _AxisMerger(theirs, ours)
    mergers[0].counts.own, mergers[1].counts.own = our_rows, their_rows
    rows = mergers[0].rows(), mergers[1].rows()
    notes = [*_notes(ours, mergers[0].counts), *_notes(theirs, mergers[1].counts)]
    return *rows, tuple(notes)


def read_whole(place: DumpLocation) -> tuple[DumpRows, tuple[str, ...]]:
    """Read the dumps of ranks that share a model, and merge them as one rank's without another side to look at.

    Returns:
        The rows of the whole, and sentences on how they were merged.

    Raises:
        DumpError: a dump is damaged.
    """
    side = read_side(place)
    merger = _AxisMerger(side, side)
    return merger.rows(), tuple(_notes(side, merger.counts))


class _AxisMerger:
    """Merges the ranks of one side, axis by axis."""

    def __init__(self, side: MergedSide, other: MergedSide) -> None:
        self._side = side
        self._references = SharedReferences(other)
        self.counts = MergeCounts()
        self._sources: Sources = {name: source for rank in side.ranks for name, source in rank.rows.sources.items()}

    def rows(self) -> DumpRows:
        """Return the rows of the whole."""
        stages = [
            self._replicas([self._same_calls(ranks, "tp") for ranks in _by_place(stage, "dp")])
            for stage in _by_place(self._side.ranks, "pp")
        ]
        calls: Sequence[DumpCall] = stages[0].rows.calls
        if len(stages) > 1:
            calls = self._references.in_order(_one_pipeline([stage.rows.calls for stage in stages]))
        return DumpRows(
            directory=self._side.place.directory,
            task=stages[0].rows.task,
            calls=tuple(calls),
            parents={key: parent for stage in stages for key, parent in stage.rows.parents.items()},
            stacks={key: stack for stage in stages for key, stack in stage.rows.stacks.items()},
            sources=self._sources,
            recomputed={
                key: part and (at, part[1])
                for at, stage in enumerate(stages)
                for key, part in stage.rows.recomputed.items()
            },
            scoped=True,
        )

    def _same_calls(self, ranks: Sequence[RankCalls], axis: str) -> RankCalls:
        """Return ranks that made the same calls as one rank."""
        if len(ranks) == 1:
            return ranks[0]
        ranks = sorted(ranks, key=lambda rank: rank.place(axis))
        by_key = [dict(keyed(rank.rows.calls)) for rank in ranks]
        layout = ranks[0].layout
        merged = [
            self._one_call(key, [calls[key] for calls in by_key if key in calls], layout, axis)
            for key in dict.fromkeys(key for calls in by_key for key in calls)
        ]
        return RankCalls(layout, ranks[0].rows._replace(calls=tuple(merged)))

    def _one_call(self, key: Key, calls: Sequence[DumpCall], layout: RankLayout, axis: str) -> DumpCall:
        first = calls[0]
        rows = [{item.place: item for item in call.items} for call in calls]
        items: list[DumpRow] = []
        is_own = False
        for item in first.items:
            row = MergedRow(
                name=f"{first.key}.{item.place}",
                items=[row[item.place] for row in rows if item.place in row],
                axis=axis,
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

    def _replicas(self, ranks: Sequence[RankCalls]) -> RankCalls:
        """Return data parallel replicas as one rank, of more micro batches or of larger ones, as the other side has."""
        if len(ranks) == 1:
            return ranks[0]
        names = Counter(key[:2] for key, _ in keyed(ranks[0].rows.calls))
        more = Counter(self._references.counts[name] == count * len(ranks) for name, count in names.items())
        has_more = more[True] > more[False]
        if not has_more and not self._are_one_batch(ranks):
            self.counts.alone = max(ranks, key=self._references.agreement).place("dp")
            return next(rank for rank in ranks if rank.place("dp") == self.counts.alone)
        if self._references.has_smaller_gradients(ranks[0], len(ranks), is_part=not has_more):
            ranks = [self._averaged(rank, len(ranks)) for rank in ranks]
        return _interleaved(ranks, names) if has_more else self._same_calls(ranks, "dp")

    def _are_one_batch(self, ranks: Sequence[RankCalls]) -> bool:
        """Return whether replicas have parts of the other side's batch, or all of them the same one."""
        first, *others = (given_from_outside(rank) for rank in ranks)
        is_same = all(given.get(place, value) == value for given in others for place, value in first.items())
        return is_same or self._references.is_larger(ranks[0])

    def _averaged(self, rank: RankCalls, replicas: int) -> RankCalls:
        """Return a replica with its gradients divided by the number of replicas.

        Not divided is what a backward starts with: each replica's is 1, and so is that of the whole.
        """
        self.counts.averaged = replicas

        def averaged(key: Key, item: DumpRow) -> DumpRow:
            other = self._references.of(key, item.place, "dp")
            start = other.item if other is not None and item.state == INPUT and item.num_elements == 1 else None
            is_start = start is not None and is_copy(item, start)
            return item if is_start else scaled(item, 1 / replicas, self._sources)

        calls = tuple(
            call
            if call.direction == FORWARD
            else call._replace(items=tuple(averaged(key, item) for item in call.items))
            for key, call in keyed(rank.rows.calls)
        )
        return rank._replace(rows=rank.rows._replace(calls=calls))


def _by_place(ranks: Sequence[RankCalls], axis: str) -> list[list[RankCalls]]:
    groups: dict[int, list[RankCalls]] = defaultdict(list)
    for rank in ranks:
        groups[rank.place(axis)].append(rank)
    return [groups[place] for place in sorted(groups)]


def _split_of(call: DumpCall, item: DumpRow, layout: RankLayout) -> tuple[int, int] | None:
    """Return how a parameter or its gradient is dealt out, and of a gated module's result how its blocks alternate."""
    path, name = call.name.rpartition(".")[0], item.place.rpartition(".")[2]
    if item.state == PARAMETERS or call.direction == PARAMETERS_GRAD:
        return layout.splits.get(f"{path}.{name}")
    _, stride = layout.splits.get(f"{path}.weight", (0, 1))
    is_result = item.state == (OUTPUT if call.direction == FORWARD else INPUT)
    return (len(item.shape or ()) - 1, stride) if is_result and stride > 1 else None


def _may_be_sums(call: DumpCall, item: DumpRow, layout: RankLayout, axis: str) -> bool | None:
    """Return whether rows of one shape are parts of a sum: surely, surely not, or None: the values decide."""
    is_gradient = call.direction == PARAMETERS_GRAD
    if axis == "tp" and item.is_summand:
        return True
    if axis == "dp":
        return True if is_gradient else False if call.family == MODULE else None
    if call.family != MODULE or not layout.splits:
        return None if call.family != MODULE or call.direction != FORWARD else False
    if is_gradient:
        return f"{call.name.rpartition('.')[0]}.{item.place}" in layout.partial
    return None if call.direction == BACKWARD and layout.partial else False


def _interleaved(ranks: Sequence[RankCalls], names: Mapping[Name, int]) -> RankCalls:
    """Return replicas as one rank that takes their micro batches in turn, as Megatron deals them out."""
    forward = [count for (name, direction), count in names.items() if direction == FORWARD and name.startswith(MODULE)]
    micro_batches = Counter(forward).most_common(1)[0][0] if forward else 1
    blocks: dict[tuple[int, int], list[DumpCall]] = defaultdict(list)
    parents: dict[str, str] = {}
    for replica, rank in enumerate(ranks):
        changed: dict[str, str] = {}
        for (name, direction, index), call in keyed(rank.rows.calls):
            each = max(1, names.get((name, direction), 1) // micro_batches)
            block, rest = divmod(index, each)
            number = (block * len(ranks) + replica) * each + rest
            changed[call.key] = _numbered_key(call, number, replica)
            blocks[block, replica].append(call._replace(key=changed[call.key], number=number))
        parents |= {
            changed[key]: changed.get(parent, parent) for key, parent in rank.rows.parents.items() if key in changed
        }
    calls = tuple(call for place in sorted(blocks) for call in blocks[place])
    return RankCalls(ranks[0].layout, ranks[0].rows._replace(calls=calls, parents=parents))


def _numbered_key(call: DumpCall, number: int, replica: int) -> str:
    if call.family == MODULE:
        return f"{call.key.partition('.')[0]}.{call.name}.{call.direction}.{number}"
    return f"{call.key} (replica {replica})" if replica else call.key


def _one_pipeline(stages: Sequence[Sequence[DumpCall]]) -> list[DumpCall]:
    """Return the calls of all stages, forwards from the first to the last stage, then backwards the other way.

    A module that is on several stages (what holds the layers, and the model itself) is one: it takes what the first
    stage takes and gives what the last one gives, the other way round in the backward.
    """
    found: dict[str, list[DumpCall]] = {}
    for is_forward in (True, False):
        for calls in stages if is_forward else reversed(stages):
            for call in calls:
                if (call.direction == FORWARD) == is_forward:
                    found.setdefault(call.key, []).append(call)
    return [_joined(calls) for calls in found.values()]


def _joined(calls: Sequence[DumpCall]) -> DumpCall:
    """Return the parts of one call, in the order in which they ran, as that call."""
    if len(calls) == 1:
        return calls[0]
    items = [item for item in calls[0].items if item.state == INPUT]
    items += {item.place: item for call in calls for item in call.items if item.state == PARAMETERS}.values()
    items += [item for item in calls[-1].items if item.state == OUTPUT]
    if calls[0].direction == PARAMETERS_GRAD:
        items = list({item.place: item for call in calls for item in call.items}.values())
    return calls[0]._replace(items=tuple(items))


def _notes(side: MergedSide, counts: MergeCounts) -> Iterator[str]:
    if len(side.ranks) == 1:
        return
    axes = " × ".join(f"{axis} {side.size(axis)}" for axis in MERGED if side.size(axis) > 1)
    yield (
        f"{side.place.directory} is merged from {len(side.ranks)} ranks ({axes}): {counts.split:,} rows are parts, "
        f"{counts.copies:,} copies, {counts.sums:,} sums"
    )
    if side.numbered:
        yield (
            f"the layers of {side.place.directory} were numbered over the stages in turn, as the dumps do not tell: "
            f"{', '.join(side.numbered)}"
        )
    if counts.alone is not None:
        yield f"the replicas had different data: only dp {counts.alone} is compared, which agrees best"
    if counts.averaged:
        yield f"gradients of {counts.averaged} replicas were averaged: each one's loss is the mean over its own batch"
    if counts.own:
        yield f"{counts.own:,} rows of functions are each rank's own and were left out: look at the modules around them"
    for names, what in (
        (counts.diverged, "should be copies but differ"),
        (counts.unclear, "have shapes that do not fit"),
    ):
        if names:
            yield f"{len(names):,} rows of its ranks {what}, the first is {names[0]}"
