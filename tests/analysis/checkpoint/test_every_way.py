"""One model, saved by every framework in every way it has, is identical in every pair of checkpoints."""

import itertools
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from trainermon.analysis.checkpoint.comparison import CheckpointOptions, compare_checkpoints
from trainermon.analysis.checkpoint.opening import open_checkpoint

WEIGHTS = CheckpointOptions(weights_only=True, jobs=1)
EVERYWHERE = "fsdp2 hf plain.safetensors torch.pt zero1 zero3 universal1 universal3 megatron_tp torch_dist_tp"
SAVED = {
    "dense": f"{EVERYWHERE} zero0 zero2 megatron_pp torch_dist_pp".split(),
    "tied": EVERYWHERE.split(),
    "experts": f"{EVERYWHERE} megatron_ep torch_dist_ep".split(),
}
PARAMETERS = {"dense": 5_456, "tied": 4_432, "experts": 12_496}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("every_way")
    run_ranks(Path(__file__).with_name("every_way_worker.py"), str(folder))
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("kind", SAVED)
def test_a_model_is_identical_in_every_two_checkpoints(saved, kind):
    opened = {name: open_checkpoint(saved / kind / name) for name in SAVED[kind]}

    for first, second in itertools.combinations(opened, 2):
        found = compare_checkpoints(opened[first], opened[second], options=WEIGHTS)

        assert found.headline == "the same model", (first, second)
        assert {tensor.verdict.value for tensor in found.tensors} == {"identical"}, (first, second)
        once = sum(tensor.count for tensor in found.tensors if "tied" not in str((tensor.notes, tensor.name)))
        assert once >= PARAMETERS[kind], (first, second)
