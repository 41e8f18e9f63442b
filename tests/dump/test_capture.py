"""What is recorded of a model's calls, held against msprobe's keys and against autograd itself."""

import collections
import gc
import json
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainermon.dump.capture import ModuleCapture
from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.records import DumpInfo
from trainermon.dump.writer import DumpWriter

Pair = collections.namedtuple("Pair", "a b")


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, n, flag, *, mask=None, options=None):
        return Pair(self.fc(x), {"k": [x * 2, 3, None]})


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.emb, self.act, self.bn = Inner(), nn.Embedding(10, 4), nn.ReLU(inplace=True), nn.BatchNorm1d(4)

    def forward(self, ids):
        x = self.emb(ids)
        r = self.inner(x, 3, True, mask=torch.tensor(True), options={"a": 1.5, "z": torch.zeros(0)})
        r = self.inner(r.a, torch.Size([2]), None, mask=torch.tensor(3))
        return self.act(self.bn(r.a) + r.b["k"][0]).sum()


# What msprobe 26.2 writes for this model at level L0, and the backward of the in-place ReLU, which it skips.
TOY_KEYS = {
    "Module.emb.Embedding.forward.0", "Module.inner.fc.Linear.forward.0", "Module.inner.Inner.forward.0",
    "Module.inner.fc.Linear.forward.1", "Module.inner.Inner.forward.1", "Module.bn.BatchNorm1d.forward.0",
    "Module.act.ReLU.forward.0", "Module.bn.BatchNorm1d.backward.0", "Module.bn.BatchNorm1d.parameters_grad.0",
    "Module.inner.fc.Linear.backward.1", "Module.inner.Inner.backward.1", "Module.inner.fc.Linear.parameters_grad.0",
    "Module.inner.fc.Linear.backward.0", "Module.inner.Inner.backward.0", "Module.emb.Embedding.backward.0",
    "Module.emb.Embedding.parameters_grad.0", "Module.act.ReLU.backward.0",
}  # fmt: skip


def captured(folder, model, run, *, task="statistics", scope=()):
    writer = DumpWriter(folder, DumpInfo(), task=task)
    capture = ModuleCapture(model, writer, scope=scope)
    capture.attach()
    try:
        run(model)
    finally:
        capture.detach()
    info = writer.close()
    assert (info.errors, info.first_error) == (0, "")
    return read_dump(folder)


def entry_of(dump, key):
    return next(entry for entry in (*dump.entries, *dump.root) if entry.key == key)


def load(record):
    return torch.load(record.data_path, weights_only=True)


def test_keys_places_and_parents_are_msprobes(tmp_path):
    dump = captured(tmp_path, Toy(), lambda model: model(torch.tensor([1, 2, 3])).backward())

    assert {entry.key for entry in dump.entries} == TOY_KEYS
    inner = entry_of(dump, "Module.inner.Inner.forward.0")
    assert [record.slot for record in inner.inputs] == ["input.0", "kwargs.mask", "kwargs.options.z"]
    assert [record.slot for record in inner.outputs] == ["output.a", "output.b.k.0"]
    assert [record.slot for record in entry_of(dump, "Module.bn.BatchNorm1d.forward.0").parameters] == [
        "parameters.weight",
        "parameters.bias",
    ]
    construct = json.loads((tmp_path / "construct.json").read_text())
    assert construct["Module.inner.fc.Linear.forward.1"] == "Module.inner.Inner.forward.1"
    assert construct["Module.inner.fc.Linear.backward.0"] == "Module.inner.Inner.backward.0"
    assert construct["Module.bn.BatchNorm1d.forward.0"] is None
    assert [entry.key for entry in dump.root] == ["Module.root.Toy.forward.0", "Module.root.Toy.backward.0"]


def test_children_come_before_parents_and_backward_in_reverse(tmp_path):
    dump = captured(tmp_path, Toy(), lambda model: model(torch.tensor([1, 2, 3])).backward())

    order = {entry.key: position for position, entry in enumerate(dump.entries)}
    assert order["Module.inner.fc.Linear.forward.0"] < order["Module.inner.Inner.forward.0"]
    assert order["Module.bn.BatchNorm1d.backward.0"] < order["Module.inner.fc.Linear.backward.0"]


def test_stack_is_the_users_own_lines(tmp_path):
    dump = captured(tmp_path, Toy(), lambda model: model(torch.tensor([1, 2, 3])).backward())

    stack = entry_of(dump, "Module.inner.fc.Linear.forward.0").stack
    assert stack[0].endswith('in forward, \n return Pair(self.fc(x), {"k": [x * 2, 3, None]})')
    assert "Toy" not in stack[0]
    assert "in forward" in stack[1]
    assert not any("/torch/nn/" in line or "/dump/capture.py" in line for line in stack)


