"""What a running training shows is right over any sharding, and the training does not notice."""

import importlib
import json
import random
import runpy
import subprocess
import sys
import types
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.analysis.environment import recorder_job
from tests.ranks import run_ranks
from trainermon import ConfigChecker, EnvironmentRecorder, cli
from trainermon.analysis.environment.compare import compare_packs
from trainermon.analysis.environment.differences import DifferenceLevel
from trainermon.analysis.environment.packs import read_pack
from trainermon.analysis.environment.rules import LevelRules
from trainermon.core.errors import ConfigError


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone") / "pack.zip"
    recorder_job.record(recorder_job.build(), path)
    return read_pack(path)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_ranks(Path(recorder_job.__file__), str(folder))
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("kind", recorder_job.KINDS)
def test_the_same_weights_are_equal_over_any_sharding(kind, alone, on_two_ranks):
    comparison = compare_packs(alone, read_pack(on_two_ranks / f"{kind}.zip"), LevelRules())

    rows = [row for row in comparison.rows if row.section == "weights"]
    assert {row.name for row in rows} == {name for name, _ in recorder_job.build().named_parameters()}
    assert [row.name for row in rows if row.level is not DifferenceLevel.SAME] == []


@pytest.mark.distributed
def test_one_changed_weight_is_found_in_a_shard(on_two_ranks, tmp_path):
    model = recorder_job.build()
    with torch.no_grad():
        model.second.weight[4, 7] += 1e-6
    recorder_job.record(model, tmp_path / "pack.zip")

    comparison = compare_packs(read_pack(tmp_path / "pack.zip"), read_pack(on_two_ranks / "tp.zip"), LevelRules())

    assert [row.name for row in comparison.rows if row.section == "weights" and row.level is DifferenceLevel.ERROR] == [
        "second.weight"
    ]


def test_moments_are_numpys(alone):
    weight = alone.ranks[0]["weights"]["first.weight"]
    (part,) = weight["regions"].values()
    values = recorder_job.build().first.weight.detach().numpy().astype(np.float64)

    assert (weight["shape"], part["count"]) == ([8, 6], 48)
    assert part["min"], part["max"] == (values.min(), values.max())
    assert part["sum_sq"] == pytest.approx(float((values**2).sum()), rel=1e-6)


def test_inputs_in_another_order_are_the_same_samples(tmp_path):
    model, batch = torch.nn.Linear(4, 2), torch.randn(8, 4)
    for name, order in (("a", range(8)), ("b", reversed(range(8))), ("c", [0, 0, *range(2, 8)])):
        with EnvironmentRecorder(model, output=tmp_path / f"{name}.zip", draws=False):
            model(batch[list(order)])
    first = read_pack(tmp_path / "a.zip")

    found = {name: [row.reason for row in compare_packs(first, read_pack(tmp_path / f"{name}.zip"), LevelRules()).rows
                    if row.section == "data"] for name in "bc"}  # fmt: skip

    assert found == {"b": ["same samples in another order"], "c": ["other samples"]}


def test_recording_changes_nothing_and_leaves_nothing_behind(tmp_path):
    def train(*, is_recorded):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = EnvironmentRecorder(model, optimizer, 2, output=tmp_path / "p.zip") if is_recorded else None
        if recorder is not None:
            recorder.start()
        for _ in range(4):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        return model, optimizer

    plain, _ = train(is_recorded=False)
    recorded, optimizer = train(is_recorded=True)

    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), recorded.parameters(), strict=True))
    assert not recorded._forward_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert sorted(read_pack(tmp_path / "p.zip").ranks[0]["data"]) == ["0", "1"]


