"""Dumps with statistics alone, checked on a device with random inputs: the CPU, sound or with a spoiled kernel."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.analysis.check.test_ops import Spoiled
from tests.recorded_dump import record_dump
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import DumpChecker
from trainermon.analysis.check.inputs.options import CallInputs, InputData
from trainermon.cli import main

CPU = ["--device", "cpu"]


class Decoder(nn.Module):
    """A small transformer with a loss: embedding, attention by hand and fused, norms, masks, labels to be ignored."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 50)
        self.mixed, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        query, key, value = self.mixed(self.norm(x)).chunk(3, -1)
        scores = query @ key.transpose(-1, -2) / 32**0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        x = x + scores.masked_fill(mask, float("-inf")).softmax(-1) @ value
        x = x + functional.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
        x = functional.dropout(x + self.down(functional.silu(self.up(x))), 0.1)
        best = self.head(x).topk(5, -1)
        logits = self.head(x).scatter(-1, best.indices, best.values)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return the folder of a dump of statistics of a step."""
    folder = tmp_path_factory.mktemp("statistics")
    torch.manual_seed(0)
    model, tokens = Decoder(), torch.randint(0, 50, (2, 12))
    labels = torch.where(torch.rand(2, 12) < 0.2, -100, tokens)
    return record_dump(folder, lambda: model(tokens, labels).backward(), model=model, task="statistics", level="L1")


def verdicts(directory, name="", **inputs):
    checker = DumpChecker(directory, wanted=lambda key: name in key, device="cpu", inputs=CallInputs(**inputs))
    return [checker.check(number) for number in range(len(checker.keys))]


def test_a_sound_device_has_no_error_with_any_seed(directory):
    calls = verdicts(directory, samples=2)

    assert [(call.key, call.reason) for call in calls if call.status is Status.ERROR] == []
    judged = [call for call in calls if call.status is not Status.SKIP]
    assert len(judged) >= 0.8 * len(calls), {call.key: call.reason for call in calls if call.status is Status.SKIP}


def test_a_wrong_kernel_is_found_and_the_seed_is_named(directory):
    with Spoiled(torch.ops.aten.silu, lambda result: result.mul_(1.001)):
        [call] = verdicts(directory, "silu.0.forward", seed=7)

    assert (call.status, call.reason) == (Status.ERROR, "inexact; random inputs of seed 7")


def test_a_wrong_kernel_of_a_backward_is_found(directory):
    with Spoiled(torch.ops.aten.silu_backward, lambda result: result.mul_(1.01)):
        [call] = verdicts(directory, "silu.0.backward")

    assert (call.status, call.slots) == (Status.ERROR, ("input.0",))


def test_of_several_seeds_the_worst_counts(directory):
    runs = iter(range(100))

    def spoil(result):
        if result.device.type == "cpu" and next(runs) == 2:
            result.mul_(1.001)

    with Spoiled(torch.ops.aten.silu, spoil):
        [call] = verdicts(directory, "silu.0.forward", samples=4)

    assert call.reason == "inexact; random inputs of seed 2"


def test_without_a_device_statistics_are_refused(directory, capsys):
    assert main(["check", "run", str(directory)]) == 1
    assert "has statistics and no tensors: what was recorded belongs to other inputs" in capsys.readouterr().err

    assert main(["check", "run", str(directory), "--data", "random"]) == 1
    assert "--data random: what was recorded belongs to other inputs" in capsys.readouterr().err


def test_the_command_judges_statistics_with_a_device(directory, capsys):
    assert main(["check", "run", str(directory), *CPU, "--only", "*.linear.*", "--exit-code", "--json"]) == 0

    [found] = json.loads(capsys.readouterr().out)
    assert {call["status"] for call in found["calls"]} == {"pass"}


def test_inputs_do_not_depend_on_which_calls_came_before(directory):
    checker = DumpChecker(directory, wanted=lambda key: "linear" in key, device="cpu")
    numbers = range(len(checker.keys))

    assert [checker.check(number) for number in numbers] == [checker.check(number) for number in numbers[::-1]][::-1]


def test_recorded_tensors_are_not_asked_for_where_there_are_none(directory):
    [call] = verdicts(directory, "silu.0.forward", data=InputData.REAL)

    assert call.reason == "its tensors were not dumped: expected a dump with task tensor"


def test_a_script_takes_random_inputs_with_the_recorded_statistics(directory, tmp_path, capsys):
    config = {"dump_json_path": str(directory / "dump.json"), "api_name": "Functional.silu.0"}
    (tmp_path / "op.json").write_text(json.dumps({**config, "data_mode": "random_data", "random_seed": 3}))

    assert main(["script", "-i", str(tmp_path / "op.json"), "-o", str(tmp_path / "case")]) == 0

    assert capsys.readouterr().out.splitlines()[:2] == ["random inputs of seed 3", "again on cpu: pass"]
    assert (tmp_path / "case" / "inputs.pt").exists()
    form = json.loads((directory / "dump.json").read_text())["data"]["Functional.silu.0.forward"]["input_args"][0]
    [given] = [one for one in torch.load(tmp_path / "case" / "inputs.pt") if isinstance(one, torch.Tensor)]
    assert float(given.norm()) == pytest.approx(form["Norm"], rel=0.02)


def test_a_made_up_shape_makes_nothing(directory, tmp_path):
    dump = json.loads((directory / "dump.json").read_text())
    dump["data"]["Functional.silu.0.forward"]["input_args"][0]["shape"] = [1 << 20, 1 << 20]
    (tmp_path / "dump.json").write_text(json.dumps(dump))

    [call] = verdicts(tmp_path, "silu.0.forward")

    assert call.status is Status.SKIP
    assert "random ones have at most" in call.reason
