"""Finds the dumps below a directory of any level (dump, step, rank, run), and which of two sides belong together."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from trainermon.core.errors import DumpError
from trainermon.dump.files.records import DUMP_FILE, PARTIAL_FILE, TENSOR_FOLDER, RankLayout

logger = logging.getLogger("trainermon")

_PART = re.compile(r"(attempt|step|rank|proc)(\d+)")
_RANK = re.compile(r"(rank|proc)\d+")
_DEEPEST = 8


class DumpShard(NamedTuple):
    """One rank's dump of several that make up a whole.

    Attributes:
        directory: The dump's folder.
        layout: The rank's position, and which part of the model it has.
        is_named: Whether `layout` tells what its modules are called in the whole model.
    """

    directory: Path
    layout: RankLayout
    is_named: bool = True


class DumpLocation(NamedTuple):
    """Where one dump is: its directory, and what its path says of it.

    Attributes:
        directory: Folder of the dump; with `parts`, the folder of all of them.
        step: None: the path names none.
        rank: Likewise.
        attempt: How often the job had been started before, plus one; 0: not known.
        parts: The dumps of single ranks, if a whole was dumped by several.
        assumed: What of its part of the model nobody tells and was taken for granted, as a clause; "": nothing.
    """

    directory: Path
    step: int | None = None
    rank: int | None = None
    attempt: int = 0
    parts: tuple[DumpShard, ...] = ()
    assumed: str = ""

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders of the dump, or of all its parts."""
        return tuple(part.directory for part in self.parts) or (self.directory,)

    @property
    def label(self) -> str:
        """Step and rank as text, `step3 rank1`, as far as they are known."""
        numbers = (("step", self.step), ("rank", self.rank))
        return " ".join(f"{word}{value}" for word, value in numbers if value is not None)


class PlacePair(NamedTuple):
    """Two dumps that are to be compared: the target, in question, and the golden one, taken to be right."""

    target: DumpLocation
    golden: DumpLocation

    @property
    def label(self) -> str:
        """Step and rank of the target as text, `step3 rank1`, as far as they are known."""
        return self.target.label


class LonePlace(NamedTuple):
    """A dump that is not compared, as the other side has none to hold it against.

    Attributes:
        place: Where it is, or should be.
        target: Its folder on the target's side; "": there is none.
        golden: Likewise, on the golden side.
        why: Why it is not compared.
    """

    place: DumpLocation
    target: str
    golden: str
    why: str


class PairedPlaces(NamedTuple):
    """The dumps of two sides.

    Attributes:
        pairs: Those that are compared.
        lone: Those that are not.
    """

    pairs: list[PlacePair]
    lone: list[LonePlace]


def find_places(path: Path) -> list[DumpLocation]:
    """Return the dumps at or below `path`: of every step and rank that of the last attempt, and of these the newest.

    Raises:
        DumpError: there is none.
    """
    path = Path(path)
    if path.is_file() and path.name not in (DUMP_FILE, PARTIAL_FILE):
        raise DumpError(f"{path} is no dump: expected a file {DUMP_FILE}, or a folder with one in it or below it")
    if path.is_file() or _holds_dump(path):
        folder = path.parent if path.is_file() else path
        return [_place(folder, folder)]
    found = sorted((_place(folder, path) for folder, holds in _folders(path) if holds), key=_recency)
    if not found:
        raise DumpError(f"{path} holds no dump: expected {DUMP_FILE} in it, or step*/rank*/{DUMP_FILE} below it")
    newest = {(place.step, place.rank, _unnamed(place)): place for place in found}
    return sorted(newest.values(), key=lambda place: (place.step or 0, place.rank or 0))


def hollow_places(path: Path, known: Collection[tuple[int | None, int | None]]) -> list[LonePlace]:
    """Return the folders `step*/rank*` below `path` that hold no dump, of a step and rank that is not `known`."""
    path = Path(path)
    named = (_place(folder, path) for folder, holds in _folders(path) if not holds and _RANK.fullmatch(folder.name))
    hollow = [place for place in named if place.step is not None and (place.step, place.rank) not in known]
    return [LonePlace(place, "", "", f"{place.directory} holds no dump") for place in hollow]


