"""What the other side has of each row: for shapes, for the order of calls, and to tell sums from copies."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from trainermon.analysis.compare.items import DumpCall, DumpRow
from trainermon.analysis.compare.merging.merge_items import ReferenceRow
from trainermon.analysis.compare.merging.ranks import Key, MergedSide, Name, RankCalls, keyed
from trainermon.dump.files.records import BACKWARD, FORWARD


class SharedReferences:
    """What the other side has of each row, by the names that both share."""

    def __init__(self, side: MergedSide) -> None:
        self._sizes = {axis: side.size(axis) for axis in ("tp", "dp", "pp")}
        self._items: dict[tuple[Key, str], DumpRow] = {}
        self._order: dict[Key, int] = {}
        self.counts: Counter[Name] = Counter()
        for rank in side.ranks:
            if rank.place("tp") or rank.place("dp"):
                continue
            for key, call in keyed(rank.rows.calls):
                self.counts[key[:2]] += 1
                self._order.setdefault(key, len(self._order))
                for item in call.items:
                    self._items.setdefault((key, item.place), item)

    def of(self, key: Key, place: str, axis: str) -> ReferenceRow | None:
        """Return the other side's row for a row; for a call that it did not make, that of its first call."""
        item = self._items.get((key, place)) or self._items.get(((*key[:2], 0), place))
        if item is None:
            return None
        is_same = (key, place) in self._items and self._sizes["tp"] == self._sizes["dp"] == 1
        return ReferenceRow(shape=item.shape, parts=self._sizes[axis], item=item if is_same else None)

    def is_larger(self, rank: RankCalls) -> bool:
        """Return whether tensors of forward calls are larger than those of a replica."""
        return any(
            other.num_elements > item.num_elements
            for key, call in keyed(rank.rows.calls)
            if call.direction == FORWARD
            for item in call.items
            if item.is_tensor and (other := self._items.get((key, item.place))) is not None
        )

    def agreement(self, rank: RankCalls) -> int:
        """Return in how many tensors of forward calls a replica has the other side's norm, but for rounding."""
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
        """Return whether gradients are smaller than those of a replica, by a factor near the number of `replicas`.

        They are where each replica's loss is the mean over its own batch. `is_part`: it has a part of a tensor.
        """
        ratios = []
        for key, call in keyed(rank.rows.calls):
            for item in call.items if call.direction == BACKWARD else ():
                other = self._items.get((key, item.place))
                if other and isinstance(item.norm, float) and isinstance(other.norm, float) and other.norm:
                    ratios.append(item.norm * (math.sqrt(replicas) if is_part else 1.0) / other.norm)
        return bool(ratios) and statistics.median(ratios) > math.sqrt(replicas)

    def in_order(self, calls: Sequence[DumpCall]) -> list[DumpCall]:
        """Return calls in the order in which the other side made them; the others stay behind those before them."""
        if self._sizes["pp"] > 1:
            return list(calls)
        position, positions = 0, []
        for key, _ in keyed(calls):
            position = self._order.get(key, position)
            positions.append(position)
        return [calls[i] for i in sorted(range(len(calls)), key=positions.__getitem__)]
