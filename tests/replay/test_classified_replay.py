"""What a replay says of the first bad operation, and of whether the step can be reproduced."""

import os
import random

import pytest
import torch
from torch import nn

from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.records import DumpInfo
from trainermon.dump.files.verdicts import NonfiniteCause, Reproducibility
from trainermon.replay import replay as replay_module
from trainermon.replay.replay import StepExamination, StepKeeper


class Body(nn.Module):
    """Hands what comes to a function of the test's."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.function(x * self.scale)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.body, self.last = nn.Linear(4, 4), Body(function), nn.Linear(4, 1)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(4))
            self.first.bias.zero_()

    def forward(self, x):
        return self.last(self.body(self.first(x)).float())


def replay(tmp_path, model, x, spoil=None):
    keeper = StepKeeper(model)
    keeper.attach()
    model(x).sum().backward()
    keeper.detach()
    result = keeper.replay(tmp_path, DumpInfo(step=1))
    return result, read_dump(tmp_path).info


def half_product(x):
    """Overflows between its operations; what it gives would fit."""
    x = x.half()
    return (x @ x.T @ torch.ones(len(x), 4, dtype=torch.float16, device=x.device)) / 1e5


@torch.library.custom_op("trainermon_tests::faulty_double", mutates_args=())
def faulty_double(x: torch.Tensor) -> torch.Tensor:
    result = x * 2
    if x.dtype is torch.float32:  # the fault of its kernel for one type
        result[0, 0] = float("nan")
    return result


@faulty_double.register_fake
def _(x):
    return torch.empty_like(x)


torch.library.register_autograd("trainermon_tests::faulty_double", lambda _ctx, grad: grad * 2)


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        pytest.param(half_product, 300.0, (NonfiniteCause.PRECISION, "aten.mm.default", True), id="fp16 product"),
        pytest.param(torch.exp, 1000.0, (NonfiniteCause.RANGE, "aten.exp.default", False), id="exp beyond float64"),
        pytest.param(torch.exp, 100.0, (NonfiniteCause.RANGE, "aten.exp.default", False), id="exp beyond float32"),
        pytest.param(
            lambda x: (x.double() * 1e305) * 1e10, 1.0, (NonfiniteCause.RANGE, "aten.mul.Tensor", False), id="float64"
        ),
        pytest.param(
            lambda x: ((x - x).log() + 1).neg(),
            1.0,
            (NonfiniteCause.RANGE, "aten.log.default", False),
            id="logarithm of zero",
        ),
        pytest.param(
            lambda x: faulty_double(x),
            1.0,
            (NonfiniteCause.KERNEL, "trainermon_tests.faulty_double.default", True),
            id="op",
        ),
    ],
)
def test_first_bad_operation_is_named_and_judged(tmp_path, function, value, expected):
    result, info = replay(tmp_path, Net(function), torch.full((2, 4), value))

    assert result.status == "nonfinite"
    first, (cause, operation, float64_finite) = info.operations[0], expected
    assert (first.operation, first.cause) == (operation, cause), first
    assert (first.call, first.direction, first.micro_step) == ("Module.body.Body.forward.0", "forward", 0)
    assert "test_classified_replay.py" in first.source
    assert (info.reproducibility, info.reproduced) == (Reproducibility.REPRODUCIBLE, True)
    assert (info.float64_finite, info.float64_modules) == (float64_finite, ("body",))


def test_a_mask_is_blamed_for_nothing_but_a_fully_masked_row_is(tmp_path):
    def attention(x):
        scores = (x - x.mean(1, keepdim=True)).masked_fill(x > 0.5, -torch.inf)
        return scores.softmax(-1)

    _, clean = replay(tmp_path / "a", Net(attention), torch.tensor([[0.1, 0.2, 0.9, 1.0], [0.1, 0.2, 0.3, 0.4]]))
    _, bad = replay(tmp_path / "b", Net(attention), torch.tensor([[0.6, 0.7, 0.9, 1.0], [0.1, 0.2, 0.3, 0.4]]))

    assert not clean.operations
    assert bad.operations[0].operation == "aten._softmax.default"
    assert "return scores.softmax(-1)" in bad.operations[0].source


def test_minus_infinity_that_was_computed_is_blamed_where_it_came_from(tmp_path):
    def scores(x):
        product = x.half() @ -x.half().T  # minus infinity, as under a mask
        return product.mul_(2).log_softmax(-1)

    _, info = replay(tmp_path, Net(scores), torch.full((4, 4), 300.0))

    assert (info.operations[0].operation, info.operations[0].cause) == ("aten.mm.default", NonfiniteCause.PRECISION)


def test_a_number_that_the_script_gave_is_inherited(tmp_path):
    _, info = replay(tmp_path, Net(lambda x: x * float("nan")), torch.ones(2, 4))

    first = info.operations[0]
    assert (first.operation, first.cause) == ("aten.mul.Tensor", NonfiniteCause.INHERITED)
    assert first.reason == "the script gave it the number nan"


def test_operation_of_the_backward_is_found_with_the_line_of_its_forward(tmp_path):
    def root(x):
        return (x - x).sqrt()

    _, info = replay(tmp_path, Net(root), torch.ones(2, 4))

    first = info.operations[0]
    assert (first.operation, first.direction) == ("aten.div.Tensor", "backward")
    assert first.call == "Module.body.Body.backward.0"
    assert "return (x - x).sqrt()" in first.source
    assert first.cause is NonfiniteCause.RANGE


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / torch.zeros_like(gradient)


def test_functions_with_a_backward_of_their_own_are_found_in_their_module(tmp_path):
    _, info = replay(tmp_path, Net(Root.apply), torch.ones(2, 4))

    first = info.operations[0]
    assert (first.operation, first.cause, first.direction) == ("aten.div.Tensor", NonfiniteCause.RANGE, "backward")
    assert first.call == "Module.body.Body.backward.0"
    assert "return gradient / torch.zeros_like(gradient)" in first.source


def test_a_constant_of_the_scripts_is_inherited(tmp_path):
    def spoiled(x):
        x = x.clone()
        x.view(-1)[3] = float("inf")
        return x

    _, info = replay(tmp_path, Net(spoiled), torch.ones(2, 4))

    assert info.operations[0].cause is NonfiniteCause.INHERITED
    assert 'x.view(-1)[3] = float("inf")' in info.operations[0].source


def trained(folder):
    """Train four steps of which one overflows and is skipped; replay it if there is a folder."""
    torch.manual_seed(5)
    model = Net(lambda x: half_product(nn.functional.dropout(x, 0.2)))
    model.norm = nn.BatchNorm1d(4)
    model.body.register_forward_pre_hook(lambda _module, args: (model.norm(args[0]),))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    keeper = StepKeeper(model, examination=StepExamination(keep_bytes=1 << 20))
    for step in range(4):
        if folder is not None:
            keeper.attach()
        x = torch.randn(6, 4)
        with torch.no_grad():
            model.body.scale.fill_(1e4 if step == 2 else 1.0)
        model(x).sum().backward()
        if not all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters()):
            if folder is not None:
                assert keeper.replay(folder, DumpInfo(step=step)).status == "nonfinite"
        else:
            optimizer.step()
        optimizer.zero_grad()
        keeper.reset()
    return [*model.parameters(), *model.buffers(), torch.get_rng_state()]


def test_three_replays_change_no_bit_of_the_run(tmp_path):
    expected = trained(None)

    found = trained(tmp_path)

    info = read_dump(tmp_path).info
    assert (info.float64_finite, info.kept, len(info.operations) > 0) == (True, "kept_step.pt", True)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


@pytest.mark.parametrize("broken", ["fingerprint", "save_step", "verdict_on"])
def test_what_breaks_in_the_examination_costs_no_dump(tmp_path, monkeypatch, broken):
    def planted(*args, **kwargs):
        raise OSError("planted fault")

    monkeypatch.setattr(replay_module, broken, planted)

    trained(tmp_path)

    assert read_dump(tmp_path).info.complete
    assert read_dump(tmp_path).nonfinite


class Stateful:
    """A counter of the script's own."""

    def __init__(self):
        self.count = 0
        self.random = random.Random(0)

    def __call__(self, x):
        self.count += 1
        return x * self.count + self.random.random()


