"""`trainermon script`: the folder runs with torch alone, and says of each result what the judge says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.analysis.check.test_ops import Spoiled
from tests.recorded_dump import record_dump
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

    def run():
        logits = nn.functional.linear(x, weight, bias=None)
        nn.functional.cross_entropy(logits, torch.tensor([0, 1, -100, 3] * 2), ignore_index=-100)
        logits.masked_fill(logits > 0, float("-inf")).softmax(dim=-1, dtype=torch.float32)
        torch.linalg.svd(x[:4, ::2], full_matrices=False)
        torch.cat([x, x], dim=0).to(torch.bfloat16).exp()
        nn.functional.dropout(x, 0.5)
        torch.ops.aten.add(x, x, alpha=2)

    return record_dump(folder, run, task="tensor", level="L1")


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
    assert "again on cpu: the same numbers as recorded" in done.stdout  # of the dropout: its generator is known


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


def test_the_folder_of_one_step_and_rank_will_do(dump, tmp_path, capsys):
    command = ["script", str(dump.parent.parent), "Functional.linear.0", "-o", str(tmp_path / "out")]
    assert main(command) == 0
    assert (tmp_path / "out/Functional.linear.0.forward.py").is_file()

    for rank in ("rank0", "rank1"):
        (tmp_path / "two" / rank).mkdir(parents=True)
        (tmp_path / "two" / rank / "dump.json").write_text("{}")
    assert main(["script", str(tmp_path / "two"), "Functional.linear.0"]) == 1
    assert "holds 2 dumps, of steps and ranks: name one of them" in capsys.readouterr().err


def test_a_damaged_call_is_refused(dump, tmp_path, capsys):
    whole = json.loads((dump / "dump.json").read_text())
    whole["data"]["Functional.linear.0.forward"]["input_args"] = 3
    (tmp_path / "dump.json").write_text(json.dumps(whole))

    assert main(["script", str(tmp_path), "Functional.linear.0"]) == 1
    assert "Functional.linear.0.forward: its entry is damaged" in capsys.readouterr().err


def test_a_call_that_torch_refuses_is_told_in_a_line(dump, tmp_path, capsys):
    shutil.copytree(dump, tmp_path / "dump")
    whole = json.loads((dump / "dump.json").read_text())
    whole["data"]["Functional.linear.0.forward"]["input_kwargs"] = {"bias": 3}
    (tmp_path / "dump" / "dump.json").write_text(json.dumps(whole))

    assert main(["script", str(tmp_path / "dump"), "Functional.linear.0"]) == 1
    assert "the call cannot be made on cpu: linear()" in capsys.readouterr().err


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
    assert "config_op.json: passed over: iter_times; --iters of the script repeats the call" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"propagation": "sideways"}, "propagation: found 'sideways', expected 'forward' or 'backward'"),
        ({"data_mode": "random"}, "data_mode: found 'random', expected 'real_data' or 'random_data'"),
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


def test_a_wrong_backward_is_made_smaller_while_it_stays_wrong(trained, tmp_path, capsys):
    def spoil(gradient):
        gradient.view(-1)[-1] += 1

    with Spoiled(torch.ops.aten.mm, spoil):
        words = ["script", str(trained), "Functional.linear.1.backward", "-o", str(tmp_path / "case"), "--shrink"]
        assert main(words) == 0

    assert "still wrong with 4 of 324 numbers: (1, 1), (1, 1), (1,), (1, 1)" in capsys.readouterr().out
    done = run_scripts(tmp_path)
    assert "recorded, result 0: wrong in 1 of 1 elements" in done.stdout
    assert "again on cpu, result 0: right" in done.stdout
    assert "Functional.linear.1.backward.py 0" in done.stdout  # the device here is sound


def test_a_right_backward_stays_as_it_is(trained, tmp_path, capsys):
    assert main(["script", str(trained), "Functional.gelu.0.backward", "-o", str(tmp_path), "--shrink"]) == 0
    assert "not made smaller: the call is not wrong on cpu" in capsys.readouterr().out


class SineModule(nn.Module):
    def forward(self, x):
        return x.sin()


class Toured(nn.Module):
    """A net whose calls reshape, give several results, write in place or into what they are given."""

    def __init__(self):
        super().__init__()
        self.embed, self.linear, self.norm = nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.attention, self.own = nn.MultiheadAttention(8, 2, batch_first=True), SineModule()

    def forward(self, tokens):
        hidden = self.own(self.norm(self.linear(self.embed(tokens))))
        found, weights = self.attention(hidden, hidden, hidden)
        largest, _ = torch.topk(found, 3, dim=-1)
        left, right = torch.split(found, 4, dim=-1)
        spread, _ = torch.var_mean(found, dim=0)
        kept = nn.functional.relu((right * 1).add_(0.1), inplace=True)
        first, *_ = torch.unbind(left, dim=1)
        return sum(one.square().sum() for one in (largest, spread, kept, first, weights))


def without_autograd():
    ones, made = torch.ones(3), torch.empty(3)
    torch.add(ones, 2, out=made)
    torch.max(torch.arange(12.0).view(3, 4), dim=1, out=(torch.empty(3), torch.empty(3, dtype=torch.long)))
    ones.masked_fill_(ones > 0, float("inf"))
    ones[1] = 7.0
    ones.index_add_(0, torch.tensor([0]), torch.ones(1))
    torch.ops.aten.add.out(made, made, out=torch.empty(3))
    torch.ops.aten.native_layer_norm(made, [3], None, None, 1e-5)
    torch.ops.aten.relu_(made)


@pytest.fixture(scope="module")
def toured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toured")
    torch.manual_seed(0)
    net = Toured()
    config = folder / "config.json"
    task = {"task": "tensor", "level": "mix", "dump_path": str(folder / "dump"), "tensor": {"risk_level": "ALL"}}
    config.write_text(json.dumps(task))
    debugger = PrecisionDebugger(str(config))
    try:
        debugger.start(model=net)
        net(torch.arange(6).view(2, 3)).backward()
        without_autograd()
        debugger.stop()
        debugger.step()
    finally:
        PrecisionDebugger.close()
    [path] = folder.rglob("dump.json")
    return path.parent


TOUR = [
    "Module.attention.MultiheadAttention.forward.0",
    "Module.norm.LayerNorm.forward.0",
    "Module.embed.Embedding.forward.0",
    "Module.linear.Linear.forward.0",
    "Functional.embedding.0.backward",
    "Functional.layer_norm.0.backward",
    "Functional.multi_head_attention_forward.0.forward",
    "Functional.multi_head_attention_forward.0.backward",
    "Functional.relu.0.forward",
    "Functional.relu.0.backward",
    "Tensor.add_.0.forward",
    "Tensor.__setitem__.0.forward",
    "Tensor.masked_fill_.0.forward",
    "Tensor.index_add_.0.forward",
    "Torch.add.0.forward",
    "Torch.max.0.forward",
    "Torch.topk.0.backward",
    "Torch.split.0.backward",
    "Torch.unbind.0.backward",
    "Torch.var_mean.0.backward",
    "aten.native_layer_norm.0.forward",
    "aten.add.0.forward",
    "aten.relu_.0.forward",
]


def test_calls_of_all_kinds_become_scripts_that_run(toured, tmp_path, capsys):
    for key in TOUR:
        assert main(["script", str(toured), key, "-o", str(tmp_path / key)]) == 0, key
    printed = capsys.readouterr().out
    done = run_scripts(tmp_path)

    assert "error" not in printed
    assert [line for line in done.stdout.splitlines() if ".py " in line] == [
        f"{key}/{key}.py 0" for key in sorted(TOUR)
    ], done.stdout + done.stderr
    assert "wrong" not in done.stdout


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "Module.own.SineModule.forward.0",
            "SineModule is no single function of torch's; name a function that it calls: Tensor.sin.0",
        ),
        ("Module.linear.Linear.backward.0", "of modules only forwards can be run again; name a function"),
        ("Module.linear.Linear.parameters_grad.0", "of modules only forwards can be run again; name a function"),
    ],
)
def test_what_a_dump_does_not_say_of_a_module_is_not_guessed(toured, key, message, capsys):
    assert main(["script", str(toured), key]) == 1
    assert message in capsys.readouterr().err


def test_a_dump_of_modules_alone_is_named_as_one(tmp_path, capsys):
    debugger = PrecisionDebugger(dump_path=str(tmp_path), task="tensor", level="L0")
    net = nn.Sequential(SineModule(), nn.LayerNorm(4, eps=0.5))
    try:
        debugger.start(model=net)
        net(torch.ones(2, 4)).sum().backward()
        debugger.stop()
        debugger.step()
    finally:
        PrecisionDebugger.close()
    [path] = tmp_path.rglob("dump.json")

    assert main(["script", str(path.parent), "Module.0.SineModule.forward.0"]) == 1
    assert "of a dump of level mix or L1: this one has level L0, modules alone" in capsys.readouterr().err
    assert main(["script", str(path.parent), "Module.1.LayerNorm.forward.0", "-o", str(tmp_path / "case")]) == 0
    text = (tmp_path / "case" / "Module.1.LayerNorm.forward.0.py").read_text()
    assert "torch.nn.functional.layer_norm(tensors[0], (4, ), tensors[1], tensors[2], 0.5)" in text
