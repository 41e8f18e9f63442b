"""Each field of the configuration, and each call of the debugger, by what is in the files afterwards."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional

from trainermon import PrecisionDebugger
from trainermon.core.errors import AttachError, ConfigError, DumpError
from trainermon.dump import module_dump, module_dump_end
from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.restore import restore_dump


@pytest.fixture(autouse=True)
def no_debugger_is_left():
    yield
    PrecisionDebugger.close()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x))) + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Block(), Block()

    def forward(self, x):
        return (self.two(self.one(x) * 2) * 3).sum()


def configured(folder, *, file="config.json", **config):
    path = folder / file
    path.write_text(json.dumps({"dump_path": str(folder / "dump"), "level": "mix", **config}))
    PrecisionDebugger.close()
    return PrecisionDebugger(path)


def train(debugger, steps=1, model=None, **start):
    torch.manual_seed(1)
    model = Net() if model is None else model
    for _ in range(steps):
        debugger.start(model, **start)
        model(torch.arange(8.0).view(2, 4)).backward()
        debugger.stop()
        debugger.step()


def data_of(folder, step=0, rank=0, file="dump.json"):
    info = json.loads((folder / f"dump/step{step}/rank{rank}/dump_info.json").read_text())
    assert (info["errors"], info["first_error"]) == (0, "")
    return json.loads((folder / f"dump/step{step}/rank{rank}/{file}").read_text())["data"]


def saved(folder, form):
    return torch.load(folder / "dump/step0/rank0/dump_tensor_data" / form["data_name"], weights_only=True)


@pytest.mark.parametrize(
    ("ranks", "is_dumped"), [([], True), ([0, 2], True), (["1-3"], True), ([0, "3-5"], False), ("2", True)]
)
def test_the_listed_ranks_dump(tmp_path, ranks, is_dumped):
    train(configured(tmp_path, rank=ranks), rank_id=2)

    assert (tmp_path / "dump/step0/rank2/dump.json").exists() is is_dumped


def test_steps_begin_where_the_script_says(tmp_path):
    debugger = configured(tmp_path, step=["100-101"])
    debugger.set_init_step(99)
    train(debugger, steps=4)

    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["step100", "step101"]


def test_tensors_of_listed_entries_are_saved_beside_the_statistics_of_all(tmp_path):
    debugger = configured(tmp_path, statistics={"tensor_list": ["Functional.gelu"]})
    train(debugger)

    data = data_of(tmp_path)
    assert {key for key, value in data.items() if "data_name" in json.dumps(value)} == {
        f"Functional.gelu.{call}.{direction}" for call in range(2) for direction in ("forward", "backward")
    }
    entry = data["Functional.gelu.0.forward"]
    assert torch.equal(saved(tmp_path, entry["output"][0]), functional.gelu(saved(tmp_path, entry["input_args"][0])))


def test_only_the_slice_of_fitting_tensors_is_saved(tmp_path):
    part = {"dim": 0, "size": 2, "begin": 1, "end": 2}
    train(configured(tmp_path, task="tensor", level="L0", tensor={"slice": [part]}))

    entry = data_of(tmp_path)["Module.one.Block.forward.0"]
    assert saved(tmp_path, entry["input_args"][0]).tolist() == [[4.0, 5.0, 6.0, 7.0]]
    assert entry["input_args"][0]["shape"] == [2, 4]
    assert entry["input_args"][0]["Max"] == 7.0
    weight = data_of(tmp_path)["Module.one.down.Linear.forward.0"]["parameters"]["weight"]
    assert list(saved(tmp_path, weight).shape) == [4, 8]


@pytest.mark.parametrize("options", [{}, {"max_async_mb": 0.0001}])
def test_tensors_that_are_written_later_are_those_of_the_moment(tmp_path, options):
    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 1.0
            return y.add_(1.0).mul_(2.0).sum() * torch.ones(1, requires_grad=True)[0]

    for folder, config in ((tmp_path / "at_once", {}), (tmp_path / "later", {"async_dump": True, **options})):
        folder.mkdir()
        train(configured(folder, task="tensor", level="L1", **config), model=InPlace())

    entries = data_of(tmp_path / "at_once")
    assert entries.keys() == data_of(tmp_path / "later").keys()
    for key, entry in entries.items():
        later = data_of(tmp_path / "later")[key]
        for side in ("input_args", "input", "output"):
            for form, other in zip(entry.get(side, []), later.get(side, []), strict=True):
                if form and "data_name" in form:
                    assert torch.equal(saved(tmp_path / "at_once", form), saved(tmp_path / "later", other)), key
    assert saved(tmp_path / "later", entries["Tensor.add_.0.forward"]["input_args"][0]).max() == 7.0
    assert saved(tmp_path / "later", entries["Tensor.add_.0.forward"]["output"][0]).max() == 8.0


def test_a_module_scope_holds_the_functions_inside(tmp_path):
    scope = ["Module.one.Block.forward.0", "Module.one.Block.forward.0"]
    train(configured(tmp_path, statistics={"scope": scope}))

    assert set(data_of(tmp_path)) == {
        "Module.one.up.Linear.forward.0", "Functional.linear.0.forward", "Functional.gelu.0.forward",
        "Module.one.down.Linear.forward.0", "Functional.linear.1.forward", "Tensor.__add__.0.forward",
        "Module.one.Block.forward.0",
    }  # fmt: skip


def test_names_are_listed_by_parts_and_by_patterns(tmp_path):
    train(configured(tmp_path, level="L1", statistics={"list": [r"name-regex(linear\.[12]\.forward$)", "gelu.0.back"]}))

    assert set(data_of(tmp_path)) == {
        "Functional.linear.1.forward", "Functional.linear.2.forward", "Functional.gelu.0.backward",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("risk", "missing", "present"),
    [
        ("ALL", [], ["Tensor.view.0.forward", "Functional.linear.0.forward", "Tensor.__mul__.0.forward"]),
        ("FOCUS", ["Tensor.view.0.forward"], ["Functional.linear.0.forward", "Tensor.__mul__.0.forward"]),
        ("CORE", ["Tensor.view.0.forward", "Tensor.__mul__.0.forward"], ["Functional.linear.0.forward"]),
    ],
)
def test_the_risk_level_chooses_functions(tmp_path, risk, missing, present):
    class Viewing(Net):
        def forward(self, x):
            return super().forward(x.view(2, 4))

    train(configured(tmp_path, level="L1", risk_level=risk), model=Viewing())

    data = data_of(tmp_path)
    assert [key for key in missing if key in data] == []
    assert [key for key in present if key not in data] == []


@pytest.mark.parametrize("mode", ["md5", "crc32", "xor"])
def test_checksums_are_named_and_tell_orders_apart(tmp_path, mode):
    """The xor of msprobe is blind to the order of elements, and to pairs of equal ones; here it gives a CRC-32."""

    class Flipped(nn.Module):
        def forward(self, x):
            return (x * 1.0 + x.flip(0) * torch.ones(1, requires_grad=True)).sum()

    train(configured(tmp_path, level="L1", risk_level="ALL", statistics={"summary_mode": mode}), model=Flipped())

    entry = data_of(tmp_path)["Tensor.flip.0.forward"]
    assert entry["input_args"][0]["crc32"] != entry["output"][0]["crc32"]
    assert entry["input_args"][0]["Max"] == entry["output"][0]["Max"] == 7.0
    notes = read_dump(tmp_path / "dump/step0/rank0").info.notes
    assert any("CRC-32 of the bytes in order" in note for note in notes) is (mode != "crc32")


def test_without_extra_info_there_is_no_tree(tmp_path):
    train(configured(tmp_path, extra_info=False))

    names = {path.name for path in (tmp_path / "dump/step0/rank0").iterdir()}
    assert names == {"dump.json", "dump_info.json"}


def test_a_removed_switch_leaves_the_dump_as_it_was_and_a_broken_file_too(tmp_path, caplog):
    path = tmp_path / "config.json"
    debugger = configured(tmp_path, dump_enable=True)
    for step, text in enumerate(
        [
            None,
            {"dump_path": str(tmp_path / "dump"), "level": "L0"},
            "{ broken",
            {"dump_path": str(tmp_path / "dump"), "dump_enable": False},
        ]
    ):
        if text is not None:
            path.write_text(text if isinstance(text, str) else json.dumps(text))
            os.utime(path, (step, step))
        train(debugger)

    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["step0", "step1", "step2"]
    assert "Functional.linear.0.forward" in data_of(tmp_path, 0)
    assert "Functional.linear.0.forward" not in data_of(tmp_path, 1)  # the level came into force
    assert "the configuration stays as it was" in caplog.text


def test_several_models_are_told_apart(tmp_path):
    for names, models in ((["0", "1"], [Net(), Net()]), (["actor", "critic"], {"actor": Net(), "critic": Net()})):
        debugger = configured(tmp_path, level="L0")
        debugger.start(models)
        for model in models.values() if isinstance(models, dict) else models:
            model(torch.ones(1, 4)).backward()
        debugger.stop()
        debugger.step()

        assert [f"Module.{name}.one.Block.forward.0" in data_of(tmp_path) for name in names] == [True, True]
        stages = {
            (entry.module.split(".")[0], entry.stage) for entry in read_dump(tmp_path / "dump/step0/rank0").entries
        }
        assert stages == {(names[0], 0), (names[1], 1)}


def test_forwards_of_a_step_are_its_micro_steps(tmp_path):
    debugger, model = configured(tmp_path, level="L0"), Net()
    debugger.start(model)
    first, second = model(torch.ones(1, 4)), model(torch.ones(1, 4))  # as a pipeline does
    first.backward()
    second.backward()
    debugger.stop()
    debugger.step()

    dump = read_dump(tmp_path / "dump/step0/rank0")
    found = {entry.micro_step for entry in dump.entries if entry.call == 1}
    assert found == {1}
    assert {entry.micro_step for entry in (*dump.entries, *dump.root) if entry.call == 0} == {0}


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_one_module_alone(tmp_path, level):
    debugger, model = configured(tmp_path, level=level), Net()
    if level == "L1":
        debugger.start()
    for _ in range(2):
        module_dump(model.two, "second")
        model(torch.ones(1, 4)).backward()
        module_dump_end()
    torch.ones(2).sqrt()
    debugger.stop()
    debugger.step()

    data = data_of(tmp_path)
    modules = {key for key in data if key.startswith("Module.") and ".forward." in key}
    assert modules == {
        f"Module.second{name}.forward.{call}" for name in (".Block", ".up.Linear", ".down.Linear") for call in range(2)
    }
    functions = {key for key in data if key.endswith(".forward")} - {"Tensor.sqrt.0.forward"}
    linear = {f"Functional.linear.{call}.forward" for call in range(4)}
    assert {key for key in functions if "linear" in key} == (set() if level == "L0" else linear)
    assert "Tensor.__mul__.0.forward" not in functions  # outside of the module
    assert ("Tensor.sqrt.0.forward" in data) is (level == "L1")  # what was interrupted goes on


def test_one_module_is_no_choice_while_all_are_recorded(tmp_path, caplog):
    debugger, model = configured(tmp_path), Net()
    debugger.start(model)
    module_dump(model.two, "second")
    model(torch.ones(1, 4)).backward()
    module_dump_end()
    debugger.stop()

    assert "module_dump has no effect" in caplog.text
    assert "Module.two.Block.forward.0" in data_of(tmp_path)


def test_one_module_needs_a_debugger():
    with pytest.raises(AttachError, match="there is no PrecisionDebugger"):
        module_dump(Net(), "net")


def test_what_belongs_to_inference_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="token_range and scheduled_tokens"):
        configured(tmp_path).start(Net(), [0, 3])


KILLED = """
    import os, signal, sys, torch
    from tests.dump.test_debugger_fields import Net
    from trainermon import PrecisionDebugger
    folder, level = sys.argv[1:]
    config = os.path.join(folder, "config.json")
    debugger, model = PrecisionDebugger(config), Net()
    if level == "published":
        debugger.start(model)
        model(torch.ones(1, 4))
        debugger.stop()
    debugger.start(model)
    model.one(torch.ones(1, 4)).sum().backward()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("moment", ["first", "published"])
