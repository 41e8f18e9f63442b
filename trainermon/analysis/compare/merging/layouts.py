"""Which part of the model each rank has, as its dump or the user tells; and what is said where neither does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainermon.analysis.compare.merging.places import DumpLocation
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import load_partial, read_layout, well_formed
from trainermon.dump.files.records import INFO_FILE, PARTIAL_FILE, RankLayout

MERGED = ("tp", "dp", "pp")
"""Axes over which dumps are merged, in this order; Megatron numbers ranks in it."""
_SILENT = f"{INFO_FILE} is missing, damaged, or says nothing of it"


class PlacedRank(NamedTuple):
    """One rank's dump, and its position.

    Attributes:
        place: Where the dump is.
        layout: The rank's position, and which part of the model it has; of one that is not told, the whole model.
        is_told: Whether its dump or the user tells that.
        is_named: Whether it is known what its modules are called in the whole model.
    """

    place: DumpLocation
    layout: RankLayout
    is_told: bool
    is_named: bool

    def at(self, axis: str) -> tuple[int, int]:
        """Return the rank's position on an axis, from 0, and how many there are."""
        return self.layout.axes.get(axis, (0, 1))


def place_ranks(places: Sequence[DumpLocation], sizes: Mapping[str, int] | None) -> list[PlacedRank]:
    """Return where the ranks with dumps at `places` stand; `sizes` is what the user says: numbers of ranks by axis.

    Of several ranks, those tell nothing whose dumps give no position on any axis.
    """
    known = [layout_at(place.directory) for place in places]
    if sizes:
        return [_said(place, known, at, sizes) for at, place in enumerate(places)]
    is_alone = num_ranks(places) == 1
    told = [layout is not None and (is_alone or bool(layout.axes)) for layout in known]
    return [
        PlacedRank(place, layout or RankLayout(), is_told, is_named=is_told)
        for place, layout, is_told in zip(places, known, told, strict=True)
    ]


def num_ranks(places: Sequence[DumpLocation]) -> int:
    """Return how many dumps there are of the step that has most."""
    return max(Counter(place.step for place in places).values(), default=0)


def layout_at(directory: Path) -> RankLayout | None:
    """Return the rank's position and its part of the model as dump_info.json in `directory` tells; None: it does not.

    A damaged one tells nothing here; whoever reads the dump's entries says so.
    """
    path, partial = directory / INFO_FILE, directory / PARTIAL_FILE
    with contextlib.suppress(DumpError, OSError), well_formed(directory):
        if path.exists():
            info = json.loads(path.read_bytes())
        else:
            info = load_partial(partial).info if partial.exists() else {}
        told = info.get("layout")
        return None if told is None else read_layout(told)
    return None


def refuse_untold(ranks: Sequence[PlacedRank], axes: Sequence[str], side: str) -> None:
    """Refuse ranks that are to be put together along `axes`, if it is not told of each which part it has.

    `side` is `target` or `golden`. A single rank is the whole.

    Raises:
        DumpError: it is not told of one or more of several.
    """
    untold = [rank for rank in ranks if not rank.is_told]
    number = num_ranks([rank.place for rank in ranks])
    if not untold or number == 1:
        return
    first, name = untold[0].place.directory, "golden side" if side == "golden" else side
    who = (
        f"{first} does not tell which part of the model it has"
        if len(untold) == 1
        else f"{len(untold):,} dumps of the {name} do not tell which part of the model they have, the first is {first}"
    )
    raise DumpError(
        f"{who} ({_SILENT}), and here ranks have to be put together: copy that file too, or say it with "
        f"--{side}-split {_example(ranks, axes, number)}"
    )


def taken_for_whole(rank: PlacedRank) -> str:
    """Return, as a clause, that a single rank was taken for the whole model; "" if its dump, or the user, tells."""
    return "" if rank.is_told else f"{rank.place.directory} was taken for the whole model, as {_SILENT}"


def compared_alone(ranks: Sequence[PlacedRank], others: Sequence[PlacedRank], side: str) -> str:
    """Return, as a clause, that the many ranks of a side may hold parts of what the fewer on the other side have.

    "" if there are not more, or all of them tell what they have.
    """
    number, fewer = (num_ranks([rank.place for rank in places]) for places in (ranks, others))
    if number <= fewer or all(rank.is_told for rank in ranks):
        return ""
    here, there = ("target", "golden side") if side == "target" else ("golden side", "target")
    return (
        f"the {here} has {number} ranks and the {there} {fewer}, and how these share the model is not known "
        f"({_SILENT}): each was compared alone; say it with --{side}-split, as {_example(ranks, (), number)}"
    )


def _example(ranks: Sequence[PlacedRank], axes: Sequence[str], number: int) -> str:
    """Return the sizes that those ranks tell that do; if none does, an example."""
    sizes = {axis: max(rank.at(axis)[1] for rank in ranks) for axis in MERGED}
    told = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    return told or f"{next((axis for axis in axes if axis != 'dp'), 'tp')}={number} (dp={number} for replicas)"


def _said(place: DumpLocation, known: Sequence[RankLayout | None], at: int, sizes: Mapping[str, int]) -> PlacedRank:
    """Return the place of a rank as the user says it, numbered as Megatron does.

    What its dump does not tell, one of the same pipeline stage may: it has the same modules.
    """
    left = place.rank or 0
    axes = {}
    for axis in MERGED:
        size = sizes.get(axis, 1)
        axes[axis] = left % size, size
        left //= size
    own = known[at]
    alike = (one for one in known if one is not None and one.axes.get("pp", (0, 1)) == axes["pp"])
    layout = own if own is not None else next(alike, None)
    told = layout or RankLayout()
    others = {} if own is None else told.axes
    return PlacedRank(
        place, dataclasses.replace(told, axes={**others, **axes}), is_told=True, is_named=layout is not None
    )
