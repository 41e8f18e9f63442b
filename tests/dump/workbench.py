"""A small training whose bits show whether somebody interfered: in one process, or under DistributedDataParallel."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from trainermon.dump.capture import ModuleCapture
from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.records import DumpInfo
from trainermon.dump.writer import DumpWriter
from trainermon.replay.replay import StepKeeper

VOCABULARY, WIDTH, LENGTH, BATCH = 29, 16, 6, 4


class Attention(nn.Module):
    """x feeds q, k, v (and the residual outside): four gradients are added, in an order that hooks must not change."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, *, mask=None):
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / WIDTH**0.5
        weights = self.dropout((scores + mask).softmax(-1))
        return self.out(weights @ self.v(x))


class Block(nn.Module):
    """Post-LN, with in-place operations right behind modules."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.activation, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.1)

    def forward(self, x, mask):
        x = self.norm1(x + self.attention(x, mask=mask))
        hidden = self.up(x)
        hidden.mul_(1.5)
        hidden = self.activation(hidden)
        return self.norm2(self.dropout(self.down(hidden)).add_(x))


class Network(nn.Module):
    """Tied embedding and head, BatchNorm buffers; `checkpointing` is none, reentrant or nonreentrant.

    `returns` is what the forward gives: `loss`, `logits`, or `both`.
    """

    def __init__(self, checkpointing="none", returns="loss"):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.batch_norm = nn.BatchNorm1d(LENGTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), float("-inf")).triu(1))
        self.checkpointing, self.returns = checkpointing, returns

    def forward(self, tokens, targets=None):
        x = self.embed(tokens)
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x, self.mask)
            else:
                x = checkpoint(block, x, self.mask, use_reentrant=self.checkpointing == "reentrant")
        logits = self.head(self.batch_norm(x))
        if self.returns == "logits":
            return logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return loss if self.returns == "loss" else {"loss": loss, "logits": logits}


@dataclasses.dataclass
class Run:
    """The bits of a training, and what the dumps of its last step say."""

    losses: list[float]
    weights: list[torch.Tensor]
    generator: torch.Tensor
    directory: Path | None
    gradients: list[dict[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    results: list = dataclasses.field(default_factory=list)


def identical(left: Run, right: Run) -> bool:
    """Whether losses, weights and buffers, and the generator's state agree bit for bit."""
    return (
        left.losses == right.losses
        and all(torch.equal(a, b) for a, b in zip(left.weights, right.weights, strict=True))
        and torch.equal(left.generator, right.generator)
    )


def train(watch="nothing", *, directory=None, dtype=torch.float32, steps=3, micro_steps=1, ddp=False, **model_options):
    """Train and return a `Run`. `watch`: nothing, statistics, tensor, replay, full_backward or alias."""
    torch.manual_seed(7)
    model = Network(**model_options).to(dtype)
    root = DistributedDataParallel(model) if ddp else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keeper = StepKeeper(root) if watch == "replay" else None
    _disturb(model, watch)
    run = Run([], [], torch.empty(0), directory)
    own = _own_gradients(model) if watch == "replay" else {}
    rank = dist.get_rank() if ddp else 0
    torch.manual_seed(100 + rank)
    for step in range(steps):
        capture = _watch(model, watch, directory, step)
        if keeper is not None:
            keeper.attach()
        for _ in range(micro_steps):
            loss = _loss(root, torch.randint(VOCABULARY, (BATCH, LENGTH + 1)), model.returns)
            (loss / micro_steps).backward()
            run.losses.append(loss.item())
        if capture is not None:
            capture.detach()
            assert capture.writer.close().errors == 0
        if keeper is not None:
            run.gradients.append(dict(own))
            run.results.append(keeper.replay(directory / f"step{step}", DumpInfo(step=step), task="tensor"))
            keeper.reset()
        optimizer.step()
        optimizer.zero_grad()
    run.weights = [value.clone() for value in model.state_dict().values()]
    run.generator = torch.get_rng_state()
    return run


def _own_gradients(model):
    """Return a dict that holds the rank's own gradients after each backward, before DDP reduces them."""
    own = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: own.update({name: p.grad.clone()}))
    return own


def _loss(root, text, returns):
    tokens, targets = text[:, :-1], text[:, 1:]
    if returns == "logits":
        return functional.cross_entropy(root(tokens).flatten(0, 1).float(), targets.flatten())
    output = root(tokens, targets=targets)
    return output if returns == "loss" else output["loss"] + 1e-3 * output["logits"].float().square().mean()