def test_nothing_is_lost_when_the_process_is_killed(tmp_path, moment):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dump_path": str(tmp_path / "dump"), "level": "mix", "task": "tensor", "flush_s": 0}))
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), moment]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    folder = tmp_path / "dump/step0/rank0"

    dump = read_dump(folder)
    keys = {entry.key for entry in dump.entries}
    call = 1 if moment == "published" else 0
    linear = 4 if moment == "published" else 0
    assert not dump.info.complete
    assert {f"Module.one.Block.forward.{call}", f"Functional.linear.{linear + 1}.backward"} <= keys
    assert all(record.data_path.exists() for entry in dump.entries for record in entry.outputs if record.data_path)

    missing = next(record.data_path for entry in dump.entries for record in entry.outputs if record.data_path)
    missing.unlink()
    assert restore_dump(folder) == len(dump.entries)
    restored = json.loads((folder / "dump.json").read_text())
    assert restored["data"].keys() == keys
    assert missing.name not in json.dumps(restored)
    assert json.loads((folder / "construct.json").read_text())["Functional.linear.0.forward"].startswith(
        "Module.one.up"
    )
    assert json.loads((folder / "stack.json").read_text())


def test_only_dumps_of_killed_processes_are_restored(tmp_path):
    train(configured(tmp_path))

    with pytest.raises(DumpError, match=r"holds no dump\.partial\.jsonl: no process was killed"):
        restore_dump(tmp_path / "dump/step0/rank0")


