"""Files with tensors of every dtype in every layout: a change is found, or the tensor is said not to be read."""

import contextlib
import io
import json

import pytest
import torch

from tests.tensor_kinds import numbers
from tests.tensor_pairs import SIDES, is_equal, pairs
from trainermon.analysis.checkpoint.comparison import compare_checkpoints
from trainermon.analysis.checkpoint.opening import open_checkpoint
from trainermon.analysis.checkpoint.verdicts import SAME
from trainermon.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: quantized, sparse and masked tensors may change


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder, in which each side is a checkpoint and a folder of files, and the tensors by side and name."""
    folder = tmp_path_factory.mktemp("pairs")
    found = {side: {} for side in SIDES}
    for side, change in SIDES.items():
        (folder / side).mkdir()
        for name, tensor in pairs(change(numbers())).items():
            written = io.BytesIO()
            with contextlib.suppress(AttributeError, KeyError, RuntimeError):  # torch does not save them all
                torch.save(tensor, written)
                (folder / side / f"{name}.pt").write_bytes(written.getvalue())
                found[side][name] = tensor
        torch.save(found[side], folder / f"{side}.pt")
    return folder, found


def equal_in(tensors, side):
    return {
        name
        for name, tensor in tensors[side].items()
        if is_equal(tensor, tensors["sound"][name], name.partition(" ")[2])
    }


@pytest.mark.parametrize("side", ["again", "zeroed", "negated"])
def test_a_changed_tensor_is_no_equal_file(saved, side, capsys):
    folder, tensors = saved

    assert main(["tensor", "diff", str(folder / side), str(folder / "sound"), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    unread = {name_in(text.partition(":")[0]) for text in found["unread"]}
    differing = {name_in(pair["ours"]) for pair in found["pairs"] if pair["differing"]}
    same = {name_in(pair["ours"]) for pair in found["pairs"]} - differing
    equal = equal_in(tensors, side)
    assert same == equal - unread
    assert same | differing | unread == set(tensors["sound"])
    assert {name.partition(" ")[2] for name in unread} >= {"meta", "wrapped"}


def name_in(path):
    return path.rpartition("/")[2].partition(".pt")[0]


@pytest.mark.parametrize("side", ["again", "zeroed", "negated"])
def test_a_changed_tensor_is_no_equal_weight(saved, side):
    folder, tensors = saved
    other, sound = (open_checkpoint(folder / f"{name}.pt") for name in (side, "sound"))

    found = compare_checkpoints(other, sound)

    equal = equal_in(tensors, side)
    unread = {name.rpartition(" (")[0] for name in sound.unread}
    assert {weight.name for weight in found.tensors if weight.verdict in SAME} == equal - unread
    assert set(sound.tensors) | unread == set(tensors["sound"])
    assert {value.key for value in found.values} <= unread - equal
    assert all("torch." not in f"{value.ours} {value.theirs}" for value in found.values)
