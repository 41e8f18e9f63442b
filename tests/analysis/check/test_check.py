"""`trainermon check run` on dumps of a small model, sound and with faults that a dispatch mode plants."""

import csv
import json
import math
import os
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests import recorded_dumps
from trainermon import PrecisionDebugger
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import check_dump, dumps_below
from trainermon.cli import main
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import read_dump


class Faulty(TorchDispatchMode):
    """A device whose matrix products are altered."""

    def __init__(self, alter):
        super().__init__()
        self._alter = alter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.linear):
            self._alter(result.view(-1))
        return result


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.norm(self.up(x)))).softmax(-1)


def dumped(folder, *, task="tensor", level="L1", dtype=torch.float32, alter=None, autocast=False):
    torch.manual_seed(0)
    model, x = Model().to(dtype), torch.randn(16, 32, dtype=dtype)
    debugger = PrecisionDebugger(dump_path=str(folder), task=task, level=level)
    try:
        debugger.start(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if alter is None:
                model(x)
            else:
                with Faulty(alter):
                    model(x)
        debugger.stop()
        debugger.step()
    finally:
        PrecisionDebugger.close()
    [directory] = dumps_below(folder)
    return directory


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    PrecisionDebugger.close()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_step_has_no_error(tmp_path, dtype, autocast):
    check = check_dump(dumped(tmp_path, dtype=dtype, autocast=autocast))

    assert [call.key for call in check.of(Status.PASS)][:1] == ["Functional.linear.0.forward"]
    assert check.of(Status.ERROR) == check.of(Status.WARNING) == []


def recorded(folder, step):
    return recorded_dumps.recorded(folder, step, risk_level="ALL")


def test_a_number_is_compared_as_the_kernel_does(tmp_path):
    def step():
        tenths = torch.full((3,), 0.1)
        assert bool((tenths == 0.1).all())
        torch.gt(tenths.bfloat16(), 0.1)
        nn.functional.hardshrink(tenths.bfloat16(), 0.1)

    assert check_dump(recorded(tmp_path, step)).of(Status.ERROR) == []


def test_a_list_that_the_dump_cut_is_not_judged(tmp_path):
    [call] = [
        call
        for call in check_dump(recorded(tmp_path, lambda: torch.stack([torch.zeros(1)] * 1100))).calls
        if "stack" in call.key
    ]

    assert (call.status, call.reason) == (Status.SKIP, "a list has 1024 items, at which dumps cut it")


def test_autocast_of_another_device_costs_no_entry(tmp_path):
    def step():
        with torch.autocast("cpu", torch.bfloat16):
            torch.relu(torch.empty(3, device="meta"))

    [entry] = [one for one in read_dump(recorded(tmp_path, step)).entries if "relu" in one.key]

    assert entry.autocast == ""


@pytest.mark.parametrize(
    "change",
    [
        {"input_args": None},
        {"input_kwargs": [1]},
        {"input_args": [{"type": "slice", "value": 5}]},
        {"input_args": [{"type": "torch.Size", "value": None}]},
        {"input_args": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": None}]},
        {"input_args": [{"type": "torch.dtype", "value": "torch.load"}]},
        {"output": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [math.nan]}]},
        {"output": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": ["4"]}]},
        {"input_args": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [10**400]}]},
        {"input_args": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4], "Max": 10**400}]},
        {"input_kwargs": {"approximate": int("7" * 4200)}},
    ],
)
def test_a_damaged_entry_costs_no_other(tmp_path, change):
    directory = dumped(tmp_path)
    path = directory / "dump.json"
    whole = json.loads(path.read_text())
    whole["data"]["Functional.gelu.0.forward"] |= change
    path.write_text(json.dumps(whole))

    found = {call.key: call for call in check_dump(directory).calls}

    assert found.pop("Functional.gelu.0.forward").status is Status.SKIP
    assert {call.status for call in found.values()} == {Status.PASS}
    assert main(["check", "overflow", str(directory)]) == 0


def test_a_damaged_entry_costs_its_backward_alone(tmp_path, capsys):
    torch.manual_seed(0)
    x = torch.randn(8, 8, requires_grad=True)
    directory = recorded(tmp_path, lambda: (x.exp() * 2).sin().sum().backward())
    path = directory / "dump.json"
    whole = json.loads(path.read_text())
    whole["data"]["Tensor.exp.0.backward"]["output"][0]["shape"] = [math.nan]
    path.write_text(json.dumps(whole))

    assert main(["check", "run", str(directory), "-o", str(tmp_path / "out"), "-f", "csv,html,md"]) == 0
    printed = capsys.readouterr().out
    assert "skipped 1: its entry is damaged" in printed
    assert "is wrong" not in printed


