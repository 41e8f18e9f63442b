"""Checkpoints of DeepSpeed and FSDP2 hold what the vendors' loaders make of them."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.analysis.checkpoint.assembled import assembled, assert_same
from tests.ranks import run_ranks
from trainermon.analysis.checkpoint.opening import open_checkpoint
from trainermon.core.errors import CheckpointError

FROZEN = ("inner.frozen.weight", "inner.frozen.bias")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(Path(__file__).with_name("sharded_worker.py"), str(folder))
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved / "zero1", tmp_path / "copied")


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_float32_weights_are_those_of_zero_to_fp32(saved, stage):
    expected = torch.load(saved / f"zero{stage}" / "main.truth")

    found = open_checkpoint(saved / f"zero{stage}")

    trained = {name: value for name, value in expected.items() if name not in FROZEN}
    assert_same(found.optimizer["main"], trained)
    assert found.layout == {"zero": stage, "dp": 2}
    if stage == 3:
        assert_same(found.tensors, expected)
    for name, moment in found.optimizer["exp_avg_sq"].items():
        values = assembled(moment)
        assert values.shape == expected[name].shape
        assert (values >= 0).all()
        assert values.any()


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_weights_are_those_of_the_engine(saved, stage):
    expected = torch.load(saved / f"zero{stage}" / "weights.truth")

    assert_same(open_checkpoint(saved / f"zero{stage}").tensors, expected)


@pytest.mark.distributed
def test_what_fsdp_saved_is_what_torchs_converter_makes_of_it(saved, tmp_path):
    dcp_to_torch_save(saved / "fsdp", tmp_path / "x.pt")
    expected = torch.load(tmp_path / "x.pt")

    found = open_checkpoint(saved / "fsdp")

    assert_same(found.tensors, expected["model"])
    moments = {name: state["exp_avg"] for name, state in expected["optim"]["state"].items()}
    assert_same(found.optimizer["exp_avg"], moments)
    assert max(len(tensor.pieces) for tensor in found.tensors.values()) == 2


@pytest.mark.distributed
def test_a_missing_file_of_a_rank_is_an_error(copied):
    next(copied.glob("*/*zero_pp_rank_1_*")).unlink()

    with pytest.raises(CheckpointError, match=r"has 1 files of optimizer states at stage 1, expected 2"):
        open_checkpoint(copied)


@pytest.mark.distributed
def test_a_tracker_that_names_nothing_is_an_error(copied):
    (copied / "latest").write_text("global_step9")

    with pytest.raises(CheckpointError, match=r"latest names 'global_step9', which is no folder there"):
        open_checkpoint(copied)


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 3])
def test_what_ds_to_universal_writes_is_what_it_was_made_of(saved, stage):
    expected = torch.load(saved / f"zero{stage}" / "main.truth")
    before = open_checkpoint(saved / f"zero{stage}")

    found = open_checkpoint(saved / f"universal{stage}")

    trained = {name: value for name, value in expected.items() if name not in FROZEN}
    weights = torch.load(saved / f"zero{stage}" / "weights.truth")
    assert_same({name: found.optimizer["main"][name] for name in trained}, trained)
    frozen = {name: weights[name].float() if stage == 1 else weights[name] for name in FROZEN}  # converted at stage 1
    assert_same(found.tensors, {**trained, **frozen})
    for kind in ("exp_avg", "exp_avg_sq"):
        for name, moment in before.optimizer[kind].items():
            assert assembled(found.optimizer[kind][name]).tobytes() == assembled(moment).tobytes()


def test_a_universal_checkpoint_has_a_folder_for_each_parameter(tmp_path):
    weight, moment = torch.randn(3, 4), torch.randn(3, 4)
    place = tmp_path / "step1_universal" / "zero" / "layer.weight"
    place.mkdir(parents=True)
    (tmp_path / "latest_universal").write_text("step1_universal")
    torch.save({"param": weight, "cat_dim": 0}, place / "fp32.pt")
    torch.save({"param": moment, "cat_dim": 0}, place / "exp_avg.pt")

    found = open_checkpoint(tmp_path)

    assert found.format == "universal"
    assert_same(found.tensors, {"layer.weight": weight})
    assert_same(found.optimizer["exp_avg"], {"layer.weight": moment})
    (place / "fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"holds no tensor|has no fp32.pt|none of the files"):
        open_checkpoint(tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_saved_without_frozen_parameters_is_not_called_whole(saved, stage):
    whole, bare = (open_checkpoint(saved / f"zero{stage}{suffix}") for suffix in ("", "_bare"))

    assert set(whole.tensors) - set(bare.tensors) == set(FROZEN)
    assert (whole.missing, whole.unsaid) == ((), ())
    assert "2 parameters have no state of the optimizer" in " ".join(whole.notes)
    if stage == 1:  # the file of a model without frozen parameters is the same
        assert "ZeRO 1 saves no names of them" in bare.unsaid[0]
    else:
        assert "saved without frozen parameters" in bare.missing[0]
