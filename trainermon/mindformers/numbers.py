"""Which numbers MindFormers' monitor tells of a step, under its tags, from the series of a rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainermon.core.catalogue import (
    GLOBAL_NORM_SERIES,
    LEARNING_RATE_SERIES,
    LOSS_SCALE_SERIES,
    SAMPLES_SERIES,
    STEP_TIME_SERIES,
)
from trainermon.core.config import MindFormersConfig
from trainermon.core.config.outputs import EVENT_FORMS
from trainermon.core.journal import Header
from trainermon.core.values import STATISTICS, Kind, Moments, SeriesKey, StatBlock

SECONDS_PER_DAY = 86_400
EVENTS, LOG = EVENT_FORMS


class MindFormersNumber(NamedTuple):
    """One number of a step.

    Attributes:
        tag: What MindFormers calls it.
        value: The number; NaN or infinite where what it is made of was not finite.
        forms: Where it is written: `EVENTS`, `LOG` or both.
        by_samples: Whether event files have it against the samples consumed, too.
    """

    tag: str
    value: float
    forms: Sequence[str]
    by_samples: bool = False


class SeriesMoments(NamedTuple):
    """One series of a step and its moments."""

    key: SeriesKey
    moments: Moments


def numbers_of(header: Header, block: StatBlock, config: MindFormersConfig) -> list[MindFormersNumber]:
    """Return the numbers of one step of one rank: loss, norms and rates first, then what `config` asks for.

    `block` may lack any series; then the number made of it is missing. Learning rates are those of the first group.
    """
    series = series_of(header, block)
    return [*_of_training(series, header), *_of_state(series, header, config)]


def series_of(header: Header, block: StatBlock) -> list[SeriesMoments]:
    """Return the series of a block with their moments."""
    values = np.asarray(block.values, np.float64).reshape(len(STATISTICS), -1)
    numbers = np.asarray(block.series).tolist()
    return [
        SeriesMoments(header.series[number], Moments(*column))
        for number, column in zip(numbers, values.T.tolist(), strict=True)
    ]


def global_batch(series: Iterable[SeriesMoments], header: Header) -> float:
    """Return the samples of the step in the whole job, 0 where the script records no `samples`.

    Every data parallel rank counts its own, over all micro steps.
    """
    own = [one.moments.sum for one in series if one.key.kind is Kind.STEP and one.key.name == SAMPLES_SERIES]
    return sum(own) * header.coordinates.dp_size


def _of_training(series: Sequence[SeriesMoments], header: Header) -> Iterator[MindFormersNumber]:
    """Yield what MindFormers' `MFLossMonitor` tells."""
    step = {one.key.name: one for one in series if one.key.kind is Kind.STEP and one.key.slot in ("", "0")}
    batch = global_batch(series, header)
    losses = [_mean(one.moments) for one in series if one.key.kind is Kind.LOSS]
    if LEARNING_RATE_SERIES in step:
        yield MindFormersNumber("learning-rate", _mean(step[LEARNING_RATE_SERIES].moments), (EVENTS,), by_samples=True)
    if batch:
        yield MindFormersNumber("batch-size", batch, (EVENTS,), by_samples=True)
    if losses:
        yield MindFormersNumber("loss", sum(losses) / len(losses), EVENT_FORMS, by_samples=True)
    for name, tag in ((LOSS_SCALE_SERIES, "loss-scale"), (GLOBAL_NORM_SERIES, "grad-norm")):
        if name in step:
            yield MindFormersNumber(tag, _mean(step[name].moments), EVENT_FORMS, by_samples=True)
    if STEP_TIME_SERIES in step:
        duration_s = _mean(step[STEP_TIME_SERIES].moments)
        yield MindFormersNumber("iteration-time", duration_s * 1000, EVENT_FORMS, by_samples=True)
        if batch and duration_s > 0:
            throughput = batch / header.coordinates.world_size / duration_s
            yield MindFormersNumber("throughput", throughput, EVENT_FORMS, by_samples=True)
            per_day = batch / duration_s * SECONDS_PER_DAY / 1e9
            yield MindFormersNumber("B-samples-per-day", per_day, (EVENTS,))


def _of_state(
    series: Sequence[SeriesMoments], header: Header, config: MindFormersConfig
) -> Iterator[MindFormersNumber]:
    """Yield what MindFormers' `TrainingStateMonitor` tells."""
    losses = [one for one in series if one.key.kind is Kind.LOSS]
    means = [_mean(one.moments) for one in losses]
    if means:
        if LOG in config.local_loss:
            yield from (MindFormersNumber("micro_local_loss", mean, (LOG,)) for mean in means)
        if EVENTS in config.local_loss:
            yield MindFormersNumber("local_loss", sum(means) / len(means), (EVENTS,))
        yield from _if_asked("device_accum_local_loss", sum(means) / len(means), config.device_local_loss)
    gradients = _by_parameter(series, (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED))
    for name, moments in gradients.items():
        yield from _if_asked(f"local_norm/{name}", _norm([moments]), config.local_norm)
    if gradients:
        yield from _if_asked("device_local_norm", _norm(gradients.values()), config.device_local_norm)
    for kind, tag in ((Kind.EXP_AVG, "adam_m_norm"), (Kind.EXP_AVG_SQ, "adam_v_norm")):
        for name, moments in _by_parameter(series, (kind,)).items():
            yield from _if_asked(f"{tag}/{name}", _norm([moments]), config.optimizer_state)
    weights = _by_parameter(series, (Kind.PARAM_UPDATED,))
    if weights:
        yield from _if_asked("weight_norm", _norm(weights.values()), config.weight_state)
    durations = [one.moments for one in series if one.key.kind is Kind.STEP and one.key.name == STEP_TIME_SERIES]
    batch = global_batch(series, header)
    if config.throughput_baseline and batch and durations and durations[0].sum > 0:
        throughput = batch / header.coordinates.world_size / durations[0].sum
        yield MindFormersNumber("throughput_linearity", throughput / config.throughput_baseline, EVENT_FORMS)


def _if_asked(tag: str, value: float, forms: Sequence[str]) -> Iterator[MindFormersNumber]:
    if forms:
        yield MindFormersNumber(tag, value, forms)


def _by_parameter(series: Iterable[SeriesMoments], kinds: Sequence[Kind]) -> Mapping[str, Moments]:
    """Return, by parameter, the moments of the first of `kinds` that it has; those of micro steps are left out."""
    found: dict[str, dict[Kind, Moments]] = {}
    for key, moments in series:
        if key.kind in kinds and key.micro_step is None and not key.slot:
            name = f"vp{key.stage}:{key.name}" if key.stage else key.name
            found.setdefault(name, {})[key.kind] = moments
    return {name: next(of[kind] for kind in kinds if kind in of) for name, of in found.items()}


def _norm(parts: Iterable[Moments]) -> float:
    """Return the L2 norm of several tensors; NaN or infinite if an element is."""
    square_sum, nans, infs = 0.0, 0.0, 0.0
    for part in parts:
        square_sum, nans, infs = square_sum + part.sum_sq, nans + part.nans, infs + part.infs
    return math.nan if nans else math.inf if infs else math.sqrt(square_sum)


def _mean(moments: Moments) -> float:
    """Return the mean of a number that was recorded; NaN or infinite if it was."""
    return math.nan if moments.nans else math.inf if moments.infs else moments.mean
