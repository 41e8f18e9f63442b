"""Holds the signs that all ranks of a job read together, put into one, against whole gradients."""

from typing import Any

import numpy as np
import torch.distributed as dist

from trainermon.analysis.gradients.runs import RankSigns
from trainermon.analysis.gradients.similarity import NEGATIVE, NOTHING, POSITIVE, whole_signs


def gathered(readings):
    """Return what every rank of the job read, at each rank."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, [(reading.part, reading.signs) for reading in readings])
    return [
        RankSigns({part.name: part for part, _ in rank}, {part.name: signs for part, signs in rank})
        for rank in everywhere
    ]


def assert_signs_are_of(sides, wholes, *, floor=0.0):
    """Fail unless the ranks hold every element of `wholes`, by name, with its sign.

    What is not larger than `floor` times the largest magnitude of its tensor may have any.
    """
    names = {name for side in sides for name in side.parts}
    assert names == set(wholes), names ^ set(wholes)
    for name, tensor in wholes.items():
        values = tensor.detach().double().numpy()
        found = whole_signs(name, sides)
        assert found.shape == values.shape, name
        assert not (found == NOTHING).any(), (name, "elements that no rank holds")
        expected = np.where(values > 0, POSITIVE, np.where(values < 0, NEGATIVE, 0))
        is_large = np.abs(values) > floor * np.abs(values).max(initial=0.0)
        wrong = (found != expected) & is_large
        assert not wrong.any(), (name, int(wrong.sum()), values.size)
        if not floor:
            assert (found == expected).all(), name