def test_what_torch_warns_of_is_not_said_again(tmp_path, recwarn):
    x = torch.randn(3, dtype=torch.complex64)

    def step():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x.to(torch.float32)

    directory = recorded(tmp_path, step)
    recwarn.clear()
    check_dump(directory)

    assert [str(one.message) for one in recwarn] == []


def test_a_pipe_in_place_of_a_tensor_file_is_not_waited_for(tmp_path):
    directory = dumped(tmp_path)
    taken = min((directory / "dump_tensor_data").glob("Functional.gelu.0.forward.output*"))
    taken.unlink()
    os.mkfifo(taken)

    assert {call.key for call in check_dump(directory).of(Status.SKIP)} >= {"Functional.gelu.0.forward"}


def test_msprobes_options_are_understood(tmp_path, capsys):
    directory = dumped(tmp_path / "dump")
    words = ["-api_info", str(directory / "dump.json"), "--out_path", str(tmp_path / "out"), "-j", "-d", "0", "1"]

    assert main(["check", "run", *words]) == 0
    assert "-j and -d have no effect" in capsys.readouterr().err
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".csv", ".csv", ".json"]
    assert main(["check", "run"]) == 1
    assert "expected a dump" in capsys.readouterr().err


def test_a_dump_says_what_autocast_had(tmp_path):
    entries = read_dump(dumped(tmp_path, autocast=True)).entries

    assert {entry.autocast for entry in entries} == {"torch.bfloat16"}
    assert {entry.autocast for entry in read_dump(dumped(tmp_path / "without")).entries} == {""}


def plant_nan(values):
    values[7] = math.nan


def lose_the_tail(values):
    values[-64:] = 0


def double(values):
    values *= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("alter", "headline"),
    [
        (plant_nan, "1 of 5 forward calls is wrong"),  # in what comes after, the NaN is the right result of a NaN
        (lose_the_tail, "2 of 5 forward calls are wrong"),
        (double, "2 of 5 forward calls are wrong"),
    ],
)
def test_a_fault_of_the_device_is_named_with_the_call_that_had_it_first(tmp_path, capsys, dtype, alter, headline):
    directory = dumped(tmp_path / "dump", dtype=dtype, alter=alter)

    status = main(["check", "run", str(directory), "--exit-code"])

    assert status == 3
    assert f"{headline}; first: Functional.linear.0.forward" in capsys.readouterr().out


def test_files_have_msprobes_columns_and_every_number(tmp_path, capsys):
    directory = dumped(tmp_path / "dump", alter=plant_nan)

    assert main(["check", "run", str(directory), "-o", str(tmp_path / "out")]) == 0
    assert main(["check", "run", str(directory), "--json"]) == 0

    [table] = (tmp_path / "out").glob("accuracy_checking_result_*.csv")
    with table.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:4] == ["API name", "Forward Test Success", "Backward Test Success", "Message"]
    assert (rows[0]["API name"], rows[0]["Forward Test Success"]) == ("Functional.linear.0", "error")
    [written] = (tmp_path / "out").glob("*.json")
    output = capsys.readouterr().out
    [printed] = json.loads(output[output.index("\n[") :])
    assert printed == json.loads(written.read_text())
    assert printed["calls"][0]["outputs"][0]["device_value"] == "NaN"
    assert printed["calls"][0]["outputs"][0]["device_nonfinite"] == 1


def test_modules_are_left_to_their_functions(tmp_path):
    check = check_dump(dumped(tmp_path, level="mix"))

    assert {call.key.partition(".")[0] for call in check.of(Status.PASS)} == {"Functional", "Tensor"}
    assert check.skipped == {"a module: its functions are judged": 3}  # the layers of the model


