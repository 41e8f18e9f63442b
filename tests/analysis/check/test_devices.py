"""Recorded calls run again on a device, which is the CPU with spoiled kernels here, or a stand-in for an NPU."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.analysis.check.test_check import dumped, lose_the_tail
from tests.analysis.check.test_ops import Spoiled
from tests.recorded_dumps import recorded
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import DumpChecker
from trainermon.analysis.check.devices import chosen_devices
from trainermon.cli import main
from trainermon.core.errors import ConfigError

ROOT = Path(__file__).parents[3]
NPU = """
import sys
import torch
from tests import npu_stand_in as npu
from trainermon.cli import main

if sys.argv[1] == "spoiled":
    def gelu(tensor, approximate="none"):
        return npu.wrap(torch.nn.functional.gelu(npu._raw(tensor)) * 1.001)

    npu._aten.impl("gelu", gelu, "PrivateUse1")
sys.exit(main(sys.argv[2:]))
"""


def checked(directory, name):
    checker = DumpChecker(directory, wanted=lambda key: name in key, device="cpu")
    return checker.check(0)


def plus(amount):
    return lambda result: result.add_(amount)


def test_a_result_that_was_wrong_once_is_transient(tmp_path):
    call = checked(dumped(tmp_path, alter=lose_the_tail), "linear.0")

    assert (call.status, [one.status for one in call.rerun]) == (Status.ERROR, [Status.PASS])
    assert call.reason == "inexact; transient: cpu gives the right result now"


def test_a_result_that_is_wrong_again_is_the_kernels_doing(tmp_path):
    with Spoiled(torch.ops.aten.gelu, plus(1)):
        directory = dumped(tmp_path)
        call = checked(directory, "gelu")

    assert call.reason == "inexact; kernel: cpu gives a wrong result again"


def test_a_result_that_changes_is_not_deterministic(tmp_path):
    amounts = iter(range(1, 100))
    directory = dumped(tmp_path)
    with Spoiled(torch.ops.aten.gelu, lambda result: result.add_(next(amounts))):
        call = checked(directory, "gelu")

    assert call.cause == "nondeterministic: cpu gives another result each time"


def test_a_device_that_is_worse_than_the_one_that_was_recorded_is_named(tmp_path):
    directory = dumped(tmp_path)
    with Spoiled(torch.ops.aten.gelu, plus(1)):
        call = checked(directory, "gelu")

    assert [one.status for one in call.judgements] == [Status.PASS]
    assert (call.status, call.worst) == (Status.ERROR, call.rerun[0])
    assert call.reason == "inexact; device: what was recorded is right, cpu gives something else"


def test_a_device_without_the_kernel_leaves_the_verdict_as_it_was(tmp_path):
    def fail(result):
        raise RuntimeError("no kernel image is available")

    directory = dumped(tmp_path)
    with Spoiled(torch.ops.aten.gelu, fail):
        call = checked(directory, "gelu")

    assert (call.status, call.rerun) == (Status.PASS, ())
    assert call.cause == "not run again on cpu: RuntimeError: no kernel image is available"


@pytest.mark.parametrize("autocast", [False, True])
def test_a_sound_step_is_right_again(tmp_path, capsys, autocast):
    directory = dumped(tmp_path, autocast=autocast)

    assert main(["check", "run", str(directory), "--device", "recorded,cpu", "--json", "--exit-code"]) == 0

    [check] = json.loads(capsys.readouterr().out)
    assert [[one["status"] for one in call["rerun"]] for call in check["calls"]] == [["pass"]] * 5


def npu(*words):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", NPU, *words], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.parametrize(("kernels", "status"), [("sound", 0), ("spoiled", 3)])
def test_calls_are_run_again_on_an_npu(tmp_path, kernels, status):
    directory = dumped(tmp_path)

    done = npu(kernels, "check", "run", str(directory), "--device", "npu:0", "--json", "--exit-code")

    assert done.returncode == status, done.stderr
    [check] = json.loads(done.stdout)
    causes = {call["key"]: call["cause"] for call in check["calls"] if "cause" in call}
    expected = {"Functional.gelu.0.forward": "device: what was recorded is right, npu:0 gives something else"}
    assert causes == (expected if status else {})
    assert all(call["rerun"] for call in check["calls"])


@pytest.mark.parametrize(("kernels", "wrong"), [("sound", []), ("spoiled", ["nn.functional.gelu.float32.0"])])
def test_an_npu_is_given_torchs_operations(kernels, wrong):
    # the stand-in has no generator, which rrelu wants
    words = [
        "--only",
        "nn.functional.*elu*",
        "--only",
        "linalg.*norm*",
        "--only",
        "matmul*",
        "--skip",
        "*rrelu*",
        "--dtype",
        "float32",
    ]

    done = npu(kernels, "check", "ops", "--device", "npu:0", "--json", *words)

    assert done.returncode == 0, done.stderr
    [check] = json.loads(done.stdout)
    assert [call["key"] for call in check["calls"] if call["status"] == "error"] == wrong
    assert len(check["calls"]) > 10


def test_devices_are_read_and_must_be_there():
    assert chosen_devices("recorded") == ()
    assert chosen_devices("recorded,cpu") == ("cpu",)
    with pytest.raises(ConfigError, match="found cpu,cpu, expected each device once"):
        chosen_devices("cpu,cpu")
    with pytest.raises(ConfigError, match="--device nowhere: torch cannot use it here"):
        chosen_devices("nowhere")


def test_msprobes_numbers_are_those_of_the_accelerator(monkeypatch):
    monkeypatch.setattr("trainermon.analysis.check.devices.require_device", lambda device: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert chosen_devices("recorded", ["0", "1"]) == ("cuda:0", "cuda:1")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert chosen_devices("recorded", ["0"]) == ("npu:0",)


def gelu_and_back():
    torch.manual_seed(0)
    tensor = torch.randn(4, 40, requires_grad=True)
    torch.nn.functional.gelu(tensor).backward(torch.randn(4, 40))


def test_a_backward_is_run_again_too(tmp_path):
    sound = recorded(tmp_path / "sound", gelu_and_back)
    with Spoiled(torch.ops.aten.gelu_backward, plus(1)):
        wrong = recorded(tmp_path / "wrong", gelu_and_back)
        again = checked(wrong, "gelu.0.backward")
        device = checked(sound, "gelu.0.backward")
    once = checked(wrong, "gelu.0.backward")
    right = checked(sound, "gelu.0.backward")

    assert [one.reason for one in (again, once, device, right)] == [
        "inexact; kernel: cpu gives a wrong result again",
        "inexact; transient: cpu gives the right result now",
        "inexact; device: what was recorded is right, cpu gives something else",
        "",
    ]
    assert [one.status for one in right.rerun] == [Status.PASS]


def test_the_file_of_details_has_the_second_opinion(tmp_path):
    with Spoiled(torch.ops.aten.gelu_backward, plus(1)):
        wrong = recorded(tmp_path, gelu_and_back)

    assert main(["check", "run", str(wrong), "--device", "cpu", "-o", str(tmp_path / "out"), "-f", "csv"]) == 0

    [file] = (tmp_path / "out").glob("accuracy_checking_details_*.csv")
    with file.open(encoding="utf-8-sig", newline="") as rows:
        names = {row["API Name"].removeprefix("Functional.gelu.0."): row for row in csv.DictReader(rows)}
    found = {direction: names[f"{direction}.output.0"] for direction in ("forward", "backward")}
    assert [found["forward"][name] for name in ("Rerun Status", "Cause")] == ["pass", " "]
    assert float(found["forward"]["Rerun Worst"]) <= 1
    words = [found["backward"][name] for name in ("Status", "Rerun Status", "Cause")]
    assert words == ["error", "pass", "transient: cpu gives the right result now"]
