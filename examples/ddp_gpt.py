"""Train a small GPT on Python's own standard library, byte by byte, on every rank of `torchrun`, and watch it.

    torchrun --nproc-per-node 2 examples/ddp_gpt.py
    torchrun --nproc-per-node 2 examples/ddp_gpt.py --fault weight     # a weight turns Inf on one rank at one step
    python examples/ddp_gpt.py --steps 20                              # one process, no torchrun

The three lines that attach the monitor are marked.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that everybody knows
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainermon import TrainerMon  # line 1

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention with separate projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (linear(x).view(shape).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A byte-level GPT; returns the loss."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def read_text(limit: int = 4 << 20) -> Tensor:
    """Return the bytes of the standard library's source files, int64 `[limit]` at most."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:limit]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(text: Tensor, *, batch: int, context: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, targets), int64 `[batch, context]` each, different on every rank, the same in every run."""
    generator = torch.Generator().manual_seed(1000 + rank)
    while True:
        starts = torch.randint(len(text) - context - 1, (batch,), generator=generator)
        rows = torch.stack([text[start : start + context + 1] for start in starts])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Fault:
    """Breaks one layer on one rank at one step, as hardware or a bug might."""

    def __init__(self, arguments: argparse.Namespace, model: GPT, rank: int) -> None:
        self.kind, self.step = arguments.fault, arguments.fault_step
        self.here = self.kind != "none" and rank == arguments.fault_rank
        self.now = False
        if self.here:
            self.module = model.get_submodule(arguments.fault_layer)
        if self.here and self.kind == "activation":
            self.module.register_forward_hook(self._break_output)
        elif self.here and self.kind == "gradient":
            self.module.register_forward_hook(self._break_gradient)

    def strike(self, step: int) -> None:
        self.now = self.here and step == self.step
        if self.now and self.kind == "weight":
            with torch.no_grad():
                next(self.module.parameters()).view(-1)[7] = float("inf")

    def _break_output(self, _module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        return output * torch.where(torch.arange(output.shape[-1]) == 3, float("inf"), 1.0) if self.now else None

    def _break_gradient(self, _module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        return BrokenBackward.apply(output) if self.now else None


class BrokenBackward(torch.autograd.Function):
    """The identity with a backward that loses its gradient, as a kernel with a bug might."""

    @staticmethod
    def forward(_context: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: object, gradient: Tensor) -> Tensor:
        return gradient * float("nan")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--config", default=str(Path(__file__).with_name("monitor_config.json")))
    parser.add_argument("--fault", choices=["none", "weight", "activation", "gradient"], default="none")
    parser.add_argument("--fault-step", type=int, default=40)
    parser.add_argument("--fault-rank", type=int, default=1)
    parser.add_argument("--fault-layer", help="name of a module (default: in the middle)")
    arguments = parser.parse_args()
    arguments.fault_layer = arguments.fault_layer or f"h.{arguments.layers // 2}.mlp.0"
    return arguments


def build_model() -> GPT:
    """Return the model of the script's arguments; `trainermon replay --model ddp_gpt.py:build_model` calls it, too."""
    arguments = parse_arguments()
    torch.manual_seed(0)
    return GPT(layers=arguments.layers, width=arguments.width, heads=arguments.heads, context=arguments.context)


def main() -> None:
    arguments = parse_arguments()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    gpt = build_model()
    fault = Fault(arguments, gpt, rank)
    model = DistributedDataParallel(gpt) if dist.is_initialized() else gpt
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.1)

    monitor = TrainerMon(arguments.config)  # line 2
    monitor.set_monitor(model, optimizer)  # line 3

    data = batches(read_text(), batch=arguments.batch, context=arguments.context, rank=rank)
    begin = time.perf_counter()
    for step in range(arguments.steps):
        fault.strike(step)
        loss = model(*next(data))
        loss.backward()
        monitor.record(loss=loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % arguments.log_every == 0:
            pace = (step + 1) / (time.perf_counter() - begin)
            print(f"step {step + 1:3}/{arguments.steps}   loss {loss.item():7.4f}   {pace:.1f} steps/s", flush=True)
    monitor.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
