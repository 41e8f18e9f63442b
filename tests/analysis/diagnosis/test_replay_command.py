"""`trainermon replay`: a bad step is kept on disk by one process, and run again from its file, bit for bit."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from trainermon import cli
from trainermon.analysis.diagnosis.replay_command import find_builder, find_kept
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.records import DumpInfo
from trainermon.replay.kept_step import KEPT_FILE
from trainermon.replay.replay import StepExamination, StepKeeper

MODEL = '''
import torch
from torch import nn

class Net(nn.Module):
    """Draws from three generators, has buffers, and overflows in float16 where the batch is large."""

    def __init__(self, width=4):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.tied = self.first
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("scale", torch.tensor(300.0))

    def forward(self, batch, *, factor):
        import random, numpy
        x = self.dropout(self.norm(self.first(batch["x"]))) + random.random() + numpy.random.rand()
        half = (x * self.scale * factor).half()
        return self.last((half @ half.T).float()[:, :4])

def build():
    return Net()

def build_another():
    return Net(width=5)

def build_nothing():
    return 3

number = 3

def keep(width, *, depth, bias=True):
    raise AssertionError

class Kept(Net):
    def __init__(self, width):
        raise AssertionError
'''
DUMPS = "dumps/gradient-nonfinite/attempt1/step8/rank0"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A training script's module in the current folder, which a later test imports anew."""
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "kept_model.py").write_text(MODEL)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield find_builder("kept_model:build")
    sys.modules.pop("kept_model", None)


@pytest.fixture
def run(tmp_path, script):
    """A run of which rank 0 kept step 8."""
    directory = tmp_path / "run"
    (directory / "nodes").mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"run_id": "run"}))
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = script()
    keep(model, directory / DUMPS)
    return directory


def keep(model, directory, *, keep_bytes=1 << 20, **given):
    keeper = StepKeeper(model, examination=StepExamination(keep_bytes=keep_bytes))
    keeper.attach()
    given = given or {"batch": {"x": torch.randn(6, 4), "ids": [1, 2]}, "factor": 1.0}
    for _ in range(2):
        model(**given).sum().backward()
    return keeper.replay(directory, DumpInfo(id="gradient-nonfinite", step=8, attempt=1, rank=0), task="tensor")


def elements(dump):
    return {
        f"{entry.key} {record.slot}": torch.load(record.data_path, weights_only=True)
        for entry in dump.entries
        for record in (*entry.inputs, *entry.outputs, *entry.parameters)
        if record.data_path
    }


def test_a_kept_step_is_replayed_bit_for_bit_from_its_file(run, capsys):
    torch.manual_seed(99)  # nothing of the step is left in the generators

    status = cli.main(["replay", str(run), "--model", "kept_model:build"])

    text = capsys.readouterr().out
    assert status == 0, text
    assert "reproducible: the replay's forwards gave the same bits as the step's" in text
    assert "cause      precision: aten." in text
    kept = elements(read_dump(run / DUMPS))
    again = elements(read_dump(run / "reports/replay-step8-rank0/dumps/replayed/attempt1/step8/rank0"))
    assert kept.keys() == again.keys()
    assert len(kept) > 20
    for name, tensor in kept.items():
        assert torch.equal(tensor.nan_to_num(), again[name].nan_to_num()), name


def test_a_step_that_is_finite_with_changed_code_is_told_as_such(run, capsys):
    path = Path(sys.modules["kept_model"].__file__)
    (path.parent / "mended_model.py").write_text(path.read_text().replace(".half()", ""))

    assert cli.main(["replay", str(run), "--model", "mended_model.py:build"]) == 0

    text = capsys.readouterr().out
    assert text.startswith("With mended_model.py:build step 8 of rank 0 is finite; in training it was not\n")
    assert "transient" not in text


def test_the_model_may_stand_in_a_file_elsewhere(run, capsys, monkeypatch, tmp_path):
    del sys.modules["kept_model"]
    monkeypatch.chdir(tmp_path)

    assert cli.main(["replay", "run", "--model", "script/kept_model.py:build", "--task", "statistics"]) == 0
    assert "again      reproducible" in capsys.readouterr().out


