"""`AccuracyDispatch` and `PtdbgDispatch` on blocks of forward and backward, sound and with faults.

Truth is torch on the CPU, and the fault that was planted.
"""

import contextlib
import csv
import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.dump.online.steps import FaultyKernels
from tests.dump.workbench import BATCH, LENGTH, VOCABULARY, Network
from trainermon import AccuracyDispatch, PtdbgDispatch
from trainermon.core.errors import ConfigError

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def rows_below(folder):
    [path] = folder.rglob("accuracy_dispatch.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def summary_below(folder):
    [path] = folder.rglob("accuracy_dispatch.json")
    return json.loads(path.read_text())


def trained(make_block, dtype=torch.float32, steps=2):
    """Return losses, gradients, weights and the generator's state, with blocks around everything."""
    torch.manual_seed(7)
    model = Network().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        with make_block():
            loss = model(text[:, :-1], text[:, 1:])
            loss.backward()
            optimizer.step()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.zero_grad()
    return [*found, *model.state_dict().values(), torch.get_rng_state()]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reference", ["cpu", "device64"])
def test_a_training_keeps_every_bit_and_a_sound_one_has_no_error(tmp_path, reference, dtype):
    dispatch = AccuracyDispatch(reference, dump_path=tmp_path)

    plain, watched = trained(contextlib.nullcontext, dtype), trained(lambda: dispatch, dtype)

    assert all(map(torch.equal, plain, watched))
    assert [row for row in rows_below(tmp_path) if row["status"] == "error"] == []
    assert summary_below(tmp_path)["results"]["pass"] > 150
    unexpected = set(summary_below(tmp_path)["skipped"]) - {
        "random or undefined", "a view", "no number of a floating type",
    }  # fmt: skip
    assert unexpected == set()


def test_forward_and_backward_are_judged_in_one_block(tmp_path):
    layer = nn.Linear(16, 4, bias=False)

    with AccuracyDispatch(dump_path=tmp_path, report="all"):
        layer(X).square().sum().backward()

    stages = {(row["api_name"].split(".")[1], row["stage"]) for row in rows_below(tmp_path)}
    assert {("mm", "forward"), ("sum", "forward"), ("mm", "backward"), ("pow", "forward")} <= stages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reference", ["cpu", "device64"])
def test_a_scale_that_is_off_by_two_fails_below_one(tmp_path, reference, dtype):
    x = (X * 1e-3).to(dtype)

    with FaultyKernels(lambda r: r.mul_(2), "mul", "mm"), AccuracyDispatch(reference, dump_path=tmp_path) as dispatch:
        x * x, x @ x.T

    assert [(row["api_name"], row["status"]) for row in rows_below(tmp_path)] == [
        ("aten.mul.Tensor.0", "error"), ("aten.mm.default.0", "error"),
    ]  # fmt: skip
    assert [one.key for one in dispatch.failed] == ["aten.mul.Tensor.0", "aten.mm.default.0"]


def test_one_nan_in_a_gradient_is_found_and_its_inputs_are_saved(tmp_path):
    def plant(result):
        result.view(-1)[3] = math.nan

    x = X.clone().requires_grad_()
    with FaultyKernels(plant, "gelu_backward"), AccuracyDispatch(dump_path=tmp_path):
        functional.gelu(x).sum().backward()

    [row] = rows_below(tmp_path)
    assert (row["api_name"], row["stage"], row["reason"]) == ("aten.gelu_backward.default.0", "backward", "not finite")
    [saved] = tmp_path.rglob("*.pt")
    kept = torch.load(saved, weights_only=True)
    assert torch.equal(kept["args"][1], X)
    assert kept["output"].isnan().sum() == 1


def test_several_outputs_and_those_in_place_or_given_are_judged(tmp_path):
    def run():
        x = X.clone()
        x.sort(-1)
        functional.layer_norm(x, (16,))
        x.topk(3)
        torch.mm(x, x.T, out=torch.empty(8, 8))
        torch._foreach_mul_([x, torch.ones(2)], 3.0)
        x.add_(1).exp_()

    with AccuracyDispatch(dump_path=tmp_path, report="all"):
        run()

    found = [(row["api_name"].split(".")[1], row["status"]) for row in rows_below(tmp_path)]
    assert {status for _, status in found} == {"pass"}
    names = [name for name, _ in found]
    assert [names.count(name) for name in ("sort", "native_layer_norm", "topk", "mm", "_foreach_mul_", "exp_")] == [
        2, 3, 2, 1, 2, 1,
    ]  # fmt: skip


def test_a_fault_in_what_is_written_in_place_is_found(tmp_path):
    x = X.clone()

    with FaultyKernels(lambda result: result.add_(0.1), "exp_"), AccuracyDispatch(dump_path=tmp_path):
        x.exp_()

    [row] = rows_below(tmp_path)
    assert (row["api_name"], row["status"]) == ("aten.exp_.default.0", "error")


def test_what_draws_or_only_looks_is_left_out_by_its_schema(tmp_path):
    with AccuracyDispatch(dump_path=tmp_path, report="all"):
        functional.dropout(X, 0.5)
        X.view(16, 8).transpose(0, 1)
        torch.empty_like(X).bernoulli_(0.5)

    rows = [row for row in rows_below(tmp_path) if "mul" not in row["api_name"] and "div" not in row["api_name"]]
    assert rows == []
    assert summary_below(tmp_path)["skipped"]["a view"] == 2


def test_sampled_operators_have_their_turns_over_blocks(tmp_path):
    dispatch = AccuracyDispatch(sample=3, dump_path=tmp_path, report="all")

    for _ in range(3):
        with dispatch:
            X.exp(), X.sin(), X.cos()

    names = sorted(row["api_name"].split(".")[1] for row in rows_below(tmp_path))
    assert names == ["cos", "exp", "sin"]


def test_names_choose_operators(tmp_path):
    with AccuracyDispatch(only=["aten.sin"], dump_path=tmp_path, report="all"):
        X.exp(), X.sin()

    assert [row["api_name"] for row in rows_below(tmp_path)] == ["aten.sin.default.0"]


def test_an_error_of_its_own_is_counted_and_the_block_goes_on(tmp_path, monkeypatch):
    from trainermon.dump.online import dispatch

    monkeypatch.setattr(dispatch, "is_surely_right", lambda *_: 1 / 0)

    with AccuracyDispatch(dump_path=tmp_path):
        result = X.exp()

    assert torch.equal(result, X.exp())
    assert summary_below(tmp_path)["skipped"] == {"ZeroDivisionError: division by zero": 1}


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"reference": "gpu"}, "reference: found 'gpu', expected cpu or device64"),
        ({"sample": 0}, "sample: found 0"),
        ({"dump": "some"}, "dump: found 'some'"),
    ],
)
def test_what_is_impossible_is_refused(arguments, found):
    with pytest.raises(ConfigError, match=found):
        AccuracyDispatch(**arguments)


