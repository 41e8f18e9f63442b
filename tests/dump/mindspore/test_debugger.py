"""Dumps of a small model of MindSpore against MindSpore's own gradients, and against the run without a dump."""

import json
import logging
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from tests.dump.mindspore.small_model import NUM_STEPS, Model, loss_of, model_and_batches, train
from trainermon.core.errors import AttachError, ConfigError
from trainermon.dump.files.reader import read_dump
from trainermon.dump.mindspore import PrecisionDebugger
from trainermon.dump.mindspore.tensors import MindSporeTensors

pytestmark = pytest.mark.mindspore


@pytest.fixture(autouse=True)
def _alone():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    PrecisionDebugger.close()
    ms.set_context(mode=ms.PYNATIVE_MODE)


def dumped(folder, step=0, **arguments):
    """Train with a dump of every step, and return that of one."""
    train(PrecisionDebugger(dump_path=folder, level="L0", **arguments))
    PrecisionDebugger.close()
    return read_dump(folder / f"step{step}" / "rank0")


def tensors_of(dump, key, side):
    """Return what stands in the files for one side of an entry."""
    [entry] = [entry for entry in dump.entries if entry.key == key]
    return [np.load(tensor.data_path) for tensor in getattr(entry, side)]


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("dtype", [ms.float32, ms.float16])
@pytest.mark.parametrize("optimizer", [nn.Adam, nn.Momentum])
def test_no_bit_of_training_differs(tmp_path, task, dtype, optimizer):
    chosen = optimizer if optimizer is nn.Adam else lambda parameters, rate: nn.Momentum(parameters, rate, 0.9)
    expected = train(dtype=dtype, optimizer=chosen)

    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0", task=task)
    assert train(debugger, dtype=dtype, optimizer=chosen) == expected
    PrecisionDebugger.close()

    assert not read_dump(tmp_path / "step1" / "rank0").info.errors
    assert "torch" not in sys.modules


def test_every_call_has_its_entries_with_msprobes_names(tmp_path):
    dump = dumped(tmp_path)

    cells = ["Cell.embed.Embedding", "Cell.head.Dense"]
    for number in (0, 1):
        cells.append(f"Cell.blocks.{number}.Block")
        cells += [f"Cell.blocks.{number}.{name}" for name in ("norm.LayerNorm", "up.Dense", "down.Dense")]
    keys = {entry.key for entry in dump.entries}
    assert {f"{cell}.forward.0" for cell in cells} | {f"{cell}.backward.0" for cell in cells} <= keys
    owners = {cell for cell in cells if not cell.endswith("Block")}
    assert {key for key in keys if "parameters_grad" in key} == {f"{cell}.parameters_grad.0" for cell in owners}
    assert {entry.key for entry in dump.root} == {"Cell.model.Model.forward.0", "Cell.model.Model.backward.0"}
    raw = json.loads((tmp_path / "step0/rank0/dump.json").read_text())
    assert (raw["framework"], raw["level"]) == ("mindspore", "L0")
    construct = json.loads((tmp_path / "step0/rank0/construct.json").read_text())
    assert construct["Cell.blocks.1.up.Dense.forward.0"] == "Cell.blocks.1.Block.forward.0"


def test_values_are_those_of_the_model(tmp_path):
    model, batches = model_and_batches()
    embedded = model.embed(batches[0])
    hidden = model.blocks[0](embedded, scale=0.5)

    dump = dumped(tmp_path, task="tensor")

    [found] = tensors_of(dump, "Cell.blocks.0.Block.forward.0", "outputs")
    np.testing.assert_array_equal(found, hidden.asnumpy())
    [entry] = [entry for entry in dump.entries if entry.key == "Cell.blocks.0.Block.forward.0"]
    values = hidden.asnumpy().astype(np.float64)
    assert entry.outputs[0].norm == pytest.approx(np.linalg.norm(values), rel=1e-12)
    assert (entry.outputs[0].max, entry.outputs[0].mean) == pytest.approx((values.max(), values.mean()), rel=1e-12)
    assert entry.parameters == ()  # a block has none of its own


def test_gradients_are_those_of_mindspore(tmp_path):
    """The gradient of a block's input has two summands: through the block, and beside it."""
    model, batches = model_and_batches()
    embedded = model.embed(batches[0])

    def rest(x):
        for block in model.blocks:
            x = block(x, scale=0.5)
        return (model.head(x) ** 2).mean()

    of_input = ms.grad(rest)(embedded).asnumpy()
    parameters = model.trainable_params()
    of_parameters = ms.grad(lambda ids: loss_of(model, ids), None, parameters)(batches[0])
    expected = {parameter.name: each.asnumpy() for parameter, each in zip(parameters, of_parameters, strict=True)}

    dump = dumped(tmp_path, task="tensor")

    [found] = tensors_of(dump, "Cell.blocks.0.Block.backward.0", "outputs")
    np.testing.assert_array_equal(found, of_input)
    [found] = tensors_of(dump, "Cell.embed.Embedding.backward.0", "inputs")
    np.testing.assert_array_equal(found, of_input)
    for entry in dump.entries:
        for gradient in entry.outputs if entry.direction == "parameters_grad" else ():
            name = f"{entry.module}.{gradient.slot}"
            np.testing.assert_array_equal(np.load(gradient.data_path), expected.pop(name))
    assert not expected


