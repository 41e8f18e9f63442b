"""The checksums of parameters' replicas on this node, for a controller that compares nodes; see its `replicas`.

The rules compare the ranks of a node by themselves (`differs` on the kind `checksum`). For the nodes an agent keeps the
checksums of the last steps, and tells of each rank one digest of all copies that the same ranks hold. Only where
digests are not equal is it asked for the single parameters:

    kept = ReplicaChecksums()          # a consumer
    kept.digests(after=99)             # {"attempt": 0, "steps": {"120": {"tp0 pp1 cp0": {"5": "9c04...", ...}}}}
    kept.copies(120, "tp0 pp1 cp0")    # {5: {"decoder.weight": 2262..., ...}, ...}
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainermon.agent.consumers import RecordConsumer
from trainermon.alerts.across_ranks.peers import AXES, copy_axes
from trainermon.alerts.across_ranks.uneven import are_uneven
from trainermon.core.journal import Header
from trainermon.core.journal.patterns import ByPattern
from trainermon.core.values import STATISTICS, Coordinates, Kind, Placement, SeriesKey, StatBlock

MAX_STEPS = 16
"""So many checked steps an agent keeps."""

_LOW, _HIGH = STATISTICS.index("min"), STATISTICS.index("max")
_Words = NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, slots=True)
class CopyGroup:
    """What all copies of the same elements, on several ranks, have in common.

    Attributes:
        name: The tensor's name, and which of its elements if not all.
        group: The ranks' position on the axes along which there are no copies (`pp2 cp0`).
    """

    name: str
    group: str


def copies_of(key: SeriesKey, placement: Placement, coordinates: Coordinates) -> CopyGroup | None:
    """Return the group of copies that a rank's tensor belongs to, as the rules see it; None if unknown.

    >>> norm = Placement(dtype="float32", shape=(8,), replicated_over=("dp", "tp"))
    >>> copies_of(SeriesKey(Kind.CHECKSUM, "norm"), norm, Coordinates(dp=3, tp=1, pp=2))
    CopyGroup(name='norm', group='pp2 cp0')
    """
    axes = copy_axes(placement)
    if not axes:
        return None
    whole = placement.offset == 0 and placement.length is None
    part = "" if whole else f"[{placement.offset}:{placement.offset + (placement.length or 0)}]"
    group = " ".join(f"{axis}{getattr(coordinates, axis)}" for axis in AXES if axis not in axes)
    return CopyGroup(f"{key.label}{part}", group)


class ReplicaChecksums(RecordConsumer):
    """Keeps the checksums of this node's parameters: of the last `MAX_STEPS` checked steps of the newest attempt.

    A step without checksums costs a look at one byte per series.
    """

    def __init__(self) -> None:
        self._attempt = -1
        self._tables: dict[int, _ChecksumSeries] = {}
        self._steps: dict[int, dict[int, tuple[NDArray[np.intp], _Words]]] = {}

    def on_block(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """Keep the checksums that one step of one rank has, if any."""
        del keys
        if header.attempt < self._attempt:
            return
        if header.attempt > self._attempt:
            self._attempt = header.attempt
            self._tables.clear()
            self._steps.clear()
        rank = header.coordinates.rank
        found = self._tables.setdefault(rank, _ChecksumSeries()).read(header, block)
        if found is None:
            return
        self._steps.setdefault(block.step, {})[rank] = found
        if len(self._steps) > MAX_STEPS:
            del self._steps[min(self._steps)]

    def digests(self, after: int = -1) -> dict[str, Any]:
        """Return {"attempt", "steps"}: for each step after `after`, group and rank, one digest of all checksums.

        The controller compares them between nodes. Digests are hexadecimal; steps and ranks are texts, as keys of JSON
        are.
        """
        steps: dict[str, dict[str, dict[str, str]]] = {}
        for step in sorted(step for step in self._steps if step > after):
            groups = steps.setdefault(str(step), {})
            for rank, (numbers, checksums) in sorted(self._steps[step].items()):
                for group, digest in self._tables[rank].digests(numbers, checksums).items():
                    groups.setdefault(group, {})[str(rank)] = f"{digest:x}"
        return {"attempt": self._attempt, "steps": steps}

    def copies(self, step: int, group: str) -> dict[int, dict[str, int]]:
        """Return, by rank and name, the checksums (0 to 2^64 - 1) of one group on a kept step; empty if not kept."""
        found: dict[int, dict[str, int]] = {}
        for rank, (numbers, checksums) in sorted(self._steps.get(step, {}).items()):
            table = self._tables[rank]
            for number, checksum in zip(numbers.tolist(), checksums.tolist(), strict=True):
                copies = table.copies[number]
                if copies is not None and copies.group == group:
                    found.setdefault(rank, {})[copies.name] = checksum
        return found


class _ChecksumSeries:
    """Of one rank's series: which are checksums, of which copies, and a hash of what those are called."""

    def __init__(self) -> None:
        self.copies: list[CopyGroup | None] = []
        self._is_checksum = np.zeros(0, bool)
        self._columns = ByPattern(self._columns_of)
        self._hashes = np.zeros(0, np.uint64)

    def read(self, header: Header, block: StatBlock) -> tuple[NDArray[np.intp], _Words] | None:
        """Return numbers and checksums of the series of a step that are checksums; None if there are none."""
        if len(self.copies) < len(header.series):
            self._meet(header)
        series = np.asarray(block.series)
        columns = self._columns.of(series)
        if not columns.size:
            return None
        values = np.asarray(block.values, np.float64).reshape(len(STATISTICS), -1)
        low = values[_LOW, columns].astype(np.uint64)
        high = (values[_HIGH, columns] - 2.0**32).astype(np.uint64)
        return series[columns].astype(np.intp), low | high << np.uint64(32)

    def digests(self, numbers: NDArray[np.intp], checksums: _Words) -> dict[str, int]:
        """Return, by group, a digest that is the same whatever the order of the series."""
        mixed = _mix(self._hashes[numbers] ^ checksums)
        columns: dict[str, list[int]] = {}
        for column, number in enumerate(numbers.tolist()):
            copies = self.copies[number]
            if copies is not None:
                columns.setdefault(copies.group, []).append(column)
        return {group: int(mixed[chosen].sum(dtype=np.uint64)) for group, chosen in columns.items()}

    def _columns_of(self, series: NDArray[Any]) -> NDArray[np.intp]:
        return np.flatnonzero(self._is_checksum[series])

    def _meet(self, header: Header) -> None:
        is_compared = not are_uneven(header.series)
        for key, placement in zip(
            header.series[len(self.copies) :], header.placements[len(self.copies) :], strict=True
        ):
            is_copy = is_compared and key.kind is Kind.CHECKSUM and placement is not None
            self.copies.append(copies_of(key, placement, header.coordinates) if is_copy and placement else None)
        self._is_checksum = np.array([is_compared and copies is not None for copies in self.copies])
        self._hashes = np.array([_hash(copies.name) if copies else 0 for copies in self.copies], np.uint64)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(words: _Words) -> _Words:
    """Spread every bit over all others: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: _Words = words ^ words >> np.uint64(31)
    return mixed