def test_msprobes_arguments_are_understood(tmp_path):
    with FaultyKernels(lambda r: r.mul_(2), "exp"), PtdbgDispatch("auto", dump_path=tmp_path, tag="first"):
        X.exp(), X.sin()
    with PtdbgDispatch("list", ["sin"], True, tmp_path, "second", 0):  # in the same second
        X.exp(), X.sin()

    first, second = sorted(tmp_path.iterdir())
    assert first.name.startswith("msprobe_first_")
    assert [row["api_name"] for row in rows_below(first)] == ["aten.exp.default.0"]
    assert [row["api_name"] for row in rows_below(second)] == ["aten.exp.default.0", "aten.sin.default.0"]
    assert sorted(path.stem for path in tmp_path.rglob("*.pt")) == ["aten.exp.default.0", "aten.sin.default.0"]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"dump_mode": "some"}, "dump_mode: found 'some'"),
        ({}, "dump_path: found None, expected a folder that exists"),
        ({"dump_path": ".", "api_list": ["no_such"]}, "names of torch.ops.aten"),
        ({"dump_path": ".", "process_num": -1}, "process_num: found -1"),
        ({"dump_path": ".", "debug": 1}, "debug: found 1"),
    ],
)
def test_msprobes_checks_are_made(arguments, found):
    with pytest.raises(ConfigError, match=found):
        PtdbgDispatch(**arguments)


def test_a_folder_that_cannot_be_written_costs_no_finding(tmp_path, caplog):
    (tmp_path / "file").touch()

    with FaultyKernels(lambda r: r.mul_(2), "mm"), AccuracyDispatch(dump_path=tmp_path / "file") as dispatch:
        X @ X.T

    assert [one.key for one in dispatch.failed] == ["aten.mm.default.0"]
    assert len([one for one in caplog.messages if "not written into" in one]) == 1


def test_factors_that_depend_on_how_the_input_lies_are_not_judged(tmp_path):
    sliced = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))[:, :6]

    with AccuracyDispatch(dump_path=tmp_path) as dispatch:
        torch.linalg.det(sliced), torch.linalg.slogdet(sliced)

    assert dispatch.failed == []


def test_blocks_of_a_process_add_up_in_both_files_and_replace_those_of_an_earlier_run(tmp_path):
    """A loop makes a new object for each of its steps."""
    calls = tmp_path / "rank0" / "calls"
    calls.mkdir(parents=True)
    (calls / "aten.mm.default.9.pt").touch()
    (tmp_path / "rank0" / "accuracy_dispatch.csv").write_text("of an earlier run\n")

    for _ in range(2):
        with FaultyKernels(lambda r: r.mul_(2), "mm"), AccuracyDispatch(dump_path=tmp_path):
            X @ X.T

    rows = rows_below(tmp_path)
    assert [(row["step"], row["api_name"]) for row in rows] == [("0", "aten.mm.default.0"), ("1", "aten.mm.default.1")]
    assert (summary_below(tmp_path)["step"], summary_below(tmp_path)["calls"]) == (1, 2)
    assert summary_below(tmp_path)["results"] == {"error": 2}
    assert sorted(path.name for path in calls.iterdir()) == ["aten.mm.default.0.pt", "aten.mm.default.1.pt"]
