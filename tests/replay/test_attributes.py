"""Attributes of modules are put back after whatever was done to them, and a replay does not show in them."""

import collections
import copy
import dataclasses
import queue
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainermon.dump.files.records import DumpInfo
from trainermon.replay.attributes import ModuleAttributes
from trainermon.replay.replay import StepKeeper
from trainermon.replay.state import NotCoveredError


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    steps: int = 0


class Holder(nn.Module):
    """Keeps state in every way that is covered."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.count = 1
        self.tensor = torch.tensor([1.0, float("nan"), -0.0])
        self.cache = [torch.ones(2), {"key": (torch.zeros(2), [3])}]
        self.recent = collections.deque([1, 2], maxlen=2)
        self.names = {"a"}
        self.votes = collections.Counter("aab")
        self.state = State(torch.ones(3))
        self.generator = torch.Generator().manual_seed(1)
        self.random = random.Random(1)
        self.weights = [self.inner.weight]
        self.cycle = []
        self.cycle.append(self.cycle)


CHANGES = {
    "count": lambda h: setattr(h, "count", 2),
    "new": lambda h: setattr(h, "new", 2),
    "deleted": lambda h: delattr(h, "count"),
    "training": lambda h: h.eval(),
    "replaced tensor": lambda h: setattr(h, "tensor", torch.zeros(3)),
    "written tensor": lambda h: h.tensor.mul_(2),
    "resized tensor": lambda h: h.tensor.resize_(7),
    "list": lambda h: h.cache.append(1),
    "tensor in a list": lambda h: h.cache[0].zero_(),
    "tensor in a tuple in a dict": lambda h: h.cache[1]["key"][0].fill_(7),
    "list in a tuple": lambda h: h.cache[1]["key"][1].clear(),
    "dict": lambda h: h.cache[1].update(other=1),
    "deque": lambda h: h.recent.append(3),
    "set": lambda h: h.names.add("b"),
    "counter": lambda h: h.votes.update("b"),
    "field of a dataclass": lambda h: setattr(h.state, "steps", 1),
    "tensor of a dataclass": lambda h: h.state.hidden.zero_(),
    "generator": lambda h: torch.rand(1, generator=h.generator),
    "Python's generator": lambda h: h.random.random(),
}


def shown(holder):
    """Everything that is covered, as text and bits, with the identity of what must stay the same object."""
    tensors = [holder.tensor, holder.cache[0], holder.cache[1]["key"][0], holder.state.hidden]
    return (
        [(id(tensor), tensor.dtype, tensor.shape, tensor.view(torch.int32).tolist()) for tensor in tensors],
        (sorted(vars(holder)), holder.count, holder.training, holder.inner.training, len(holder.cache)),
        (
            list(holder.cache[1]),
            holder.cache[1]["key"][1][:],
            list(holder.recent),
            set(holder.names),
            dict(holder.votes),
        ),
        (id(holder.cache), id(holder.recent), id(holder.state), holder.state.steps, len(holder.cycle)),
        (holder.generator.get_state().tolist(), holder.random.getstate()),
    )


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_change_is_taken_back(change):
    holder = Holder()
    before = shown(holder)
    attributes = ModuleAttributes(holder)
    change(holder)

    attributes.put_back()

    assert shown(holder) == before


def test_what_did_not_change_is_not_written_to():
    holder = Holder()
    versions = [holder.tensor._version, holder.inner.weight._version]

    ModuleAttributes(holder).put_back()

    assert [holder.tensor._version, holder.inner.weight._version] == versions


def test_parameters_submodules_and_hooks_are_left_alone():
    holder = Holder()
    attributes = ModuleAttributes(holder)
    with torch.no_grad():
        holder.inner.weight.zero_()
    holder.register_forward_hook(lambda module, args, output: None)
    holder.added = nn.Linear(1, 1)

    attributes.put_back()

    assert not holder.inner.weight.any()
    assert len(holder._forward_hooks) == 1
    assert isinstance(holder.added, nn.Linear)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
def test_tensors_that_cannot_be_copied_are_left_alone():
    holder: Any = nn.Module()
    holder.odd = [
        torch.zeros(1).expand(1 << 50),
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ]
    with torch.inference_mode():
        holder.odd.append(torch.ones(2))
    odd = list(holder.odd)

    ModuleAttributes(holder).put_back()

    assert [id(tensor) for tensor in holder.odd] == [id(tensor) for tensor in odd]


def test_one_that_cannot_be_put_back_does_not_keep_the_others_from_it():
    class Stubborn(dict):
        def clear(self):
            raise TypeError("fixed")

    holder: Any = nn.Module()
    holder.before, holder.stubborn, holder.behind = [1], Stubborn(), [2]
    attributes = ModuleAttributes(holder)
    holder.before.append(3)
    holder.behind.append(3)
    holder.stubborn["key"] = 1

    with pytest.raises(TypeError, match="fixed"):
        attributes.put_back()

    assert (holder.before, holder.behind) == ([1], [2])


class Stateful(nn.Module):
    """Goes on from what its last forward left in attributes."""

    def __init__(self):
        super().__init__()
        self.linear, self.hidden, self.calls = nn.Linear(4, 4), None, 0
        self.lengths, self.noise = [], torch.Generator().manual_seed(3)

    def forward(self, x):
        y = self.linear(x) + (0 if self.hidden is None else self.hidden) + torch.rand(4, generator=self.noise)
        self.hidden = y.detach() * 0.5
        self.calls += 1
        self.lengths.append(len(x))
        return y * self.calls * len(self.lengths)


def losses(directory=None):
    torch.manual_seed(0)
    model, found = Stateful(), []
    keeper = StepKeeper(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(4):
        if directory:
            keeper.attach()
        loss = model(torch.randn(3, 4)).square().sum()
        loss.backward()
        if directory:
            assert keeper.replay(directory / f"step{step}", DumpInfo(step=step)).status == "clean"
            keeper.reset()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_run_with_state_in_attributes_goes_on_bit_for_bit_after_replays(tmp_path):
    assert losses(tmp_path) == losses()


class Counter:
    name: str

    def __init__(self):
        self.calls = 0


def counting_hook():
    calls = [0]
    number = 0

    def count(module, args, output):
        nonlocal number
        number += 1
        calls[0] += 1

    hook: Any = count
    hook.state = lambda: (number, calls[0])
    return hook


GENERATOR = torch.Generator()


class Busy(nn.Linear):
    """Draws from, and counts in, everything that a module may keep beside its tensors."""

    def __init__(self):
        super().__init__(2, 2)
        self.own = torch.Generator().manual_seed(1)
        self.numpy, self.old_numpy = np.random.default_rng(1), np.random.RandomState(1)
        self.array, self.counter = np.zeros(2), Counter()

    def forward(self, x):
        self.array += 1
        self.counter.calls += 1
        self.counter.name = "new"
        drawn = [torch.rand((), generator=g).item() for g in (self.own, GENERATOR)]
        return super().forward(x) + sum(drawn) + self.numpy.random() + self.old_numpy.rand()

    def state(self):
        states = [g.get_state().tolist() for g in (self.own, GENERATOR)]
        more = self.numpy.bit_generator.state, self.old_numpy.get_state(legacy=False)["state"]["key"].tolist()
        return states, more, self.array.tolist(), vars(self.counter)


def test_generators_arrays_objects_and_hooks_are_put_back():
    model, hook = Busy(), counting_hook()
    model.register_forward_hook(hook)
    before = copy.deepcopy(model.state()), hook.state()

    attributes = ModuleAttributes(model)
    model(torch.ones(2))
    assert (model.state(), hook.state()) != before
    attributes.put_back()

    assert (model.state(), hook.state()) == before


def test_what_was_given_is_put_back():
    given: list[Any] = [torch.Generator().manual_seed(3), Counter(), torch.ones(2)]
    before = given[0].get_state()

    attributes = ModuleAttributes(nn.Linear(1, 1), given)
    torch.rand(2, generator=given[0])
    given[1].calls = 7
    given[2] += 1
    attributes.put_back()

    assert torch.equal(given[0].get_state(), before)
    assert given[1].calls == 0
    assert given[2].tolist() == [2, 2]  # a tensor that is given by itself is kept by reference, and its version checked


@pytest.mark.parametrize("given", [iter([1]), [iter([1])], (i for i in range(3))])
def test_an_iterator_is_refused(given):
    with pytest.raises(NotCoveredError, match="is in use, which a replay would move on for good"):
        ModuleAttributes(nn.Linear(1, 1), [given])


def test_more_than_a_budget_is_refused(monkeypatch):
    monkeypatch.setattr("trainermon.replay.attributes.MAX_COPY_BYTES", 100)
    model: Any = nn.Linear(1, 1)
    model.cache = {"keys": [torch.ones(100)]}

    with pytest.raises(NotCoveredError, match="outside of parameters and buffers"):
        ModuleAttributes(model)


class Prefetcher:
    def __init__(self):
        self.lock, self.ready = threading.Lock(), []


def test_what_another_thread_may_be_filling_is_left_alone():
    model: Any = nn.Linear(1, 1)
    model.prefetcher, model.queue = Prefetcher(), queue.Queue()

    attributes = ModuleAttributes(model)
    model.prefetcher.ready.append("batch")
    model.queue.put("batch")
    attributes.put_back()

    assert model.prefetcher.ready == ["batch"]
    assert model.queue.get_nowait() == "batch"


def test_what_cannot_be_written_needs_no_copy():
    model: Any = nn.Linear(1, 1)
    model.table, model.source = np.arange(3), random.SystemRandom()
    model.table.flags.writeable = False

    ModuleAttributes(model).put_back()


def test_what_frameworks_keep_is_left_alone():
    model: Any = nn.Linear(1, 1)
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    attributes = ModuleAttributes(model)
    model.optimizer.state["new"] = 1
    attributes.put_back()

    assert model.optimizer.state["new"] == 1
