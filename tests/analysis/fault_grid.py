"""Two ranks train a small GPT with one fault after the other, and replay the step that each one spoils."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from trainermon.dump.files.records import DumpInfo
from trainermon.replay.replay import StepKeeper

VOCABULARY, WIDTH, LENGTH, BATCH = 31, 16, 8, 2
FAULT_STEP = 1


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong in `module` of `rank` in step 1. `phase` is the right answer."""

    kind: str
    module: str
    rank: int
    phase: str

    @property
    def name(self):
        return f"{self.kind}-{self.module}-rank{self.rank}"


GRID = [
    Fault("weight", "h.0.attention.projection", 0, "parameter"),
    Fault("weight", "h.2.up", 1, "parameter"),
    Fault("weight", "norm", 1, "parameter"),
    Fault("weight", "tokens", 0, "parameter"),
    Fault("transient", "h.0.down", 1, "forward"),
    Fault("transient", "h.1.attention", 0, "forward"),
    Fault("transient", "h.2.norm1", 1, "forward"),
    Fault("transient", "tokens", 0, "forward"),
    Fault("backward", "h.0.up", 0, "backward"),
    Fault("backward", "h.2.attention.qkv", 1, "backward"),
    Fault("backward", "h.1.norm2", 1, "backward"),
    Fault("backward", "head", 0, "backward"),
]
# Other ways to the same three kinds, beyond the grid.
EXTRA = [
    Fault("in-place", "h.1.down", 1, "forward"),
    Fault("operation", "h.1", 0, "forward"),
    Fault("bad-backward", "h.1.up", 1, "backward"),
    Fault("input-gradient", "h.2.down", 0, "backward"),
    Fault("weight-gradient", "h.0.attention.qkv", 1, "backward"),
    Fault("operation-backward", "h.2", 1, "backward"),
    Fault("batch", "(input)", 1, "forward"),
    Fault("loss-gradient", "(loss)", 0, "backward"),
    Fault("once", "h.1.up", 1, "forward"),
]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.projection((q @ k.transpose(-1, -2) / WIDTH**0.5 + mask).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.activation, self.down = nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.disturb = lambda x: x

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        hidden = self.disturb(self.norm2(x))
        return x + self.dropout(self.down(self.activation(self.up(hidden))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), float("-inf")).triu(1))

    def forward(self, tokens, extra):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])) + extra
        for block in self.h:
            x = block(x, self.mask)
        return self.head(self.norm(x))


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


def _spoil(output):
    output = output.clone()
    output[0, 0, 0] = float("inf")
    return output


def _inject(model, fault):
    """Put the fault in place; return what takes it away again."""
    nan = float("nan")
    if fault.kind in ("operation", "operation-backward"):
        block = model.get_submodule(fault.module)
        block.disturb = _spoil if fault.kind == "operation" else _BadBackward.apply
        return lambda: None
    if fault.module.startswith("("):
        return lambda: None
    module = model.get_submodule(fault.module)
    if fault.kind == "weight":
        with torch.no_grad():
            module.weight.view(-1)[5] = float("inf")
            if fault.module == "tokens":
                module.weight[:, 2] = float("inf")
        return lambda: None
    if fault.kind == "weight-gradient":
        return module.weight.register_hook(lambda gradient: gradient * nan).remove
    if fault.kind == "input-gradient":
        return module.register_forward_pre_hook(
            lambda module, args: args[0].register_hook(lambda gradient: gradient * nan) and None
        ).remove
    calls = []
    hooks = {
        "transient": lambda module, args, output: _spoil(output),
        "in-place": lambda module, args, output: output.view(-1)[3:4].fill_(float("inf")) and None,
        "backward": lambda module, args, output: output.register_hook(lambda gradient: gradient * nan) and None,
        "bad-backward": lambda module, args, output: _BadBackward.apply(output),
        "once": lambda module, args, output: None if calls or calls.append(1) else _spoil(output),
    }
    return module.register_forward_hook(hooks[fault.kind]).remove


def run_fault(fault, folder):
    """Train two steps with the fault in the second; return the status of this rank's replay."""
    torch.manual_seed(3)
    model = GPT()
    root = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    keeper = StepKeeper(root)
    rank = dist.get_rank()
    torch.manual_seed(50 + rank)
    for step in range(FAULT_STEP + 1):
        here = step == FAULT_STEP and rank == fault.rank
        remove = _inject(model, fault) if here else (lambda: None)
        keeper.attach()
        text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        extra = torch.zeros(BATCH, LENGTH, WIDTH)
        if here and fault.kind == "batch":
            extra[1, 2, 3] = float("nan")
        logits = root(text[:, :-1], extra)
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        if here and fault.kind == "loss-gradient":
            loss = loss * _BadBackward.apply(torch.ones((), requires_grad=True)) + _BadBackward.apply(loss)
        loss.backward()
        if not all(parameter.grad.isfinite().all() for parameter in model.parameters()):
            directory = folder / fault.name / f"dumps/replay/attempt1/step{step}/rank{rank}"
            info = DumpInfo(id="replay", step=step, attempt=1, rank=rank)
            before = [parameter.grad.clone() for parameter in model.parameters()]
            result = keeper.replay(directory, info)
            same = all(map(functools.partial(torch.equal), *_bits(before, model)))
            return {"status": result.status, "reason": result.reason, "seconds": result.seconds, "untouched": same}
        keeper.reset()
        optimizer.step()
        optimizer.zero_grad()
        remove()
    return {"status": "not seen"}


def _bits(before, model):
    now = [parameter.grad for parameter in model.parameters()]
    return [tensor.view(torch.int32) for tensor in before], [tensor.view(torch.int32) for tensor in now]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    results = {fault.name: run_fault(fault, folder) for fault in [*GRID, *EXTRA]}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
