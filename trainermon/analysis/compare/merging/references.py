"""What the other side has of each row: for shapes, for the order of calls, and to tell sums from copies."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from trainermon.analysis.compare.items import DumpCall, DumpRow
from trainermon.analysis.compare.merging.merge_items import ReferenceRow, is_copy
from trainermon.analysis.compare.merging.ranks import Key, MergedSide, Name, RankCalls, keyed
from trainermon.dump.files.records import BACKWARD, FORWARD


class SharedReferences:
    """Looks up, for the rows of ranks that are being merged, what the other side of the comparison has."""

    def __init__(self, side: MergedSide) -> None:
        self._sizes = {axis: side.size(axis) for axis in ("tp", "dp", "pp")}
        self._items: dict[tuple[Key, str], DumpRow] = {}
        self._dealt: set[tuple[Key, str]] = set()
        self._order: dict[Key, int] = {}
        self.counts: Counter[Name] = Counter()
        first = {axis: min(rank.place(axis) for rank in side.ranks) for axis in ("tp", "dp")}
        ranks = [rank for rank in side.ranks if rank.place("dp") == first["dp"]]
        for rank in ranks:
            if rank.place("tp") != first["tp"]:
                continue
            for key, call in keyed(rank.rows.calls):
                self.counts[key[:2]] += 1
                self._order.setdefault(key, len(self._order))
                for item in call.items:
                    self._items.setdefault((key, item.place), item)
        for rank in ranks:
            if rank.place("tp") != first["tp"]:
                self._note_parts(rank)

    def of(self, key: Key, place: str, axis: str) -> ReferenceRow | None:
        """Return what the other side has at `place` (`input.0`) of the call `key`; None if nothing.

        For a repetition of the call that the other side did not make, its first call counts. `axis` is the one being
        merged.
        """
        item = self._items.get((key, place)) or self._items.get(((*key[:2], 0), place))
        if item is None:
            return None
        is_dealt = (key, place) in self._dealt
        is_same = (key, place) in self._items and self._sizes["dp"] == 1 and not is_dealt
        return ReferenceRow(
            shape=item.shape,
            parts=self._sizes[axis],
            item=item if is_same else None,
            is_dealt=is_dealt and axis == "tp",
            is_copied=not is_dealt and axis == "tp" and self._sizes["tp"] > 1,
        )

    def _note_parts(self, rank: RankCalls) -> None:
        for key, call in keyed(rank.rows.calls):
            for item in call.items:
                first = self._items.get((key, item.place))
                if first is not None and item.is_tensor and item.shape == first.shape and not is_copy(item, first):
                    self._dealt.add((key, item.place))

    def is_larger(self, rank: RankCalls) -> bool:
        """Return whether the other side's forward tensors are larger than this replica's, as after a larger batch."""
        return any(
            other.num_elements > item.num_elements
            for key, call in keyed(rank.rows.calls)
            if call.direction == FORWARD
            for item in call.items
            if item.is_tensor and (other := self._items.get((key, item.place))) is not None
        )

    def agreement(self, rank: RankCalls) -> int:
        """Return how many forward tensors of a replica have the other side's norm, but for rounding."""
        return sum(
            math.isclose(item.norm, other.norm, rel_tol=1e-3)
            for key, call in keyed(rank.rows.calls)
            if call.direction == FORWARD
            for item in call.items
            if (other := self._items.get((key, item.place)))
            and isinstance(item.norm, float)
            and isinstance(other.norm, float)
        )

    def has_smaller_gradients(self, rank: RankCalls, replicas: int, *, is_part: bool) -> bool:
        """Return whether the other side's gradients are about `replicas` times smaller than this replica's.

        They are where each replica's loss is the mean over its own batch. `is_part`: the replica has only a part of a
        tensor.
        """
        ratios = []
        for key, call in keyed(rank.rows.calls):
            for item in call.items if call.direction == BACKWARD else ():
                other = self._items.get((key, item.place))
                if other and isinstance(item.norm, float) and isinstance(other.norm, float) and other.norm:
                    ratios.append(item.norm * (math.sqrt(replicas) if is_part else 1.0) / other.norm)
        return bool(ratios) and statistics.median(ratios) > math.sqrt(replicas)

    def in_order(self, calls: Sequence[DumpCall]) -> list[DumpCall]:
        """Return `calls` in the order in which the other side made them.

        Calls it lacks stay behind the one before them.
        """
        if self._sizes["pp"] > 1:
            return list(calls)
        position, positions = 0, []
        for key, _ in keyed(calls):
            position = self._order.get(key, position)
            positions.append(position)
        return [calls[i] for i in sorted(range(len(calls)), key=positions.__getitem__)]
