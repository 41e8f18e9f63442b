"""Distributed checkpoints of torch hold what torch's own converter makes of them."""

import shutil

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.analysis.checkpoint.assembled import assert_same, save_alone
from trainermon.analysis.checkpoint.opening import open_checkpoint
from trainermon.core.errors import CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of one process, and the state in it."""
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3, dtype=torch.bfloat16))
    weights = {**model.state_dict(), "turned": torch.randn(4, 6).t(), "scalar": torch.tensor(2.0)}
    moments = {
        name: {"exp_avg": torch.randn(value.shape), "step": torch.tensor(4.0)} for name, value in weights.items()
    }
    state = {"model": weights, "optim": {"state": moments, "lr": 0.5}, "step": 4}
    folder = tmp_path_factory.mktemp("dcp") / "saved"
    save_alone(state, folder)
    return folder, state


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of it, to be damaged."""
    return shutil.copytree(saved[0], tmp_path / "copied")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_tensors_are_those_of_torchs_converter(saved, tmp_path):
    dcp_to_torch_save(saved[0], tmp_path / "x.pt")
    expected = torch.load(tmp_path / "x.pt")

    found = open_checkpoint(saved[0])

    assert found.format == "dcp"
    assert_same(found.tensors, expected["model"])
    moments = expected["optim"]["state"]
    assert_same(found.optimizer["exp_avg"], {name: moment["exp_avg"] for name, moment in moments.items()})
    assert (found.step, found.values["optim.lr"]) == (4, 0.5)


def test_a_missing_file_of_a_rank_is_named(copied):
    (copied / "__0_0.distcp").unlink()

    with pytest.raises(CheckpointError, match=r"__0_0.distcp cannot be opened \(No such file"):
        open_checkpoint(copied)


def test_a_file_that_was_cut_is_named(copied):
    path = copied / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-200])

    with pytest.raises(CheckpointError, match=r"__0_0.distcp is cut off"):
        open_checkpoint(copied)


def test_empty_metadata_is_named(copied):
    (copied / ".metadata").write_bytes(b"")

    with pytest.raises(CheckpointError, match=r".metadata has 0 bytes"):
        open_checkpoint(copied)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        pytest.param(b"__0_0.distcp", b"/etc/hostnam", "outside its folder", id="absolute"),
        pytest.param(b"__0_0.distcp", b"../../../etc", "outside its folder", id="above"),
        pytest.param(b"K\x04K\x05\x86", b"K\x04K\x09\x86", "scalar|overlap|leave a gap|outside", id="a larger tensor"),
    ],
)
def test_metadata_that_cannot_be_true_is_refused(copied, old, new, fault):
    path = copied / ".metadata"
    before = path.read_bytes()
    assert old in before
    path.write_bytes(before.replace(old, new, 1))

    with pytest.raises(CheckpointError, match=fault):
        open_checkpoint(copied)
