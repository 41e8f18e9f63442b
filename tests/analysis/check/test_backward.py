"""`trainermon check run` on backwards: sound nets have no error, and planted faults of a gradient are named."""

import csv
import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.recorded_dumps import recorded
from trainermon import PrecisionDebugger
from trainermon.accuracy import large
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import check_dump
from trainermon.analysis.check.screen import render_text
from trainermon.analysis.check.tables import write_files


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    PrecisionDebugger.close()


def dumped(folder, step):
    return recorded(folder, step, risk_level="ALL")


def backwards(folder, step):
    """Return the verdicts on the backwards of a step, by the stem of their keys."""
    return {call.stem: call for call in check_dump(dumped(folder, step)).calls if call.is_backward}


class Block(nn.Module):
    """Attention and a gated MLP around residual connections, and a head tied to the embedding."""

    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(53, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 2, -1).movedim(2, 0).transpose(2, 3)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden = self.norm2(x)
        x = x + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return functional.cross_entropy(functional.linear(x, self.embed.weight).flatten(0, 1).float(), tokens.flatten())


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8)
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, pictures):
        x = functional.relu(self.norm1(self.conv1(pictures)), inplace=True)
        x = x + functional.gelu(self.norm2(self.conv2(x)))
        return self.head(functional.max_pool2d(x, 4).flatten(1)).float().logsumexp(-1).mean()


def training(kind, dtype, autocast):
    torch.manual_seed(0)
    model = kind().to(dtype)
    given = torch.randint(0, 53, (2, 12)) if kind is Block else torch.randn(2, 3, 16, 16, dtype=dtype)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(given)
        loss.backward()

    return step


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Block, Pictures])
def test_a_sound_step_has_no_error_and_nearly_all_of_it_is_judged(tmp_path, kind, dtype, autocast):
    found = backwards(tmp_path, training(kind, dtype, autocast))

    assert [call.key for call in found.values() if call.status is Status.ERROR] == []
    if dtype is torch.float32 and not autocast:
        assert [call.key for call in found.values() if call.status is Status.WARNING] == []
    unjudged = {call.stem: call.reason for call in found.values() if call.status is Status.SKIP}
    assert set(unjudged.values()) <= {"it gives back what it takes"}
    assert len(unjudged) < 0.1 * len(found)


class FaultyBackward(TorchDispatchMode):
    """A device on which the results of one operator are altered by `alter(results, *arguments)`."""

    def __init__(self, operator, alter):
        super().__init__()
        self._operator, self._alter = operator, alter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return self._alter(result, *args) if func.overloadpacket is self._operator else result


def lose_a_term(result, left, right):
    return result - torch.outer(left[:, 0], right[0])


def average(result, terms, *_):
    return result / (terms.numel() / result.numel())


def scale(result, *_):
    return result * 1.0005


def plant_nan(results, *_):
    results[0].view(-1)[3] = math.nan
    return results


def double_the_weights(results, *_):
    return results[0], results[1] * 2, results[2]


aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "alter", "wrong"),
    [
        (aten.mm, lose_a_term, {"Functional.linear.0": {"input.0", "input.1"}}),
        (aten.sum, average, {"Functional.linear.0": {"bias"}, "Tensor.__mul__.0": {"input.1"}}),
        (aten.sin, scale, {"Tensor.cos.0": {"input.0"}}),
        (aten.native_layer_norm_backward, plant_nan, {"Functional.layer_norm.0": {"input.0"}}),
        (aten.native_layer_norm_backward, double_the_weights, {"Functional.layer_norm.0": {"weight"}}),
        (aten.exp, scale, {}),  # the backward has none
    ],
)
def test_a_fault_in_a_backward_is_named_by_call_and_argument(tmp_path, operator, alter, wrong):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((6, 8), (10, 8), (10,)))
    gain, scales = torch.randn(8, requires_grad=True), torch.randn(1, 10, requires_grad=True)

    def step():
        rows = functional.layer_norm(x, [8], weight=gain)
        loss = (functional.linear(rows, weight, bias=bias) * scales).cos().sum()
        with FaultyBackward(operator, alter):
            loss.backward()

    found = backwards(tmp_path, step)

    assert {
        stem: {slot for slot, one in zip(call.slots, call.judgements, strict=True) if one.status is Status.ERROR}
        for stem, call in found.items()
        if call.status is Status.ERROR
    } == wrong
    assert {call.status for stem, call in found.items() if stem not in wrong} == {Status.PASS}


