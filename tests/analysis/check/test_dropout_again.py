"""Steps with dropout, judged as recorded and again: each run draws from a known state, and is judged by its mask."""

import pytest
import torch
from torch.nn import functional

from tests.analysis.check.test_ops import Spoiled
from tests.recorded_dumps import recorded
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import DumpChecker, check_dump
from trainermon.cli import main


def dumped(folder, dtype=torch.float32, share=0.1, size=1.0, function=functional.dropout):
    torch.manual_seed(0)
    x = (torch.randn(64, 256) * size).to(dtype).requires_grad_()
    weights = torch.randn(64, 256).to(dtype)
    return recorded(folder, lambda: (function(x * 1, share) * weights).sum().backward())


def checked(directory, name):
    return DumpChecker(directory, wanted=lambda key: name in key, device="cpu").check(0)


@pytest.mark.parametrize("function", [functional.dropout, functional.dropout1d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_sound_dropout_is_right_again(tmp_path, function, dtype, direction):
    call = checked(dumped(tmp_path, dtype, function=function), f"{function.__name__}.0.{direction}")

    assert (call.status, call.cause) == (Status.PASS, "")
    assert [one.status for one in call.rerun] == [Status.PASS]


def test_the_generator_of_the_script_is_left_alone(tmp_path):
    directory = dumped(tmp_path)
    before = torch.get_rng_state()
    checked(directory, "dropout.0.backward")

    assert torch.equal(torch.get_rng_state(), before)


def test_a_device_that_is_bad_in_a_backward_is_told_with_the_place(tmp_path, capsys):
    directory = dumped(tmp_path)
    with Spoiled(torch.ops.aten.mul, lambda result: result.mul_(1.5)):
        status = main(
            [
                "check",
                "run",
                str(directory),
                "--device",
                "cpu",
                "--only",
                "*__mul__*backward",
                "-o",
                str(tmp_path / "out"),
            ]
        )

    printed = capsys.readouterr().out
    assert status == 0
    assert "device: what was recorded is right, cpu gives something else in the gradient of input.0" in printed


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-7])
def test_small_numbers_keep_the_last_step_of_their_type(tmp_path, share, size):
    check = check_dump(dumped(tmp_path, torch.float16, share, size))

    assert check.of(Status.ERROR) == []
