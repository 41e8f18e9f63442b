"""Holds what all ranks of a job recorded of their weights, added up, against the hashes of whole parameters."""

from typing import Any

import torch.distributed as dist

from trainermon.analysis.environment.weights import whole_weights
from trainermon.core.environment.pack import EnvironmentPack
from trainermon.statistics.positions import positional_hash


def assert_weights_add_up(recorded, wholes):
    """Fail unless what the ranks recorded of each parameter makes up the one of that name in `wholes`, bit by bit."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, recorded)
    ranks = {rank: {"weights": weights} for rank, weights in enumerate(everywhere)}
    found = whole_weights(EnvironmentPack(sections={}, ranks=ranks))
    assert set(found) == set(wholes), set(found) ^ set(wholes)
    for name, tensor in wholes.items():
        entry = found[name]
        expected = (list(tensor.shape), tensor.numel(), positional_hash(tensor))
        held = (entry["shape"], entry["count"], entry["hash"])
        assert held == expected, f"{name}: {held}, expected {expected}"
