"""Calls of MindSpore's functions in a dump: numpy in float64, MindSpore's own gradients, and the run without a dump."""

import json
import sys
import threading

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from tests.dump.mindspore.small_model import loss_of, model_and_batches, train
from trainermon.core.errors import AttachError
from trainermon.dump.files.reader import read_dump
from trainermon.dump.mindspore import PrecisionDebugger
from trainermon.dump.mindspore.function_names import recorded_functions

pytestmark = pytest.mark.mindspore


@pytest.fixture(autouse=True)
def _alone():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    PrecisionDebugger.close()


def dumped(folder, run, *, level="L1", model=None):
    """Return the dump of what `run` does, and its entries by key."""
    folder.joinpath("config.json").write_text(json.dumps({"tensor": {"risk_level": "ALL"}}))
    debugger = PrecisionDebugger(folder / "config.json", "tensor", folder, level)
    debugger.start(model)
    run()
    PrecisionDebugger.close()
    dump = read_dump(folder / "step0" / "rank0")
    return dump, {entry.key: entry for entry in dump.entries}


def arrays(tensors):
    return [np.load(tensor.data_path) for tensor in tensors]


@pytest.mark.parametrize("level", ["L1", "mix"])
@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("dtype", [ms.float32, ms.float16])
def test_no_bit_of_training_differs(tmp_path, level, task, dtype):
    expected = train(dtype=dtype)
    before = [getattr(place.owner, place.attribute) for place in recorded_functions()]

    assert train(PrecisionDebugger(dump_path=tmp_path, level=level, task=task), dtype=dtype) == expected

    PrecisionDebugger.close()
    info = read_dump(tmp_path / "step1" / "rank0").info
    assert (info.errors, info.first_error) == (0, "")
    assert [getattr(place.owner, place.attribute) for place in recorded_functions()] == before
    assert "__add__" not in vars(Tensor)  # it is inherited
    assert "torch" not in sys.modules


def test_calls_have_msprobes_names_and_numpys_values(tmp_path):
    x = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    given = Tensor(x)

    def run():
        mint.nn.functional.softplus(mint.exp(ops.relu(given) * 2.0 + 1).sum(0)[1:])
        ops.zeros((2,), ms.float32)
        ops.relu(given)

    _, entries = dumped(tmp_path, run)

    wide = np.maximum(x.astype(np.float64), 0)
    expected = {
        "Functional.relu.0.forward": wide,
        "Tensor.__mul__.0.forward": wide * 2,
        "Tensor.__add__.0.forward": wide * 2 + 1,
        "Mint.exp.0.forward": np.exp(wide * 2 + 1),
        "Tensor.sum.0.forward": np.exp(wide * 2 + 1).sum(0),
        "Tensor.__getitem__.0.forward": np.exp(wide * 2 + 1).sum(0)[1:],
        "MintFunctional.softplus.0.forward": np.log1p(np.exp(np.exp(wide * 2 + 1).sum(0)[1:])),
        "Functional.zeros.0.forward": np.zeros(2),
        "Functional.relu.1.forward": wide,
    }
    assert list(entries) == list(expected)
    for key, values in expected.items():
        [found] = arrays(entries[key].outputs)
        np.testing.assert_allclose(found, values, rtol=1e-5, err_msg=key)


def test_gradients_are_those_of_mindspore(tmp_path):
    model, batches = model_and_batches()

    def rest(hidden):
        return (model.head(ops.relu(hidden)) ** 2).mean()

    hidden = model.embed(batches[0])
    expected = ms.grad(rest)(hidden).asnumpy()
    _, entries = dumped(tmp_path, lambda: ms.value_and_grad(rest)(hidden), model=model)

    backward = entries["Functional.relu.0.backward"]
    np.testing.assert_array_equal(arrays(backward.outputs)[0], expected)
    inputs = arrays(backward.inputs)[0]
    np.testing.assert_array_equal(np.where(hidden.asnumpy() > 0, inputs, 0), expected)


def test_primitives_of_cells_are_recorded_with_their_attributes(tmp_path):
    model, batches = model_and_batches()

    dump, entries = dumped(tmp_path, lambda: loss_of(model, batches[0]), level="mix", model=model)

    entry = entries["Primitive.matmul.MatMul.4.forward"]
    x, weight = (each.astype(np.float64) for each in arrays(entry.inputs))
    np.testing.assert_allclose(arrays(entry.outputs)[0], x @ weight.T, rtol=1e-5)
    raw = json.loads((dump.directory / "dump.json").read_text())["data"][entry.key]
    assert raw["trainermon"]["attributes"] == {"transpose_a": False, "transpose_b": True}
    construct = json.loads((dump.directory / "construct.json").read_text())
    assert construct[entry.key] == "Cell.head.Dense.forward.0"
    assert construct["Functional.relu.1.forward"] == "Cell.blocks.1.Block.forward.0"
    assert type(model.head.matmul) is ops.MatMul


