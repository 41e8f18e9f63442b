"""One model, saved by every framework in every way it has, is identical in every pair of checkpoints."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch

from tests.ports import free_port
from tests.ranks import run_ranks
from trainermon.analysis.checkpoint.comparison import CheckpointOptions, compare_checkpoints
from trainermon.analysis.checkpoint.opening import open_checkpoint

RANKS = 4
PARAMETERS = {"dense": 9_360, "tied": 4_432, "experts": 12_496}
CHECKPOINTS = {"dense": 46, "tied": 22, "experts": 23}
MOMENTS = ("exp_avg", "exp_avg_sq")
WITHOUT_MOMENTS = ("hf", "plain.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("every_way")
    ports = [str(free_port()) for _ in range(RANKS)]
    run_ranks(Path(__file__).with_name("every_way_worker.py"), str(folder), *ports, world_size=RANKS)
    return {kind: _opened(folder / kind) for kind in PARAMETERS}


def _opened(folder):
    return {path.name: open_checkpoint(path) for path in sorted(folder.iterdir()) if not path.name.startswith("latest")}


@pytest.mark.distributed
def test_buckets_are_not_named_if_arguments_contradict_the_weights(saved, tmp_path):
    copied = shutil.copytree(saved["dense"]["torch_dist_tp2dp2_buckets"].path, tmp_path / "copied")
    common = torch.load(copied / "common.pt", weights_only=False)
    common["args"].swiglu = False
    torch.save(common, copied / "common.pt")

    found = open_checkpoint(copied)

    assert all("bucket_idx" in name for name in found.optimizer["main"])
    assert any("has parts at [0, 12, 24, 36], expected [0, 24] by the arguments" in note for note in found.notes)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", PARAMETERS)
def test_a_model_is_identical_in_every_two_checkpoints(saved, kind):
    opened = saved[kind]
    assert len(opened) == CHECKPOINTS[kind]

    for first, second in itertools.combinations(opened, 2):
        found = compare_checkpoints(opened[first], opened[second], options=CheckpointOptions(jobs=1))

        odd = {t.verdict.value for t in found.tensors if t.kind != "step"} - {"identical"}
        assert (found.headline.partition(";")[0], odd) == ("the same model", set()), (first, second)
        counts = dict.fromkeys(("weights", *MOMENTS), 0)
        for tensor in found.tensors:
            if "tied" not in str((tensor.notes, tensor.name)):
                counts[tensor.kind] = counts.get(tensor.kind, 0) + tensor.count
        with_moments = not {first, second} & set(WITHOUT_MOMENTS)
        assert counts["weights"] >= PARAMETERS[kind], (first, second)
        assert all((counts[moment] >= PARAMETERS[kind]) == with_moments for moment in MOMENTS), (first, second)