def pair_places(targets: list[DumpLocation], goldens: list[DumpLocation]) -> list[PlacePair]:
    """Return which dumps are compared: those of one step and rank, or the only ones of both sides.

    If each side has one step, these are compared though their numbers differ, and so are single ranks. What has no
    counterpart is told in the log.

    Raises:
        DumpError: no step and rank is on both sides.
    """
    if len(targets) == len(goldens) == 1:
        return [PlacePair(targets[0], goldens[0])]
    same_step = len({place.step for place in targets}) == len({place.step for place in goldens}) == 1
    same_rank = len({place.rank for place in targets}) == len({place.rank for place in goldens}) == 1
    by_key = {_key(place, same_step=same_step, same_rank=same_rank): place for place in goldens}
    keyed = ((place, _key(place, same_step=same_step, same_rank=same_rank)) for place in targets)
    pairs = [PlacePair(place, by_key[key]) for place, key in keyed if key in by_key]
    if not pairs:
        raise DumpError(
            f"no dump of the target ({_names(targets)}) belongs to one of the golden side ({_names(goldens)}): "
            "steps and ranks must agree, or name two dumps"
        )
    for side, left in zip(("target", "golden side"), _unpaired(pairs, targets, goldens), strict=True):
        if left:
            logger.warning("not compared, on the %s only: %s", side, _names(left))
    return pairs


def lone_places(
    pairs: Sequence[PlacePair], targets: Sequence[DumpLocation], goldens: Sequence[DumpLocation]
) -> list[LonePlace]:
    """Return the dumps of both sides that are in none of `pairs`, those of the target first."""
    ours, theirs = _unpaired(pairs, targets, goldens)
    return [
        *(LonePlace(place, str(place.directory), "", "on the target's side only") for place in ours),
        *(LonePlace(place, "", str(place.directory), "on the golden side only") for place in theirs),
    ]


def _unpaired(
    pairs: Sequence[PlacePair], targets: Sequence[DumpLocation], goldens: Sequence[DumpLocation]
) -> tuple[list[DumpLocation], list[DumpLocation]]:
    paired = {id(place) for pair in pairs for place in pair}
    ours, theirs = ([place for place in places if id(place) not in paired] for places in (targets, goldens))
    return ours, theirs


def _key(place: DumpLocation, *, same_step: bool, same_rank: bool) -> tuple[int | None, int | None]:
    return None if same_step else place.step, None if same_rank else place.rank


def _names(places: list[DumpLocation]) -> str:
    return ", ".join(map(_name, places[:4])) + (f" and {len(places) - 4} more" if len(places) > 4 else "")


def _name(place: DumpLocation) -> str:
    return place.label or str(place.directory)


def _folders(path: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders below `path`, and whether each holds a dump."""
    for folder, below, files in os.walk(path):
        yield Path(folder), DUMP_FILE in files or PARTIAL_FILE in files
        deep = len(Path(folder).relative_to(path).parts) >= _DEEPEST
        below[:] = [] if deep else sorted(name for name in below if name != TENSOR_FOLDER)


def _holds_dump(folder: Path) -> bool:
    return (folder / DUMP_FILE).exists() or (folder / PARTIAL_FILE).exists()


def _place(folder: Path, start: Path) -> DumpLocation:
    parts = (
        (start.resolve().name, *folder.parts[len(start.parts) :]) if folder != start else folder.resolve().parts[-4:]
    )
    numbers = {match[1]: int(match[2]) for part in parts if (match := _PART.fullmatch(part))}
    return DumpLocation(folder, numbers.get("step"), numbers.get("rank"), numbers.get("attempt", 0))


def _unnamed(place: DumpLocation) -> str:
    """Return what tells dumps apart that name no rank: several processes of one step that never knew theirs."""
    return place.directory.name if place.rank is None else ""


def _recency(place: DumpLocation) -> tuple[int, float]:
    return place.attempt, place.directory.stat().st_mtime
