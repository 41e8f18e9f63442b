"""`PrecisionDebugger` as scripts use it: which steps, ranks and names are dumped, and that no bit changes."""

import json
import logging
import math
import os
import struct
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.dump import debugger_ranks
from tests.dump.workbench import VOCABULARY, Network
from tests.ranks import run_ranks
from trainermon import PrecisionDebugger
from trainermon.core.errors import AttachError, ConfigError
from trainermon.dump.files.reader import read_dump
from trainermon.dump.function_calls import FunctionCapture


@pytest.fixture(autouse=True)
def no_debugger_is_left():
    yield
    PrecisionDebugger.close()


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.act(self.fc(x)) + x
        y += 1.0
        y = 2 * y
        return functional.softmax(y @ self.fc.weight.t(), dim=-1).view(-1).sum()


def dumped(tmp_path, *, config=None, model=None, steps=1, file=True, **arguments):
    """Train `model` under a debugger, and return what is in dump.json of each step that was dumped."""
    path = None
    if file:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"dump_path": str(tmp_path / "dump"), **(config or {})}))
    debugger = PrecisionDebugger(path, **arguments)
    model = Small() if model is None else model
    for _ in range(steps):
        debugger.start(model if isinstance(model, nn.Module) else None)
        model(torch.ones(2, 4)).backward()
        debugger.stop()
        debugger.step()
    folders = sorted((tmp_path / "dump").glob("step*/rank0"), key=lambda path: int(path.parent.name[4:]))
    data = {}
    for folder in folders:
        info = json.loads((folder / "dump_info.json").read_text())
        assert (info["errors"], info["first_error"]) == (0, "")
        data[folder.parent.name] = json.loads((folder / "dump.json").read_text())["data"]
    return data


def test_three_lines_dump_the_chosen_steps(tmp_path):
    data = dumped(tmp_path, file=False, dump_path=str(tmp_path / "dump"), level="L0", step=[1, "3-4"], steps=6)

    assert list(data) == ["step1", "step3", "step4"]
    assert "Module.fc.Linear.forward.0" in data["step3"]


FORWARD_NAMES = [
    "Functional.linear.0", "Functional.relu.0", "Tensor.__add__.0", "Tensor.__iadd__.0", "Tensor.__rmul__.0",
    "Tensor.t.0", "Tensor.__matmul__.0", "Functional.softmax.0", "Tensor.sum.0",
]  # fmt: skip


def test_functions_are_named_and_numbered_as_in_msprobe(tmp_path):
    data = dumped(tmp_path, config={"level": "L1"}, steps=2)

    for step in data.values():
        assert [key for key in step if key.endswith("forward")] == [f"{name}.forward" for name in FORWARD_NAMES]
    assert "Functional.softmax.0.backward" in data["step1"]


def test_mixed_level_hangs_functions_into_modules(tmp_path):
    dumped(tmp_path, config={"level": "mix"}, model=nn.Sequential(Small()))

    construct = json.loads((tmp_path / "dump/step0/rank0/construct.json").read_text())
    assert construct["Functional.linear.0.forward"] == "Module.0.fc.Linear.forward.0"
    assert construct["Tensor.__add__.0.forward"] == "Module.0.Small.forward.0"
    assert construct["Tensor.view.0.forward"] == "Module.0.Small.forward.0"


def test_an_in_place_function_is_recorded_before_and_after(tmp_path):
    def model(x):
        x = x * 1.0
        x.mul_(3.0)
        return x.sum() * torch.ones(1, requires_grad=True)[0]

    data = dumped(tmp_path, config={"level": "L1"}, model=model)["step0"]

    entry = data["Tensor.mul_.0.forward"]
    assert (entry["input_args"][0]["Max"], entry["output"][0]["Max"]) == (1.0, 3.0)