@pytest.mark.parametrize("values", [[1.5, -2.0, np.nan], [[1, 2], [3, -4]], [True, False], [], 3.25])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int32", "bool_"])
def test_tensors_are_saved_as_they_are(tmp_path, values, dtype):
    if dtype in ("int32", "bool_") and np.isnan(np.asarray(values, float)).any():
        values = np.nan_to_num(values)
    tensor = ms.Tensor(np.asarray(values, np.float32)).astype(getattr(ms, dtype))

    tensors = MindSporeTensors()
    tensors.save(tensor, tmp_path / "tensor.npy")

    found = np.load(tmp_path / "tensor.npy")
    assert found.dtype.name == {"bfloat16": "float32", "bool_": "bool"}.get(dtype, dtype)
    np.testing.assert_array_equal(found, tensor.astype(ms.float64).asnumpy().astype(found.dtype))
    assert len(tensors.checksum(tensor)) == 8


def test_steps_ranks_lists_and_checksums_are_chosen(tmp_path):
    config: dict[str, object] = {"task": "statistics", "dump_path": str(tmp_path / "dump"), "level": "L0", "step": [1]}
    config["statistics"] = {"list": ["head"], "summary_mode": "crc32", "data_mode": ["forward"]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))

    train(PrecisionDebugger(path))
    PrecisionDebugger.close()

    assert [folder.name for folder in (tmp_path / "dump").iterdir()] == ["step1"]
    raw = json.loads((tmp_path / "dump/step1/rank0/dump.json").read_text())["data"]
    assert list(raw) == ["Cell.head.Dense.forward.0"]
    assert len(raw["Cell.head.Dense.forward.0"]["output"][0]["crc32"]) == 8


def test_variables_and_their_gradients_are_saved(tmp_path):
    debugger = PrecisionDebugger(dump_path=tmp_path, level="debug", task="tensor")
    model, batches = model_and_batches()

    def forward(ids):
        embedded = model.embed(ids)
        debugger.save({"embedded": embedded, "scale": 0.5}, "here")
        return (embedded**2).sum()

    ms.value_and_grad(forward, None, model.trainable_params())(batches[0])
    PrecisionDebugger.close()

    found = json.loads((tmp_path / "step0/rank0/debug.json").read_text())["data"]
    assert found["here.0.debug"]["scale"] == {"type": "float", "value": 0.5}
    values = model.embed(batches[0]).asnumpy().astype(np.float64)
    assert found["here.0.debug"]["embedded"]["Norm"] == pytest.approx(np.linalg.norm(values), rel=1e-12)
    assert found["here_grad.0.debug.embedded"]["Norm"] == pytest.approx(2 * np.linalg.norm(values), rel=1e-6)


def test_a_cell_called_twice_and_two_models_are_told_apart(tmp_path):
    first, batches = model_and_batches()
    second = Model()
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    debugger.start({"actor": first, "critic": second})
    first(batches[0])
    first(batches[1])
    second(batches[0])
    PrecisionDebugger.close()

    keys = [entry.key for entry in read_dump(tmp_path / "step0/rank0").entries]
    assert {"Cell.actor.head.Dense.forward.0", "Cell.actor.head.Dense.forward.1"} <= set(keys)
    assert [key for key in keys if key.startswith("Cell.critic.head")] == ["Cell.critic.head.Dense.forward.0"]


def test_an_error_of_the_script_and_one_of_ours_leave_training_alone(tmp_path, monkeypatch):
    expected = train()
    monkeypatch.setattr("trainermon.dump.mindspore.capture.encode_output", lambda *_: 1 / 0)
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")

    assert train(debugger) == expected

    PrecisionDebugger.close()
    info = read_dump(tmp_path / "step0/rank0").info
    assert info.errors
    assert info.first_error == "ZeroDivisionError: division by zero"


def test_compiled_code_shows_no_calls_and_that_is_said(tmp_path, caplog):
    expected = train(compiled=True)
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    with caplog.at_level(logging.WARNING, "trainermon"):
        assert train(debugger, compiled=True) == expected
    PrecisionDebugger.close()

    assert "no call is seen" in " ".join(read_dump(tmp_path / f"step{NUM_STEPS - 1}/rank0").info.notes)


def test_nothing_is_left_on_the_model(tmp_path):
    model, batches = model_and_batches()
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    debugger.start(model)
    loss_of(model, batches[0])
    PrecisionDebugger.close()

    assert not any(cell._forward_pre_hook or cell._forward_hook for _, cell in model.cells_and_names())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "L2"}, "level"),
        ({"task": "overflow_check"}, "task: found 'overflow_check', expected one of statistics, tensor, structure"),
        ({"task": "grad_probe"}, r"for its task use trainermon\.monitor\.mindspore\.gradient_probe\.GradientMonitor"),
    ],
)
def test_what_mindspore_does_not_show_is_refused(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        PrecisionDebugger(**{"dump_path": tmp_path, "level": "L0"} | arguments)


@pytest.mark.parametrize("model", [None, "model", [3]])
def test_what_is_no_cell_is_refused(tmp_path, model):
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    with pytest.raises(AttachError, match=r"start\(model\)"):
        debugger.start(model)
