"""Gradients as msprobe 26.2.0 recorded them (`record_step.py`): those of the last operation of each call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import check_dump
from trainermon.cli import main

RECORDED = Path(__file__).parent / "recorded" / "msprobe_26" / "step.json"


@pytest.fixture
def dump(tmp_path):
    """Return the dump of one step as msprobe lays it out."""
    recorded = json.loads(RECORDED.read_text())
    (tmp_path / "dump.json").write_text(json.dumps(recorded["head"] | {"data": recorded["calls"]}))
    folder = tmp_path / "dump_tensor_data"
    folder.mkdir()
    for name, numbers in recorded["tensors"].items():
        torch.save(torch.tensor(numbers), folder / name)
    return tmp_path


def backwards(dump):
    return {call.stem: call for call in check_dump(dump).calls if call.is_backward}


def test_every_backward_of_a_sound_step_passes(dump):
    found = backwards(dump)

    assert {stem: call.status for stem, call in found.items()} == dict.fromkeys(found, Status.PASS)
    assert len(found) == 8
    assert found["Functional.layer_norm.0"].slots == ("input.0", "input.2", "input.3")
    assert found["Functional.embedding.0"].slots == ("input.1",)
    # of a product of three dimensions the last operation gives its result another shape; of a cross entropy it picks
    assert found["Functional.linear.0"].slots == ("intermediate.0",)
    assert found["Functional.cross_entropy.0"].slots == ("intermediate.0",)


@pytest.mark.parametrize(
    ("stem", "number"),
    [
        ("Functional.layer_norm.0", 1),
        ("Functional.linear.1", 1),
        ("Torch.topk.0", 0),
        ("Functional.cross_entropy.0", 0),
    ],
)
def test_a_wrong_gradient_is_found(dump, stem, number):
    path = dump / "dump_tensor_data" / f"{stem}.backward.output.{number}.pt"
    torch.save(torch.load(path) * 1.01, path)

    wrong = [call for call in backwards(dump).values() if call.status is Status.ERROR]

    assert [call.stem for call in wrong] == [stem]


def test_a_wrong_gradient_is_saved_beside_the_right_one(dump, tmp_path):
    path = dump / "dump_tensor_data" / "Functional.layer_norm.0.backward.output.1.pt"
    right = torch.load(path)
    torch.save(right * 1.01, path)
    folder = tmp_path / "saved"

    assert main(["check", "run", str(dump), "--save", str(folder)]) == 0

    bench, device = (torch.load(one) for one in sorted(folder.rglob("Functional.layer_norm.0.backward.output.*.1.pt")))
    torch.testing.assert_close(bench, right.double(), rtol=1e-5, atol=1e-6)
    assert torch.equal(device, right * 1.01)


def test_gradients_of_another_computation_are_not_judged(dump):
    path = dump / "dump.json"
    whole = json.loads(path.read_text())
    gradients = whole["data"]["Functional.layer_norm.0.backward"]["output"]
    gradients.append(gradients[0])
    path.write_text(json.dumps(whole))

    call = backwards(dump)["Functional.layer_norm.0"]

    assert (call.status, call.reason) == (Status.SKIP, "the CPU computes it in other steps")


def test_a_backward_becomes_a_script(dump, tmp_path, capsys):
    for stem, said in (("Functional.layer_norm.0", "pass, pass, pass"), ("Functional.linear.0", "only summed")):
        assert main(["script", str(dump), f"{stem}.backward", "-o", str(tmp_path / stem)]) == 0
        assert f"recorded: {said}" in capsys.readouterr().out