def test_json_is_all_that_is_printed_where_files_are_written_too(tmp_path, capsys):
    directory = dumped(tmp_path / "dump")

    assert main(["check", "run", str(directory), "--json", "-f", "csv", "-o", str(tmp_path / "out")]) == 0

    [found] = json.loads(capsys.readouterr().out)
    [table] = (tmp_path / "out").glob("accuracy_checking_result_*")
    with table.open(encoding="utf-8-sig", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(found["calls"]) == 5


def test_only_chosen_calls_are_judged(tmp_path, capsys):
    directory = dumped(tmp_path)

    main(["check", "run", str(directory), "--only", "*.linear.*", "--skip", "*.1.*", "--json"])

    [found] = json.loads(capsys.readouterr().out)
    assert [call["key"] for call in found["calls"]] == ["Functional.linear.0.forward"]


def test_a_dump_without_tensors_says_so_of_every_call(tmp_path, capsys):
    check = check_dump(dumped(tmp_path, task="statistics"))

    assert {call.status for call in check.calls} == {Status.SKIP}
    assert "its tensors were not dumped: expected a dump with task tensor" in check.skipped


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_one_stage_is_judged_alone(tmp_path, capsys, stage):
    weight = torch.ones(3, requires_grad=True)
    directory = recorded(tmp_path, lambda: (weight * 2).sum().backward())

    main(["check", "run", str(directory), "--stage", stage, "--json"])

    [found] = json.loads(capsys.readouterr().out)
    assert {call["key"].rpartition(".")[2] for call in found["calls"]} == {stage}


def test_a_damaged_tensor_costs_its_calls_only(tmp_path):
    directory = dumped(tmp_path)
    broken = min((directory / "dump_tensor_data").glob("Functional.gelu.0.forward.output*"))
    broken.write_bytes(b"no tensor")

    check = check_dump(directory)

    assert {call.key for call in check.of(Status.SKIP)} == {"Functional.gelu.0.forward", "Functional.linear.1.forward"}
    assert all("cannot be read" in call.reason for call in check.of(Status.SKIP))
    assert len(check.of(Status.PASS)) == len(check.calls) - 2


def test_a_folder_without_a_dump_is_refused(tmp_path, capsys):
    with pytest.raises(DumpError, match="holds no dump"):
        dumps_below(tmp_path)
    assert main(["check", "run", str(tmp_path)]) == 1
    assert "dump.json" in capsys.readouterr().err


def test_a_damaged_dump_costs_none_of_the_others(tmp_path, capsys):
    directory = dumped(tmp_path)
    broken = directory.parent / "rank1"
    broken.mkdir()
    (broken / "dump.json").write_text("{")

    assert main(["check", "run", str(tmp_path)]) == 0

    said = capsys.readouterr().out
    assert "all 5 forward calls are right" in said
    assert said.startswith(f"1 of 2 dumps could not be read as a whole: {broken}/dump.json is not JSON")


def test_complex_numbers_are_given_again(tmp_path):
    x = torch.randn(4)
    check = check_dump(recorded(tmp_path, lambda: (x * 2j, torch.add(x, 1 - 1j), torch.mul(x, complex(math.inf, 0)))))

    assert [call.status for call in check.calls] == [Status.PASS] * 3, check.calls


def test_an_argument_that_no_operation_takes_is_no_error(tmp_path):
    directory = recorded(tmp_path, lambda: torch.ones(3) * 2)
    path = directory / "dump.json"
    data = json.loads(path.read_text())
    data["data"]["Tensor.__mul__.0.forward"]["input_args"][1] = None
    path.write_text(json.dumps(data))

    [call] = [call for call in check_dump(directory).calls if "mul" in call.key]

    assert call.status is Status.SKIP


def test_a_gate_needs_something_that_was_judged(tmp_path, capsys):
    dump = dumped(tmp_path / "dump")
    assert main(["check", "run", str(dump), "--exit-code", "--only", "nothing*"]) == 1
    assert "no call was judged" in capsys.readouterr().err

    file = next(path for path in (dump / "dump_tensor_data").iterdir() if "softmax" in path.name)
    file.write_bytes(b"junk")
    for words in ([], ["--strict"]):
        assert main(["check", "run", str(dump), "--exit-code", *words]) == 4
        headline = capsys.readouterr().out.splitlines()[1]
        assert headline.startswith("  all ")
        assert headline.endswith("are right; 1 more call could not be read")


NESTED = json.loads("[" * 400 + "]" * 400)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [1, 2],
        "lost",
        {"input_args": NESTED},
        {"input_args": "lost"},
        {"input_args": [{"type": "slice", "value": 5}]},
        {"input_kwargs": [1]},
    ],
)
def test_an_entry_that_cannot_be_read_is_counted_and_is_no_pass(tmp_path, capsys, entry):
    directory = recorded(tmp_path, lambda: (torch.ones(3) * 2, torch.ones(3).exp()))
    path = directory / "dump.json"
    data = json.loads(path.read_text())
    (key,) = [key for key in data["data"] if "exp" in key]
    data["data"][key] = data["data"][key] | entry if isinstance(entry, dict) else entry
    path.write_text(json.dumps(data))

    assert main(["check", "run", str(directory), "--exit-code"]) == 4

    assert "right; 1 more call could not be read" in capsys.readouterr().out.splitlines()[1]