def test_a_forward_that_changes_attributes_is_stateful_and_they_are_named(tmp_path):
    _, info = replay(tmp_path, Net(Stateful()), torch.ones(2, 4))

    assert info.reproducibility is Reproducibility.STATEFUL
    assert "body.function.count, body.function.random" in info.reproducibility_reason


def test_a_forward_that_gives_something_else_each_time_is_not_reproducible(tmp_path):
    _, info = replay(tmp_path, Net(lambda x: x + int.from_bytes(os.urandom(2), "big")), torch.ones(2, 4))

    assert info.reproducibility is Reproducibility.NOT_REPRODUCIBLE
    assert "two replays from the same state differ" in info.reproducibility_reason


def test_a_fault_that_replays_do_not_show_is_transient(tmp_path):
    flag = tmp_path / "done"  # outside of all that a replay covers

    def once(x):
        if flag.exists():
            return x
        flag.touch()
        return x * float("nan")

    result, info = replay(tmp_path / "dump", Net(once), torch.ones(2, 4))

    assert result.status == "clean" or info.lost_nonfinite
    assert info.reproducibility is Reproducibility.NOT_REPRODUCIBLE
    assert "two replays agree with one another, but not with the step" in info.reproducibility_reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_operations_on_a_device_are_judged_by_the_host(tmp_path):
    model = Net(half_product).cuda()
    keeper = StepKeeper(model)
    keeper.attach()
    model(torch.full((2, 4), 300.0, device="cuda")).sum().backward()
    keeper.replay(tmp_path / "forward", DumpInfo(step=1))
    root = Net(lambda x: (x - x).sqrt()).cuda()
    keeper = StepKeeper(root)
    keeper.attach()
    root(torch.ones(2, 4, device="cuda")).sum().backward()
    keeper.replay(tmp_path / "backward", DumpInfo(step=1))

    forward, backward = (read_dump(tmp_path / name).info.operations[0] for name in ("forward", "backward"))
    assert (forward.cause, forward.call) == (NonfiniteCause.PRECISION, "Module.body.Body.forward.0")
    assert (backward.cause, backward.call) == (NonfiniteCause.RANGE, "Module.body.Body.backward.0")
