"""What is kept of a model's settings; a difference in any of them is told by both commands that compare runs."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainermon import TrainerMon
from trainermon.analysis.diagnosis.against.settings import setting_differences
from trainermon.analysis.environment.compare import compare_packs
from trainermon.analysis.environment.differences import DifferenceLevel
from trainermon.analysis.environment.packs import read_pack
from trainermon.analysis.environment.rules import LevelRules
from trainermon.monitor.environment.model_settings import model_settings


class Model(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.word = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) for _ in range(depth))
        self.head = nn.Linear(4, 5, bias=False)
        self.attention_dropout = 0.2

    def forward(self, text):
        x = self.word(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_model_as_it_is_has_three_lines():
    assert model_settings([Model()]) == {
        "trainable": "all",
        "dtype": "float32",
        "dropout.blocks.*.*.p": 0.1,
        "dropout.attention_dropout": 0.2,
    }


@settings(max_examples=30)
@given(frozen=st.sets(st.integers(0, 5), max_size=6))
def test_the_numbers_of_frozen_blocks_can_be_read_back(frozen):
    model = Model(depth=6)
    for number in frozen:
        model.blocks[number][0].weight.requires_grad = False

    found = model_settings([model])

    said = found.get("frozen.blocks.*.*.weight", "")
    assert (found["trainable"] == "all") == (not frozen)
    expected = set() if not said else range(6) if said == "all" else numbers_of(said)
    assert set(expected) == frozen


def numbers_of(said):
    """Return the first numbers in a text like `1.0, 3.0`."""
    return {int(part.split(".")[0]) for part in said.split(", ")}


def freeze(model):
    model.blocks[1][0].weight.requires_grad = False


def halve(model):
    model.bfloat16()


def halve_one(model):
    model.head.bfloat16()


def tie(model):
    model.head.weight = model.word.weight


def drop_otherwise(model):
    model.blocks[2][1].p = 0.0


CHANGES: Mapping[Any, Mapping[str, Any]] = {
    freeze: {"trainable": ("9 of 10 parameters", "all"), "frozen.blocks.*.*.weight": ("1.0", None)},
    halve: {"dtype": ("bfloat16", "float32")},
    halve_one: {"dtype.head.weight": ("bfloat16, all", None)},
    tie: {"tied.head.weight": ("word.weight", None)},
    drop_otherwise: {"dropout.blocks.*.*.p": ([0.0, 0.1], 0.1)},
}


def attach(folder, change=None, *, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(3)
    model = Model()
    if change is not None:
        change(model)
    config = {"run_id": folder.name, "output_dir": str(folder.parent), "spool_dir": str(folder / "spool")}
    config |= {"agent": {"start": False}, "replay": {"enabled": False}}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with TrainerMon(config) as monitor:
        monitor.set_monitor(model, optimizer(trained, **{"lr": 0.1, **options}))
    return folder


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_both_commands_tell_what_the_model_is_set_to(change, tmp_path):
    ours, theirs = attach(tmp_path / "ours", change), attach(tmp_path / "theirs")

    comparison = compare_packs(read_pack(ours), read_pack(theirs), LevelRules())
    found = (row for row in comparison.rows if row.level is not DifferenceLevel.SAME)
    rows = {row.name: row.values for row in found if row.section == "model"}
    assert rows == CHANGES[change]
    said = setting_differences(ours, theirs)
    assert sorted(line.partition(" is ")[0] for line in said) == [f"model: {name}" for name in sorted(CHANGES[change])]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"betas": (0.9, 0.98)}, "betas"),
        ({"eps": 1e-6}, "eps"),
        ({"weight_decay": 0.5}, "weight_decay"),
        ({"lr": 0.2}, "lr"),
        ({"amsgrad": True}, "amsgrad"),
        ({"optimizer": torch.optim.NAdam}, "class"),
    ],
)
def test_both_commands_tell_what_the_optimizer_is_set_to(options, name, tmp_path):
    ours, theirs = attach(tmp_path / "ours", **options), attach(tmp_path / "theirs")

    comparison = compare_packs(read_pack(ours), read_pack(theirs), LevelRules())
    assert f"optimizer.{name}" in {row.name for row in comparison.rows if row.level is DifferenceLevel.ERROR}
    assert any(line.startswith(f"hyperparameters: optimizer.{name} is ") for line in setting_differences(ours, theirs))