def test_a_tensor_of_another_shape_than_recorded_is_not_judged(tmp_path):
    dump = dumped(tmp_path)
    file = next(path for path in (dump / "dump_tensor_data").iterdir() if "softmax" in path.name)
    torch.save(torch.zeros(3, 5), file)

    [call] = [call for call in check_dump(dump).calls if "softmax" in call.key]

    assert (call.status, "has the shape [3, 5]" in call.reason) == (Status.SKIP, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--timeout", "inf"], "--timeout: found inf"),
        (["--device", "meta"], "--device meta: it computes nothing"),
    ],
)
def test_an_option_that_means_nothing_is_refused(tmp_path, capsys, options, message):
    assert main(["check", "run", str(dumped(tmp_path)), *options]) == 1
    assert message in capsys.readouterr().err


def test_a_pipe_in_place_of_a_dump_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "dump.json")

    with pytest.raises(DumpError, match="is no file"):
        check_dump(tmp_path)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
)
def test_all_numbers_of_8_bits_are_judged(tmp_path, dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)

    def step():
        codes.clone()
        codes.to(torch.float32)
        torch.linspace(-1e3, 1e3, 64).to(dtype)

    directory = recorded_dumps.recorded(tmp_path, step, risk_level="ALL")

    assert {call.status for call in check_dump(directory).calls} == {Status.PASS}
    for name, place in (("Tensor.clone.0", 3), ("Tensor.to.0", 8)):
        path = directory / "dump_tensor_data" / f"{name}.forward.output.0.pt"
        given = torch.load(path)
        given.view(torch.uint8)[place] ^= 1  # the last bit
        torch.save(given, path)
    wrong = [call for call in check_dump(directory).calls if call.status is Status.ERROR]
    assert [call.stem for call in wrong] == ["Tensor.clone.0", "Tensor.to.0"]
    assert wrong[0].worst.index == (3,)


def test_calls_that_reshape_in_place_are_judged(tmp_path):
    def step():
        x = torch.randn(3, 4)
        x.t_()
        x.unsqueeze_(0).squeeze_(0)
        x.transpose_(0, 1)

    calls = check_dump(recorded_dumps.recorded(tmp_path, step, risk_level="ALL")).calls

    found = {call.stem: call.status for call in calls if call.stem.endswith("_.0")}
    names = ("t_", "unsqueeze_", "squeeze_", "transpose_")
    assert found == {f"Tensor.{name}.0": Status.PASS for name in names}


def test_what_a_call_writes_into_its_arguments_is_said_to_be_unjudged(tmp_path, capsys):
    norm, rows = nn.BatchNorm1d(4), torch.randn(8, 4)
    table = torch.randn(5, 3) * 10
    directory = recorded(
        tmp_path, lambda: (norm(rows), nn.functional.embedding(torch.tensor([1]), table, max_norm=1.0))
    )
    of_norm, of_table = (
        next(call for call in check_dump(directory).calls if name in call.key)
        for name in ("batch_norm", "Functional.embedding")
    )

    assert [one.status for one in of_norm.judgements] == [Status.PASS, Status.SKIP, Status.SKIP]
    assert [one.status for one in of_table.judgements] == [Status.PASS, Status.SKIP]
    assert main(["check", "run", str(directory), "-o", str(tmp_path / "out"), "-f", "csv,html"]) == 0
    assert "  of 2 of them not judged: what they write into their arguments" in capsys.readouterr().out


def test_norms_that_write_nothing_have_no_such_row(tmp_path):
    norm, rows = nn.BatchNorm1d(4).eval(), torch.randn(8, 4)
    [call] = check_dump(recorded(tmp_path, lambda: norm(rows))).calls

    assert [one.status for one in call.judgements] == [Status.PASS]


def test_a_view_of_memory_that_the_dump_does_not_have_is_skipped(tmp_path):
    numbers = torch.arange(24.0, requires_grad=True)

    def step():
        (numbers * 1)[5:17].view(3, 4).as_strided((2, 2), (1, 2), 3).sum().backward()
        torch.arange(24).half()[5:17].as_strided((2, 2), (1, 2), 3)

    check = check_dump(recorded(tmp_path, step))

    assert check.of(Status.ERROR) == []
    assert {call.reason for call in check.calls if "as_strided" in call.key} == {
        "it takes memory around its argument, which is not known"
    }