class ReturnsItsBias(nn.Module):
    """Leaves the bias to whoever comes next, as Megatron's linear layers do."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return functional.linear(x, self.weight), self.bias


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = ReturnsItsBias()

    def forward(self, x):
        x, bias = self.layer(x)
        return (x + bias).square()


def test_a_leaf_of_two_micro_steps_in_flight_is_filed_with_its_own(tmp_path):
    torch.manual_seed(0)
    model, batches = Stage(), torch.randn(3, 2, 4)
    wanted = []
    for batch in batches:
        x = functional.linear(batch, model.layer.weight).detach()
        wanted.append((2 * (x + model.layer.bias)).detach().sum(0).norm().item())

    debugger = PrecisionDebugger(task="statistics", dump_path=str(tmp_path), level="L0")
    debugger.start(model)
    first, second = model(batches[0]).sum(), model(batches[1]).sum()  # one forward, one backward from here on
    first.backward()
    third = model(batches[2]).sum()
    second.backward()
    third.backward()
    debugger.stop()
    debugger.step()

    dump = read_dump(tmp_path / "step0" / "rank0")
    found = {entry.key: entry for entry in dump.entries if ".layer." in entry.key and ".backward." in entry.key}
    norms = [found[f"Module.layer.ReturnsItsBias.backward.{number}"].inputs[1].norm for number in range(3)]
    assert norms == pytest.approx(wanted)
