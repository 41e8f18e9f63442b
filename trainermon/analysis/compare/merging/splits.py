"""Which dumps of a step are parts of one whole: ranks that share a model differently on the two sides.

Ranks of an axis (tensor, pipeline, data parallel) are brought together where the two sides have another number of them;
where both have as many, rank is compared with rank, if nobody asks for the whole. Places come from the dumps, or from
what the user says of them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from trainermon.analysis.compare.merging.layouts import (
    MERGED,
    PlacedRank,
    compared_alone,
    place_ranks,
    refuse_untold,
    taken_for_whole,
)
from trainermon.analysis.compare.merging.places import (
    DumpLocation,
    DumpShard,
    PairedPlaces,
    find_places,
    hollow_places,
    lone_places,
    pair_places,
)
from trainermon.core.errors import ConfigError, DumpError

_DUMP_ALL = "dump all ranks, or name two dumps to compare these alone"


def parse_sizes(text: str | None) -> dict[str, int]:
    """Return the numbers of ranks by axis in a text such as `tp=2,pp=4`; {} for None.

    Raises:
        ConfigError: it is not of that form.
    """
    sizes = {}
    for part in text.split(",") if text is not None else ():
        axis, _, size = part.partition("=")
        if axis.strip() not in MERGED or not size.strip().isdigit() or int(size) < 1:
            raise ConfigError(f"found {text!r}, expected sizes such as tp=2,pp=4 (axes: {', '.join(MERGED)})")
        sizes[axis.strip()] = int(size)
    return sizes


def find_pairs(
    target: Path,
    golden: Path,
    *,
    target_sizes: Mapping[str, int] | None = None,
    golden_sizes: Mapping[str, int] | None = None,
    merged: Collection[str] = (),
) -> PairedPlaces:
    """Return which dumps below the folder `target` are compared with which below `golden`, and which with none.

    Dumps of ranks that hold parts of one model count as one; see `bring_together` for the sizes, and `merged`.

    Raises:
        DumpError: a side has no dump, none of them belong together, or ranks of a whole are missing.
    """
    sides = find_places(target), find_places(golden)
    whole = bring_together(*sides, target_sizes=target_sizes, golden_sizes=golden_sizes, merged=merged)
    pairs = pair_places(*whole)
    lone = lone_places(pairs, *whole)
    for path, places in zip((target, golden), sides, strict=True):
        known = {(one.step, one.rank) for one in (*places, *(other.place for other in lone))}
        lone += hollow_places(path, known)
    return PairedPlaces(pairs, lone)


def find_wholes(path: Path, *, sizes: Mapping[str, int], merged: Collection[str]) -> list[DumpLocation]:
    """Return the dumps below the folder `path`; those of ranks that share a model along the axes `merged` as one.

    `sizes` are for dumps that do not tell their layout, see `bring_together`.

    Raises:
        DumpError: there is no dump, or ranks of a whole are missing.
    """
    places = find_places(path)
    if not merged:
        return places
    return bring_together(places, places, target_sizes=sizes, golden_sizes=sizes, merged=merged)[0]


def bring_together(
    targets: Sequence[DumpLocation],
    goldens: Sequence[DumpLocation],
    *,
    target_sizes: Mapping[str, int] | None = None,
    golden_sizes: Mapping[str, int] | None = None,
    merged: Collection[str] = (),
) -> tuple[list[DumpLocation], list[DumpLocation]]:
    """Join, on either side, the dumps of ranks that hold parts of one model into one location with `parts`.

    `target_sizes` and `golden_sizes` are for dumps that do not tell their layout: numbers of ranks by axis, where ranks
    are numbered as Megatron does, tensor parallel ones first. Along the axes `merged` ranks are joined though both
    sides have as many; tensor parallel ones also if one side alone splits the sequence, where each has a summand of
    some gradients.

    Returns:
        The locations of the target, and those of the golden side.

    Raises:
        DumpError: ranks of a whole are missing.
    """
    if len(targets) == len(goldens) == 1:
        _check_single(targets[0], target_sizes)
        _check_single(goldens[0], golden_sizes)
        return list(targets), list(goldens)  # these were meant
    ours, theirs = place_ranks(targets, target_sizes), place_ranks(goldens, golden_sizes)
    axes = _axes_to_merge(ours, theirs, merged)
    if not axes:
        return _alone(ours, theirs, "target"), _alone(theirs, ours, "golden")
    for side, ranks in (("target", ours), ("golden", theirs)):
        refuse_untold(ranks, axes, side)
    return list(_merged(ours, axes, "target")), list(_merged(theirs, axes, "golden"))


def _axes_to_merge(ours: Sequence[PlacedRank], theirs: Sequence[PlacedRank], merged: Collection[str]) -> list[str]:
    sizes = {axis: (_size(ours, axis), _size(theirs, axis)) for axis in MERGED}
    parted = _partial(ours) != _partial(theirs)
    return [
        axis
        for axis, (one, other) in sizes.items()
        if one != other or (one > 1 and (axis in merged or (axis == "tp" and parted)))
    ]


def _size(ranks: Sequence[PlacedRank], axis: str) -> int:
    return max((rank.at(axis)[1] for rank in ranks), default=1)


def _partial(ranks: Sequence[PlacedRank]) -> bool:
    return any(rank.layout.partial for rank in ranks)


def _alone(ranks: Sequence[PlacedRank], others: Sequence[PlacedRank], side: str) -> list[DumpLocation]:
    assumed = compared_alone(ranks, others, side)
    return [rank.place._replace(assumed=assumed) for rank in ranks]


def _merged(ranks: Sequence[PlacedRank], axes: Sequence[str], side: str) -> Iterator[DumpLocation]:
    groups: dict[tuple[object, ...], list[PlacedRank]] = defaultdict(list)
    for rank in ranks:
        rest = tuple(sorted((axis, at) for axis, (at, _) in rank.layout.axes.items() if at and axis not in axes))
        groups[rank.place.step, rank.place.attempt, rest].append(rank)
    steps = Counter(key[0] for key in groups)
    numbers: Counter[object] = Counter()
    for key, members in groups.items():
        members.sort(key=lambda member: member.place.rank or 0)
        _check_complete(members, axes, side)
        first = members[0].place
        parts = tuple(DumpShard(one.place.directory, one.layout, is_named=one.is_named) for one in members)
        number = numbers[key[0]] if steps[key[0]] > 1 else None
        numbers[key[0]] += 1
        assumed = taken_for_whole(members[0]) if len(members) == 1 else ""
        yield first._replace(directory=_common(parts), rank=number, parts=parts, assumed=assumed)


def _check_single(place: DumpLocation, sizes: Mapping[str, int] | None) -> None:
    if sizes and (number := math.prod(sizes.values())) > 1:
        told = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        raise DumpError(
            f"found one rank in {place.directory}, expected {number:,} by the split {told}: name the folder of all, "
            "or leave the split out"
        )


def _check_complete(members: Sequence[PlacedRank], axes: Sequence[str], side: str) -> None:
    """Refuse ranks of a whole, unless each place on `axes` is that of one of them."""
    step, found = members[0].place.step, f"found {len(members)} rank{'' if len(members) == 1 else 's'}"
    taken = Counter(tuple(member.at(axis)[0] for axis in axes) for member in members)
    sizes = [_size(members, axis) for axis in axes]
    for number, (axis, size) in enumerate(zip(axes, sizes, strict=True)):
        if missing := sorted(set(range(size)) - {place[number] for place in taken}):
            raise DumpError(
                f"step {step}: {found} of which {axis} has {size} places, but none of {axis} "
                f"{', '.join(map(str, missing))}: {_DUMP_ALL}"
            )
    for place in product(*map(range, sizes)):
        where = ", ".join(f"{axis} {at}" for axis, at in zip(axes, place, strict=True))
        if not taken[place]:
            raise DumpError(f"step {step}: {found}, but none of {where}: {_DUMP_ALL}")
        if taken[place] > 1:
            raise DumpError(
                f"step {step}: {taken[place]} of {len(members)} ranks of the {side} are in one place, {where}: name "
                f"the dump of one, or say how all of them share the model with --{side}-split tp=…,dp=…,pp=…"
            )


def _common(parts: Sequence[DumpShard]) -> Path:
    return parts[0].directory if len(parts) == 1 else parts[0].directory.parent