def test_values_are_those_of_the_moment(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    x = torch.randn(2, 3)
    truth = {}

    def run(model):
        truth["hidden"] = nn.functional.linear(x, model[0].weight, model[0].bias).detach()
        model(x).mul_(10).sum().backward()

    dump = captured(tmp_path, model, run, task="tensor")

    linear, relu, last = (entry for entry in dump.entries if entry.direction == "forward")
    assert torch.equal(load(linear.outputs[0]), truth["hidden"])
    assert torch.equal(load(relu.inputs[0]), truth["hidden"])
    assert torch.equal(load(relu.outputs[0]), truth["hidden"].relu())
    assert torch.equal(load(last.outputs[0]), model[2](truth["hidden"].relu()))
    assert linear.outputs[0].order == relu.inputs[0].order != relu.outputs[0].order


def test_gradients_are_autograds(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3, requires_grad=True)
    hidden = model[0](x)
    active = model[1](hidden)
    expected = torch.autograd.grad(model[2](active).square().sum(), [x, hidden, active, *model.parameters()])

    dump = captured(tmp_path, model, lambda model: model(x).square().sum().backward(), task="tensor")

    def saved(key, side="outputs"):
        return [load(record) for record in getattr(entry_of(dump, key), side)]

    assert torch.equal(saved("Module.0.Linear.backward.0")[0], expected[0])
    assert torch.equal(saved("Module.0.Linear.backward.0", "inputs")[0], expected[1])
    assert torch.equal(saved("Module.1.Tanh.backward.0")[0], expected[1])
    assert torch.equal(saved("Module.2.Linear.backward.0")[0], expected[2])
    gradients = {record.slot: load(record) for record in entry_of(dump, "Module.0.Linear.parameters_grad.0").outputs}
    assert torch.equal(gradients["weight"], expected[3])
    assert torch.equal(gradients["bias"], expected[4])


class Checkpointed(nn.Module):
    """Calls one block twice in one segment and once in another."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 1)
        self.reentrant = reentrant

    def twice(self, x):
        return self.block(self.block(x) + 1)

    def segment(self, function, x):
        return checkpoint(function, x, use_reentrant=self.reentrant) if self.reentrant is not None else function(x)

    def forward(self, x):
        x = self.segment(self.block, self.first(x))
        return self.last(self.segment(self.block, x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_not_counted_and_its_gradients_find_their_call(tmp_path, reentrant):
    torch.manual_seed(0)
    plain, model = Checkpointed(reentrant=None), Checkpointed(reentrant=reentrant)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(4, 3)

    expected = captured(tmp_path / "plain", plain, lambda model: model(x).sum().backward())
    dump = captured(tmp_path / "checkpointed", model, lambda model: model(x).sum().backward())

    def numbers(dump):
        return {
            (entry.key, record.slot): (record.max, record.min, record.norm)
            for entry in dump.entries
            if entry.direction != "parameters_grad"
            for record in (*entry.inputs, *entry.outputs)
        }

    assert numbers(dump) == numbers(expected)


def test_calls_in_one_checkpointed_segment_stay_apart(tmp_path):
    model: Any = Checkpointed(reentrant=True)
    model.forward = lambda x: model.last(checkpoint(model.twice, model.first(x), use_reentrant=True))
    seen = []
    model.block.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))

    dump = captured(tmp_path, model, lambda model: model(torch.randn(4, 3)).sum().backward(), task="tensor")

    forwards = [entry for entry in dump.entries if entry.module == "block" and entry.direction == "forward"]
    assert [entry.call for entry in forwards] == [0, 1]
    assert [torch.equal(load(entry.outputs[0]), output) for entry, output in zip(forwards, seen, strict=False)] == [
        True,
        True,
    ]
    assert sorted(
        entry.call for entry in dump.entries if entry.module == "block" and entry.direction == "backward"
    ) == [0, 1]


def test_forward_without_gradient_has_no_backward(tmp_path):
    def run(model):
        with torch.no_grad():
            model(torch.tensor([1, 2, 3]))

    dump = captured(tmp_path, Toy(), run)

    assert {entry.direction for entry in dump.entries} == {"forward"}


def test_scope_chooses_modules(tmp_path):
    dump = captured(tmp_path, Toy(), lambda model: model(torch.tensor([1, 2, 3])).backward(), scope=["inner.*", "bn"])

    assert {entry.module for entry in dump.entries} == {"inner.fc", "bn"}
    assert entry_of(dump, "Module.inner.fc.Linear.forward.0").parent is None


def test_a_fault_of_the_capture_costs_entries_but_not_the_step(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    writer = DumpWriter(tmp_path, DumpInfo())
    capture = ModuleCapture(model, writer)
    real = writer.record
    monkeypatch.setattr(
        writer, "record", lambda key, leaves: 1 / 0 if key.startswith("Module.0.") else real(key, leaves)
    )
    x = torch.randn(3, 2)
    expected = model(x).sum()
    capture.attach()

    loss = model(x).sum()
    loss.backward()
    capture.detach()
    info = writer.close()

    assert torch.equal(loss, expected)
    assert model[0].weight.grad is not None
    assert info.errors > 0
    assert info.first_error == "ZeroDivisionError: division by zero"
    assert "Module.1.Linear.forward.0" in {entry.key for entry in read_dump(tmp_path).entries}


def test_an_error_of_the_model_passes_through_and_leaves_a_readable_dump(tmp_path):
    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError("the model's own")

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Failing()), nn.Linear(2, 2))
    writer = DumpWriter(tmp_path, DumpInfo())
    capture = ModuleCapture(model, writer)
    capture.attach()
    with pytest.raises(ValueError, match="the model's own"):
        model(torch.ones(1, 2))
    model[0](torch.ones(1, 2))
    capture.detach()
    writer.close()

    dump = read_dump(tmp_path)
    assert [(entry.key, entry.parent) for entry in dump.entries] == [
        ("Module.0.Linear.forward.0", None),
        ("Module.0.Linear.forward.1", None),
    ]


def test_nothing_is_left_behind(tmp_path):
    model = Toy()
    kept_alive = []
    model.bn.register_forward_hook(lambda module, args, output: kept_alive.append(weakref.ref(output)))
    captured(tmp_path, model, lambda model: model(torch.tensor([1, 2, 3])).backward())

    for module in model.modules():
        assert not module._forward_pre_hooks
        assert len(module._forward_hooks) == (module is model.bn)
        assert not module._forward_hooks_always_called
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    gc.collect()
    assert kept_alive[0]() is None


def test_writing_through_a_view_of_an_output_is_survived(tmp_path):
    """In torch 2.13 register_hook dies of a segmentation fault on such a tensor, unless its grad_fn was read."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, output: output.view(-1)[1:2].fill_(3.0) and None)

    dump = captured(tmp_path, model, lambda model: model(torch.randn(2, 3, 2)).sum().backward())

    assert entry_of(dump, "Module.0.Linear.forward.0").outputs[0].max == 3


def test_a_gradient_hook_of_the_script_is_noted(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model[1].register_forward_hook(lambda module, args, output: output.register_hook(lambda grad: grad * 2) and None)

    dump = captured(tmp_path, model, lambda model: model(torch.randn(3, 2)).sum().backward())

    hooked = {
        (entry.module, side)
        for entry in dump.entries
        if entry.direction == "backward"
        for side, records in (("input", entry.inputs), ("output", entry.outputs))
        for record in records
        if record.hooked
    }
    assert hooked == {("1", "input"), ("2", "output")}


def test_tied_parameters_are_recorded_with_each_owner(tmp_path):
    model: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
    model[2].weight = model[0].weight

    dump = captured(tmp_path, model, lambda model: model(torch.randn(3, 2)).sum().backward(), task="tensor")

    keys = [entry.key for entry in dump.entries if entry.direction == "parameters_grad"]
    assert sorted(keys) == ["Module.0.Linear.parameters_grad.0", "Module.2.Linear.parameters_grad.0"]
    assert all(torch.equal(load(entry_of(dump, key).outputs[0]), model[0].weight.grad) for key in keys)


class VarianceAndMean(nn.Module):
    """Two outputs of one node of the graph."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.var_mean(self.linear(x), -1)


def test_an_output_that_the_loss_does_not_use_costs_no_entry(tmp_path):
    model = nn.Sequential(VarianceAndMean())

    dump = captured(tmp_path / "dump", model, lambda model: model(torch.randn(3, 4))[0].sum().backward())

    (entry,) = [entry for entry in dump.entries if entry.key == "Module.0.VarianceAndMean.backward.0"]
    assert [record.slot for record in entry.inputs] == ["input.0"]
    assert dump.info.errors == 0