def test_a_fault_of_the_recorder_does_not_reach_training(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("trainermon.analysis.environment.recorder.recorded_weights", lambda *_: 1 / 0)
    model = torch.nn.Linear(2, 2)

    with EnvironmentRecorder(model, output=tmp_path / "p.zip", draws=False):
        model(torch.ones(1, 2))

    assert "division by zero" in caplog.text
    assert not model._forward_pre_hooks


def test_config_checker_has_msprobes_calls_and_files(tmp_path):
    """Msprobe writes at every forward; sees neither `randperm` nor dropout."""
    script = tmp_path / "train.sh"
    script.write_text("torchrun train.py --lr 1e-4\n")
    pack = tmp_path / "pack.zip"
    ConfigChecker.apply_patches("pytorch")
    torch.randperm(4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout())
    ConfigChecker(model, [str(script)], str(pack), fmk="pytorch")
    model(torch.ones(3, 4))
    size = pack.stat().st_size
    model(torch.ones(3, 4))

    assert pack.stat().st_size == size
    with zipfile.ZipFile(pack) as archive:
        names = set(archive.namelist())
        weights = json.loads(archive.read("weights/step0/rank0/weight.json"))
        data = json.loads(archive.read("dataset/step0/rank0/dataset.json"))
        draws = json.loads(archive.read("random/rank0.json"))
    assert {"env", "pip", "hyperparameters/hyperparameters_static.json"} <= names
    assert weights["0.weight"]["norm"] == pytest.approx(float(next(model.parameters()).detach().norm()), rel=1e-6)
    assert data["args"]["0"] == {"max": 1.0, "min": 1.0, "mean": 1.0, "norm": pytest.approx(12**0.5)}
    assert "torch_random.randperm" in draws


@pytest.mark.parametrize(
    "arguments",
    [(None, None, "pack.tar"), (None, None, "p.zip", "jax"), ("model", None, "p.zip"), ([], None, "p.zip")],
)
def test_wrong_arguments_are_refused(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError):
        ConfigChecker(*arguments)


def test_a_job_is_recorded_without_a_line_in_its_script(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_TOKEN", "never-to-be-seen")
    Path("train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(4, 3)\nmodel(input=torch.ones(2, 4)).sum().backward()\n"
    )
    Path("train.sh").write_text("python train.py --lr 1e-3 --bf16 --api-key never-to-be-seen\n")
    real = [sys.executable, "train.py", "--lr", "2e-3", "--bf16", "--api-key", "never-to-be-seen"]

    status = cli.main(["env", "collect", "train.sh", "-o", "p.zip", "--run", "--", *real])

    pack = read_pack(Path("p.zip"))
    assert status == 0
    assert set(pack.ranks[0]["weights"]) == {"weight", "bias"}
    assert list(pack.ranks[0]["data"]["0"]) == ["kwargs.input"]
    assert pack.notes == ("option lr: the job got '2e-3', its script says '1e-3'",)
    with zipfile.ZipFile("p.zip") as archive:
        assert b"never-to-be-seen" not in b"".join(map(archive.read, archive.namelist()))
    written = capfd.readouterr()
    assert "never-to-be-seen" not in written.out + written.err
    assert "Error" not in written.err


def test_a_job_shows_its_draws_and_its_optimizer(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import os, random, torch\n"
        "random.seed(5)\n"
        "model = torch.nn.Linear(4, 3)\n"
        "if not (child := os.fork()):\n"
        "    random.random(); os._exit(0)\n"  # as a worker that loads data, at a time of its own
        "os.waitpid(child, 0)\n"
        "random.random()\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, betas=(0.5, 0.75))\n"
        "for _ in range(2):\n"
        "    model(torch.rand(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )

    assert cli.main(["env", "collect", "-o", "p.zip", "--run", "--", sys.executable, "train.py"]) == 0

    shown = read_pack(Path("p.zip")).ranks[0]
    drawn = {draw["name"]: draw["crc32"] for draw in shown["random"]["draws"]}
    assert [name for name in drawn if name.startswith("python")] == ["python_random.random.0"]
    expected = np.asarray(random.Random(5).random()).tobytes()  # a draw to compare with
    assert drawn["python_random.random.0"] == f"{zlib.crc32(expected):08x}"
    assert [name for name in drawn if "rand." in name] == ["torch_random.rand.0"]
    names = ("optimizer.lr", "optimizer.betas")
    assert [shown["hyperparameters"][name] for name in names] == [0.125, [0.5, 0.75]]
    assert shown["layout"]["framework"] == "plain"
    assert "Error" not in capfd.readouterr().err


SOURCE = (
    "from torch import nn\n\nclass Own(nn.Linear):\n    def forward(self, x):\n        return 2 * super().forward(x)\n"
)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (SOURCE.replace("    def", "    # said\n\n    def"), []),
        (
            SOURCE.replace("2 *", "3 *"),
            [("code", "model.own_model.Own", "class Own of own_model has other code", DifferenceLevel.ERROR)],
        ),
    ],
)
def test_code_of_the_model_that_changed_is_named(changed, expected, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    packs = []
    for number, source in enumerate((SOURCE, changed)):
        (tmp_path / "own_model.py").write_text(source)
        sys.modules.pop("own_model", None)
        importlib.invalidate_caches()
        model = torch.nn.Sequential(runpy.run_path(str(tmp_path / "own_model.py"), run_name="own_model")["Own"](2, 2))
        sys.modules["own_model"] = types.SimpleNamespace(__file__=str(tmp_path / "own_model.py"))  # type: ignore[assignment]
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        recorder_job.record_forward(model, tmp_path / f"{number}.zip", torch.ones(1, 2))
        packs.append(read_pack(tmp_path / f"{number}.zip"))
    sys.modules.pop("own_model")

    rows = [row for row in compare_packs(packs[0], packs[1], LevelRules()).rows if row.level is DifferenceLevel.ERROR]
    assert [(row.section, row.name, row.reason, row.level) for row in rows] == expected


def test_the_libraries_that_are_loaded_are_among_the_packages(alone):
    maps = Path("/proc/self/maps").read_text()
    native = {
        name: value["version"] for name, value in alone.sections["packages"].items() if name.startswith("native.")
    }

    assert native
    assert all(f"/{file}" in maps for file in native.values())


def test_the_command_loads_no_torch():
    code = "import sys, trainermon.analysis.environment.command; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"