def test_gradients_of_functions_are_autograds(tmp_path):
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.ones(2, 4)
    hidden = functional.linear(x, weight)
    expected = torch.autograd.grad(hidden.square().sum(), [hidden, weight])

    data = dumped(
        tmp_path, config={"level": "L1", "task": "tensor"}, model=lambda x: functional.linear(x, weight).square().sum()
    )

    entry = data["step0"]["Functional.linear.0.backward"]
    folder = tmp_path / "dump/step0/rank0/dump_tensor_data"
    assert torch.equal(torch.load(folder / entry["input"][0]["data_name"]), expected[0])
    assert torch.equal(torch.load(folder / entry["output"][1]["data_name"]), expected[1])


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("checkpointing", ["none", "nonreentrant", "reentrant"])
def test_dumping_changes_no_bit(tmp_path, level, checkpointing):
    def train(level):
        torch.manual_seed(3)
        model = Network(checkpointing=checkpointing)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        debugger = PrecisionDebugger(dump_path=tmp_path / level, level=level, task="tensor") if level else None
        bits = []
        for _ in range(2):
            text = torch.randint(VOCABULARY, (4, 7))
            if debugger:
                debugger.start(model)
            loss = model(text[:, :-1], targets=text[:, 1:])
            loss.backward()
            if debugger:
                debugger.stop()
                debugger.step()
            bits += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        if debugger:
            assert read_dump(tmp_path / level / "step1/rank0").info.errors == 0
        return [*bits, *model.state_dict().values(), torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(train(None), train(level), strict=True))


def test_recomputation_is_not_counted(tmp_path):
    weight = torch.randn(4, 4, requires_grad=True)

    def model(x):
        return checkpoint(lambda x: functional.linear(x, weight).tanh(), x, use_reentrant=False).sum()

    data = dumped(tmp_path, config={"level": "L1"}, model=model)["step0"]

    assert [key for key in data if key.startswith("Functional.linear")] == [
        "Functional.linear.0.forward",
        "Functional.linear.0.backward",
    ]


def test_a_scope_is_a_window_with_both_ends(tmp_path):
    scope = ["Functional.relu.0.forward", "Tensor.__rmul__.0.forward"]
    data = dumped(tmp_path, config={"level": "L1", "statistics": {"scope": scope}})["step0"]

    assert list(data) == [f"{name}.forward" for name in FORWARD_NAMES[1:5]]


def test_a_listed_module_opens_what_runs_in_it(tmp_path):
    listed = ["Module.0.fc.Linear.forward.0"]
    model = nn.Sequential(Small())
    data = dumped(tmp_path, config={"level": "mix", "statistics": {"list": listed}}, model=model)["step0"]

    assert set(data) == {"Functional.linear.0.forward", "Module.0.fc.Linear.forward.0"}


@pytest.mark.parametrize(
    ("modes", "directions", "sides"),
    [
        (["forward"], {"forward"}, {"input_args", "input_kwargs", "output"}),
        (["backward", "output"], {"backward"}, {"output"}),
        (["input"], {"forward", "backward"}, {"input_args", "input_kwargs", "input"}),
    ],
)
def test_data_mode_chooses_directions_and_sides(tmp_path, modes, directions, sides):
    data = dumped(tmp_path, config={"level": "L1", "statistics": {"data_mode": modes}})["step0"]

    assert {key.rsplit(".", 1)[-1] for key in data} == directions  # of functions the direction comes last
    assert {side for value in data.values() for side in value} - {"trainermon"} == sides


def test_a_checksum_sees_the_order_of_elements(tmp_path):
    def model(x):
        return torch.flip(torch.arange(4.0) * torch.ones(1, requires_grad=True), [0]).sum()

    data = dumped(tmp_path, config={"level": "L1", "statistics": {"summary_mode": "md5"}}, model=model)["step0"]

    entry = data["Torch.flip.0.forward"]
    assert entry["input_args"][0]["md5"] != entry["output"][0]["md5"]
    assert (
        entry["output"][0]["crc32"] == entry["output"][0]["md5"] == f"{zlib.crc32(struct.pack('<4f', 3, 2, 1, 0)):08x}"
    )


def test_a_method_that_somebody_has_replaced_runs_once(tmp_path, monkeypatch):
    """Torch hands a function mode the replacement, which is running already: Megatron on a CPU ended of that."""
    calls = []
    real = torch.Tensor.exp

    def exp(tensor):
        calls.append(tensor)
        return real(tensor) + 1

    def model(x):
        return x.exp().sum() * torch.ones(1, requires_grad=True)[0]

    monkeypatch.setattr(torch.Tensor, "exp", exp)

    data = dumped(tmp_path, config={"level": "L1"}, model=model)["step0"]

    assert len(calls) == 1
    assert data["Tensor.exp.0.forward"]["output"][0]["Max"] == pytest.approx(math.e)


def test_structure_has_names_only(tmp_path):
    data = dumped(tmp_path, config={"task": "structure"}, model=nn.Sequential(Small()))

    folder = tmp_path / "dump/step0/rank0"
    stacks = json.loads((folder / "stack.json").read_text())
    assert data == {"step0": {}}
    assert "Functional.linear.0.forward" in json.loads((folder / "construct.json").read_text())
    assert any("Functional.linear.0.forward" in names for names, _ in stacks.values())


