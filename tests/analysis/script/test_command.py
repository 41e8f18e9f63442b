"""`trainermon script`: the folder runs with torch alone, and says of each result what the judge says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.analysis.check.test_ops import Spoiled
from tests.recorded_dumps import recorded
from trainermon import PrecisionDebugger
from trainermon.accuracy.calls import OperationCall
from trainermon.analysis.script.emit import ReproducedCall, write_folder
from trainermon.analysis.script.literals import literal
from trainermon.analysis.script.shrink import shrink
from trainermon.cli import main
from trainermon.core.errors import DumpError


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump")
    torch.manual_seed(0)
    x, weight = torch.randn(8, 16), torch.randn(4, 16)
    debugger = PrecisionDebugger(dump_path=str(folder), task="tensor", level="L1")
    try:
        debugger.start()
        logits = nn.functional.linear(x, weight, bias=None)
        nn.functional.cross_entropy(logits, torch.tensor([0, 1, -100, 3] * 2), ignore_index=-100)
        logits.masked_fill(logits > 0, float("-inf")).softmax(dim=-1, dtype=torch.float32)
        torch.linalg.svd(x[:4, ::2], full_matrices=False)
        torch.cat([x, x], dim=0).to(torch.bfloat16).exp()
        nn.functional.dropout(x, 0.5)
        torch.ops.aten.add(x, x, alpha=2)
        debugger.stop()
        debugger.step()
    finally:
        PrecisionDebugger.close()
    [path] = folder.rglob("dump.json")
    return path.parent


def forwards(dump):
    return [key for key in json.loads((dump / "dump.json").read_text())["data"] if key.endswith(".forward")]


def run_scripts(tmp_path):
    """Run all scripts below a folder in one process without trainermon, which prints how each ended."""
    runner = tmp_path / "all.py"
    runner.write_text(
        "import glob, runpy, sys\nsys.modules['trainermon'] = None\n"
        "for path in sorted(glob.glob('*/*.py')):\n"
        "    sys.argv = [path]\n"
        "    try:\n        runpy.run_path(path, run_name='__main__')\n"
        "    except SystemExit as end:\n        print(path, end.code)\n"
    )

    return subprocess.run([sys.executable, str(runner)], cwd=tmp_path, capture_output=True, text=True, check=True)


def test_every_call_of_a_step_becomes_a_script_that_runs(dump, tmp_path, capsys):
    keys = forwards(dump)
    assert len(keys) > 8
    for key in keys:
        assert main(["script", str(dump), key, "-o", str(tmp_path / key)]) == 0
    printed = capsys.readouterr().out
    done = run_scripts(tmp_path)

    ends = [line.split()[1] for line in done.stdout.splitlines() if ".py " in line]
    assert ends == ["0"] * len(keys), done.stdout
    assert printed.count("recorded: pass") >= len(keys) - 3
    assert "wrong" not in done.stdout


def test_a_wrong_result_ends_the_script_with_3_and_is_made_smaller(dump, tmp_path, capsys):
    def spoil(result):
        result.view(-1)[-1] += 1

    with Spoiled(torch.ops.aten.mm, spoil):
        assert main(["script", str(dump), "Functional.linear.0", "-o", str(tmp_path), "--shrink"]) == 0

    printed = capsys.readouterr().out
    assert "recorded: pass\nagain on cpu: error (inexact)" in printed
    assert "still wrong with 2 of 192 numbers" in printed
    [script] = tmp_path.glob("*.py")
    alone = f"import sys, runpy; sys.modules['trainermon'] = None; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", alone], cwd=tmp_path.parent, capture_output=True, text=True)
    assert done.returncode == 0  # the device here is sound: what was recorded is wrong, what is given now is right
    assert "recorded, result 0: wrong in 1 of 1 elements" in done.stdout
    assert "again on cpu, result 0: right" in done.stdout


def test_a_script_finds_the_fault_of_the_device_it_runs_on(dump, tmp_path):
    main(["script", str(dump), "Functional.linear.0", "-o", str(tmp_path), "--pytest"])
    [script] = tmp_path.glob("test_*.py")
    faulty = tmp_path / "faulty.py"
    faulty.write_text(
        "import runpy, sys, torch\n"
        "true = torch.nn.functional.linear\n"
        "torch.nn.functional.linear = lambda *args, **kwargs: true(*args, **kwargs) * 1.001\n"
        f"sys.argv = [{str(script)!r}, '--iters', '2', '--bench']\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )

    done = subprocess.run([sys.executable, str(faulty)], capture_output=True, text=True)

    assert done.returncode == 3
    assert "recorded, result 0: right" in done.stdout
    assert "again on cpu, result 0: wrong in " in done.stdout
    assert " µs a call" in done.stdout
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(script)], cwd=tmp_path, capture_output=True, text=True
    )
    assert "1 passed" in tested.stdout


def test_a_script_excuses_no_more_than_the_judge(tmp_path, capsys):
    """A product in bfloat16 that is zero has no element beyond what rounding after each term may do."""
    torch.manual_seed(0)
    call = OperationCall(torch.mm, [torch.randn(16, 4096).bfloat16(), torch.randn(4096, 16).bfloat16()], {})
    zeros = ReproducedCall(
        key="Torch.mm.0", name="mm", operator="", call=call, recorded=(torch.zeros(16, 16).bfloat16(),)
    )
    script = write_folder(zeros, tmp_path)

    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)

    assert "recorded, result 0: wrong" in done.stdout
    assert "again on cpu, result 0: right" in done.stdout
    assert done.returncode == 0


def test_a_damaged_call_is_refused(dump, tmp_path, capsys):
    whole = json.loads((dump / "dump.json").read_text())
    whole["data"]["Functional.linear.0.forward"]["input_args"] = 3
    (tmp_path / "dump.json").write_text(json.dumps(whole))

    assert main(["script", str(tmp_path), "Functional.linear.0"]) == 1
    assert "is not laid out as a dump" in capsys.readouterr().err


def test_files_are_the_users_own(dump, tmp_path):
    folder = tmp_path / "new"
    main(["script", str(dump), "Functional.linear.0", "-o", str(folder)])

    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "Functional.linear.0.forward.py": 0o600,
        "inputs.pt": 0o600,
        "expected.pt": 0o600,
        "environment.json": 0o600,
    }
    assert json.loads((folder / "environment.json").read_text())["torch"] == torch.__version__


def test_msprobes_configuration_names_dump_and_call(dump, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config_op.json"
    given = {"dump_json_path": str(dump / "dump.json"), "api_name": "Functional.linear.0", "extract_api_path": "",
             "propagation": "forward", "data_mode": "real_data", "random_seed": 1234, "iter_times": 1}  # fmt: skip
    config.write_text(json.dumps(given))

    assert main(["script", "-i", str(config)]) == 0
    assert os.listdir("Functional.linear.0.forward")
    said = capsys.readouterr().err
    assert "config_op.json: passed over: random_seed, iter_times; the recorded tensors are used" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"propagation": "sideways"}, "propagation: found 'sideways', expected 'forward' or 'backward'"),
        ({"data_mode": "random_data"}, "data_mode: found 'random_data', expected 'real_data'"),
        ({"api": "x"}, "api: unknown key; known keys: api_name"),
        ({"api_name": 3}, "api_name: expected the key of a call"),
        ({"dump_json_path": None}, "dump_json_path: expected the path of a dump.json"),
    ],
)
def test_a_configuration_is_read_strictly(dump, tmp_path, change, message, capsys):
    config = tmp_path / "config_op.json"
    config.write_text(
        json.dumps({"dump_json_path": str(dump / "dump.json"), "api_name": "Functional.linear.0"} | change)
    )

    assert main(["script", "-i", str(config)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Functional.lineal.0"], "no forward call Functional.lineal.0; did you mean Functional.linear.0.forward?"),
        ([], "expected a dump and the key of a call, or -i config_op.json"),
        (["Functional.linear.0", "--device", "cuda:97"], "the call cannot be made on cuda:97"),
    ],
)
def test_what_cannot_be_done_is_said(dump, words, message, capsys):
    assert main(["script", str(dump), *words]) == 1
    assert message in capsys.readouterr().err


class Text(str):
    """Text that would run as code."""

    def __repr__(self):
        return "__import__('os').abort()"


@pytest.mark.parametrize("value", [object(), Text("x"), print, {1, 2}])
def test_what_is_no_plain_value_is_not_written(value):
    with pytest.raises(DumpError, match="cannot be written into a script"):
        literal([value], [])


@pytest.mark.parametrize(
    "value",
    [None, True, -3, 1e-300, "a'b\n\"", 1 + 2j, [1, [2.5, None]], (1,), (), {"a": (1, 2)}, slice(None, 3), ...,
     torch.bfloat16, torch.channels_last, torch.strided, float("inf"), complex("inf")],
)  # fmt: skip
def test_a_value_is_written_so_that_it_reads_the_same(value):
    assert eval(literal(value, [])) == value


def test_a_call_is_shrunk_to_the_numbers_that_matter():
    torch.manual_seed(0)
    call = OperationCall(torch.matmul, [torch.randn(32, 64), torch.randn(64, 48)], {})

    def is_wrong(candidate):
        return candidate.function(*candidate.args).shape[1] >= 3

    smaller = shrink(call, is_wrong)

    assert [tuple(tensor.shape) for tensor in smaller.args] == [(1, 1), (1, 3)]
    assert all(not tensor.any() for tensor in smaller.args)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 4))
    table, targets = nn.Parameter(torch.randn(10, 16)), torch.arange(8) % 4

    def step():
        logits = net(nn.functional.embedding(torch.arange(8), table))
        nn.functional.cross_entropy(logits + logits.tanh(), targets).backward()

    return recorded(folder, step)


def test_every_backward_of_a_step_becomes_a_script_that_runs(trained, tmp_path, capsys):
    stems = [key.removesuffix(".forward") for key in forwards(trained)]
    assert len(stems) > 6
    for stem in stems:
        assert main(["script", str(trained), f"{stem}.backward", "-o", str(tmp_path / stem)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("again on cpu: pass") == len(stems)
    assert "recorded: only summed" in printed

    done = run_scripts(tmp_path)
    ends = [line.split()[1] for line in done.stdout.splitlines() if ".py " in line]
    assert ends == ["0"] * len(stems), done.stdout
    assert "wrong" not in done.stdout


def test_a_script_of_a_backward_finds_a_wrong_gradient(trained, tmp_path, capsys):
    folder = tmp_path / "case"
    assert main(["script", str(trained), "Functional.gelu.0", "--stage", "backward", "-o", str(folder)]) == 0
    expected = torch.load(folder / "expected.pt", weights_only=True)
    expected["exact"][0] *= 1 + 1e-4  # as if the device were off by this
    torch.save(expected, folder / "expected.pt")

    done = subprocess.run(
        [sys.executable, str(folder / "Functional.gelu.0.backward.py")], capture_output=True, text=True, check=False
    )

    assert done.returncode == 3, done.stdout + done.stderr


def test_a_backward_is_not_made_smaller(trained, capsys):
    assert main(["script", str(trained), "Functional.gelu.0.backward", "--shrink"]) == 1
    assert "--shrink: only a forward call" in capsys.readouterr().err
