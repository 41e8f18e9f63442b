"""Which modules of a rank are shown for each quantity, and what of their elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.core.metrics import METRICS, MODULE_METRICS
from trainermon.core.values import Kind, Placement, SeriesKey
from trainermon.exporters.prometheus.budget import outermost, roll_up, share

ROOT = "(root)"
# Parts of a module, whose moments merge; the tensors of the other kinds stand for themselves.
PARTS = frozenset(MODULE_METRICS) - {*(Kind.ACTV, Kind.ACTV_RECOMPUTED, Kind.ACTV_GRAD, Kind.COMM, Kind.FEATURE)}
# What goes into a module came out of another one: its outputs are enough.
OUTPUTS_ONLY = frozenset({Kind.ACTV, Kind.ACTV_GRAD})

Array = npt.NDArray[Any]

_LARGEST = METRICS["trainermon_feature_max"]
# Elsewhere it is the root mean square.
_MEANS = frozenset({MODULE_METRICS[Kind.MG_DIRECTION].name, MODULE_METRICS[Kind.FEATURE].name})
SHOWN_BY_LARGEST = frozenset({"attention_max_logit", "expert_load", "fp8_amax.forward", "fp8_amax.backward"})
_LEFT_TO_THE_STORE = "expert_load."  # which experts have the most and the least load


class _ModuleQuantity(NamedTuple):
    """What one metric shows, under one value of the label that it may have beside run, rank and module."""

    kind: Kind
    metric: str
    slot: str = ""


class ModuleKey(NamedTuple):
    """What one Prometheus series of a module shows.

    Attributes:
        kind: Which kind of tensor: `grad_reduced`, `actv` …
        metric: Name of the metric.
        module: The module, or a module above it.
        slot: Which tensor of its call: `output.0`; "": none.
    """

    kind: Kind
    metric: str
    module: str
    slot: str

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the metric beside run and rank."""
        return {"module": self.module, **dict(zip(METRICS[self.metric].labels[3:], (self.slot,), strict=False))}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSeries:
    """Chooses which modules of one rank are shown in `/metrics`, and computes their values.

    Attributes:
        shown: What each group (one Prometheus series) shows.
        groups: By series id, its group; `len(shown)` for a series that is not shown.
        slices: For each metric, its name and which groups it has.
        rolled_up: Number of series that are shown under another name than their own.
        left_out: Number of series for which there was no room.
    """

    shown: list[ModuleKey]
    groups: Array
    slices: Sequence[tuple[str, slice]]
    rolled_up: int
    left_out: int

    @classmethod
    def choose(cls, keys: Sequence[SeriesKey], placements: Sequence[Placement | None], *, room: int) -> ModuleSeries:
        """Return a `ModuleSeries` of at most `room` modules over all quantities; depends on the arguments only.

        Args:
            keys: The series table.
            placements: Parallel to `keys`, or shorter; a series without one counts as one element.
            room: Most series.
        """
        quantities = _quantities(keys)
        granted = _share(quantities, keys, room)
        shown: list[ModuleKey] = []
        slices: list[tuple[str, slice]] = []
        group_of = [-1] * len(keys)
        rolled_up = left_out = 0
        for quantity, ids in quantities.items():
            names = _labels_of(quantity.kind, keys, placements, ids=ids, limit=granted[quantity])
            first = len(shown)
            number = {label: first + position for position, label in enumerate(dict.fromkeys(names.values()))}
            shown += [ModuleKey(quantity.kind, quantity.metric, label or ROOT, quantity.slot) for label in number]
            slices.append((quantity.metric, slice(first, len(shown))))
            for i in ids:
                label = names.get(keys[i].name)
                if label is None:
                    left_out += 1
                else:
                    group_of[i] = number[label]
                    rolled_up += label != keys[i].name
        groups = np.array([len(shown) if group < 0 else group for group in group_of], dtype=np.intp)
        return cls(shown=shown, groups=groups, slices=slices, rolled_up=rolled_up, left_out=left_out)

    def values(
        self, finite: Array, sums: Array, sum_sq: Array, largest: Array
    ) -> Iterator[tuple[str, slice, list[float]]]:
        """Yield each metric with its groups and their values: NaN or -Inf where nothing finite is known.

        Args:
            finite: Number of finite elements by series id.
            sums: Their sum by series id.
            sum_sq: Sum of their squares by series id.
            largest: The largest of them by series id; any number without one.
        """
        size = len(self.shown)
        numbers, totals, squares = (
            np.bincount(self.groups, weights=weights, minlength=size + 1)[:size] for weights in (finite, sums, sum_sq)
        )
        peaks = np.full(size + 1, -np.inf)
        np.maximum.at(peaks, self.groups, np.where(finite > 0, largest, -np.inf))
        known = {"out": np.full((2, size), np.nan), "where": numbers > 0}
        means, mean_squares = np.divide((totals, squares), numbers, **known)
        roots = np.sqrt(mean_squares)
        for name, part in self.slices:
            values = peaks if name == _LARGEST.name else means if name in _MEANS else roots
            yield name, part, values[part].tolist()


def _quantities(keys: Sequence[SeriesKey]) -> dict[_ModuleQuantity, list[int]]:
    ids: dict[_ModuleQuantity, list[int]] = {}
    for i, key in enumerate(keys):
        quantity = _quantity_of(key)
        if quantity:
            ids.setdefault(quantity, []).append(i)
    return ids


def _quantity_of(key: SeriesKey) -> _ModuleQuantity | None:
    """Return what a series is shown as; None if it is not about a module, or too much detail."""
    metric = MODULE_METRICS.get(key.kind)
    if metric is None or (key.kind in OUTPUTS_ONLY and not key.slot.startswith("output")):
        return None
    if key.kind is Kind.COMM:
        side = key.slot.partition(".")[0]
        return _ModuleQuantity(key.kind, metric.name, side) if side in ("pre", "post") else None
    if key.kind is Kind.FEATURE:
        name = _LARGEST.name if key.slot in SHOWN_BY_LARGEST else metric.name
        return None if key.slot.startswith(_LEFT_TO_THE_STORE) else _ModuleQuantity(key.kind, name, key.slot)
    return _ModuleQuantity(key.kind, metric.name, key.slot if key.kind is Kind.STATE else "")


def _share(
    quantities: Mapping[_ModuleQuantity, list[int]], keys: Sequence[SeriesKey], room: int
) -> dict[_ModuleQuantity, int]:
    """Return, by quantity, how many modules it may show: equal parts for kinds, then for a kind's quantities."""
    demands: dict[Kind, dict[_ModuleQuantity, int]] = {}
    for quantity, ids in quantities.items():
        demands.setdefault(quantity.kind, {})[quantity] = len({keys[i].name for i in ids})
    of_kind = share({kind: sum(parts.values()) for kind, parts in demands.items()}, room)
    return {quantity: granted for kind in demands for quantity, granted in share(demands[kind], of_kind[kind]).items()}


def _labels_of(
    kind: Kind, keys: Sequence[SeriesKey], placements: Sequence[Placement | None], *, ids: list[int], limit: int
) -> dict[str, str]:
    """Return, by the name of a series, the label under which it is shown; others are left out."""
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