def test_levels_with_modules_need_a_model(tmp_path):
    PrecisionDebugger(dump_path=tmp_path, level="L0", step=[5])

    with pytest.raises(AttachError, match="level L0 records modules, but no model was given"):
        PrecisionDebugger.start()


def test_what_is_no_model_is_refused(tmp_path):
    PrecisionDebugger(dump_path=tmp_path, level="L0")

    with pytest.raises(AttachError, match=r"start\(model\): found a str, expected a torch\.nn\.Module"):
        PrecisionDebugger.start("model")  # type: ignore[arg-type]  # which is what is tested


def test_models_may_be_given_by_an_iterator(tmp_path):
    model = Small()
    PrecisionDebugger(dump_path=tmp_path, level="L0")
    PrecisionDebugger.start(iter([model]))  # type: ignore[arg-type]  # more than is promised
    model(torch.ones(2, 4)).backward()
    PrecisionDebugger.stop()

    data = json.loads((tmp_path / "step0/rank0/dump.json").read_text())["data"]
    assert "Module.0.fc.Linear.forward.0" in data


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"task": ["tensor"]}, "task: found .*, expected one of statistics, tensor, structure"),
        ({"lvel": "L1"}, "lvel: unknown key; did you mean 'level'"),
        ({"level": "L3"}, "level: found 'L3', expected one of L0, L1, mix, debug"),
        ({"task": "nan_check"}, "task: 'nan_check' is no task here"),
        ({"statistics": {"scope": ["a"]}}, "scope: found .*, expected no name or two"),
        ({"step": ["5-3"]}, "step: found '5-3', expected first ≤ last"),
    ],
)
def test_a_wrong_configuration_is_refused_with_its_place(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        dumped(tmp_path, config=config)


def test_keys_without_effect_are_told(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        dumped(tmp_path, config={"level": "L0", "precision": "high"})

    assert "precision has no effect: statistics are always accumulated in float64" in caplog.text
    assert "precision has no effect" in read_dump(tmp_path / "dump/step0/rank0").info.notes[0]


def test_stop_and_start_within_a_step_go_on_counting(tmp_path):
    model = nn.Sequential(Small())
    debugger = PrecisionDebugger(dump_path=tmp_path, level="mix")
    for _ in range(2):
        debugger.start(model)
        model(torch.ones(1, 4)).backward()
        debugger.stop()
    debugger.step()

    keys = {entry.key for entry in read_dump(tmp_path / "step0/rank0").entries}
    assert {"Module.0.fc.Linear.forward.1", "Functional.linear.1.forward"} <= keys


def test_a_dump_that_was_never_stopped_can_be_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dump_path": str(tmp_path), "level": "L1", "flush_s": 0}))
    debugger = PrecisionDebugger(path)
    debugger.start()
    Small()(torch.ones(1, 4))

    dump = read_dump(tmp_path / "step0/rank0")

    assert not dump.info.complete
    assert "Functional.linear.0.forward" in {entry.key for entry in dump.entries}


def test_the_file_switches_the_dump_on_while_training(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dump_path": str(tmp_path), "level": "L1", "dump_enable": False}))
    debugger = PrecisionDebugger(path)
    for step in range(4):
        if step in (1, 3):
            path.write_text(json.dumps({"dump_path": str(tmp_path), "level": "L1", "dump_enable": step == 1}))
            os.utime(path, (step, step))
        debugger.start()
        torch.ones(2) + 1
        debugger.stop()
        debugger.step()

    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step1", "step2"]


def test_saved_variables_and_their_gradients(tmp_path):
    debugger = PrecisionDebugger(dump_path=tmp_path, level="debug", task="tensor")
    y = torch.ones(2, 2, requires_grad=True) * 2
    debugger.save(y, "y")
    debugger.save({"k": [y, 3]}, "v")
    y.sum().backward()
    debugger.step()

    data = json.loads((tmp_path / "step0/rank0/debug.json").read_text())["data"]
    # names and nesting as msprobe 26.2 writes them for the same calls
    assert data["y.0.debug"]["data_name"] == "y.0.debug.pt"
    assert data["v.0.debug"]["k"][0]["data_name"] == "v.0.debug.k.0.pt"
    assert data["v.0.debug"]["k"][1] == {"type": "int", "value": 3}
    assert data["v_grad.0.debug"]["k"][0]["Max"] == 1.0
    assert data["v_grad.0.debug"]["k"][1] is None
    assert data["y_grad.0.debug"]["Norm"] == 2.0


def test_a_registered_function_is_recorded(tmp_path):
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L1")
    debugger.register_custom_api(torch.nn.utils.rnn, "pad_sequence", "Mine")
    debugger.start()
    torch.nn.utils.rnn.pad_sequence([torch.ones(2), torch.ones(3)])
    debugger.stop()
    debugger.step()

    data = json.loads((tmp_path / "step0/rank0/dump.json").read_text())["data"]
    assert data["Mine.pad_sequence.0.forward"]["output"][0]["shape"] == [3, 2]


def test_compiled_models_run_eagerly_and_the_dump_says_so(tmp_path):
    model = Small()
    model.compile(backend="eager")
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    for _ in range(2):
        debugger.start(model)
        model(torch.ones(2, 4)).backward()
        debugger.stop()
        debugger.step()

    dump = read_dump(tmp_path / "step1/rank0")
    assert "compiled code ran eagerly" in dump.info.notes[0]
    assert "Module.fc.Linear.forward.0" in {entry.key for entry in dump.entries}


def test_compiled_functions_run_eagerly_in_dumped_steps_only(tmp_path):
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x.exp() * 2, backend=backend)
    function(torch.ones(2))
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L1", step=[1])
    for _ in range(3):
        debugger.start()
        function(torch.ones(2))
        debugger.stop()
        debugger.step()

    dump = read_dump(tmp_path / "step1/rank0")
    assert "compiled code ran eagerly" in dump.info.notes[0]
    assert "Tensor.exp.0.forward" in {entry.key for entry in dump.entries}
    assert len(graphs) == 1  # neither was it compiled again


def test_a_fault_of_the_dump_lets_go_of_the_model_and_training_goes_on(tmp_path, monkeypatch, caplog):
    model = nn.Sequential(Small())
    debugger = PrecisionDebugger(dump_path=tmp_path, level="mix")
    monkeypatch.setattr(FunctionCapture, "attach", lambda self: 1 / 0)
    for _ in range(2):
        debugger.start(model)
        model(torch.ones(1, 4)).backward()
        debugger.stop()
        debugger.step()

    assert "ZeroDivisionError" in caplog.text
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def strange(kind):
    values = torch.tensor([[0.0, 2.0], [-4.0, 0.0]])
    with FakeTensorMode():
        fake = torch.ones(2, 2)
    return {
        "bf16": values.bfloat16(),
        "fp8": values.to(torch.float8_e4m3fn),
        "complex": values.to(torch.complex64),
        "sparse": values.to_sparse(),
        "meta": values.to("meta"),
        "fake": fake,
        "empty": torch.ones(0),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "largest"),
    [("bf16", 2.0), ("fp8", 2.0), ("complex", 4.0), ("sparse", 2.0), ("meta", None), ("fake", None), ("empty", None)],
)
def test_tensors_of_every_kind_are_described(tmp_path, kind, largest):
    class Kept(nn.Module):
        def forward(self, value):
            return value

    model = nn.Sequential(Kept())
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    debugger.start(model)
    model(strange(kind))
    debugger.stop()
    debugger.step()

    dump = read_dump(tmp_path / "step0/rank0")
    assert (dump.info.errors, dump.info.first_error) == (0, "")
    assert dump.entries[0].outputs[0].max == largest


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        row = torch.ones(4) * index
        for _ in range(100):  # enough that a worker, if it recorded, would write
            row = torch.relu(row)
        return row


@pytest.mark.parametrize("level", ["L1", "mix"])
def test_a_worker_forked_within_a_dump_leaves_it_to_its_parent(tmp_path, level):
    model = Small()
    debugger = PrecisionDebugger(None, "tensor", tmp_path, level)
    debugger.start(model)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    for batch in loader:
        model(batch).backward()
    debugger.stop()
    debugger.step()

    dump = read_dump(tmp_path / "step0/rank0")
    assert (dump.info.complete, dump.info.errors) == (True, 0)
    forwards = [entry for entry in dump.entries if entry.direction == "forward"]
    assert [entry.call for entry in forwards if entry.module == "linear"] == [0, 1]
    assert not list((tmp_path / "step0/rank0/dump_tensor_data").glob("*relu.99*"))


@pytest.mark.distributed
def test_dumping_changes_no_bit_under_ddp_and_sees_collectives():
    texts = run_ranks(Path(debugger_ranks.__file__))

    assert ["done" in text for text in texts] == [True, True], texts