def _watch(model, watch, directory, step):
    if watch not in ("statistics", "tensor"):
        return None
    capture = ModuleCapture(model, DumpWriter(directory / f"step{step}", DumpInfo(step=step), task=watch))
    capture.attach()
    return capture


def _disturb(model, watch):
    """Watch in a way that must not be used: (residual + q) + k + v becomes residual + (q + k + v)."""
    for attention in (module for module in model.modules() if isinstance(module, Attention)):
        if watch == "full_backward":
            attention.register_full_backward_hook(lambda module, inputs, outputs: None)
        if watch == "alias":
            attention.register_forward_pre_hook(lambda module, args: tuple(arg.view_as(arg) for arg in args))


def replayed_gradients(directory: Path, name: str) -> list[torch.Tensor]:
    """Return the gradients of the parameter `name` that stand in a dump, one per micro step."""
    module, _, parameter = name.rpartition(".")
    return [
        torch.load(tensor.data_path, weights_only=True)
        for entry in read_dump(directory).entries
        if entry.direction == "parameters_grad" and entry.module == module
        for tensor in entry.outputs
        if tensor.slot == parameter
    ]


def wrong_gradients(run: Run) -> list[str]:
    """Return the parameters whose replayed gradient, of a single micro step, is not the rank's own bit for bit."""
    return [
        f"step {step} {name}"
        for step, gradients in enumerate(run.gradients)
        for name, own in gradients.items()
        if not _is_one(own, replayed_gradients(run.directory / f"step{step}", name))
    ]


def _is_one(own, replayed):
    return len(replayed) == 1 and torch.equal(own, replayed[0])


def _compare(case, folder):
    wrong = []
    plain = case()
    for watch in ("tensor", "replay"):
        run = case(watch, directory=folder / watch)
        if not identical(plain, run):
            wrong.append(f"{folder.name} {watch} is not identical")
        wrong += [f"{folder.name} {watch}: {r.status} {r.reason}" for r in run.results if r.status != "clean"]
        if watch == "replay":
            wrong += [f"{folder.name}: gradient of {place}" for place in wrong_gradients(run)]
    if identical(plain, case("full_backward")):
        wrong.append(f"{folder.name}: full backward hooks did not show")
    return wrong


class Talkative(nn.Module):
    """Talks to the other ranks in its forward, or only in its backward."""

    def __init__(self, where):
        super().__init__()
        self.inner, self.where = nn.Linear(2, 2), where

    def forward(self, x):
        output = self.inner(x)
        if self.where == "forward":
            dist.all_reduce(torch.ones(1))
        else:
            output.register_hook(lambda gradient: dist.all_reduce(torch.ones(1)) and None)
        return output


def _talkative(rank, folder):
    """Rank 0 alone replays a model that communicates: it must be refused, and nobody may wait for anybody."""
    wrong = []
    for where in ("forward", "backward"):
        model = Talkative(where)
        keeper = StepKeeper(model)
        keeper.attach()
        model(torch.ones(1, 2)).sum().backward()
        if rank == 0:
            result = keeper.replay(folder / where, DumpInfo())
            if result.status != "refused" or "all_reduce" not in result.reason.replace("allreduce", "all_reduce"):
                wrong.append(f"communication in the {where}: {result}")
    return wrong


def main() -> int:
    """Under two ranks: compare all cases of DistributedDataParallel and print what is wrong."""
    dist.init_process_group("gloo")
    rank, wrong = dist.get_rank(), []
    with tempfile.TemporaryDirectory() as folder:
        for dtype, checkpointing in (
            (torch.float32, "none"),
            (torch.float32, "reentrant"),
            (torch.bfloat16, "nonreentrant"),
        ):
            case = functools.partial(train, dtype=dtype, checkpointing=checkpointing, ddp=True, steps=2)
            wrong += [f"rank {rank}: {text}" for text in _compare(case, Path(folder) / f"{dtype}{checkpointing}")]
        wrong += _talkative(rank, Path(folder))
        dist.barrier()
    sys.stdout.write("\n".join([*wrong, f"rank {rank} done\n"]))
    sys.stdout.flush()
    dist.barrier()
    os._exit(bool(wrong))


if __name__ == "__main__":
    main()
