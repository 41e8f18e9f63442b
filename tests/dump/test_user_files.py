"""The configuration files that users of msprobe bring, as its manuals print them (`user_files/`): each one dumps."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainermon import PrecisionDebugger, compare
from trainermon.cli import main
from trainermon.core.errors import ConfigError
from trainermon.dump import seed_all
from trainermon.dump.debugger_config import OTHER_TASKS
from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.verdicts import NonfiniteCause
from trainermon.replay.dumped_calls import judge_dumped

FILES = Path(__file__).parent / "user_files"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with seed_all():
        yield
    PrecisionDebugger.close()


def train(debugger, model, *, steps=1, x=None):
    for _ in range(steps):
        debugger.start(model if isinstance(model, nn.Module) else None)
        model(torch.ones(2, 4) if x is None else x).sum().backward()
        debugger.stop()
        debugger.step()


def notes_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "trainermon"]


@pytest.mark.parametrize("name", ["all_blocks", "seeded_tensors", "collectives"])
def test_every_file_of_the_manuals_dumps_as_it_is(tmp_path, name):
    given = json.loads((FILES / f"{name}.json").read_text())

    debugger = PrecisionDebugger(FILES / f"{name}.json")
    train(debugger, nn.Linear(4, 4))

    folder = tmp_path / given["dump_path"] / "step0/rank0"
    keys = {entry.key for entry in read_dump(folder).entries}
    assert ("Functional.linear.0.forward" in keys) is (name != "collectives")
    assert any((folder / "dump_tensor_data").glob("*.pt")) is (name == "seeded_tensors")


def test_what_has_no_effect_is_told_once_and_blocks_of_other_tasks_not_at_all(caplog):
    with caplog.at_level(logging.WARNING):
        train(PrecisionDebugger(FILES / "all_blocks.json"), nn.Linear(4, 4), steps=2)

    told = notes_of(caplog)
    assert [note for note in told if note.startswith("enable_dataloader has no effect")] == told


def test_other_ranks_of_a_job_do_not_tell_it_again(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")

    with caplog.at_level(logging.WARNING):
        PrecisionDebugger(FILES / "all_blocks.json")

    assert notes_of(caplog) == []


@pytest.mark.parametrize("block", [*OTHER_TASKS, "overflow_check", "statistics"])
def test_a_block_of_another_task_is_passed_over_whatever_stands_in_it(block):
    Path("config.json").write_text(
        json.dumps({"task": "tensor", "dump_path": "dump", block: {"keys": "of that task"}, "tensor": {"list": ["a"]}})
    )

    assert PrecisionDebugger("config.json").config.list == ("a",)


@pytest.mark.parametrize("task", list(OTHER_TASKS))
def test_a_task_that_is_none_here_is_refused_with_what_to_use(task):
    with pytest.raises(ConfigError, match=f"task: '{task}' is no task here; .*`trainermon "):
        PrecisionDebugger(task=task, dump_path="dump")


def test_the_seed_of_the_file_is_set(caplog):
    with caplog.at_level(logging.WARNING):
        PrecisionDebugger(FILES / "seeded_tensors.json")

    drawn = torch.rand(3)
    torch.manual_seed(1234)
    assert torch.equal(drawn, torch.rand(3))
    assert not torch.are_deterministic_algorithms_enabled()
    assert [note for note in notes_of(caplog) if "seed_all(1234, mode=False)" in note]


def test_determinism_alone_has_the_default_seed():
    PrecisionDebugger.close()
    Path("config.json").write_text(json.dumps({"dump_path": "dump", "is_deterministic": True}))
    PrecisionDebugger("config.json")

    assert torch.are_deterministic_algorithms_enabled()
    assert torch.initial_seed() == 1234


def test_without_these_keys_nothing_is_seeded():
    torch.manual_seed(5)
    PrecisionDebugger(dump_path="dump", level="L1")

    assert torch.initial_seed() == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": -1}, "seed: found -1, expected a whole number from 0"),
        ({"seed": "1234"}, "seed: found '1234', expected a whole number"),
        ({"is_deterministic": "no"}, "is_deterministic: found 'no', expected true or false"),
        ({"task": "tensor", "tensor": {"file_format": "h5"}}, "file_format: found 'h5', expected one of pt, npy"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(values, message):
    Path("config.json").write_text(json.dumps({"dump_path": "dump", **values}))

    with pytest.raises(ConfigError, match=message):
        PrecisionDebugger("config.json")


def npy_dump(level="L1", dtype=torch.float32, **config):
    Path("config.json").write_text(
        json.dumps({"task": "tensor", "dump_path": "dump", "level": level, "tensor": {"file_format": "npy"}, **config})
    )
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(dtype)
    train(PrecisionDebugger("config.json"), model, x=torch.ones(2, 4, dtype=dtype))
    PrecisionDebugger.close()
    return model, Path("dump/step0/rank0")


@pytest.mark.parametrize("config", [{}, {"async_dump": True}])
def test_tensors_are_saved_as_numpy_files_if_asked_for(config):
    model, folder = npy_dump(**config)

    entry = json.loads((folder / "dump.json").read_text())["data"]["Functional.linear.0.forward"]
    names = [form["data_name"] for form in entry["input_args"]]
    assert names[1] == "Functional.linear.0.forward.input.1.npy"
    assert np.array_equal(np.load(folder / "dump_tensor_data" / names[1]), model.weight.detach().numpy())
    assert {path.suffix for path in (folder / "dump_tensor_data").iterdir()} == {".npy"}
    assert (folder / "dump_tensor_data" / names[1]).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compare_and_the_tensor_commands_read_numpy_files(tmp_path, dtype, capsys):
    _, folder = npy_dump(dtype=dtype)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    name = "Functional.linear.0.forward.output.0.npy"
    array = np.load(other / "dump_tensor_data" / name)
    array[1, 2] += 4.0
    np.save(other / "dump_tensor_data" / name, array)

    (same,) = compare(folder, folder)
    (changed,) = compare(other, folder)

    assert changed.mode.value == "tensor"
    assert not same.blamed
    assert [call.key for call in changed.blamed] == ["Functional.linear.0.forward"]
    assert main(["tensor", "diff", str(other), str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "Functional.linear.0.forward.output.0" in shown
    assert "input" not in shown


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_diagnose_runs_a_bad_call_again_from_numpy_files(dtype):
    Path("config.json").write_text(
        json.dumps({"task": "tensor", "dump_path": "dump", "level": "L1", "tensor": {"file_format": "npy"}})
    )
    x = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    train(PrecisionDebugger("config.json"), torch.log, x=x)
    PrecisionDebugger.close()

    folder = Path("dump/step0/rank0")
    (entry,) = (entry for entry in read_dump(folder).entries if entry.key == "Torch.log.0.forward")
    assert judge_dumped(folder, entry).cause is NonfiniteCause.RANGE


def test_an_earlier_dump_in_the_other_format_is_replaced_whole():
    npy_dump()
    _, folder = npy_dump(tensor={"file_format": "pt"})

    assert {path.suffix for path in (folder / "dump_tensor_data").iterdir()} == {".pt"}


def train_with_nan_at(steps, bad, debugger):
    """Train, with a NaN weight from step `bad` on."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    for step in range(steps):
        if step == bad:
            model[2].weight.data[0, 1] = float("nan")
        train(debugger, model)


