"""`task: free_benchmark` on results that are right, and on results with a fault.

Truth is torch on the CPU, and the fault that was planted.
"""

import json
import math

import pytest
import torch
from torch.nn import functional

from tests.dump.online.steps import FaultyKernels, rows_of, summary_of, tried
from tests.full_disk import room_for
from trainermon import PrecisionDebugger
from trainermon.accuracy.judge import Judgement, Status
from trainermon.core.errors import ConfigError
from trainermon.dump.debugger_config import read_debugger_config
from trainermon.dump.online.findings import CallFinding, FindingsFile

MSPROBES = ["rank", "pert_mode", "stage", "step", "api_name", "max_rel", "dtype", "shape", "output_index"]
PRINTED = {
    "task": "free_benchmark",
    "dump_path": "./dump_path",
    "rank": [],
    "step": [],
    "level": "L1",
    "free_benchmark": {
        "scope": [],
        "list": [],
        "fuzz_device": "npu",
        "pert_mode": "improve_precision",
        "handler_type": "check",
        "fuzz_level": "L1",
        "fuzz_stage": "forward",
        "if_preheat": False,
        "preheat_step": 15,
        "max_sample": 20,
    },
}


X, WEIGHT = torch.randn(18, 16, generator=torch.Generator().manual_seed(0)).split([6, 12])


def healthy():
    return functional.gelu(functional.linear(X, weight=WEIGHT)).softmax(-1)


def test_the_configuration_that_the_manual_prints_is_read():
    config, notes = read_debugger_config(PRINTED)

    assert (config.task, notes) == ("free_benchmark", ())
    assert (config.free_benchmark.pert_mode, config.free_benchmark.max_sample) == ("improve_precision", 20)


@pytest.mark.parametrize(
    ("block", "found"),
    [
        ({"pert_mode": "to_cpu"}, r"fuzz_device: found 'npu', expected cpu with pert_mode to_cpu"),
        ({"fuzz_device": "cpu"}, r"fuzz_device: found 'cpu', expected cpu with pert_mode to_cpu, and only then"),
        ({"pert_mode": "noise"}, r"pert_mode: found 'noise'"),
        ({"fuzz_level": "L2"}, r"fuzz_level: found 'L2', expected L1"),
        ({"fuzz_stage": "backward"}, r"list: .*with fuzz_stage backward"),
        ({"handler_type": "fix", "pert_mode": "add_noise"}, r"pert_mode: .* with handler_type fix"),
        ({"handler_type": "fix", "if_preheat": True}, r"if_preheat: .* with handler_type fix"),
        ({"handler_type": "fix", "fuzz_stage": "backward", "list": ["a"]}, r"fuzz_stage: .* with handler_type fix"),
        ({"preheat_step": 0}, r"preheat_step: found 0"),
        ({"if_preheat": "yes"}, r"if_preheat: found 'yes', expected true or false"),
        ({"pert_mod": "to_cpu"}, r"pert_mod: unknown key; did you mean 'free_benchmark.pert_mode'"),
    ],
)
def test_what_does_not_go_together_is_refused(block, found):
    with pytest.raises(ConfigError, match=found):
        read_debugger_config({**PRINTED, "free_benchmark": block})


def test_a_sound_step_has_no_row_and_a_file_with_msprobes_columns(tmp_path):
    assert tried(tmp_path, healthy) == []

    header = (tmp_path / "dump/step0/rank0/free_benchmark.csv").read_text().splitlines()[0].split(",")
    assert header[:9] == MSPROBES
    assert summary_of(tmp_path)["results"] == {"pass": 3}


def test_every_call_is_a_row_if_that_is_asked_for(tmp_path):
    rows = tried(tmp_path, healthy, report="all", steps=2)

    assert [row["api_name"] for row in rows] == [
        "Functional.linear.0.forward", "Functional.gelu.0.forward", "Tensor.softmax.0.forward",
    ]  # fmt: skip
    assert {(row["step"], row["status"], row["dtype"]) for row in rows} == {("1", "pass", "float32")}
    assert {row["line"].partition(":")[0] for row in rows} == {"test_free_benchmark.py"}


def test_one_nan_is_an_error_without_any_process_group(tmp_path):
    def plant(result):
        result.view(-1)[5] = math.nan

    def step():
        with FaultyKernels(plant, "gelu"):
            healthy()

    [row, *_] = tried(tmp_path, step)

    assert (row["api_name"], row["status"], row["reason"]) == ("Functional.gelu.0.forward", "error", "not finite")
    assert (row["index"], row["place"], row["max_rel"]) == ("[0, 5]", "element [0, 5], 1 element", "nan")


def test_a_fault_in_the_first_part_of_a_large_result_is_found(tmp_path):
    """64 MiB are four parts to the other tool, and the last one's maximum replaces those before."""
    x = torch.rand(1 << 24)

    def plant(result):
        result[7] *= 1.5

    def step():
        with FaultyKernels(plant, "abs"):
            x.abs()

    [row] = tried(tmp_path, step)

    assert (row["status"], row["index"]) == ("error", "[7]")
    assert float(row["max_rel"]) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_scale_is_found_in_small_results_too(tmp_path, dtype):
    x = (torch.rand(64) * 1e-4).to(dtype)

    def step():
        with FaultyKernels(lambda result: result.mul_(2), "mul"):
            x * x

    [row] = tried(tmp_path, step)

    assert (row["api_name"], row["status"]) == ("Tensor.__mul__.0.forward", "error")


