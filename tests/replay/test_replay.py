"""The replay of a step: what it finds, what it leaves untouched, and what it refuses."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional

from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.records import DumpInfo
from trainermon.replay.replay import StepKeeper
from trainermon.replay.state import BufferKeeper, same_bits

NAN = float("nan")


class Net(nn.Module):
    table: torch.Tensor
    count: torch.Tensor

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x, *, scale=1.0):
        self.count.add_(1)
        noise = random.random() + np.random.rand()  # as scripts do
        return self.last(self.dropout(self.norm(self.first(x)))) * scale + noise * self.table.sum()


def prepared(model, *inputs, memory_bytes=1 << 20, **kwargs):
    """Run one backward per input and return the keeper and the gradients of each."""
    keeper = StepKeeper(model, memory_bytes=memory_bytes)
    keeper.attach()
    own = []
    for x in inputs:
        model.zero_grad()
        model(x, **kwargs).square().sum().backward()
        own.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return keeper, own


def replayed(dump, name):
    module, _, parameter = name.rpartition(".")
    return [
        torch.load(record.data_path, weights_only=True)
        for entry in dump.entries
        if (entry.module, entry.direction) == (module, "parameters_grad")
        for record in entry.outputs
        if record.slot == parameter
    ]


def snapshot(model):
    return {
        "state": {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]},
        "objects": [id(value) for value in [*model.parameters(), *model.buffers()]],
        "gradients": [(id(p.grad), None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        "training": [module.training for module in model.modules()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"].copy(),
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "tensor hooks": [bool(p._backward_hooks) for p in model.parameters()],
    }


def equal(left, right):
    if isinstance(left, torch.Tensor):
        return same_bits(left, right)
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right


def test_replay_gives_the_same_gradients_and_leaves_everything_as_it_was(tmp_path):
    model = Net()
    keeper, own = prepared(model, torch.randn(6, 4), torch.randn(6, 4), scale=2.0)
    # what a script may do between its backward and its optimizer step
    model.norm.eval()
    model.count.add_(5)
    _ = torch.rand(1), random.random(), np.random.rand()
    before = snapshot(model)

    result = keeper.replay(tmp_path, DumpInfo(step=3), task="tensor")

    assert equal(snapshot(model), before)
    assert (result.status, result.micro_steps, result.reason) == ("clean", 2, "")
    dump = read_dump(tmp_path)
    assert (dump.info.replay, dump.info.micro_steps, dump.info.reproduced, dump.info.step) == (True, 2, True, 3)
    for name, gradient in own[0].items():
        first, second = replayed(dump, name)
        assert torch.equal(first, gradient), name
        assert torch.equal(second, own[1][name]), name
    assert {entry.micro_step for entry in dump.entries} == {0, 1}
    assert not keeper.replaying


def test_nonfinite_weight_is_found(tmp_path):
    model = Net()
    with torch.no_grad():
        model.last.weight[0, 1] = torch.inf
    keeper, _ = prepared(model, torch.randn(6, 4))

    result = keeper.replay(tmp_path, DumpInfo())

    assert (result.status, result.nonfinite) == ("nonfinite", True)
    assert result.dump == tmp_path
    assert result.bytes_written > 0
    assert result.seconds > 0


def test_returned_loss_and_logits_are_not_counted_twice(tmp_path):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            logits = self.fc(x)
            return {"loss": logits.square().mean(), "logits": logits}

    for use in (
        lambda out: out["loss"],
        lambda out: out["loss"] + out["logits"].sum(),
        lambda out: out["logits"].sum(),
    ):
        model = Both()
        keeper = StepKeeper(model)
        keeper.attach()
        use(model(torch.randn(5, 3))).backward()

        keeper.replay(tmp_path, DumpInfo(), task="tensor")

        (gradient,) = replayed(read_dump(tmp_path), "fc.weight")
        torch.testing.assert_close(gradient, model.fc.weight.grad)


def test_gradient_hooks_of_the_script_act_on_the_replay_too(tmp_path):
    model = Net()
    model.first.weight.register_hook(lambda gradient: gradient * 3)
    keeper, own = prepared(model, torch.randn(6, 4))

    keeper.replay(tmp_path, DumpInfo(), task="tensor")

    assert torch.equal(replayed(read_dump(tmp_path), "first.weight")[0], own[0]["first.weight"])


def test_recurrent_modules_and_their_flat_weights(tmp_path):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, num_layers=2)

        def forward(self, x):
            return self.lstm(x)[0]

    model = Recurrent()
    keeper, own = prepared(model, torch.randn(5, 2, 3))
    weights = [id(weight) for weight in model.lstm._flat_weights]

    result = keeper.replay(tmp_path, DumpInfo(), task="tensor")

    assert result.status == "clean"
    assert torch.equal(replayed(read_dump(tmp_path), "lstm.weight_hh_l1")[0], own[0]["lstm.weight_hh_l1"])
    assert [id(weight) for weight in model.lstm._flat_weights] == weights


def test_autocast_is_as_it_was(tmp_path):
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    keeper = StepKeeper(model)
    keeper.attach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(3, 4)).sum()
    loss.backward()
    own = model[0].weight.grad.clone()

    keeper.replay(tmp_path / "inside", DumpInfo(), task="tensor")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keeper.reset()
        with torch.autocast("cpu", enabled=False):
            model(torch.randn(3, 4)).sum().backward()
        keeper.replay(tmp_path / "outside", DumpInfo())

    dump = read_dump(tmp_path / "inside")
    assert torch.equal(replayed(dump, "0.weight")[0], own)
    assert dump.info.reproduced
    linears = [entry for entry in dump.entries if entry.class_name == "Linear" and entry.direction == "forward"]
    assert [entry.outputs[0].dtype for entry in linears] == ["torch.bfloat16"] * 2
    assert read_dump(tmp_path / "outside").entries[0].outputs[0].dtype == "torch.float32"


def test_a_fault_that_does_not_come_back_is_told(tmp_path):
    model = Net()
    spoiled = []
    model.first.register_forward_hook(
        lambda module, args, output: None if spoiled else spoiled.append(1) or output * NAN
    )
    keeper, _ = prepared(model, torch.randn(6, 4))

    result = keeper.replay(tmp_path, DumpInfo())

    info = read_dump(tmp_path).info
    assert (info.reproduced, info.lost_nonfinite) == (False, True)
    assert "transient" in result.reason


@pytest.mark.parametrize("is_differentiated", [False, True])
def test_a_backward_that_is_differentiated_is_said_not_to_be_in_the_replay(tmp_path, is_differentiated):
    model, x = nn.Linear(4, 1), torch.randn(6, 4, requires_grad=True)
    keeper = StepKeeper(model)
    keeper.attach()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=is_differentiated)
    (slope.square().sum() if is_differentiated else model(x).sum()).backward()

    keeper.replay(tmp_path / "first", DumpInfo())
    keeper.reset()
    model(x).sum().backward()
    keeper.replay(tmp_path / "next", DumpInfo())

    assert ("create_graph" in read_dump(tmp_path / "first").info.uncovered) == is_differentiated
    assert len(read_dump(tmp_path / "first").info.absent) == is_differentiated
    assert read_dump(tmp_path / "next").info.uncovered == ""


def sound_hook(gradient):
    return gradient


def accumulated_hook(parameter):
    parameter.grad.mul_(float("nan"))


@pytest.mark.parametrize(
    ("kind", "absent"),
    [
        ("accumulated", ("a hook on accumulated gradients",)),
        ("transform", ("a transform of torch.func",)),
        ("gradient", ()),
        ("module", ()),
        ("none", ()),
    ],
)
def test_only_what_no_replay_contains_is_said_not_to_be_in_it(tmp_path, kind, absent):
    model, x = nn.Linear(4, 1), torch.randn(6, 4, requires_grad=True)
    keeper = StepKeeper(model)
    keeper.attach()
    if kind == "accumulated":
        model.weight.register_post_accumulate_grad_hook(accumulated_hook)
    elif kind == "gradient":
        model.weight.register_hook(sound_hook)
    elif kind == "module":
        model.register_full_backward_hook(lambda module, given, made: given)
    loss = model(x).sum()
    if kind == "transform":
        parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        slope = torch.func.grad(lambda value: torch.func.functional_call(model, parameters, (value,)).square().sum())(x)
        loss = loss + slope.square().sum()
    loss.backward()

    keeper.replay(tmp_path, DumpInfo())

    info = read_dump(tmp_path).info
    assert info.absent == absent
    assert all(words in info.uncovered for words in absent)


@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_communication_hook_is_said_not_to_be_in_the_replay(tmp_path, is_hooked):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
        if is_hooked:
            model.register_comm_hook(None, allreduce_hook)
        keeper, _ = prepared(model, torch.randn(6, 4))
        keeper.replay(tmp_path / "dump", DumpInfo())
    finally:
        torch.distributed.destroy_process_group()

    assert ("communication hook" in read_dump(tmp_path / "dump").info.uncovered) == is_hooked


def test_budget_keeps_the_last_micro_steps(tmp_path):
    model = nn.Linear(1000, 1)
    keeper, _ = prepared(model, *(torch.randn(10, 1000) for _ in range(4)), memory_bytes=100_000)

    result = keeper.replay(tmp_path, DumpInfo())

    assert keeper.size_bytes <= 100_000
    assert result.micro_steps == 2
    assert "the first 2 micro steps did not fit" in result.reason
    assert {entry.micro_step for entry in read_dump(tmp_path).root} == {2, 3}
    keeper.reset()
    assert keeper.size_bytes == 0


def test_outputs_are_let_go_before_micro_steps(tmp_path):
    model = nn.Linear(1, 1000)
    keeper, _ = prepared(model, *(torch.randn(10, 1) for _ in range(2)), memory_bytes=100_000)

    result = keeper.replay(tmp_path, DumpInfo())

    assert result.micro_steps == 2
    assert read_dump(tmp_path).info.reproduced is None


@pytest.mark.parametrize("attached", [True, False])
def test_forwards_without_backward_are_not_kept(tmp_path, attached):
    model = Net()
    keeper = StepKeeper(model)
    if attached:
        keeper.attach()
    with torch.no_grad():
        model(torch.randn(6, 4))
    model(torch.randn(6, 4))

    result = keeper.replay(tmp_path, DumpInfo())

    assert (result.status, result.reason) == ("refused", "no forward with a gradient was kept for this step")
    assert not list(tmp_path.iterdir())


def test_an_overwritten_batch_is_refused(tmp_path):
    model = Net()
    x = torch.randn(6, 4)
    keeper, _ = prepared(model, x)
    x.copy_(torch.randn(6, 4))

    result = keeper.replay(tmp_path, DumpInfo())

    assert (result.status, result.reason) == ("refused", "an input of the model was overwritten after the forward")
    info = read_dump(tmp_path).info
    assert (info.replay, info.aborted, info.uncovered) == (True, "refused", result.reason)


def test_a_model_that_writes_to_its_parameters_is_not_touched_again(tmp_path):
    model = nn.Embedding(10, 4, max_norm=0.1)
    with torch.no_grad():
        model.weight.normal_()
    keeper, _ = prepared(model, torch.tensor([1, 2]))
    before = snapshot(model)

    result = keeper.replay(tmp_path, DumpInfo())

    assert "writes to its parameters" in result.reason
    assert equal(snapshot(model), before)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), "1 is a SyncBatchNorm"),
        (nn.Linear(2, 2, device="meta"), "on the meta device"),
    ],
)
def test_unsuitable_models_are_refused_before_anything_is_hooked(tmp_path, model, reason):
    keeper = StepKeeper(model)
    keeper.attach()

    assert reason in keeper.refusal
    assert not model._forward_hooks
    assert keeper.replay(tmp_path, DumpInfo()).status == "refused"


def test_an_error_in_the_replayed_model_is_contained(tmp_path, caplog):
    model = Net()
    keeper, _ = prepared(model, torch.randn(6, 4))
    handle = model.last.register_forward_hook(lambda module, args, output: 1 / 0)
    before = snapshot(model)

    result = keeper.replay(tmp_path / "a", DumpInfo())

    assert (result.status, result.reason) == ("failed", "ZeroDivisionError: division by zero")
    assert equal(snapshot(model), before)
    assert "Module.first.Linear.forward.0" in {entry.key for entry in read_dump(tmp_path / "a").entries}
    assert read_dump(tmp_path / "a").info.aborted == "failed"
    handle.remove()
    assert keeper.replay(tmp_path / "b", DumpInfo()).status == "clean"
    assert not read_dump(tmp_path / "b").info.aborted


def test_an_unwritable_place_is_contained(tmp_path):
    (tmp_path / "file").write_text("")
    keeper, _ = prepared(Net(), torch.randn(6, 4))

    result = keeper.replay(tmp_path / "file/below", DumpInfo())

    assert result.status == "failed"
    assert result.dump is None


def test_hooks_see_that_a_replay_is_on(tmp_path):
    model = Net()
    keeper, _ = prepared(model, torch.randn(6, 4))
    seen = tmp_path / "seen"  # what a hook keeps in memory is put back after the replay
    model.register_forward_hook(lambda module, args, output: seen.write_text(str(keeper.replaying)))

    keeper.replay(tmp_path / "dump", DumpInfo())

    assert seen.read_text() == "True"


def test_compiled_model_is_replayed_in_eager_mode(tmp_path):
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = torch.compile(inner, backend="eager")
    keeper, _ = prepared(compiled, torch.randn(6, 4))

    result = keeper.replay(tmp_path, DumpInfo())

    dump = read_dump(tmp_path)
    assert result.status == "clean"
    assert "Module.0.Linear.forward.0" in {entry.key for entry in dump.entries}
    assert "eager mode" in dump.info.notes[0]
    inner.compile(backend="eager")
    assert "compiled in place" in StepKeeper(inner).refusal


def test_constant_buffers_are_not_copied_again():
    model = Net()
    buffers = BufferKeeper(model)
    kept = buffers.keep()
    assert all(buffer.clone is not None for buffer in kept)
    model(torch.randn(6, 4))
    buffers.learn(kept)

    constant = {buffer.name for buffer in buffers.keep() if buffer.clone is None}

    assert constant == {"table"}
    model.table.add_(1)
    assert all(buffer.clone is not None for buffer in buffers.keep())


class OwnStatistics(nn.Module):
    """Writes running statistics without counting a version, in a module that torch does not know."""

    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def forward(self, x):
        return functional.batch_norm(x, self.mean, self.variance, training=True)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, OwnStatistics])
@pytest.mark.parametrize("bad", range(4))
def test_running_statistics_that_became_nan_in_any_micro_step_are_replayed(tmp_path, norm, bad):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), norm(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    inputs = [torch.randn(3, 1, 8, 8) for _ in range(4)]
    inputs[bad][0, 0, 2, 2] = NAN
    keeper, own = prepared(model, *inputs)
    before = snapshot(model)

    result = keeper.replay(tmp_path, DumpInfo(), task="tensor")

    assert (result.status, result.reason) == ("nonfinite", "")
    assert equal(snapshot(model), before)
    dump = read_dump(tmp_path)
    assert dump.info.reproduced
    for name in own[0]:
        assert equal(replayed(dump, name), [gradients[name] for gradients in own]), name


def test_statistics_that_stood_still_in_evaluation_mode_are_replayed_in_training(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    keeper, _ = prepared(model, torch.randn(6, 4))
    keeper.reset()
    model.train()
    model(torch.randn(6, 4) + 3).square().sum().backward()
    model.eval()
    model(torch.randn(6, 4)).square().sum().backward()
    before = snapshot(model)

    result = keeper.replay(tmp_path, DumpInfo())

    assert (result.status, read_dump(tmp_path).info.reproduced) == ("clean", True)
    assert equal(snapshot(model), before)


def test_detached_keeper_leaves_no_hook():
    model = Net()
    keeper, _ = prepared(model, torch.randn(6, 4))
    keeper.detach()

    assert not model._forward_hooks
    assert not model._forward_pre_hooks
