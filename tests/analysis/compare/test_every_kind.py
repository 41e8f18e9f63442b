"""Pairs of dumps with tensors of every dtype and layout: a change is found, or said not to be judged."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.dumped_kinds import TASKS, all_dumps, kind_of
from tests.tensor_kinds import DAMAGES, unchanged_by
from trainermon import PrecisionDebugger
from trainermon.analysis.compare import compare
from trainermon.analysis.compare.answer.summary import headline
from trainermon.analysis.compare.items import OUTPUT
from trainermon.analysis.compare.noise import ROUNDOFF
from trainermon.analysis.compare.tensors import _LEAST_EXPONENT
from trainermon.analysis.compare.verdicts import ERROR, NOT_COMPARED, PASS, WARNING
from trainermon.dump.files.reader import read_dump

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: quantized, sparse and masked tensors may change


@pytest.fixture(scope="module", params=TASKS)
def dumps(request, tmp_path_factory):
    return request.param, all_dumps(tmp_path_factory.mktemp(request.param), request.param)


def results(comparison):
    return {
        kind_of(call.key): {row.result for row in call.rows if row.target.state == OUTPUT}
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
    within_rounding = {"float4_e2m1fn_x2"} if damage == "one element" and task == "tensor" else set()
    assert {name for name, result in found.items() if PASS in result} == unchanged_by(damage) | within_rounding
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


def gradients_of_samples(folder, *, task, level, scale=1.0):
    """Dump a step with gradients for each sample, as differential privacy takes them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    given = torch.randn(5, 6) * scale
    debugger = PrecisionDebugger(dump_path=folder, level=level, task=task)
    debugger.start(model)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights, sample):
        return torch.func.functional_call(model, weights, (sample[None],)).square().mean()

    torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, given)
    model(given).square().mean().backward()
    debugger.stop()
    debugger.close()
    PrecisionDebugger.close()
    return folder / "step0/rank0"


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_calls_inside_vmap_are_read_and_compared(tmp_path, task, level):
    one, other, changed = (
        gradients_of_samples(tmp_path / name, task=task, level=level, scale=scale)
        for name, scale in (("one", 1.0), ("other", 1.0), ("changed", 0.7))
    )

    dump = read_dump(one)
    (alike,) = compare(one, other)
    (apart,) = compare(changed, one)

    assert (dump.info.errors, dump.info.first_error) == (0, "")
    inside = next(entry for entry in dump.entries if entry.key == "Module.0.Linear.forward.0")
    assert inside.inputs[0].shape[0] == 5
    assert set(alike.row_counts()) == {PASS}
    assert headline(alike).startswith("The dumps agree")
    assert "Module.0.Linear.forward.0" in headline(apart) or not headline(apart).startswith("The dumps agree")


@pytest.mark.parametrize("tool", ["compare", "graph"])
def test_what_torch_says_of_kinds_of_tensors_is_not_on_the_screen(dumps, tool, tmp_path):
    _, folders = dumps
    options = ["-o", str(tmp_path / "out")]

    ran = subprocess.run(
        [sys.executable, "-m", "trainermon", tool, str(folders["again"]), str(folders["sound"]), *options],
        capture_output=True,
        text=True,
        check=False,
    )

    assert "Warning" not in ran.stdout + ran.stderr
    assert ran.returncode in (0, 3), ran.stderr
