"""Results that overflowed, each for a reason that is known here by how it was made."""

import csv
import json
import math

import pytest
import torch

from tests.analysis.check.test_check import recorded
from tests.analysis.check.test_ops import Spoiled
from trainermon.analysis.check.overflow import overflows_of
from trainermon.cli import main


def planted(result):
    result.view(-1)[3] = math.inf


def saturated(result):
    result.clamp_(-65504, 65504)


HALF = torch.full((4,), 300.0, dtype=torch.float16)
SINGLE = torch.full((4,), 1e30)
NAN = torch.full((4,), math.nan)
CASES = {
    "nothing": (lambda: torch.sigmoid(SINGLE), None),
    "precision": (lambda: torch.square(HALF), "precision"),  # 90 000
    "range": (lambda: torch.square(SINGLE), "range"),
    "mathematics": (lambda: torch.log(torch.zeros(4)), "mathematics"),
    "inherited": (lambda: torch.tanh(NAN), "inherited"),
    "mask": (lambda: torch.zeros(4).masked_fill(torch.ones(4, dtype=torch.bool), torch.finfo().min), None),
}


@pytest.mark.parametrize("name", CASES)
def test_an_overflow_has_its_class(tmp_path, name):
    step, expected = CASES[name]

    found = overflows_of(recorded(tmp_path, step))

    assert [call.cause.value for call in found] == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("numbers", "expected"), [(HALF, "precision"), (SINGLE * 1e-20, None), (SINGLE, "range"), (NAN, "inherited")]
)
def test_an_overflow_of_a_backward_has_its_class(tmp_path, numbers, expected):
    x = torch.zeros_like(numbers).requires_grad_()

    found = overflows_of(recorded(tmp_path, lambda: torch.mul(x, numbers).backward(numbers)))

    backward = {call.key: call.cause.value for call in found if call.key.endswith(".backward")}
    assert backward == ({} if expected is None else {"Torch.mul.0.backward": expected})


def test_a_kernel_is_to_blame_for_what_fits(tmp_path, capsys):
    with Spoiled(torch.ops.aten.tanh, planted):
        directory = recorded(tmp_path, lambda: torch.tanh(SINGLE))

    assert main(["check", "overflow", str(directory), "--exit-code"]) == 3
    out = capsys.readouterr().out
    assert "1 call overflowed: 1 kernel; first: Torch.tanh.0.forward" in out
    assert "exactly it reaches 1, which float32 holds: the device or its kernel is to blame" in out


def test_a_result_at_the_end_of_its_type_in_place_of_a_larger_one_is_named(tmp_path):
    with Spoiled(torch.ops.aten.pow, saturated, torch.float16):
        [call] = overflows_of(recorded(tmp_path, lambda: torch.pow(HALF, 2)))

    assert call.cause.value == "precision"
    assert call.reason.startswith("it stands at the type's end: exactly it reaches 9e+04, float16 ends at 6.55e+04")


def test_a_dump_without_overflow_says_so(tmp_path, capsys):
    directory = recorded(tmp_path, lambda: torch.sigmoid(SINGLE))

    assert main(["check", "overflow", "-api_info", str(directory / "dump.json"), "-d", "0", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == [{"source": str(directory), "calls": []}]
    assert "-j and -d have no effect" in said.err
    assert main(["check", "overflow", str(directory)]) == 0
    assert "no call overflowed" in capsys.readouterr().out
    assert main(["check", "overflow"]) == 1


@pytest.mark.parametrize(
    "change", [{"output": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [math.nan]}]}, None]
)
@pytest.mark.parametrize("step", [torch.sigmoid, torch.square])
def test_a_call_whose_entry_cannot_be_read_is_not_said_to_be_finite(tmp_path, capsys, step, change):
    directory = recorded(tmp_path, lambda: (step(HALF), torch.tanh(SINGLE)))
    path = directory / "dump.json"
    whole = json.loads(path.read_text())
    whole["data"]["Torch.tanh.0.forward"] = whole["data"]["Torch.tanh.0.forward"] | change if change else None
    path.write_text(json.dumps(whole))

    assert main(["check", "overflow", str(directory), "--exit-code"]) == 4

    headline, *_, last = capsys.readouterr().out.splitlines()[1:]
    assert "; 1 could not be read" in headline
    assert ("no call overflowed" in headline) is (step is torch.sigmoid)
    assert "unknown     Torch.tanh.0.forward" in last
    assert "its entry is damaged" in last


def test_without_tensors_the_reason_is_not_known(tmp_path):
    directory = recorded(tmp_path, lambda: torch.square(SINGLE))
    for file in (directory / "dump_tensor_data").iterdir():
        file.unlink()

    [call] = overflows_of(directory)

    assert (call.cause.value, "cannot be read" in call.reason) == ("unknown", True)


def test_the_classes_are_written_as_files(tmp_path, capsys):
    directory = recorded(tmp_path / "run", lambda: torch.square(HALF))

    assert main(["check", "overflow", str(directory), "-o", str(tmp_path / "out")]) == 0

    table, document = sorted((tmp_path / "out").iterdir())
    rows = list(csv.DictReader(table.read_text(encoding="utf-8-sig").splitlines()))
    [[call]] = [check["calls"] for check in json.loads(document.read_text())]
    assert [(row["API name"], row["Class"], row["Dump"]) for row in rows] == [
        ("Torch.square.0.forward", "precision", str(directory))
    ]
    assert (call["key"], call["cause"], call["reason"]) == (rows[0]["API name"], "precision", rows[0]["Reason"])
    assert capsys.readouterr().err.count("wrote") == 2
    (tmp_path / "file").touch()
    assert main(["check", "overflow", str(directory), "-o", str(tmp_path / "file")]) == 1
