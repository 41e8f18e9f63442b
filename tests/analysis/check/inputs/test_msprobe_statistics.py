"""Dumps of statistics as msprobe 26 and 8 write them (`record_step.py`): what is judged, reproduced and followed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.analysis.check.test_ops import Spoiled
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import DumpChecker
from trainermon.cli import main

RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.fixture(params=["msprobe_26", "msprobe_8"])
def dump(request, tmp_path):
    """Return the folder of the dump: its file holds the calls apart from what stands above them."""
    parts = json.loads((RECORDED / request.param / "statistics.json").read_text())
    folder = tmp_path / "dump" / "step0" / "rank0"
    folder.mkdir(parents=True)
    (folder / "dump.json").write_text(json.dumps(parts["head"] | {"data": parts["calls"]}))
    return folder


def checked(dump):
    checker = DumpChecker(dump, device="cpu")
    return {call.key: call for call in map(checker.check, range(len(checker.keys)))}


def test_every_call_of_a_sound_device_is_right(dump):
    calls = checked(dump)

    forwards = [call for key, call in calls.items() if key.endswith(".forward")]
    assert len(forwards) >= 7
    assert {call.key for call in forwards if call.status is not Status.PASS} == set()
    assert not [call for call in calls.values() if call.status in (Status.ERROR, Status.WARNING)]
    assert sum(call.status is Status.PASS for call in calls.values() if call.is_backward) >= 5


def test_a_wrong_kernel_is_found(dump):
    with Spoiled(torch.ops.aten._log_softmax, lambda result: result.mul_(1.01)):
        found = [key for key, call in checked(dump).items() if call.status is Status.ERROR]

    assert found[0] == "Functional.cross_entropy.0.forward"


def test_a_call_becomes_a_script(dump, tmp_path, capsys):
    words = ["script", str(dump), "Functional.cross_entropy.0", "--data", "random", "--seed", "3"]
    assert main([*words, "-o", str(tmp_path / "case")]) == 0

    assert "random inputs of seed 3\nagain on cpu: pass" in capsys.readouterr().out
    logits, labels = torch.load(tmp_path / "case" / "inputs.pt", weights_only=True)
    recorded = json.loads((dump / "dump.json").read_text())["data"]["Functional.cross_entropy.0.forward"]
    assert logits.max().item() == pytest.approx(recorded["input_args"][0]["Max"])
    assert set(labels.tolist()) <= set(range(5))


def test_a_call_without_random_inputs_is_refused(dump, capsys):
    assert main(["script", str(dump), "Functional.linear.0"]) == 1

    assert "its tensors were not dumped: expected a dump with task tensor" in capsys.readouterr().err


def test_a_step_of_them_that_is_followed_stays_where_it_is(dump, capsys):
    """What is followed is what the training computed, and statistics do not say that."""
    assert main(["check", "follow", str(dump.parents[1]), "--once"]) == 1

    assert "step0 is left where it is: no call could be judged: its tensors were not" in capsys.readouterr().err
    assert (dump / "dump.json").is_file()
