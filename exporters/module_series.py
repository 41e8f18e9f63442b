"""Which modules of a rank are shown for each kind, and their root mean squares."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainermon.exporters.budget import outermost, roll_up, share
from trainermon.exporters.openmetrics import Samples, sample_prefix
from trainermon.monitor.catalogue import MODULE_METRICS
from trainermon.monitor.values import Kind, Placement, SeriesKey

ROOT = "(root)"
# Parts of a module, whose moments merge; the tensors of the other kinds stand for themselves.
PARTS = frozenset(MODULE_METRICS) - {Kind.ACTV, Kind.ACTV_GRAD, Kind.COMM, Kind.FEATURE}
# What goes into a module came out of another one: its outputs are enough.
OUTPUTS_ONLY = frozenset({Kind.ACTV, Kind.ACTV_GRAD})

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSeries:
    """The modules shown of one rank.

    Attributes:
        prefixes: Text in front of each value, in the order of the groups.
        groups: Group of each series id, `len(prefixes)` for a series that is not shown.
        slices: The groups of each metric, by metric name.
        rolled_up: Number of series that are shown under another name than their own.
        left_out: Number of series for which there was no room.
    """

    prefixes: list[str]
    groups: Array
    slices: Mapping[str, slice]
    rolled_up: int
    left_out: int

    @classmethod
    def choose(
        cls, labels: Mapping[str, str], keys: Sequence[SeriesKey], placements: Sequence[Placement | None], *, room: int
    ) -> ModuleSeries:
        """Return at most `room` modules over all kinds; depends on the arguments only.

        Args:
            labels: Run and rank.
            keys: The series table.
            placements: Parallel to `keys`, or shorter; a series without one counts as one element.
            room: Most series.
        """
        by_kind = _by_kind(keys)
        granted = share({kind: len({keys[i].name for i in ids}) for kind, ids in by_kind.items()}, room)
        prefixes: list[str] = []
        slices: dict[str, slice] = {}
        group_of = [-1] * len(keys)
        rolled_up = left_out = 0
        for kind, ids in by_kind.items():
            shown = _labels_of(kind, keys, placements, ids=ids, limit=granted[kind])
            first = len(prefixes)
            number = {label: first + position for position, label in enumerate(dict.fromkeys(shown.values()))}
            metric = MODULE_METRICS[kind]
            prefixes += [sample_prefix(metric, {**labels, "module": label or ROOT}) for label in number]
            slices[metric.name] = slice(first, len(prefixes))
            for i in ids:
                label = shown.get(keys[i].name)
                if label is None:
                    left_out += 1
                else:
                    group_of[i] = number[label]
                    rolled_up += label != keys[i].name
        groups = np.array([len(prefixes) if group < 0 else group for group in group_of], dtype=np.intp)
        return cls(prefixes=prefixes, groups=groups, slices=slices, rolled_up=rolled_up, left_out=left_out)

    def samples(self, finite: Array, sum_sq: Array) -> Iterator[tuple[str, Samples]]:
        """Return the root mean square of each module by metric name, NaN where nothing finite is known.

        Args:
            finite: Number of finite elements by series id.
            sum_sq: Sum of their squares by series id.
        """
        size = len(self.prefixes)
        numbers = np.bincount(self.groups, weights=finite, minlength=size + 1)[:size]
        squares = np.bincount(self.groups, weights=sum_sq, minlength=size + 1)[:size]
        means = np.divide(squares, numbers, out=np.full(size, np.nan), where=numbers > 0)
        values = np.sqrt(means).tolist()
        for name, part in self.slices.items():
            yield name, Samples(self.prefixes[part], values[part])


def _by_kind(keys: Sequence[SeriesKey]) -> dict[Kind, list[int]]:
    ids: dict[Kind, list[int]] = {}
    for i, key in enumerate(keys):
        if key.kind in MODULE_METRICS and (key.kind not in OUTPUTS_ONLY or key.slot.startswith("output")):
            ids.setdefault(key.kind, []).append(i)
    return ids


def _labels_of(
    kind: Kind, keys: Sequence[SeriesKey], placements: Sequence[Placement | None], *, ids: list[int], limit: int
) -> dict[str, str]:
    """Return the label of each name that is shown."""
    if kind not in PARTS:
        return {name: name for name in outermost((keys[i].name for i in ids), limit)}
    elements: dict[str, int] = {}
    for i in ids:
        placement = placements[i] if i < len(placements) else None
        elements[keys[i].name] = elements.get(keys[i].name, 0) + _num_elements(placement)
    return roll_up(elements, limit)


def _num_elements(placement: Placement | None) -> int:
    if placement is None:
        return 1
    if placement.length is not None:
        return placement.length
    return int(np.prod(placement.shape, dtype=np.int64))
