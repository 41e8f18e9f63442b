"""Experts of different ranks are told where they have one gradient; what is alike by right is not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.alerts.laws.test_relations import gradients, step_of, tensor
from trainermon.alerts.laws.experts import OwnExperts
from trainermon.alerts.laws.law import LawStep
from trainermon.core.values import Coordinates, Kind, Placement

SETTINGS = settings(deadline=None, max_examples=60)
OWN = Placement(dtype="float32", shape=(300,))
COPIED = Placement(dtype="float32", shape=(300,), replicated_over=("edp",))
STACKED = Placement(dtype="float32", shape=(600,), partitioned_over=("ep",))
LAYER = "layers.0.mlp.experts.local_experts"


def at(*experts: int) -> list[Coordinates]:
    """Return as many ranks, by their places along the axis of expert parallelism."""
    size = max(experts) + 1
    return [
        Coordinates(rank=rank, world_size=len(experts), dp=rank, dp_size=len(experts), ep=ep, ep_size=size)
        for rank, ep in enumerate(experts)
    ]


def step(held: Sequence[Sequence[np.ndarray | None]], places: Sequence[Coordinates], placement: Placement) -> LawStep:
    names = [tensor(f"{LAYER}.{number}.fc1.weight") for number in range(len(held[0]))]
    return step_of({Kind.GRAD_REDUCED: held}, tensors=names, at=places, placement=placement)


@SETTINGS
@given(st.integers(0, 1 << 30), st.integers(0, 1), st.integers(0, 1))
def test_experts_that_share_a_gradient_are_named_on_both_ranks(seed: int, one: int, other: int) -> None:
    own = gradients(seed, num_ranks=2, size=300, tensors=2)
    own[1][other] = own[0][one]
    held = [[*own[0], None, None], [None, None, *own[1]]]

    broken = OwnExperts({}).judge(step(held, at(0, 1), OWN)).broken

    expected = np.zeros((2, 4), bool)
    expected[0, one] = expected[1, 2 + other] = True
    assert (broken == expected).all()


@SETTINGS
@given(st.integers(0, 1 << 30))
def test_parts_of_one_tensor_that_holds_all_experts_of_a_rank_are_experts_too(seed: int) -> None:
    own = gradients(seed, num_ranks=2, size=300, tensors=1)

    assert not OwnExperts({}).judge(step(own, at(0, 1), STACKED)).broken.any()
    assert OwnExperts({}).judge(step([own[0], own[0]], at(0, 1), STACKED)).broken.all()


def test_copies_of_an_expert_are_alike_by_right() -> None:
    first, second = gradients(3, num_ranks=1, size=300, tensors=2)[0]
    held = [[first, None], [None, second], [first, None], [None, second]]

    verdict = OwnExperts({}).judge(step(held, at(0, 1, 0, 1), COPIED))

    assert verdict.judged.any()
    assert not verdict.broken.any()


@pytest.mark.parametrize(
    ("elements", "places"),
    [
        (np.zeros(300), at(0, 1)),
        (np.full(300, np.nan), at(0, 1)),
        (np.ones(1), at(0, 1)),
        (np.ones(300), at(0, 0)),
    ],
    ids=["without tokens", "NaN", "one element", "no expert parallelism"],
)
def test_of_these_nothing_is_said(elements: np.ndarray, places: Sequence[Coordinates]) -> None:
    verdict = OwnExperts({}).judge(step([[elements, None], [None, elements]], places, OWN))

    assert verdict is None or not verdict.broken.any()
