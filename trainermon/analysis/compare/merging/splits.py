"""Which dumps of a step are parts of one whole: ranks that share a model differently on the two sides.

Ranks of an axis (tensor, pipeline, data parallel) are brought together where the two sides have another number of them;
where both have as many, rank is compared with rank, if nobody asks for the whole. Places come from the dumps, or from
what the user says of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

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
from trainermon.dump.files.reader import load_partial, read_layout
from trainermon.dump.files.records import INFO_FILE, PARTIAL_FILE, RankLayout

MERGED = ("tp", "dp", "pp")
"""Axes over which dumps are merged, in this order; Megatron numbers ranks in it."""


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
    ours = [(place, _layout(place, target_sizes)) for place in targets]
    theirs = [(place, _layout(place, golden_sizes)) for place in goldens]
    sizes = {axis: (_size(ours, axis), _size(theirs, axis)) for axis in MERGED}
    parted = _partial(ours) != _partial(theirs)
    axes = [
        axis
        for axis, (one, other) in sizes.items()
        if one != other or (one > 1 and (axis in merged or (axis == "tp" and parted)))
    ]
    if not axes:
        return list(targets), list(goldens)
    return list(_merged(ours, axes)), list(_merged(theirs, axes))


def layout_at(directory: Path) -> RankLayout:
    """Return the rank's position and its part of the model as dump_info.json in `directory` tells.

    Without it, the whole model.

    Raises:
        DumpError: dump_info.json is damaged.
    """
    path = directory / INFO_FILE
    try:
        info = json.loads(path.read_bytes())
    except FileNotFoundError:
        partial = directory / PARTIAL_FILE
        info = load_partial(partial).info if partial.exists() else {}
    except ValueError as error:
        raise DumpError(f"{path} is not JSON ({error}): copy the dump again") from error
    return read_layout(info.get("layout") if isinstance(info, dict) else None)


def _layout(place: DumpLocation, sizes: Mapping[str, int] | None) -> RankLayout:
    known = layout_at(place.directory)
    if not sizes:
        return known
    left = place.rank or 0
    axes = {}
    for axis in MERGED:
        size = sizes.get(axis, 1)
        axes[axis] = left % size, size
        left //= size
    return dataclasses.replace(known, axes={**known.axes, **axes})


def _size(places: Sequence[tuple[DumpLocation, RankLayout]], axis: str) -> int:
    return max((_place_in(layout, axis)[1] for _, layout in places), default=1)


def _partial(places: Sequence[tuple[DumpLocation, RankLayout]]) -> bool:
    return any(layout.partial for _, layout in places)


def _place_in(layout: RankLayout, axis: str) -> tuple[int, int]:
    return layout.axes.get(axis, (0, 1))


def _merged(places: Sequence[tuple[DumpLocation, RankLayout]], axes: Sequence[str]) -> Iterator[DumpLocation]:
    groups: dict[tuple[object, ...], list[tuple[DumpLocation, RankLayout]]] = defaultdict(list)
    for place, layout in places:
        rest = tuple(sorted((axis, where) for axis, (where, _) in layout.axes.items() if axis not in axes))
        groups[place.step, place.attempt, rest].append((place, layout))
    steps = Counter(key[0] for key in groups)
    numbers: Counter[object] = Counter()
    for key, members in groups.items():
        members.sort(key=lambda member: member[0].rank or 0)
        _check_complete(members, axes)
        first = members[0][0]
        parts = tuple(DumpShard(directory=place.directory, layout=layout) for place, layout in members)
        number = numbers[key[0]] if steps[key[0]] > 1 else None
        numbers[key[0]] += 1
        yield first._replace(directory=_common(parts), rank=number, parts=parts)


def _check_single(place: DumpLocation, sizes: Mapping[str, int] | None) -> None:
    if sizes and (number := math.prod(sizes.values())) > 1:
        told = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        raise DumpError(
            f"found one rank in {place.directory}, expected {number:,} by the split {told}: name the folder of all, "
            "or leave the split out"
        )


def _check_complete(members: Sequence[tuple[DumpLocation, RankLayout]], axes: Sequence[str]) -> None:
    for axis in axes:
        size = max(_place_in(layout, axis)[1] for _, layout in members)
        missing = sorted(set(range(size)) - {_place_in(layout, axis)[0] for _, layout in members})
        if missing:
            place = members[0][0]
            raise DumpError(
                f"step {place.step}: found {len(members)} ranks of which {axis} has {size} places, but none of "
                f"{axis} {', '.join(map(str, missing))}: dump all ranks, or name two dumps to compare these alone"
            )


def _common(parts: Sequence[DumpShard]) -> Path:
    return parts[0].directory if len(parts) == 1 else parts[0].directory.parent
