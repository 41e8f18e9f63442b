"""Which copies of a parameter are not equal, by the checksums that ranks report: a comparison of rows, no collective.

The rules compare the ranks of a node by themselves (`differs` on the kind `checksum`). What stands here is for whoever
brings together what several nodes have reported of one step, such as the controller:

    reports = {rank: checksums_of(header, block), ...}       # of one step and attempt
    for found in divergences(reports): ...
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping

import numpy as np

from trainermon.alerts.peers import same_elements
from trainermon.monitor.journal import Header
from trainermon.monitor.values import STATISTICS, Coordinates, Kind, Placement, SeriesKey, StatBlock

_LOW, _HIGH = STATISTICS.index("min"), STATISTICS.index("max")


@dataclasses.dataclass(frozen=True, slots=True)
class Copies:
    """What all copies of the same elements have in common: their series, and what tells parts of it apart."""

    series: SeriesKey
    place: Hashable = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Copies that are not equal.

    Attributes:
        copies: Which.
        ranks: The ranks whose copy differs from that of most; all of them if there is no such value.
        others: The ranks that hold the value of most; none if there is no such value.
    """

    copies: Copies
    ranks: tuple[int, ...]
    others: tuple[int, ...] = ()


def copies_of(key: SeriesKey, placement: Placement, coordinates: Coordinates) -> Copies | None:
    """Return which copies a rank's tensor is one of, as the rules see it; None if there is no way to tell.

    >>> norm = Placement(dtype="float32", shape=(8,), replicated_over=("dp", "tp"))
    >>> key = SeriesKey(Kind.CHECKSUM, "norm")
    >>> copies_of(key, norm, Coordinates(dp=3, tp=1, pp=2)) == copies_of(key, norm, Coordinates(dp=0, tp=0, pp=2))
    True
    """
    place = same_elements(key, placement, coordinates)
    return None if place is None else Copies(key, place)


def checksums_of(header: Header, block: StatBlock) -> dict[Copies, int]:
    """Return the checksums (0 to 2^64 - 1) in one step of one rank; empty on most steps."""
    found: dict[Copies, int] = {}
    values = np.asarray(block.values, np.float64).reshape(len(STATISTICS), -1)
    for column, number in enumerate(np.asarray(block.series).tolist()):
        key, placement = header.series[number], header.placements[number]
        if key.kind is not Kind.CHECKSUM or placement is None:
            continue
        copies = copies_of(key, placement, header.coordinates)
        if copies is not None:
            found[copies] = int(values[_LOW, column]) | int(values[_HIGH, column] - 2.0**32) << 32
    return found


def divergences(reports: Mapping[int, Mapping[Copies, int]]) -> list[Divergence]:
    """Return the copies that are not equal, in the order of the model.

    The value that most ranks have is taken for the right one. Where two values are equally frequent nobody can tell,
    and all ranks are named.

    Args:
        reports: By rank, its checksums of one step and attempt, from `checksums_of`.
    """
    holders: dict[Copies, dict[int, int]] = {}
    for rank in sorted(reports):
        for copies, checksum in reports[rank].items():
            holders.setdefault(copies, {})[rank] = checksum
    return [_compare(copies, held) for copies, held in holders.items() if len(set(held.values())) > 1]


def _compare(copies: Copies, held: Mapping[int, int]) -> Divergence:
    (usual, most), (_, second), *_ = Counter(held.values()).most_common()
    if most == second:
        return Divergence(copies=copies, ranks=tuple(held))
    return Divergence(
        copies=copies,
        ranks=tuple(rank for rank, checksum in held.items() if checksum != usual),
        others=tuple(rank for rank, checksum in held.items() if checksum == usual),
    )