def test_a_fault_is_found_in_the_sum_of_what_several_calls_give_back_and_blamed_on_the_likeliest(tmp_path):
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()

    def step():
        loss = (functional.softmax(x * 2, -1) + x).square().sum()
        with FaultyBackward(aten._softmax_backward_data, scale):
            loss.backward()

    assert {call.status for call in backwards(tmp_path / "one", step).values()} >= {Status.ERROR}

    def shared():
        y = x * 2
        loss = (functional.softmax(y, -1) + y).square().sum()
        with FaultyBackward(aten._softmax_backward_data, scale):
            loss.backward()

    found = backwards(tmp_path / "two", shared)

    [call] = [call for call in found.values() if call.status is Status.ERROR]
    assert (call.stem, call.reason) == ("Functional.softmax.0", "inexact, summed with Tensor.__add__.0")
    assert [one.reason for one in found["Tensor.__add__.0"].judgements] == [
        "",
        "see Functional.softmax.0.backward: the same tensor",
    ]


class Doubled(torch.autograd.Function):
    """A function of the script's own, which no dump shows."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_a_tensor_that_something_unseen_takes_too_is_not_judged(tmp_path):
    x = torch.randn(4, requires_grad=True)

    def step():
        y = x.sin()
        (y.cos() + Doubled.apply(y)).sum().backward()

    found = backwards(tmp_path, step)

    assert found["Tensor.cos.0"].reason == "something that is not in the dump takes the same tensor"
    assert found["Tensor.sin.0"].status is Status.PASS  # its own gradient came to it whole


def accumulate(x, weight):
    for _ in range(2):
        (x @ weight).square().sum().backward()


def go_back_twice(x, weight):
    loss = (x @ weight).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def go_back_in_parts(x, weight):
    hidden = x @ weight
    parts = hidden.split(2, -1)
    parts[0].sin().sum().backward(retain_graph=True)
    (parts[1].cos().sum() + hidden.square().sum()).backward()


def penalize(x, weight):
    loss = (x @ weight).sin().sum()
    [gradient] = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def have_a_hook(x, weight):
    hidden = x @ weight
    hidden.register_hook(lambda gradient: gradient * 3)
    hidden.sin().sum().backward()


def checkpointed(x, weight):
    y = x.sin()
    loss = checkpoint(lambda one: (one @ weight).sin() + one.sum(), y, use_reentrant=True).sum() + y.sum()
    loss.backward()


def write_in_place(x, weight):
    hidden = x @ weight
    hidden[1:] = hidden[:-1] * 3
    hidden.mul_(2).neg_()
    part = hidden[0]
    part.add_(1)
    (hidden * hidden.clone().exp_()).sum().backward()


def pick_some(x, weight):
    values, _ = (x @ weight).topk(2, -1)
    torch.autograd.grad(values.sum() + x.detach().sum() + weight.sum(), weight)


@pytest.mark.parametrize(
    "step",
    [
        *(accumulate, go_back_twice, go_back_in_parts, penalize, have_a_hook, checkpointed, write_in_place, pick_some),
    ],
)
def test_unusual_backwards_are_no_faults(tmp_path, step):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    found = backwards(tmp_path, lambda: step(x, weight))

    assert found
    assert {call.status for call in found.values()} <= {Status.PASS, Status.SKIP}


def test_a_row_of_the_csv_has_both_directions_and_the_screen_counts_them(tmp_path):
    x = torch.randn(4, requires_grad=True)

    def step():
        loss = x.cos().sum()
        with FaultyBackward(aten.sin, scale):
            loss.backward()

    check = check_dump(dumped(tmp_path, step))
    path, _ = write_files(check, tmp_path, ["csv"], "now")

    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = {row["API name"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["Tensor.cos.0", "Tensor.sum.0"]
    verdicts = [rows["Tensor.cos.0"][f"{side} Test Success"] for side in ("Forward", "Backward")]
    assert (verdicts, rows["Tensor.cos.0"]["Message"]) == (["pass", "error"], "backward: inexact")
    text = render_text([check])
    assert "1 of 4 calls (2 forward, 2 backward) is wrong; first: Tensor.cos.0.backward" in text
    assert "inexact in the gradient of input.0: " in text


def without_our_marks(form):
    match form:
        case dict():
            dropped = ("tensor", "consumers")
            return {name: without_our_marks(item) for name, item in form.items() if name not in dropped}
        case list():
            return [without_our_marks(item) for item in form]
        case _:
            return form


def test_an_older_dump_is_judged_as_far_as_it_allows(tmp_path):
    x = torch.randn(4, requires_grad=True)

    def step():
        y = x.sin()
        (y.cos() + Doubled.apply(y)).sum().backward()

    directory = dumped(tmp_path, step)
    path = directory / "dump.json"
    path.write_text(json.dumps(without_our_marks(json.loads(path.read_text()))))

    found = {call.key: call for call in check_dump(directory).calls}

    assert found["Tensor.cos.0.backward"].reason == "the dump does not say what else took the same tensor"
    assert found["Tensor.sin.0.backward"].status is Status.PASS


@pytest.mark.parametrize(
    ("alter", "status"), [(lambda result, *_: result, Status.PASS), (lambda result, *_: result.roll(1), Status.ERROR)]
)
def test_a_dropout_gives_back_what_its_forward_kept(tmp_path, alter, status):
    torch.manual_seed(0)
    x = torch.randn(40, 40, requires_grad=True)

    def step():
        loss = functional.dropout(x.relu(), 0.3).sum()
        with FaultyBackward(aten.mul, alter):
            loss.backward()

    assert backwards(tmp_path, step)["Functional.dropout.0"].status is status


def test_backwards_of_large_products_are_projected_and_a_wrong_one_is_found(tmp_path, monkeypatch):
    """Every product counts as a large one; no backward of theirs is run as a whole."""
    monkeypatch.setattr(large, "MAX_PRODUCTS", 0)
    torch.manual_seed(0)
    x, weights = torch.randn(5, 33, 24, requires_grad=True), torch.randn(3, 40, 24, requires_grad=True)

    def step(factor=1.0):
        hidden = x * 1
        parts = [functional.linear(hidden, weight) for weight in weights.unbind()]
        if factor != 1:
            parts[1].grad_fn.register_hook(lambda given, _: (given[0] * factor, *given[1:]))
        sum(parts).backward(torch.randn(5, 33, 40))

    sound, wrong = (backwards(tmp_path / name, lambda f=f: step(f)) for name, f in (("sound", 1.0), ("wrong", 1.1)))

    products = [call for stem, call in sound.items() if "linear" in stem]
    assert {one.standard for call in products for one in call.judgements if one.status is Status.PASS} == {"projected"}
    assert [call.key for call in sound.values() if call.status is Status.ERROR] == []
    found = {call.stem: call.reason for call in wrong.values() if call.status is Status.ERROR}
    assert set(found) == {"Functional.linear.0", "Functional.linear.1"}  # of the shared input, and of its own weight
    assert found["Functional.linear.0"] == "inexact, projected, summed with 2 others, Functional.linear.1"
