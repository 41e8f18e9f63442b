"""Which heat map a series is a row of, and what may be shown of it.

A heat map has a name: a kind, or a kind and a slot (`feature/attention_entropy`) where what differs in the slot is not
of the same sort and would share no scale. Numbers of the step are no rows: they are lines. Of checksums there is
nothing to see.
"""

from __future__ import annotations

from typing import NamedTuple

from trainermon.core.values import Kind, SeriesKey
from trainermon.exporters.prometheus.module_series import SHOWN_BY_LARGEST

HEATMAP_STATISTICS = ("rms", "absmax", "zero_ratio")
"""What is shown of tensors, whose elements have either sign."""

_NO_ROWS = frozenset({Kind.LOSS, Kind.STEP, Kind.CHECKSUM})
_WAIT = "wait_seconds"
_DETAILS = "expert_load."  # which experts have the most and the least load: numbers of experts have no scale


class HeatRow(NamedTuple):
    """A row of a heat map: one series over all local ranks, micro steps and calls of a collective.

    Attributes:
        heat_map: Which heat map: the kind of series, for some with the slot.
        label: Text beside the row: the module or parameter.
    """

    heat_map: str
    label: str


def heat_row(key: SeriesKey) -> HeatRow | None:
    """Return the heat map and the row in which the page shows a series; None if it does not."""
    if key.kind in _NO_ROWS:
        return None
    if key.kind is Kind.COMM:
        return _row_of_call(key)
    if key.kind in (Kind.FEATURE, Kind.STATE):
        is_shown = not key.slot.startswith(_DETAILS)
        label = SeriesKey(key.kind, key.name, stage=key.stage).label
        return HeatRow(f"{key.kind}/{key.slot}", label) if is_shown else None
    return HeatRow(key.kind.value, SeriesKey(key.kind, key.name, key.slot, key.call, stage=key.stage).label)


def statistics_of(heat_map: str) -> tuple[str, ...]:
    """Return the statistics that a heat map can show, the most informative first.

    Of values that mean something by themselves, such as shares, entropies and times, that is the mean and the largest.
    """
    kind, _, slot = heat_map.partition("/")
    if kind == Kind.MG_DIRECTION:
        return ("mean",)
    if slot in SHOWN_BY_LARGEST:
        return ("max", "zero_ratio") if slot == "expert_load" else ("max", "mean")
    if kind == Kind.FEATURE or slot == _WAIT:
        return ("mean", "max")
    return HEATMAP_STATISTICS


def _row_of_call(key: SeriesKey) -> HeatRow | None:
    if key.slot == _WAIT:
        return HeatRow(f"{key.kind}/{_WAIT}", key.name)
    is_operand = key.slot.startswith(("pre.", "post."))
    return HeatRow(key.kind.value, f"{key.name}.{key.slot}") if is_operand else None
