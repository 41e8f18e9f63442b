"""Which gradients a framework's norm leaves out or counts twice, on squares that numpy adds up."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainermon.alerts.laws.norms import NormExplanation, SquaredGradient, explain_norm
from trainermon.core.values import Coordinates, Placement

COPIED = Placement(dtype="float32", shape=(8,), replicated_over=("dp", "tp"))
SPLIT = Placement(dtype="float32", shape=(8,), replicated_over=("dp",), partitioned_over=("tp",))
EXPERT = Placement(dtype="float32", shape=(8,), partitioned_over=("ep",))
LAYERS = range(4)


def gradients_of(seed):
    """Return what two tensor-parallel ranks contribute to the norm in one step; copies count once, on rank 0."""
    draw = np.random.default_rng(seed)
    found = []
    for rank in range(2):
        place = Coordinates(rank=rank, world_size=2, tp=rank, tp_size=2)
        for layer in LAYERS:
            kinds = [(f"layers.{layer}.{name}.weight", SPLIT) for name in ("fc1", "fc2")]
            kinds += [(f"layers.{layer}.experts.up", EXPERT)]
            kinds += [(f"layers.{layer}.norm.weight", COPIED), (f"layers.{layer}.sink", SPLIT)] if rank == 0 else []
            found += [
                SquaredGradient(name, float(draw.lognormal(sigma=1.5)), place, placement) for name, placement in kinds
            ]
    return found


def squares(gradients, chosen=lambda one: True):
    return sum(one.squares for one in gradients if chosen(one))


def explained(norm_of, seed=0, num_steps=3):
    """Return what explains the squared norms `norm_of` returns, on each of a few steps."""
    among = None
    for step in range(num_steps):
        gradients = gradients_of(1000 * seed + step)
        among = explain_norm(gradients, norm_of(gradients) * (1 + 1e-7), among)
    return among


def is_norm(one):
    return "norm" in one.name


@pytest.mark.parametrize(
    ("norm_of", "which", "how"),
    [
        (lambda g: squares(g) + squares(g, is_norm), "layers.*.norm.weight", "counted 2 times"),
        (lambda g: squares(g, lambda one: not is_norm(one)), "layers.*.norm.weight", "left out"),
        (lambda g: squares(g, lambda one: "expert" not in one.name), "layers.*.experts.up", "left out"),
        (lambda g: squares(g, lambda one: one.name != "layers.2.sink"), "layers.2.sink", "left out"),
        (lambda g: 2 * squares(g), "all gradients", "counted 2 times"),
        (lambda g: squares(g, lambda one: one.place.tp == 0), "all gradients", "counted on tp 0 only"),
        (
            lambda g: squares(g, lambda one: one.place.tp == 0 or "fc1" not in one.name),
            "layers.*.fc1.weight",
            "counted on tp 0 only",
        ),
    ],
)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_what_is_left_out_or_counted_twice_is_named(norm_of, which, how, seed):
    first = explained(norm_of, seed)[0]

    assert (first.which, first.how) == (which, how)
    patterns = {one.name for one in gradients_of(0) if which in ("all gradients", one.name) or _fits(one.name, which)}
    assert set(first.names) == patterns


def _fits(name, pattern):
    return ".".join("*" if part.isdigit() else part for part in name.split(".")) == pattern


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000), factor=st.floats(0.3, 3.0).filter(lambda f: abs(f - 1) > 0.01))
def test_what_chance_explains_on_one_step_is_not_said_after_three(seed, factor):
    others = np.random.default_rng(seed).uniform(0.9, 1.1, 3)
    wrong = iter(others * factor)

    assert explained(lambda gradients: squares(gradients) * next(wrong), seed) == ()


def test_nothing_is_explained_of_a_norm_that_is_right():
    assert explained(squares) == ()


def test_many_names_are_cut_off():
    names = tuple(f"layers.{n}.w" for n in range(9))
    assert str(NormExplanation(names, "layers.*.w", "left out")) == (
        "layers.0.w, layers.1.w, layers.2.w and 6 more left out (layers.*.w)"
    )
    assert str(NormExplanation(("w",), "w", "left out")) == "w left out"
