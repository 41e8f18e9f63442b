"""What is measured of the log-probabilities of two sides; docs/rl.md has the names that others have for it.

In all of it Δ is the trainer's log-probability less the rollout's, r = exp(Δ) the ratio that importance sampling uses,
and a mean is one over tokens, each of which was sampled by the rollout's policy.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from trainermon.rl.tokens import Flags, Floats, Integers, Tokens

MAX_EXPONENT = 80.0
"""Differences are cut here before they are exponents, so that sums of squares stay finite in float64."""
TRUNCATED_AT = 2.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyMeasures:
    """The numbers of a set of tokens. NaN: there are too few tokens for this one, or what it needs was not given.

    Attributes:
        tokens: How many tokens.
        sequences: How many sequences they are of.
        mean: Mean of Δ, nats.
        mean_abs: Mean of |Δ|; then its median, 95th and 99th percentile and maximum.
        median_abs: See there.
        p95_abs: See there.
        p99_abs: See there.
        max_abs: See there.
        probability_mean_abs: Mean of the absolute difference of the probabilities themselves, 0 to 1.
        probability_std: Standard deviation of these absolute differences, of a sample as verl has it.
        probability_max_abs: The largest.
        k1: Mean of -Δ, the plain estimate of the divergence KL(rollout || trainer).
        k3: Mean of r - 1 - Δ, the estimate of it that is never negative.
        chi2_token: Mean of r² less 1.
        chi2_sequence: The same of whole sequences, whose ratio is the product of their tokens'.
        ratio: Mean of r: 1 for any two policies, if what was logged is what was sampled from and supports agree.
        ratio_z: How many standard errors that mean is from 1; sequences count as independent, their tokens do not.
        ess: Effective sample size of the ratios as a share of the tokens, 0 to 1.
        ess_truncated: The same of ratios cut at 2.
        outside_tenth: Share of tokens with r outside 0.9 to 1.1.
        outside_half: Share of tokens with r outside 0.5 to 2.
        perplexity_rollout: exp of the mean negative log-probability of the rollout.
        perplexity_train: The trainer's.
        correlation: Pearson's, of the two log-probabilities.
        slope: Of the regression of the rollout's log-probabilities on the trainer's.
        lag: Of -1 and 1, by how many tokens the trainer's must be moved to correlate best, beside not at all.
        lag_correlation: The correlation there.
        experts_differ: Share of tokens whose first expert differs in some layer.
        sequence_mean_abs: Mean over sequences of the absolute value of their mean Δ.
        sequence_max_abs: The largest of these.
    """

    tokens: int
    sequences: int
    mean: float
    mean_abs: float
    median_abs: float
    p95_abs: float
    p99_abs: float
    max_abs: float
    probability_mean_abs: float
    probability_std: float
    probability_max_abs: float
    k1: float
    k3: float
    chi2_token: float
    chi2_sequence: float
    ratio: float
    ratio_z: float
    ess: float
    ess_truncated: float
    outside_tenth: float
    outside_half: float
    perplexity_rollout: float
    perplexity_train: float
    correlation: float
    slope: float
    lag: int
    lag_correlation: float
    experts_differ: float = math.nan
    sequence_mean_abs: float = math.nan
    sequence_max_abs: float = math.nan


def measure(tokens: Tokens) -> PolicyMeasures:
    """Return the measures of tokens; all means are NaN if there is none.

    Cost: some 20 passes over the columns; nothing is changed.
    """
    if not len(tokens):
        nothing = {field.name: math.nan for field in dataclasses.fields(PolicyMeasures)}
        return PolicyMeasures(**(nothing | {"tokens": 0, "sequences": 0, "lag": 0}))  # type: ignore[arg-type]  # whole numbers
    delta = tokens.train - tokens.rollout
    capped = np.minimum(delta, MAX_EXPONENT)
    ratio = np.exp(capped)
    starts = _starts(tokens.sequence)
    ratio_mean, ratio_z = mean_ratio(ratio, starts)
    of_sequences = np.abs(np.add.reduceat(delta, starts)) / np.diff(np.append(starts, len(delta)))
    lag, lag_correlation = _best_lag(tokens)
    correlation, slope = _regression(tokens.train, tokens.rollout)
    return PolicyMeasures(
        tokens=len(tokens),
        sequences=len(starts),
        mean=float(delta.mean()),
        **_sizes(np.abs(delta)),
        **_of_probabilities(tokens),
        k1=float(-delta.mean()),
        k3=float((ratio - 1.0 - capped).mean()),
        chi2_token=float(np.square(ratio).mean() - 1.0),
        chi2_sequence=_chi2_of_sequences(delta, starts),
        ratio=ratio_mean,
        ratio_z=ratio_z,
        ess=_effective_share(ratio),
        ess_truncated=_effective_share(np.minimum(ratio, TRUNCATED_AT)),
        outside_tenth=_share((ratio < 0.9) | (ratio > 1.1)),
        outside_half=_share((ratio < 0.5) | (ratio > 2.0)),
        perplexity_rollout=_perplexity(tokens.rollout),
        perplexity_train=_perplexity(tokens.train),
        correlation=correlation,
        slope=slope,
        lag=lag,
        lag_correlation=lag_correlation,
        experts_differ=math.nan if tokens.experts_differ is None else _share(tokens.experts_differ),
        sequence_mean_abs=float(of_sequences.mean()),
        sequence_max_abs=float(of_sequences.max()),
    )


def mean_ratio(ratio: Floats, starts: Integers) -> tuple[float, float]:
    """Return the mean ratio, and how many standard errors it is from 1; `starts`: where each sequence begins.

    The standard error is that of a ratio of sums over clusters: the tokens of a sequence depend on each other. NaN with
    fewer than two sequences, and 0 where every ratio is 1.

    Source: W. G. Cochran, Sampling Techniques, 3rd edition, section 9A.
    """
    mean = float(ratio.mean())
    clusters = len(starts)
    if clusters < 2:
        return mean, math.nan
    lengths = np.diff(np.append(starts, len(ratio)))
    rest = np.add.reduceat(ratio, starts) - mean * lengths
    error = math.sqrt(float(np.square(rest).sum()) * clusters / (clusters - 1)) / len(ratio)
    if not error:
        return mean, 0.0 if mean == 1.0 else math.copysign(math.inf, mean - 1.0)
    return mean, (mean - 1.0) / error


def _starts(sequence: Integers) -> Integers:
    starts: Integers = np.concatenate(([0], np.nonzero(np.diff(sequence))[0] + 1))
    return starts


def _sizes(size: Floats) -> dict[str, float]:
    last = len(size) - 1
    wanted = {"median_abs": last // 2, "p95_abs": round(last * 0.95), "p99_abs": round(last * 0.99)}
    ordered = np.partition(size, sorted({*wanted.values(), last}))
    found = {name: float(ordered[index]) for name, index in wanted.items()}
    return {"mean_abs": float(size.mean()), **found, "max_abs": float(ordered[last])}


def _of_probabilities(tokens: Tokens) -> dict[str, float]:
    size = np.abs(np.exp(np.minimum(tokens.train, 0.0)) - np.exp(np.minimum(tokens.rollout, 0.0)))
    std = float(size.std(ddof=1)) if len(size) > 1 else math.nan
    return {
        "probability_mean_abs": float(size.mean()),
        "probability_std": std,
        "probability_max_abs": float(size.max()),
    }


def _chi2_of_sequences(delta: Floats, starts: Integers) -> float:
    whole = np.clip(np.add.reduceat(delta, starts), -MAX_EXPONENT, MAX_EXPONENT)
    return float(np.exp(2.0 * whole).mean() - 1.0)


def _effective_share(ratio: Floats) -> float:
    total = float(ratio.sum())
    return total * total / (len(ratio) * float(np.square(ratio).sum())) if total else 0.0


def _share(flags: Flags) -> float:
    return float(np.count_nonzero(flags)) / len(flags)


def _perplexity(logprobs: Floats) -> float:
    return math.exp(min(float(-logprobs.mean()), 700.0))


def _regression(x: Floats, y: Floats) -> tuple[float, float]:
    """Return the correlation of x and y, and the slope of the regression of y on x; NaN where either is constant."""
    if len(x) < 3:
        return math.nan, math.nan
    x0, y0 = x - x.mean(), y - y.mean()
    xx, yy, xy = float(x0 @ x0), float(y0 @ y0), float(x0 @ y0)
    if not xx or not yy:
        return math.nan, math.nan
    return xy / math.sqrt(xx * yy), xy / xx


def _best_lag(tokens: Tokens) -> tuple[int, float]:
    inside = tokens.sequence[1:] == tokens.sequence[:-1]
    before = _regression(tokens.train[:-1][inside], tokens.rollout[1:][inside])[0]
    after = _regression(tokens.train[1:][inside], tokens.rollout[:-1][inside])[0]
    if math.isnan(before) or math.isnan(after):
        return 0, math.nan
    return (1, before) if before >= after else (-1, after)


def welch(some: Floats, others: Floats) -> tuple[float, float, float]:
    """Return both means and how many standard errors are between; NaN where either has fewer than three."""
    if min(len(some), len(others)) < 3:
        return math.nan, math.nan, math.nan
    error = math.sqrt(some.var(ddof=1) / len(some) + others.var(ddof=1) / len(others))
    between = float(some.mean() - others.mean())
    return float(some.mean()), float(others.mean()), between / error if error else math.nan
