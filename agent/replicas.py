"""Which copies of a parameter are not equal, by the checksums that ranks report: a comparison of rows, no collective.

The rules compare the ranks of a node by themselves (`differs` on the kind `checksum`). What stands here is for whoever
brings together what several nodes have reported of one step, such as the controller:

    reports = {rank: checksums_of(header, block), ...}       # of one step and attempt
    for found in divergences(reports): ...
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import numpy as np

from trainermon.monitor.journal import Header
from trainermon.monitor.values import STATISTICS, Coordinates, Kind, Placement, SeriesKey, StatBlock

AXES = ("dp", "tp", "pp", "cp", "ep")
_LOW, _HIGH = STATISTICS.index("min"), STATISTICS.index("max")


@dataclasses.dataclass(frozen=True, slots=True)
class Copies:
    """What all copies of the same elements have in common: series, and place on axes that tell parts apart."""

    series: SeriesKey
    place: tuple[tuple[str, int], ...] = ()


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
    """Return which copies a rank's tensor is one of; None if there is no way to tell.

    Ranks hold copies if they stand at the same place on every axis along which the parameter is not replicated. The
    ranks of expert parallelism are data-parallel ones to a parameter that is no expert's; experts are replicated over
    `edp`, which runs along the data axes between ranks of the same expert-parallel place.

    >>> norm = Placement(dtype="float32", shape=(8,), replicated_over=("dp", "tp"))
    >>> copies_of(SeriesKey(Kind.CHECKSUM, "norm"), norm, Coordinates(dp=3, tp=1, pp=2)).place
    (('pp', 2), ('cp', 0))
    """
    if not placement.replicated_over or not set(placement.partitioned_over) <= set(AXES):
        return None
    free = set(placement.replicated_over)
    if free & set(placement.partitioned_over):
        return None
    if "dp" in free:
        free.add("ep")
    if "edp" in free:
        free |= {"dp", "cp"}
    return Copies(key, tuple((axis, getattr(coordinates, axis)) for axis in AXES if axis not in free))


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