def test_the_file_holds_no_code_and_is_private(run):
    path = run / DUMPS / KEPT_FILE

    assert read_dump(run / DUMPS).info.kept == KEPT_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert torch.load(path, weights_only=True)["version"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "kept_model:build_another"], "parameter first.weight is [4, 5], expected [4, 4]"),
        (["--model", "kept_model:build_nothing"], "returned a int, expected a torch.nn.Module"),
        (["--model", "kept_model:missing"], "has no function missing"),
        (["--model", "no_such_module:build"], "no_such_module cannot be imported from"),
        (["--model", "no_such/train.py:build"], "no_such/train.py:build: there is no file "),
        (
            ["--model", "kept_model:keep"],
            "kept_model:keep needs width, depth: expected is a function that takes no arguments",
        ),
        (["--model", "kept_model:Kept"], "kept_model:Kept needs width: expected is a function that takes no arguments"),
        (["--model", "kept_model:number"], "kept_model:number is of type int, expected a function"),
        (["--model", "kept_model"], "expected MODULE:FUNCTION"),
        (["--model", "kept_model:build", "--step", "7"], "has not kept step 7: there is step 8 of rank 0"),
        (["--model", "kept_model:build", "--rank", "3"], "has not kept rank 3: there is step 8 of rank 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_found(run, capsys, arguments, message):
    assert cli.main(["replay", str(run), *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("model", ["no_such.py:build", "kept_model:keep"])
def test_a_model_that_cannot_be_built_is_refused_before_the_step_is_read(model, run, capsys):
    (run / DUMPS / KEPT_FILE).write_bytes(b"")

    assert cli.main(["replay", str(run), "--model", model]) == 1
    assert capsys.readouterr().err.startswith(f"trainermon replay: --model {model}")


def test_another_class_is_named(run, capsys, monkeypatch):
    module = sys.modules["kept_model"]
    monkeypatch.setattr(module, "build", lambda: nn.Sequential(nn.Linear(4, 4)))

    assert cli.main(["replay", str(run), "--model", "kept_model:build"]) == 1
    assert "module (the model itself) is Sequential, expected Net" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keep_bytes", "given", "reason"),
    [
        (100, {}, "MiB on disk, replay.keep_mb is"),
        (0, {}, "replay.keep_mb is 0"),
        (1 << 20, {"batch": {"x": torch.randn(6, 4), "ids": {1, 2}}, "factor": 1.0}, "kwargs['batch']['ids'] is a set"),
    ],
    ids=["budget", "off", "class"],
)
def test_what_is_not_kept_says_why(tmp_path, script, keep_bytes, given, reason):
    run = tmp_path / "run"

    keep(script(), run / DUMPS, keep_bytes=keep_bytes, **given)

    assert not (run / DUMPS / KEPT_FILE).exists()
    assert reason in read_dump(run / DUMPS).info.kept
    with pytest.raises(DumpError, match=r"has no kept step: expected dumps/.*not kept on disk: "):
        find_kept(run)


def test_json_tells_of_the_replayed_step_what_the_text_does(run, capsys):
    assert cli.main(["replay", str(run), "--model", "kept_model:build", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)

    assert (found["step"], found["rank"], found["verdict"]) == (8, 0, "located")


SCRIPT_WITH_ARGUMENTS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, required={required})
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()
from kept_model import Net
def build():
    assert parser.parse_args() == args
    return Net(width=args.width or 4)
"""


@pytest.mark.parametrize(
    ("kept", "required", "said"),
    [
        (["--width", "4", "--bf16"], True, "again      reproducible"),
        (["--width", "5"], True, "parameter first.weight is [4, 5], expected [4, 4]"),
        ([], False, "again      reproducible"),
        (None, False, "again      reproducible"),
        (None, True, "the script ended with status 2 when it was imported with no arguments, as the run kept none"),
        (
            ["--other"],
            False,
            "the script ended with status 2 when it was imported with the arguments of the run, --other",
        ),
    ],
)
def test_the_script_gets_its_own_arguments_and_not_ours(run, capsys, kept, required, said):
    Path("with_arguments.py").write_text(SCRIPT_WITH_ARGUMENTS.format(required=required))
    ranks = run / "ranks"
    ranks.mkdir()
    environment = {} if kept is None else {"arguments": kept}
    (ranks / "rank00000.json").write_text(json.dumps({"rank": 0, "environment": environment}))
    words = ["replay", str(run), "--model", "with_arguments.py:build", "--task", "statistics"]
    before = [*sys.argv]

    cli.main(words)

    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert sys.argv == before
    sys.modules.pop("with_arguments", None)
