"""Tensors of every layout: what a dump says of them, by numpy's numbers of their components."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from tests.tensor_kinds import cast, numbers
from tests.tensor_pairs import Wrapped
from trainermon import PrecisionDebugger
from trainermon.dump.encode import tensor_form
from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.records import IN_GRAD, IN_VMAP, TRANSFORMED, DumpInfo
from trainermon.dump.files.tensor_files import save_tensor
from trainermon.dump.forms import TensorLeaf
from trainermon.dump.statistics import TensorReadings
from trainermon.dump.torch_tensors import checksum
from trainermon.replay.replay import StepKeeper
from trainermon.replay.state import same_bits
from trainermon.statistics.kernel import moments

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
PARTS = [torch.arange(18.0).reshape(3, 6), -torch.arange(30.0).reshape(5, 6)]


@pytest.fixture(autouse=True)
def _no_debugger():
    yield
    PrecisionDebugger.close()


def nested(layout, parts=PARTS):
    return torch.nested.nested_tensor(list(parts), layout=layout)


def narrowed():
    """Return a jagged tensor between whose components lie elements that are not its own."""
    whole = torch.arange(42.0).reshape(2, 7, 3)
    return torch.nested.narrow(whole, 1, torch.tensor([0, 2]), torch.tensor([3, 4]), layout=torch.jagged)


def elements(tensor):
    return np.concatenate([part.numpy().ravel() for part in tensor.unbind()])


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_every_call_on_nested_tensors_is_recorded(tmp_path, layout, level, task):
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level, task=task)
    debugger.start(model)
    given = nested(layout)
    model(given).to_padded_tensor(0.0).square().sum().backward()
    debugger.stop()
    debugger.close()

    dump = read_dump(tmp_path / "step0/rank0")
    assert (dump.info.errors, dump.info.first_error) == (0, "")
    keys = {entry.key for entry in dump.entries}
    assert {f"Module.{name}.forward.0" for name in ("0.Linear", "1.LayerNorm", "2.Linear")} <= keys
    found = next(entry for entry in dump.entries if entry.key == "Module.0.Linear.forward.0").inputs[0]
    truth = elements(given)
    assert (found.max, found.min, found.norm) == pytest.approx((truth.max(), truth.min(), np.linalg.norm(truth)))
    assert np.prod(found.shape) == truth.size
    if task == "tensor":
        assert np.array_equal(torch.load(found.data_path, weights_only=True).numpy().ravel(), truth)
    text = json.loads((tmp_path / "step0/rank0/dump.json").read_text())
    noted = text["data"]["Module.0.Linear.forward.0"]["input_args"][0]["nested"]
    assert "2 components, 3 dimensions" in noted


@pytest.mark.parametrize("make", [lambda: nested(torch.jagged), lambda: nested(torch.strided), narrowed])
def test_moments_of_nested_tensors_are_those_of_their_components(make):
    given, out = make(), torch.zeros(2, 8, dtype=torch.float64)
    moments([given, torch.ones(3)], out)
    truth = elements(given)
    assert out[0, :5].tolist() == pytest.approx([truth.size, truth.min(), truth.max(), truth.sum(), (truth**2).sum()])


def test_a_replay_of_a_model_on_jagged_tensors_names_the_module(tmp_path):
    class Root(nn.Module):
        def forward(self, value):
            return torch.sqrt(value.abs() - 1e6)

    model = nn.Sequential(nn.Linear(6, 8), Root(), nn.Linear(8, 3))
    keeper = StepKeeper(model, memory_bytes=1 << 20)
    keeper.attach()
    (model(nested(torch.jagged)).values() ** 2).sum().backward()
    assert keeper.replay(tmp_path, DumpInfo(step=1)).status == "nonfinite"
    dump = read_dump(tmp_path)
    assert dump.info.reproduced is True
    origin = next(entry for entry in dump.entries if entry.outputs and entry.outputs[0].nans)
    assert origin.class_name == "Root"


@pytest.mark.parametrize(
    "make",
    [
        lambda values: values,
        lambda values: nested(torch.jagged, [values, values]),
        lambda values: nested(torch.strided, [values, values]),
        *[
            lambda values, layout=layout: values.to_sparse(layout=layout)
            for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
        ],
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_bits_are_compared_in_every_layout(make):
    values = torch.eye(4)
    other = values.clone()
    other[1, 1] = 2
    moved = values.roll(1, 0)
    assert same_bits(make(values), make(values.clone()))
    assert not same_bits(make(values), make(other))
    assert not same_bits(make(values), make(moved))


def freed(values):
    """Return a tensor as FSDP leaves a parameter that is not gathered: with a shape, and without memory."""
    values.untyped_storage().resize_(0)
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64], ids=str)
def test_a_tensor_without_memory_is_refused_and_not_read(tmp_path, dtype):
    """To read it would end the process of the training."""
    for refused in (checksum, lambda tensor: save_tensor(tensor, tmp_path / "a.pt")):
        with pytest.raises(ValueError, match="no memory of its own"):
            refused(freed(cast(numbers(), dtype)))

    form = tensor_form(tensor := freed(cast(numbers(), dtype)))
    (error,) = TensorReadings().read([TensorLeaf("input.0", tensor, form)])
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("make", [lambda: freed(torch.ones(4)), lambda: Wrapped(torch.ones(4))])
def test_bits_that_are_not_known_are_not_the_same(make):
    assert not same_bits(make(), make())


def test_a_value_that_json_does_not_know_costs_no_entry(tmp_path):
    class Sizes(nn.Module):
        def forward(self, value, sizes):
            assert sizes is not None
            return value

    model = nn.Sequential(Sizes())
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    debugger.start(model)
    model[0](torch.ones(2), nested(torch.jagged).shape)
    debugger.stop()
    debugger.close()
    dump = read_dump(tmp_path / "step0/rank0")
    assert (dump.info.errors, len(dump.entries)) == (0, 1)


def test_statistics_are_brought_while_a_function_transform_runs():
    tensor = torch.arange(12.0).reshape(3, 4)
    readings, forms = TensorReadings(), []

    def look(part):
        forms.append(tensor_form(part))
        readings.read([TensorLeaf("input.0", part, forms[-1])])
        readings.resolve()
        return part.sum()

    torch.func.grad(look)(tensor)
    torch.func.vmap(look)(tensor)

    texts = [json.loads(form.text()) for form in forms]
    assert [(text["Max"], text["Norm"], text["shape"]) for text in texts] == [
        (11.0, pytest.approx(np.linalg.norm(np.arange(12.0))), [3, 4])
    ] * 2
    assert [text[TRANSFORMED] for text in texts] == [IN_GRAD, IN_VMAP]