def test_an_overflow_check_keeps_the_steps_with_one_and_ends_after_enough(tmp_path, caplog):
    debugger = PrecisionDebugger(FILES / "overflows.json")

    with caplog.at_level(logging.WARNING):
        train_with_nan_at(5, 2, debugger)

    assert [path.name for path in sorted((tmp_path / "npu_dump").glob("step*"))] == ["step2"]
    dump = read_dump(tmp_path / "npu_dump/step2/rank0")
    assert (dump.info.complete, dump.info.errors) == (True, 0)
    assert [entry.key for entry in dump.entries if entry.direction == "forward"][:2] == [
        "Functional.linear.0.forward",
        "Functional.relu.0.forward",
    ]
    assert "calls gave NaN or Inf up to step 2: no more is recorded" in caplog.text
    assert not list((tmp_path / "npu_dump/overflow_check").iterdir())


def test_the_step_of_an_overflow_check_can_be_diagnosed(capsys):
    train_with_nan_at(3, 1, PrecisionDebugger(FILES / "overflows.json"))

    main(["diagnose", "npu_dump"])

    assert "Functional.linear.1" in capsys.readouterr().out.splitlines()[0]


def test_without_an_end_every_bad_step_is_kept(tmp_path):
    config = {"task": "overflow_check", "dump_path": "dump", "overflow_check": {"overflow_nums": -1}}
    Path("config.json").write_text(json.dumps(config))

    train_with_nan_at(4, 1, PrecisionDebugger("config.json"))

    assert sorted(path.name for path in (tmp_path / "dump").glob("step*")) == ["step1", "step2", "step3"]


def test_masks_of_minus_infinity_are_no_overflow_and_a_product_too_large_is_one(tmp_path):
    def masked(x):
        mask = torch.zeros(2, 4).masked_fill(torch.eye(4)[:2].bool(), float("-inf"))
        return torch.softmax(x * torch.ones(1, requires_grad=True) + mask, -1)

    def too_large(x):
        return x.half() * torch.full((1,), 6e4, dtype=torch.half, requires_grad=True) * 2

    debugger = PrecisionDebugger(FILES / "overflows.json")
    train(debugger, masked)
    train(debugger, too_large)

    assert [path.name for path in (tmp_path / "npu_dump").glob("step*")] == ["step1"]


@pytest.mark.parametrize("count", [0, -2, "all"])
def test_a_wrong_number_of_overflows_is_refused(count):
    config = {"task": "overflow_check", "dump_path": "dump", "overflow_check": {"overflow_nums": count}}
    Path("config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match="overflow_nums: found"):
        PrecisionDebugger("config.json")
