"""DeepSpeed's checkpoints of pipelines and tensor parallel models hold the whole model."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.analysis.checkpoint.assembled import assert_same
from tests.ranks import run_ranks
from trainermon.analysis.checkpoint.comparison import compare_checkpoints
from trainermon.analysis.checkpoint.inspection import check_tensors
from trainermon.analysis.checkpoint.opening import open_checkpoint
from trainermon.core.errors import CheckpointError

STEP = "global_step1"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed_parallel")
    run_ranks(Path(__file__).with_name("deepspeed_parallel_worker.py"), str(folder), world_size=4)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved / "pp_tp", tmp_path / "copied")


def changed(file, change):
    """Have a file of torch hold something else."""
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("pp", {"tp": 1, "pp": 2, "zero": 1, "dp": 2}),
        ("pp_tp", {"tp": 2, "pp": 2, "zero": 1, "dp": 1}),
        ("pp_universal", {}),
        ("pp_tp_universal", {}),
    ],
)
def test_weights_and_moments_are_those_that_were_saved(saved, name, layout):
    truth = torch.load(saved / "truth.pt")

    found = open_checkpoint(saved / name)

    assert dict(found.layout) == layout
    assert_same(found.tensors, truth["weight"])
    assert_same(found.optimizer["main"], truth["weight"])
    for kind in ("exp_avg", "exp_avg_sq"):
        assert_same(found.optimizer[kind], truth[kind])
    assert not [tensor for tensor in check_tensors(found) if tensor.faults]


@pytest.mark.distributed
def test_a_pipeline_without_zero_has_its_weights_by_number_of_the_layer(saved):
    truth = torch.load(saved / "truth.pt")["weight"]
    truth["0.weight"] = truth.pop("tied_modules.embed.weight")  # no file says that it is tied

    found = open_checkpoint(saved / "pp_zero0")

    assert_same(found.tensors, truth)
    assert not found.optimizer
    assert any("numbers parameters" in note for note in found.notes)


@pytest.mark.distributed
def test_the_same_model_on_other_ranks_is_the_same(saved):
    assert compare_checkpoints(saved / "pp", saved / "pp_tp").headline.startswith("the same model")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("mp_rank_03_model_states.pt", "no mp_rank_03_model_states.pt|has no \\*_model_states.pt"),
        ("layer_02-model_01-model_states.pt", "has no layer_02-model_01-model_states.pt"),
        ("layer_02-*", "has no layer_\\*-model_states.pt with '2.norm.weight', nor with 5 others"),
        ("zero_pp_rank_0_mp_rank_02_optim_states.pt", "has no \\*_optim_states.pt"),
    ],
)
def test_a_missing_file_is_named(copied, file, message):
    for path in (copied / STEP).glob(file):
        path.unlink()

    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(copied)


@pytest.mark.distributed
def test_files_of_two_runs_are_refused(copied):
    changed(copied / STEP / "mp_rank_02_model_states.pt", lambda state: state.update(global_steps=7))

    with pytest.raises(CheckpointError, match="model rank 0 has 1, model rank 2 has 7: copy them from one run"):
        open_checkpoint(copied)


@pytest.mark.distributed
def test_what_nothing_describes_is_refused_by_name(copied):
    for file in (copied / STEP).glob("mp_rank_*"):
        changed(file, lambda state: state.pop("universal_checkpoint_info"))

    with pytest.raises(CheckpointError, match=r"how 'tied_modules.embed.weight' is split: there is no universal"):
        open_checkpoint(copied)


@pytest.mark.distributed
@pytest.mark.parametrize("pattern", ["(a+)+$", "a*" * 20, "x" * 500, 3, "["])
def test_a_pattern_that_could_take_long_is_refused(copied, pattern):
    def change(state):
        state["universal_checkpoint_info"]["tp_replicated_parameter_patterns"] = [pattern]

    for file in (copied / STEP).glob("mp_rank_*"):
        changed(file, change)

    with pytest.raises(CheckpointError, match=re.escape(f"{pattern!r:.60}")):
        open_checkpoint(copied)


@pytest.mark.distributed
def test_replicas_that_differ_are_named(copied):
    def change(state):
        state["norm.weight"][3] += 1

    changed(copied / STEP / "layer_02-model_01-model_states.pt", change)

    (found,) = [tensor for tensor in check_tensors(open_checkpoint(copied)) if tensor.faults]

    assert found.name == "2.norm.weight"
    assert "layer_02-model_01" in found.faults[0]
