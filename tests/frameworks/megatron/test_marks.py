"""Marks that scripts of their own put on parameters: what Megatron-Core would have marked too may be missing."""

import pytest
import torch
from torch import nn

from trainermon.dump.files.layout import split_dim
from trainermon.monitor.frameworks.megatron.groups import GroupPlace, MegatronGroups
from trainermon.monitor.frameworks.megatron.placements import placement_of


@pytest.mark.parametrize(("mark", "dim"), [({}, 0), ({"partition_dim": -1}, 0), ({"partition_dim": 1}, 1)])
def test_a_split_parameter_without_a_dimension_is_split_along_the_first(mark, dim):
    parameter = nn.Parameter(torch.zeros(3, 5))
    for name, value in {"tensor_model_parallel": True, **mark}.items():
        setattr(parameter, name, value)
    one, two = GroupPlace(rank=0, size=1), GroupPlace(rank=1, size=2)
    groups = MegatronGroups(**dict.fromkeys(MegatronGroups.__annotations__, one) | {"tp": two, "etp": two})

    placement = placement_of("sinks", parameter, groups, torch.zeros(3, 5))

    assert split_dim(parameter) == dim
    assert placement.shape == ((6, 5), (3, 10))[dim]
    assert placement.partitioned_over == ("tp",)
