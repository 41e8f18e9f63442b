"""Pairs of dumps with tensors of every dtype and layout: a change is found, or said not to be judged."""

import json

import pytest
import torch
from torch import nn

from tests.tensor_kinds import DAMAGES, every_kind, numbers, unchanged_by
from trainermon import PrecisionDebugger
from trainermon.analysis.compare import compare
from trainermon.analysis.compare.answer.summary import headline
from trainermon.analysis.compare.items import OUTPUT
from trainermon.analysis.compare.noise import ROUNDOFF
from trainermon.analysis.compare.tensors import _LEAST_EXPONENT
from trainermon.analysis.compare.verdicts import ERROR, NOT_COMPARED, PASS, WARNING
from trainermon.dump.files.reader import read_dump

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: quantized, sparse and masked tensors may change
TASKS = {
    "statistics": {"task": "statistics"},
    "tensor": {"task": "tensor"},
    "md5": {"task": "statistics", "summary_mode": "md5"},
}


class Shows(nn.Module):
    """Gives each tensor to a module of its own."""

    def __init__(self, names):
        super().__init__()
        self.kinds = nn.ModuleDict({name: nn.Identity() for name in names})

    def forward(self, tensors):
        for name, tensor in tensors.items():
            self.kinds[name](tensor)


def dumped(folder, values, task):
    tensors = {f"{name}_": tensor for name, tensor in every_kind(values).items()}
    model = Shows(tensors)
    config = folder.with_suffix(".json")
    options = TASKS[task]
    config.write_text(
        json.dumps(
            {
                "task": options["task"],
                "dump_path": str(folder),
                "rank": [],
                "step": [],
                "level": "L0",
                options["task"]: {"summary_mode": options.get("summary_mode", "statistics")},
            }
        )
    )
    debugger = PrecisionDebugger(config_path=str(config))
    debugger.start(model)
    model(tensors)
    debugger.stop()
    debugger.close()
    return folder / "step0/rank0"


@pytest.fixture(scope="module", params=TASKS)
def dumps(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    sides = {"sound": numbers(), "again": numbers()}
    sides |= {name: damage(numbers()) for name, damage in DAMAGES.items()}
    found = {name: dumped(folder / name, values, request.param) for name, values in sides.items()}
    PrecisionDebugger.close()
    return request.param, found


def results(comparison):
    return {
        call.key.removeprefix("Module.kinds.").removesuffix("_.Identity.forward.0"): {
            row.result for row in call.rows if row.target.state == OUTPUT
        }
        for call in comparison.calls
        if ".kinds." in call.key
    }


def test_every_kind_is_read(dumps):
    _, folders = dumps
    dump = read_dump(folders["sound"])

    assert (dump.info.errors, dump.info.complete) == (0, True)
    assert all(record.max is not None for entry in dump.entries for record in entry.outputs)


def test_the_same_tensors_agree(dumps):
    _, folders = dumps

    (comparison,) = compare(folders["again"], folders["sound"])

    assert set().union(*results(comparison).values()) == {PASS}
    assert headline(comparison).startswith("The dumps agree")


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_passes(dumps, damage):
    task, folders = dumps

    (comparison,) = compare(folders[damage], folders["sound"])

    found = results(comparison)
    assert {name for name, result in found.items() if PASS in result} == unchanged_by(damage)
    if task != "statistics":
        assert not any(NOT_COMPARED in result for result in found.values())
    assert set().union(*found.values()) <= {ERROR, WARNING, PASS, NOT_COMPARED}


def test_integers_that_are_the_same_as_float64_are_told_apart(tmp_path):
    sides = []
    for name in ("one", "other"):
        model = nn.Identity()
        debugger = PrecisionDebugger(dump_path=tmp_path / name, level="L0", task="tensor")
        debugger.start(model)
        model(torch.tensor([2**60, 2**60 + (name == "other")]))
        debugger.stop()
        debugger.close()
        PrecisionDebugger.close()
        sides.append(tmp_path / name / "step0/rank0")

    (comparison,) = compare(*sides)

    assert PASS not in comparison.row_counts()


def test_every_type_with_a_roundoff_has_a_least_exponent():
    assert set(_LEAST_EXPONENT) == set(ROUNDOFF)
