"""One step of a watch: what was passed in, its comparison, and the numbers of it that become series."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from trainermon.rl.causes import Limits, judged_z
from trainermon.rl.judging import floor_of, judge, refuse
from trainermon.rl.names import NameMap
from trainermon.rl.snapshots import Snapshot
from trainermon.rl.tokens import Flags, NotComparableError, joined, pair, read_side
from trainermon.rl.values import Report, Sampling, Verdict, WeightCheck

ENGINE = "engine"
"""What an engine is called that has no other name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a watch was told, see `Watch`."""

    sampling: Sampling
    dtype: str
    is_mixture: bool
    name_map: NameMap
    limits: Limits


@dataclasses.dataclass(slots=True)
class WatchedStep:
    """What was passed in during a step, in the order of the calls.

    `sent` are the versions of the weights that had been sent when it ended.
    """

    number: int
    rollout: list[Snapshot] = dataclasses.field(default_factory=list)
    train: list[Snapshot] = dataclasses.field(default_factory=list)
    engines: list[tuple[str | None, int | None]] = dataclasses.field(default_factory=list)
    known: list[Flags | None] = dataclasses.field(default_factory=list)
    sent: tuple[int, ...] = ()

    @property
    def version_lag(self) -> int | None:
        """By how many versions the oldest engine is behind what was sent; None: not known."""
        versions = [version for _, version in self.engines if version is not None]
        return max(0, max(self.sent) - min(versions)) if versions and self.sent else None


def judge_step(step: WatchedStep, settings: Settings, weights: WeightCheck | None) -> Report:
    """Return the report on what was passed in; it may be that the two sides cannot be compared."""
    if not step.rollout or not step.train:
        side = "train" if step.rollout else "rollout"
        return refuse(step.number, NotComparableError(f"nothing was passed to {side}() in this step"), weights)
    try:
        parts = [read_side(**each.values()) for each in step.rollout]
        tokens = pair(joined(parts), joined([read_side(**each.values()) for each in step.train]))
    except NotComparableError as error:
        return refuse(step.number, error, weights)
    counts = [len(part.lengths) for part in parts]
    return judge(
        step.number,
        tokens,
        floor=floor_of(tokens, dtype=settings.dtype, is_mixture=settings.is_mixture),
        sampling=settings.sampling,
        limits=settings.limits,
        engines=[
            engine for engine, count in zip(_named(step.engines, weights), counts, strict=True) for _ in range(count)
        ],
        known_before=_joined_flags(step.known, counts),
        weights=weights,
        version_lag=step.version_lag,
    )


def _named(
    engines: Sequence[tuple[str | None, int | None]], weights: WeightCheck | None
) -> list[tuple[str, int | None]]:
    """Return the engines with their names: one without is the only one whose weights were checked."""
    known = weights.engines if weights is not None else ()
    unnamed = known[0] if len(known) == 1 else ENGINE
    return [(unnamed if name is None else name, version) for name, version in engines]


def _joined_flags(known: Sequence[Flags | None], counts: Sequence[int]) -> Flags | None:
    if any(flags is None or len(flags) != count for flags, count in zip(known, counts, strict=True)):
        return None
    return np.concatenate([flags for flags in known if flags is not None])


SERIES = MappingProxyType(
    {
        "rl_mean_abs": "mean_abs",
        "rl_p99_abs": "p99_abs",
        "rl_max_abs": "max_abs",
        "rl_probability_mean_abs": "probability_mean_abs",
        "rl_probability_max_abs": "probability_max_abs",
        "rl_k1": "k1",
        "rl_k3": "k3",
        "rl_chi2_token": "chi2_token",
        "rl_ratio": "ratio",
        "rl_ess": "ess",
        "rl_outside_tenth": "outside_tenth",
        "rl_outside_half": "outside_half",
        "rl_perplexity_rollout": "perplexity_rollout",
        "rl_perplexity_train": "perplexity_train",
        "rl_correlation": "correlation",
        "rl_slope": "slope",
        "rl_tokens": "tokens",
    }
)
"""Series of a monitor, and the measure that each is."""


def series_of(report: Report, limits: Limits, *, is_greedy: bool = False) -> dict[str, float]:
    """Return the numbers of a report that a monitor records, by name.

    `rl_floors` is the mean |Δ| in floors; `rl_weights_differ` counts tensors that are missing or not equal, and is
    there if weights were checked; `rl_not_comparable` is 1 where tokens could not be paired. `rl_ratio_z` is 0 where
    there are too few sequences to tell, the engine is greedy, or the ratio is too near 1 to matter. What is NaN is left
    out.
    """
    numbers = {"rl_not_comparable": float(report.verdict is Verdict.NOT_COMPARABLE)}
    if report.measures is not None:
        numbers |= {name: float(getattr(report.measures, measure)) for name, measure in SERIES.items()}
        numbers["rl_ratio_z"] = 0.0 if is_greedy else judged_z(report.measures, limits)
        if report.floor is not None:
            numbers["rl_floors"] = report.measures.mean_abs / report.floor.mean_abs
    if report.weights is not None:
        numbers["rl_weights_differ"] = float(len(report.weights.differing) + len(report.weights.missing))
    if report.version_lag is not None:
        numbers["rl_version_lag"] = float(report.version_lag)
    return {name: number for name, number in numbers.items() if not math.isnan(number)}
