"""Measures against plain float64 arithmetic, token by token, and against what is known of ratios of two policies."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainermon.rl.measures import mean_ratio, measure
from trainermon.rl.tokens import pair, read_side


def tokens_of(rollout, train, **more):
    return pair(read_side(rollout), read_side(train, **more))


def by_hand(rollout, train):
    """Return measures by their formulas, in plain Python."""
    pairs = [(r, t) for one, other in zip(rollout, train, strict=True) for r, t in zip(one, other, strict=True)]
    delta = [t - r for r, t in pairs]
    ratio = [math.exp(d) for d in delta]
    n = len(pairs)
    probability = [abs(math.exp(t) - math.exp(r)) for r, t in pairs]
    mean_p = math.fsum(probability) / n
    whole = [
        math.fsum(t - r for r, t in zip(one, other, strict=True)) for one, other in zip(rollout, train, strict=True)
    ]
    return {
        "mean": math.fsum(delta) / n,
        "mean_abs": math.fsum(map(abs, delta)) / n,
        "max_abs": max(map(abs, delta)),
        "probability_mean_abs": mean_p,
        "probability_std": math.sqrt(math.fsum((p - mean_p) ** 2 for p in probability) / (n - 1)),
        "probability_max_abs": max(probability),
        "k1": -math.fsum(delta) / n,
        "k3": math.fsum(r - 1 - d for r, d in zip(ratio, delta, strict=True)) / n,
        "chi2_token": math.fsum(r * r for r in ratio) / n - 1,
        "chi2_sequence": math.fsum(math.exp(2 * w) for w in whole) / len(whole) - 1,
        "sequence_mean_abs": math.fsum(abs(w) / len(one) for w, one in zip(whole, rollout, strict=True)) / len(whole),
        "sequence_max_abs": max(abs(w) / len(one) for w, one in zip(whole, rollout, strict=True)),
        "ratio": math.fsum(ratio) / n,
        "ess": math.fsum(ratio) ** 2 / (n * math.fsum(r * r for r in ratio)),
        "ess_truncated": math.fsum(min(r, 2) for r in ratio) ** 2 / (n * math.fsum(min(r, 2) ** 2 for r in ratio)),
        "outside_tenth": sum(not 0.9 <= r <= 1.1 for r in ratio) / n,
        "outside_half": sum(not 0.5 <= r <= 2 for r in ratio) / n,
        "perplexity_rollout": math.exp(-math.fsum(r for r, _ in pairs) / n),
        "perplexity_train": math.exp(-math.fsum(t for _, t in pairs) / n),
    }


@given(st.integers(0, 10_000), st.sampled_from([1e-3, 0.1, 1.0]))
@settings(max_examples=40, deadline=None)
def test_measures_are_those_of_the_formulas(seed, spread):
    random = np.random.default_rng(seed)
    rollout = [-random.exponential(2.0, size) for size in random.integers(1, 9, 12)]
    train = [np.minimum(one + spread * random.normal(size=len(one)), 0.0) for one in rollout]

    found = measure(tokens_of(rollout, train))

    for name, value in by_hand(rollout, train).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-9, abs=1e-12), name
    flat, other = np.concatenate(rollout), np.concatenate(train)
    assert found.correlation == pytest.approx(np.corrcoef(flat, other)[0, 1], rel=1e-9)
    assert found.slope == pytest.approx(np.polyfit(other, flat, 1)[0], rel=1e-7)
    size = np.abs(other - flat)
    for name, share in (("median_abs", 50), ("p95_abs", 95), ("p99_abs", 99)):
        near = np.percentile(size, [max(share - 100 / len(size), 0), min(share + 100 / len(size), 100)])
        assert near[0] <= getattr(found, name) <= near[1], name


def test_the_error_of_the_mean_ratio_is_that_of_many_repetitions():
    random = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        common = random.normal(0, 0.3, (64, 1))  # what the tokens of a sequence share
        delta = common + random.normal(0, 0.1, (64, 20)) - (0.3**2 + 0.1**2) / 2
        ratio = np.exp(delta).ravel()
        mean, z = mean_ratio(ratio, np.arange(64) * 20)
        means.append(mean)
        errors.append((mean - 1) / z)

    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)


@pytest.mark.parametrize("wide", [0.05, 0.5])
def test_the_mean_ratio_of_two_policies_is_one(wide):
    random = np.random.default_rng(3)
    logits = random.normal(size=(256, 40, 30)) * 2
    other = logits + wide * random.normal(size=logits.shape)
    rollout, train = (each - np.logaddexp.reduce(each, axis=-1, keepdims=True) for each in (logits, other))
    ids = (np.exp(rollout).cumsum(-1) < random.random((256, 40, 1))).sum(-1).clip(0, 29)[..., None]

    found = measure(tokens_of(*(np.take_along_axis(each, ids, -1)[..., 0] for each in (rollout, train))))

    assert abs(found.ratio_z) < 3.5
    assert found.k3 > 0


def test_one_sequence_has_no_error_of_its_mean_and_equal_sides_have_none():
    one = measure(tokens_of([[-1.0, -2.0, -0.5]], [[-1.1, -2.0, -0.4]]))
    same = measure(tokens_of([[-1.0, -2.0], [-0.5]], [[-1.0, -2.0], [-0.5]]))

    assert math.isnan(one.ratio_z)
    assert (same.ratio, same.ratio_z, same.mean_abs, same.ess) == (1.0, 0.0, 0.0, 1.0)


def test_differences_that_overflow_stay_numbers():
    found = measure(tokens_of([[-2000.0, -1.0]], [[-1.0, -2000.0]]))

    assert all(math.isfinite(getattr(found, name)) for name in ("k3", "chi2_token", "chi2_sequence", "ratio", "ess"))
