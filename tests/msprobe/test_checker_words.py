"""The command lines of msprobe's checker are understood as they are typed."""

import pytest
import torch

from tests.recorded_dumps import recorded
from trainermon.cli import main
from trainermon.msprobe.checker_words import COMMANDS, translated


@pytest.fixture
def dump(tmp_path):
    return recorded(tmp_path, lambda: [torch.ones(3).exp(), *(torch.ones(4).exp() for _ in range(2))]) / "dump.json"


@pytest.mark.parametrize(
    ("words", "judged"),
    [
        ("run_ut -api_info DUMP", 3),
        ("acc_check -api_info DUMP -f", 2),
        ("acc_check --api_info_file DUMP --filter_api -jit_compile", 2),
        ("-f pytorch acc_check -api_info DUMP -j --save_error_data", 3),
        ("multi_run_ut -api_info DUMP --num_splits 1 -f", 2),
        ("multi_acc_check -api_info DUMP -n 1 -save_error_data", 3),
        ("check run DUMP -f", 2),
        ("check run DUMP --device cpu", 3),
    ],
)
def test_calls_are_judged(dump, capsys, monkeypatch, words, judged):
    monkeypatch.chdir(dump.parent)

    assert main([str(dump) if word == "DUMP" else word for word in words.split()]) == 0
    assert f"all {judged} forward calls are right" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a number is a device there")
def test_a_number_of_a_device_is_one_of_an_accelerator(dump, capsys):
    assert main(["run_ut", "-api_info", str(dump), "--device", "0"]) == 0
    assert "-d have no effect" in capsys.readouterr().err
    assert main(["check", "run", str(dump), "--device", "0"]) == 1
    assert "found a number, and no accelerator: expected cpu" in capsys.readouterr().err


def test_two_files_are_compared(tmp_path, capsys):
    assert main(["api_precision_compare", "-npu", str(tmp_path / "a.csv"), "-gpu", str(tmp_path / "b.csv")]) == 1
    assert "cannot read" in capsys.readouterr().err


def test_other_command_lines_stay_as_they_are():
    for words in (["check", "run", "run_ut"], ["-f", "csv", "run_ut"], [], ["-f"]):
        assert translated(words) == words
    assert all(translated([name])[0] == "check" for name in COMMANDS)
