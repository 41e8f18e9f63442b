"""A dump that MindSpore made, compared with torch's of the same model, weights and batch.

The recorded one is of step 0 of `tests/dump/mindspore/small_model.py`, with MindSpore 2.10 on a CPU.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from trainermon.analysis.compare import compare
from trainermon.cli import main
from trainermon.dump import PrecisionDebugger

RECORDED = Path(__file__).parent / "recorded" / "mindspore"
EPSILON = 1e-7  # MindSpore's default
TORCHS_NAMES = {"gamma": "weight", "beta": "bias", "embedding_table": "weight"}


class Block(nn.Module):
    def __init__(self, epsilon):
        super().__init__()
        self.norm = nn.LayerNorm(8, eps=epsilon)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x, scale=1.0):
        return x + scale * self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *epsilons):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Block(epsilon) for epsilon in epsilons])
        self.head = nn.Linear(8, 10)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


@pytest.fixture
def dumped(tmp_path):
    """Return a function that dumps a step of torch with MindSpore's weights, changed by `change`, and its folder."""

    def dump(*epsilons, change=lambda _model: None):
        model = Model(*epsilons)
        with np.load(RECORDED / "weights.npz") as weights, torch.no_grad():
            theirs = {_torchs(name): weights[name] for name in weights if name != "ids"}
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(theirs.pop(name)))
            assert not theirs
            ids = torch.from_numpy(weights["ids"])
        change(model)
        debugger = PrecisionDebugger(dump_path=tmp_path / "torch", level="L0", task="statistics")
        debugger.start(model)
        (model(ids) ** 2).mean().backward()
        debugger.stop()
        PrecisionDebugger.close()
        return tmp_path / "torch" / "step0" / "rank0"

    yield dump
    PrecisionDebugger.close()


def _torchs(name):
    owner, _, last = name.rpartition(".")
    return f"{owner}.{TORCHS_NAMES.get(last, last)}"


def blamed(folder, capsys):
    main(["compare", str(folder), str(RECORDED)])
    return capsys.readouterr().out


def test_equal_models_agree(dumped, capsys):
    said = blamed(dumped(EPSILON, EPSILON), capsys)

    assert "0 error, 0 warning" in said
    assert "calls     0 error, 0 warning, 28 pass, 0 unmatched" in said


@pytest.mark.parametrize("number", [0, 1])
def test_another_epsilon_is_found(dumped, capsys, number):
    epsilons = [EPSILON, EPSILON]
    epsilons[number] = 0.1

    said = blamed(dumped(*epsilons), capsys)

    assert f"The first difference arose in Module.blocks.{number}.norm.LayerNorm.forward.0" in said


def test_another_weight_is_found(dumped, capsys):
    def change(model):
        with torch.no_grad():
            model.blocks[1].up.weight *= 1.3

    said = blamed(dumped(EPSILON, EPSILON, change=change), capsys)

    assert "The first difference arose in blocks.1.up.weight" in said or "blocks.1.up" in said.splitlines()[0]


def test_the_order_of_the_two_sides_does_not_matter(dumped, tmp_path):
    compare(RECORDED, dumped(EPSILON, EPSILON), output_path=tmp_path / "out")
    assert list((tmp_path / "out").glob("compare_result*.csv"))