def test_what_is_written_into_a_tensor_is_recorded_before_and_after(tmp_path):
    tensor = Tensor(np.zeros(3, np.float32))

    def run():
        tensor[1] = 5.0

    _, entries = dumped(tmp_path, run)

    entry = entries["Tensor.__setitem__.0.forward"]
    assert arrays(entry.inputs)[0].tolist() == [0, 0, 0]
    assert arrays(entry.outputs)[0].tolist() == [0, 5, 0]


def test_recomputed_calls_are_not_counted_again(tmp_path):
    model, batches = model_and_batches()
    model.blocks[0].recompute()
    gradients = ms.value_and_grad(lambda ids: loss_of(model, ids), None, model.trainable_params())

    _, entries = dumped(tmp_path, lambda: gradients(batches[0]), level="mix", model=model)

    assert [key for key in entries if "relu" in key and "forward" in key] == [
        "Functional.relu.0.forward",
        "Functional.relu.1.forward",
    ]
    assert not any(".forward.1" in key for key in entries)


class Compiled(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 3)

    def construct(self, x):
        y = mint.add(ops.relu(self.dense(x)), ops.clamp(x, 0.0, 1.0))
        return mint.exp(y * 2.0)[0].sum() + y.softmax(-1).max()


def test_what_is_compiled_meanwhile_is_compiled_as_ever(tmp_path):
    x = Tensor(np.ones((2, 3), np.float32))
    model = Compiled()
    expected = ms.jit(fresh(model))(x).asnumpy()
    found = []

    def run():
        found.append(ms.jit(fresh(model))(x))
        ops.abs(x)

    _, entries = dumped(tmp_path, run, model=model)

    np.testing.assert_array_equal(found[0].asnumpy(), expected)
    assert list(entries) == ["Functional.abs.0.forward"]


def fresh(model):
    """Return a function that MindSpore has not compiled yet."""

    def compute(x):
        return model(x)

    return compute


def test_an_exception_of_a_function_reaches_the_script_and_the_next_call_is_recorded(tmp_path):
    x = Tensor(np.ones((2, 3), np.float32))

    def run():
        with pytest.raises(TypeError):
            ops.matmul(x, "x")
        ops.abs(x)

    _, entries = dumped(tmp_path, run)

    assert list(entries) == ["Functional.abs.0.forward"]


def test_other_threads_are_not_recorded(tmp_path):
    x = Tensor(np.ones(3, np.float32))

    def run():
        thread = threading.Thread(target=lambda: ops.abs(x))
        thread.start()
        thread.join(60)

    dump, entries = dumped(tmp_path, run)

    assert not entries
    assert "no call is seen" in " ".join(dump.info.notes)


def test_an_error_that_mindspore_tells_late_still_reaches_the_script(tmp_path):
    x = Tensor(np.ones((2, 3), np.float32))
    products = []

    dump, _ = dumped(tmp_path, lambda: products.append(ops.matmul(x, x)))

    assert dump.info.errors
    with pytest.raises(RuntimeError, match="must be equal"):
        products[0].asnumpy()


def test_what_only_moves_is_left_out_by_default(tmp_path):
    train(PrecisionDebugger(dump_path=tmp_path, level="L1"))
    PrecisionDebugger.close()

    keys = json.loads((tmp_path / "step0/rank0/dump.json").read_text())["data"]
    assert {key.split(".")[-3] for key in keys} == {
        *("MatMul", "BiasAdd", "LayerNorm", "Gather"),
        *("relu", "__rmul__", "__add__", "__pow__", "mean"),
    }


def test_names_and_directions_are_chosen(tmp_path):
    config: dict[str, object] = {"dump_path": str(tmp_path / "dump"), "level": "L1", "task": "statistics"}
    config["statistics"] = {"list": ["relu"], "data_mode": ["forward"]}
    (tmp_path / "config.json").write_text(json.dumps(config))

    train(PrecisionDebugger(tmp_path / "config.json"))
    PrecisionDebugger.close()

    data = json.loads((tmp_path / "dump/step0/rank0/dump.json").read_text())["data"]
    assert list(data) == ["Functional.relu.0.forward", "Functional.relu.1.forward"]


def test_mix_needs_a_model(tmp_path):
    debugger = PrecisionDebugger(dump_path=tmp_path, level="mix")
    with pytest.raises(AttachError, match="level mix records cells"):
        debugger.start()


def test_an_interrupted_function_leaves_its_cells_primitives_alone(tmp_path):
    model = nn.Dense(2, 2)
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L1")
    debugger.start(model)
    with pytest.raises(ValueError, match=r"shape|dim"):
        model(Tensor(np.ones((3, 5), np.float32)))
    debugger.stop()

    assert type(model.matmul) is ops.MatMul
