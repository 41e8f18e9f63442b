"""`trainermon check ops`: a sound CPU passes, and kernels that a dispatch mode spoils are found."""

from __future__ import annotations

import importlib
import json
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainermon.accuracy.judge import Status
from trainermon.analysis.check.ops import check_device
from trainermon.cli import main
from trainermon.core.errors import ConfigError


class Spoiled(TorchDispatchMode):
    """A device on which one kernel is spoiled for one type; the reference, in float64, is not."""

    def __init__(self, kernel, spoil, dtype=torch.float32):
        super().__init__()
        self._kernel = kernel
        self._spoil = spoil
        self._dtype = dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is self._kernel and result.dtype is self._dtype:
            self._spoil(result)
        return result


def some(*parts):
    return lambda key: any(part in key for part in parts)


def test_a_sound_device_has_no_error():
    check = check_device(
        "cpu", dtypes=[torch.float32, torch.bfloat16], wanted=some("linalg.", "gelu", "conv", "softmax")
    )

    assert len(check.of(Status.PASS)) > 50
    assert check.of(Status.ERROR) == []
    assert (check.source, torch.backends.flags_frozen()) == ("cpu", False)


def test_functions_that_are_deprecated_are_called_without_a_word():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        [call] = check_device("cpu", dtypes=[torch.float32], wanted=some("upsample_nearest")).calls

    assert (call.status, said) == (Status.PASS, [])


def test_a_spoiled_kernel_is_named_and_no_other():
    with Spoiled(torch.ops.aten.gelu, lambda result: result.mul_(1.001)):
        check = check_device("cpu", dtypes=[torch.float32], wanted=some("gelu", "relu", "silu"))

    assert [call.key for call in check.of(Status.ERROR)] == ["nn.functional.gelu.float32.0"]


def test_a_kernel_that_raises_is_an_error():
    def fail(result):
        raise RuntimeError("no kernel image is available")

    with Spoiled(torch.ops.aten.gelu, fail):
        [call] = check_device("cpu", dtypes=[torch.float32], wanted=some(".gelu.")).calls

    assert (call.status, call.reason) == (Status.ERROR, "raises RuntimeError: no kernel image is available")


def test_an_operation_of_one_argument_is_given_every_number_of_16_bits():
    check = check_device(
        "cpu", dtypes=[torch.bfloat16, torch.float32], samples=None, wanted=some("relu6", "ceil", "add.")
    )

    assert [call.key for call in check.calls] == ["ceil.bfloat16.all", "nn.functional.relu6.bfloat16.all"]
    assert {call.judgements[0].shape for call in check.calls} == {(65536,)}
    assert check.of(Status.ERROR) == []


def test_one_number_of_all_is_found():
    def spoil(result):
        result[40000] = 3

    with Spoiled(torch.ops.aten.tanh, spoil, torch.bfloat16):
        [call] = check_device(
            "cpu", dtypes=[torch.bfloat16], samples=None, wanted=lambda key: key == "tanh.bfloat16.all"
        ).calls

    assert (call.status, call.worst.index) == (Status.ERROR, (40000,))


def test_the_command_says_by_its_status_whether_the_device_is_sound(tmp_path, capsys):
    command = ["check", "ops", "--dtype", "float32", "--only", "nn.functional.gelu.*", "--exit-code", "--json"]

    assert main([*command, "-o", str(tmp_path)]) == 0
    [check] = json.loads(capsys.readouterr().out)
    assert (check["source"], check["calls"][0]["status"]) == ("cpu", "pass")
    assert check["calls"][0]["outputs"][0]["legacy"]["metrics"]["cosine"] > 0.9999
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".csv", ".json"]

    with Spoiled(torch.ops.aten.gelu, lambda result: result.mul_(1.001)):
        assert main(command) == 3


@pytest.mark.parametrize("device", ["cuda:97", "nowhere"])
def test_a_device_that_is_not_there_is_named(device):
    with pytest.raises(ConfigError, match=f"--device {device}: torch cannot use it here"):
        check_device(device)


def test_no_samples_are_refused(capsys):
    assert main(["check", "ops", "--samples", "0"]) == 1
    assert "--samples: found 0, expected 1 or more" in capsys.readouterr().err


def test_a_package_that_the_database_needs_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'expecttest'", name="expecttest")

    monkeypatch.setattr(importlib, "import_module", missing)

    with pytest.raises(ConfigError, match="it needs the package expecttest: pip install expecttest"):
        check_device("cpu")