def test_what_a_function_overwrites_is_tried_with_what_was_there_before(tmp_path):
    given = torch.rand(8)

    def step():
        x = given.clone()
        x.exp_().mul_(2)
        functional.relu(x, inplace=True)
        torch.add(x, x, out=torch.empty(8))
        functional.batch_norm(x.view(4, 2), torch.zeros(2), torch.ones(2), training=True)

    rows = tried(tmp_path, step, report="all")

    assert [row["status"] for row in rows] == ["pass"] * 5


def test_names_choose_calls(tmp_path):
    rows = tried(tmp_path, healthy, report="all", list=["gelu"])
    scope = ["Functional.gelu.0.forward", "Tensor.softmax.0.forward"]

    assert [row["api_name"] for row in rows] == ["Functional.gelu.0.forward"]
    assert len(tried(tmp_path / "..", healthy, report="all", scope=scope)) >= 2


def test_every_call_has_its_turn(tmp_path):
    tried(tmp_path, healthy, report="all", every=3, steps=3)

    names = [row["api_name"].split(".")[1] for step in range(3) for row in rows_of(tmp_path, step)]
    assert sorted(names) == ["gelu", "linear", "softmax"]


def test_a_spent_budget_is_continued_where_it_ended(tmp_path):
    tried(tmp_path, healthy, report="all", budget_ms=1e-6, steps=4)

    names = [[row["api_name"].split(".")[1] for row in rows_of(tmp_path, step)] for step in range(4)]
    assert names == [["linear"], ["gelu"], ["softmax"], ["linear"]]


def test_an_error_of_its_own_is_counted_and_training_goes_on(tmp_path, monkeypatch):
    from trainermon.dump.online import trials

    def fail(*_args, **_kwargs):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(trials, "judge_call", fail)

    assert tried(tmp_path, healthy, report="all") == []
    assert summary_of(tmp_path)["skipped"] == {"ZeroDivisionError: planted": 3}


def test_too_large_calls_are_left_out_and_counted(tmp_path):
    tried(tmp_path, healthy, max_elements=100)

    assert summary_of(tmp_path)["skipped"]["more than max_elements"] == 1
    assert summary_of(tmp_path)["calls"] == 2


def test_a_level_of_modules_becomes_that_of_functions(tmp_path):
    config, notes = read_debugger_config({**PRINTED, "level": "mix"})

    assert config.level == "L1"
    assert notes == ("level is L1: task free_benchmark is about functions",)
    assert json.dumps(PRINTED)
    PrecisionDebugger.close()


def test_the_losss_own_backward_is_tried_too(tmp_path):
    weight = torch.randn(5, 16, requires_grad=True, generator=torch.Generator().manual_seed(0))

    def step():
        functional.cross_entropy(functional.linear(X, weight), torch.arange(6) % 5).backward()

    rows = tried(tmp_path, step, report="all", fuzz_stage="backward", list=["cross_entropy", "linear"])

    assert [(row["api_name"], row["status"]) for row in rows] == [
        ("Functional.cross_entropy.0.backward", "pass"),
        ("Functional.linear.0.backward", "pass"),
        ("Functional.linear.0.backward", "pass"),
    ]


def second_row_lost(result):
    result[1] = 0


@pytest.mark.parametrize(
    ("step", "operator", "modes"),
    [
        (lambda: X @ X.T, "mm", ["change_value:batch"]),
        (lambda: functional.silu(X), "silu", ["change_value:batch"]),
    ],
)
def test_a_row_that_is_lost_shows_when_rows_change_places(tmp_path, step, operator, modes):
    def spoiled():
        with FaultyKernels(second_row_lost, operator):
            step()

    sound = tried(tmp_path, step, report="all", pert_mode="change_value")
    assert {row["status"] for row in sound} == {"pass"}
    assert [row["pert_mode"] for row in tried(tmp_path, spoiled, pert_mode="change_value")] == modes


def test_a_sum_that_leaves_out_its_end_shows_when_its_terms_change_places(tmp_path):
    class Short(FaultyKernels):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            is_sum = "sum" in str(func) and args[0].dtype is torch.float32
            return func(args[0].flatten()[:-1]) if is_sum else func(*args, **(kwargs or {}))

    def spoiled():
        with Short(second_row_lost):
            X.sum()

    assert {row["status"] for row in tried(tmp_path, X.sum, report="all", pert_mode="change_value")} == {"pass"}
    [row] = tried(tmp_path, spoiled, pert_mode="change_value")
    assert (row["pert_mode"], row["reason"]) == ("change_value:order", "relation order does not hold")


def test_rows_that_do_not_fit_on_the_disk_are_counted_and_none_is_torn(tmp_path, caplog):
    for number in range(2):
        file = FindingsFile(tmp_path / "dump" / f"step{number}" / "rank0", rank=0, step=number, takes_all=True)
        with room_for(400):
            for key in range(9):
                judgement = Judgement(status=Status.PASS)
                name = f"Torch.add.{key}.forward"
                file.add(CallFinding(key=name, mode="add_noise", stage="forward", number=0, judgement=judgement))
            file.close()

    written = [row["api_name"] for row in rows_of(tmp_path, 1)]
    assert 0 < len(written) < 9
    assert written == [f"Torch.add.{key}.forward" for key in range(len(written))]
    assert (tmp_path / "dump/step1/rank0/free_benchmark.csv").read_text().endswith("\n")
    assert summary_of(tmp_path, 1)["rows_lost"] == 9 - len(written)
    assert ["File too large; rows are lost" in record.getMessage() for record in caplog.records] == [True]


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path, caplog):
    (tmp_path / "dump").write_text("")

    with pytest.raises(NotADirectoryError):  # of the test's own look at the rows
        tried(tmp_path, healthy, steps=2)

    [record] = caplog.records
    assert "Not a directory; rows are lost" in record.getMessage()
    assert record.exc_info is None
