"""Trains a small decoder as it should be, and once more for each mistake that leaves every value finite.

A mistake is there from the first step on, so no step before it shows how a sound run looks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from trainermon import TrainerMon

WORDS, WIDTH, LENGTH, BATCH, DEPTH = 37, 16, 8, 4, 3
NUM_STEPS, NUM_MICRO_STEPS = 4, 2
SOUND = "sound"
CONFIG = {
    "param_distribution": True,
    "mv_distribution": True,
    "xy_distribution": True,
    "agent": {"start": False},
    "replay": {"enabled": False},
    "escalation": {"enabled": False},
}


@dataclasses.dataclass(frozen=True)
class Mistake:
    """What is done wrong on the first step, beside which sound run, and the right answer: any of the modules, phase."""

    name: str
    modules: tuple[str, ...]
    phase: str
    reference: str = SOUND
    micro_step: int | None = None


MISTAKES = [
    Mistake("scores_scale", ("blocks.1.mix",), "forward"),
    Mistake("half_module", ("blocks.0.wide",), "forward"),
    Mistake("other_gelu", ("blocks.1.act",), "forward"),
    Mistake("norm_eps", ("blocks.2.before",), "forward"),
    Mistake("dropped_position", ("place", "(input)", "(model)"), "forward"),
    Mistake("loss_halved", ("(loss)",), "forward"),
    Mistake("gradient_halved", ("(loss)",), "backward"),
    Mistake("smoothed_labels", ("(loss)",), "forward"),
    Mistake("temperature", ("(loss)",), "forward"),
    Mistake("unmasked_padding", ("(loss)",), "forward"),
    Mistake("backward_scaled", ("blocks.1.narrow",), "backward"),
    Mistake("second_backward", ("blocks.0.wide",), "backward", micro_step=0),
    Mistake("second_backward_tied", ("blocks.0.wide",), "backward", reference="tied", micro_step=0),
    Mistake("no_autocast", ("blocks.0.mix.take",), "forward", reference="bfloat16"),
    Mistake("other_gelu_bfloat16", ("blocks.1.act",), "forward", reference="bfloat16"),
    Mistake("beta", (), "optimizer"),
    Mistake("decay", (), "optimizer"),
    Mistake("rate", (), "optimizer"),
    Mistake("decay_sums", (), "optimizer"),
]
HEALTHY = [("sums", SOUND), ("sums_bfloat16", "bfloat16"), ("sums_tied", "tied"), ("threads", SOUND)]
"""Runs that differ from another sound one by nothing but the order in which sums are taken."""


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.take, self.give = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = WIDTH**-0.5

    def forward(self, x):
        q, k, v = self.take(x).chunk(3, -1)
        hidden = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
        return self.give((q @ k.transpose(-1, -2) * self.scale + hidden).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.mix, self.after = nn.LayerNorm(WIDTH), Mix(), nn.LayerNorm(WIDTH)
        self.wide, self.act, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.mix(self.before(x))
        return x + self.drop(self.narrow(self.act(self.wide(self.after(x)))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.last = nn.LayerNorm(WIDTH)
        self.head: nn.Module = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, text):
        x = self.word(text) + self.place(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


class Tied(Decoder):
    """A decoder of which the head is given the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.head = Product()

    def forward(self, text):
        x = self.word(text) + self.place(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x), self.word.weight)


class Product(nn.Module):
    def forward(self, x, weight):
        return x @ weight.T


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def _rewrite(module, forward):
    module.forward = forward.__get__(module)


def _with_scaled_gradient(module, factor):
    """Let the backward of `module` give back a gradient that is `factor` times what it should be."""
    own = type(module).forward
    _rewrite(module, lambda self, x: own(self, _Scaled.apply(x, factor)))


def _half(self, x):
    return functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()


def _change_model(model, name):
    match name.removesuffix("_bfloat16").removesuffix("_tied"):
        case "scores_scale":
            model.blocks[1].mix.scale *= 1.01
        case "half_module":
            _rewrite(model.blocks[0].wide, _half)
        case "other_gelu":
            model.blocks[1].act.approximate = "tanh"
        case "norm_eps":
            model.blocks[2].before.eps = 1e-3
        case "dropped_position":
            _rewrite(model.place, lambda self, at: functional.embedding(at.clamp(max=LENGTH - 2), self.weight))
        case "backward_scaled":
            _with_scaled_gradient(model.blocks[1].narrow, 1.02)
        case "second_backward":
            _with_scaled_gradient(model.blocks[0].wide, 1.01)
        case "sums" | "decay_sums":
            _sum_in_parts(model)
    return model


def _sum_in_parts(model):
    for module in model.modules():
        if type(module) is nn.Linear:
            _rewrite(module, _in_parts)


def _in_parts(self, x):
    """Return the same as `Linear.forward`, summed in another order."""
    half = x.shape[-1] // 2
    parts = (x[..., half:], self.weight[:, half:]), (x[..., :half], self.weight[:, :half])
    found = sum(functional.linear(*part) for part in parts)
    return found if self.bias is None else found + self.bias.to(found.dtype)


def _loss(logits, labels, name):
    if name == "temperature":
        logits = logits / 1.05
    if name == "unmasked_padding":
        labels = labels.masked_fill(labels == -100, 0)
    smoothing = 0.05 if name == "smoothed_labels" else 0.0
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)


def _optimizer(model, name):
    decay = 0.5 if name in ("decay", "decay_sums") else 0.01
    betas = (0.9, 0.98 if name == "beta" else 0.95)
    return torch.optim.AdamW(model.parameters(), lr=2e-3 if name == "rate" else 1e-3, betas=betas, weight_decay=decay)


def train(folder: Path, name: str, *, rank: int = 0, wrap=lambda model: model) -> None:
    """Train a few steps into `folder`, with the mistake of that name or none; every run sees the same batches."""
    torch.manual_seed(11)
    torch.set_num_threads(4 if name == "threads" else 1)
    model = _change_model(Tied() if "tied" in name else Decoder(), name)
    root = wrap(model)
    optimizer = _optimizer(model, name)
    torch.manual_seed(70 + rank)
    config = CONFIG | {"run_id": folder.name, "output_dir": str(folder.parent), "spool_dir": str(folder / "spool")}
    with TrainerMon(config) as monitor:
        monitor.set_monitor(root, optimizer, grad_acc_steps=NUM_MICRO_STEPS)
        for _ in range(NUM_STEPS):
            for micro_step in range(NUM_MICRO_STEPS):
                is_last = micro_step == NUM_MICRO_STEPS - 1
                with contextlib.nullcontext() if is_last or root is model else root.no_sync():
                    monitor.record(loss=_run_micro_step(root, name) * NUM_MICRO_STEPS)
            optimizer.step()
            optimizer.zero_grad()


def _run_micro_step(model, name):
    text = torch.randint(WORDS, (BATCH, LENGTH + 1))
    labels = text[:, 1:].masked_fill(text[:, 1:] < 4, -100)
    with torch.autocast("cpu", torch.bfloat16, enabled="bfloat16" in name):
        loss = _loss(model(text[:, :-1]).float(), labels, name) / NUM_MICRO_STEPS
    loss = loss / 2 if name == "loss_halved" else loss
    (_Scaled.apply(loss, 0.5) if name == "gradient_halved" else loss).backward()
    return loss.detach()


def main() -> None:
    folder = Path(sys.argv[1])
    for name in {*(mistake.reference for mistake in MISTAKES), *(mistake.name for mistake in MISTAKES), *dict(HEALTHY)}:
        train(folder / name, name)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
