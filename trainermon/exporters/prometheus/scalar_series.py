"""Which values of a rank are shown by themselves: numbers of the step, and what is known of its process groups.

What the rank measures has a metric of its own, so that it does not use up the few values that a script may record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.core.catalogue import (
    ACCELERATOR_SERIES,
    CLIP_RATIO_SERIES,
    GLOBAL_NORM_SERIES,
    GROUP_SETTINGS,
    LEARNING_RATE_SERIES,
    LOSS_SCALE_SERIES,
    LOSS_SERIES,
    MODULE_SETTINGS_SERIES,
    ROLLOUT_SERIES,
    SKIPPED_SERIES,
    STEP_TIME_SERIES,
    TOKENS_PER_SECOND_SERIES,
    TOKENS_SERIES,
)
from trainermon.core.metric import MetricType
from trainermon.core.metrics import METRICS
from trainermon.core.values import Kind, SeriesKey

MOST = 8
"""Most recorded values, parameter groups and process groups of a rank; the others are in the store."""

Array = npt.NDArray[Any]

LOSS = "trainermon_loss"
WAITED = "trainermon_collective_wait_seconds_total"
_LEARNING_RATE = "trainermon_learning_rate"
_NOT_EXPORTED = frozenset((STEP_TIME_SERIES, *ACCELERATOR_SERIES, *GROUP_SETTINGS, MODULE_SETTINGS_SERIES))
_STEP = MappingProxyType(
    {
        GLOBAL_NORM_SERIES: "trainermon_global_gradient_norm",
        CLIP_RATIO_SERIES: "trainermon_clip_ratio",
        LOSS_SCALE_SERIES: "trainermon_loss_scale",
        SKIPPED_SERIES: "trainermon_skipped_steps_total",
        TOKENS_SERIES: "trainermon_tokens_total",
        TOKENS_PER_SECOND_SERIES: "trainermon_tokens_per_second",
    }
)
# By slot; `count` is how much the first of them has grown in the step.
_COLLECTIVES = MappingProxyType(
    {
        "sequence": "trainermon_collectives_total",
        "in_flight": "trainermon_collectives_in_flight",
        "wait_seconds": WAITED,
        "bytes": "trainermon_collective_bytes_total",
        "unseen": "trainermon_unseen_collectives_total",
        "unfinished": "trainermon_unfinished_collectives_total",
    }
)
_IS_TOTAL_ALREADY = "sequence"


class ScalarSeries(NamedTuple):
    """A Prometheus series that shows one number of a step, as the loss, or of a process group.

    Attributes:
        metric: Name of the metric.
        labels: What it has beside run and rank: nothing, or one label.
        ids: The ids of the series that it is made of: micro steps of one step, or all calls of a process group.
        adds_up: It is the sum over all steps, not the mean of the newest one.
    """

    metric: str
    labels: Mapping[str, str]
    ids: Array
    adds_up: bool

    @property
    def identity(self) -> tuple[str, str]:
        """A key that stays the same when the series table grows: metric and value of the label."""
        return self.metric, "".join(self.labels.values())


def losses(keys: Sequence[SeriesKey]) -> list[ScalarSeries]:
    """Return the Prometheus series for the training loss; [] if the rank records none."""
    ids = [number for number, key in enumerate(keys) if key.kind is Kind.LOSS and key.name == LOSS_SERIES]
    return [_scalar(LOSS, {}, ids)] if ids else []


def step_values(keys: Sequence[SeriesKey]) -> list[ScalarSeries]:
    """Return the Prometheus series for the numbers of the step: those measured, then those that the script records.

    The duration of the step is not among them, nor settings of parameter groups, which have a row only when they
    change, nor what is known of the accelerator: in `/metrics` that is as new as its driver tells it, whether the rank
    goes on or not.
    """
    measured: dict[str, list[int]] = {}
    rates: dict[str, list[int]] = {}
    rollouts: dict[str, list[int]] = {}
    recorded: dict[str, list[int]] = {}
    for number, key in enumerate(keys):
        if key.kind is not Kind.STEP or key.name in _NOT_EXPORTED:
            continue
        if key.name == LEARNING_RATE_SERIES and key.slot:
            rates.setdefault(key.slot, []).append(number)
        elif key.name in _STEP:
            measured.setdefault(key.name, []).append(number)
        elif key.name in ROLLOUT_SERIES:
            rollouts.setdefault(key.name, []).append(number)
        else:
            recorded.setdefault(key.name, []).append(number)
    return [
        *(_scalar(_STEP[name], {}, measured[name]) for name in _STEP if name in measured),
        *(_scalar(_LEARNING_RATE, {"group": group}, ids) for group, ids in _first(rates)),
        *(_scalar("trainermon_rollout_value", {"name": name}, ids) for name, ids in rollouts.items()),
        *(_scalar("trainermon_recorded_value", {"name": name}, ids) for name, ids in _first(recorded)),
    ]


def collectives(keys: Sequence[SeriesKey]) -> list[ScalarSeries]:
    """Return the Prometheus series of each process group.

    Waiting times of all its operations and calls are one value.
    """
    found: dict[str, dict[str, list[int]]] = {}
    for number, key in enumerate(keys):
        if key.kind is Kind.COMM and key.slot in _COLLECTIVES:
            purpose = key.name.rpartition(".")[0] if key.slot == "wait_seconds" else key.name
            found.setdefault(purpose, {}).setdefault(key.slot, []).append(number)
    return [
        _scalar(_COLLECTIVES[slot], {"purpose": purpose}, slots[slot], adds_up=slot != _IS_TOTAL_ALREADY)
        for purpose, slots in _first(found)
        for slot in _COLLECTIVES
        if slot in slots
    ]


def _first(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, found[name]) for name in list(found)[:MOST])


def _scalar(metric: str, labels: Mapping[str, str], ids: Iterable[int], *, adds_up: bool = True) -> ScalarSeries:
    is_counter = METRICS[metric].type is MetricType.COUNTER
    return ScalarSeries(metric, labels, np.fromiter(ids, dtype=np.intp), is_counter and adds_up)
