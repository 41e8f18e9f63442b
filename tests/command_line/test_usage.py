"""The examples in every `--help`: all are understood, and all that need no server are run as they stand there."""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.analysis.gradients.test_compare import write_whole
from tests.analysis.rl.fused_engine import dump
from tests.exporters.recorded_run import commit
from tests.recorded_dumps import recorded
from trainermon import rl, usage
from trainermon.cli import COMMANDS, build_parser, leaves, main
from trainermon.rl import StageRecorder

DUMPS = Path(__file__).parents[1] / "analysis/compare/recorded"
LINES = [line for examples in usage.EXAMPLES.values() for line, _ in examples]
NEED_MORE = {"replay", "restore", "dashboards push", "node", "agent", "controller", "serve"}
"""A kept step, a killed process, Grafana; what runs until it is told to end. Each has tests of its own."""
EXPECTED = {
    "trainermon compare dump golden --exit-code": 3,
    "trainermon rules test rules.yaml run": 3,
    # nobody listens: the run is over
    **{line: 1 for line, _ in usage.EXAMPLES["alerts"] if "--acknowledge" in line or "--silence" in line},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    commit(folder / "run/nodes/node/segments", range(3))
    (folder / "run/run.json").write_text(json.dumps({"config": {}}))
    for name, source in (("dump", "faulty"), ("golden", "sound")):
        shutil.copytree(DUMPS / source, folder / name)
    made = recorded(folder / "made", lambda: torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3)))
    for name in ("tensors", "dumps"):
        shutil.copytree(made, folder / name / "step0/rank0")
    np.save(folder / "weight.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    write_whole(folder / "signs", 0, {"weight": np.ones((2, 3), np.float32)})
    (folder / "anomaly_detected/rank0").mkdir(parents=True)
    (folder / "anomaly_detected/rank0/anomaly.json").write_text("{}")
    shutil.copy(Path(usage.__file__).with_name("alerts") / "default_rules.yaml", folder / "rules.yaml")
    (folder / "norms/rank_0").mkdir(parents=True)
    for name in ("local_loss_float32_0", "finish_step_float32_1"):
        np.save(folder / f"norms/rank_0/{name}.npy", np.ones(1, np.float32))
    (folder / "train.py").write_text("print('trained')\n")
    (folder / "train.log").write_text("  rollout_temperature ..... 1.0\n")
    write_rollouts(folder / "rl_out")
    StageRecorder(folder / "stages").save({"reward": np.ones(3)})
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4))
    dump(folder / "trainer_dump", model, input=torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]))
    dump(folder / "engine_dump", model, input=torch.tensor([1, 2]))
    return folder


@pytest.fixture(scope="module")
def workplace(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["tensor", "convert", "weight.npy", "model.safetensors"]) == 0
        assert main(["check", "run", "tensors", "-o", "checked", "-f", "csv"]) == 0
        [details] = Path("checked").rglob("*details*.csv")
        for device in ("npu", "gpu"):
            shutil.copy(details, f"{device}.csv")
        assert main(["env", "collect", "-o", "here.zip"]) == 0
        assert main(["export", "run", "--format", "csv"]) == 0
    return folder


def write_rollouts(folder):
    watch = rl.Watch(folder, rank=0)
    for step in range(3):
        with watch.step(step):
            watch.rollout(logprobs=[[-1.0, -2.0], [-0.5]])
            watch.train(logprobs=[[-1.01, -2.0], [-0.5]])
    watch.close()


def test_every_command_has_examples_and_every_example_is_of_a_command():
    commands = {leaf.prog.partition(" ")[2] for leaf in leaves(build_parser(COMMANDS))}

    assert usage.EXAMPLES.keys() == commands
    for command, examples in usage.EXAMPLES.items():
        assert all(f"{line} ".startswith(f"trainermon {command} ") for line, _ in examples)


@pytest.mark.parametrize("line", LINES)
def test_an_example_is_understood(line):
    words = shlex.split(line)[1:]

    assert build_parser(words[:1]).parse_args(words).subcommand == words[0]


@pytest.mark.parametrize(
    "line", [line for name, examples in usage.EXAMPLES.items() if name not in NEED_MORE for line, _ in examples]
)
def test_an_example_runs_as_it_is_shown(line, workplace, monkeypatch, capfd):
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # with `python`, as in a venv

    status = main(shlex.split(line)[1:])

    assert status == EXPECTED.get(line, 0), capfd.readouterr().err


def test_examples_are_shown_below_the_options(capsys):
    with pytest.raises(SystemExit):
        main(["checkpoint", "show", "--help"])

    assert "\nexamples:\n  trainermon checkpoint show model.safetensors\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["rollouts", "show"])
def test_a_folder_alone_is_shown(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rollouts(tmp_path / name)
    assert main(["rl", "show", name]) == 0
    shown = capsys.readouterr().out

    assert main(["rl", f"./{name}"]) == 0

    assert capsys.readouterr().out == shown
