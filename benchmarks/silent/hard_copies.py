"""Healthy programs whose weights move, or stand still, in other ways than by one optimizer's step."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.silent import tasks
from benchmarks.silent.case import silent
from benchmarks.silent.ddp_reduction import mean_over_ranks
from benchmarks.silent.loop import Loop
from benchmarks.silent.models import VOCABULARY, WIDTH, ConvNet, TinyLstm, TinyMlp, TinyTransformer
from benchmarks.silent.plain_optimizer import adam, classifier, clips, language, sgd


@silent(
    "hard",
    "mean teacher, timm's ModelEma",
    "an average of the weights is kept in a copy, and put in and taken out again for an evaluation every ten steps",
    None,
)
def averaged_copy(**_broken: bool) -> Loop:
    loop = classifier(model := ConvNet())
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)

    @torch.no_grad()
    def after(step: int) -> None:
        for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            mean.copy_(0.9 * mean + 0.1 * value if mean.is_floating_point() else value)
        if step % 10 == 9:
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(average.state_dict())
            model.eval()
            model(loop.batch(1000, 0)[0])
            model.train()
            model.load_state_dict(own)

    loop.after = after
    return loop


def train_shared(model: nn.Module, number: int, begin: Any, end: Any) -> None:
    """Train a model that other processes train at the same time, until they have ended."""
    torch.set_num_threads(1)
    optimizer, step = sgd(model, 0.02), 0
    begin.wait()
    while not end.is_set():
        optimizer.zero_grad()
        tasks.classified(model, tasks.table(step, 0, number)).backward()
        optimizer.step()
        step += 1


@silent(
    "hard",
    "pytorch/examples mnist_hogwild",
    "three more processes train the same shared weights at the same time, without locks",
    None,
)
def hogwild(**_broken: bool) -> Loop:
    model = TinyMlp().share_memory()
    spawn = torch.multiprocessing.get_context("spawn")
    begin, end = spawn.Barrier(4), spawn.Event()
    others = [spawn.Process(target=train_shared, args=(model, n, begin, end), daemon=True) for n in (1, 2, 3)]
    loop = classifier(model, sgd(model, 0.02), steps=60)

    def before(step: int) -> None:
        if step == 0:
            for process in others:
                process.start()
            begin.wait()

    def after(step: int) -> None:
        if step == loop.steps - 1:
            end.set()
            for process in others:
                process.join()

    loop.before, loop.after = before, after
    return loop


@silent(
    "hard",
    "post-local SGD, DiLoCo",
    "two ranks train on their own and take the mean of their weights every eight steps",
    None,
    ranks=2,
)
def local_sgd(**_broken: bool) -> Loop:
    loop = classifier(model := TinyMlp())

    @torch.no_grad()
    def after(step: int) -> None:
        for parameter in model.parameters() if step % 8 == 7 else ():
            mean_over_ranks(parameter)

    loop.after = after
    return loop


@silent(
    "hard",
    "pytorch forum: fine-tuning of a head",
    "the backbone is frozen and its batch norm in evaluation mode; the optimizer is given the head alone",
    None,
)
def frozen_backbone(**_broken: bool) -> Loop:
    model = ConvNet()
    model.requires_grad_(requires_grad=False)
    model.fc.requires_grad_()
    model.train()
    for module in (model.bn1, model.bn2):
        module.eval()
    return classifier(model, torch.optim.SGD(model.fc.parameters(), lr=0.3, momentum=0.9))


class _LowRank(nn.Module):
    """A frozen linear layer, and beside it the trained product of two thin matrices. The second one starts as zeros."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + 2 * functional.linear(functional.linear(x, self.down), self.up)


@silent(
    "hard",
    "LoRA (peft)",
    "adapters alone are trained, and half of their weights start as zeros; the optimizer is given all weights",
    None,
)
def low_rank_adapters(**_broken: bool) -> Loop:
    model = TinyTransformer()
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        block.attn.qkv, block.attn.proj = _LowRank(block.attn.qkv), _LowRank(block.attn.proj)  # type: ignore
        block.mlp.fc, block.mlp.out = _LowRank(block.mlp.fc), _LowRank(block.mlp.out)  # type: ignore
    return language(model, adam(model, 1e-2))


@silent(
    "hard",
    "ULMFiT, Lightning's BackboneFinetuning",
    "layers are unfrozen one after the other, and added to the optimizer as groups with lower learning rates",
    None,
)
def gradual_unfreezing(**_broken: bool) -> Loop:
    model = TinyTransformer(layers=3)
    model.requires_grad_(requires_grad=False)
    for module in (model.ln_f, model.head):
        module.requires_grad_()
    loop = language(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))

    def before(step: int) -> None:
        if step in {10, 20, 30}:
            block = model.blocks[3 - step // 10].requires_grad_()
            loop.optimizer.add_param_group({"params": list(block.parameters()), "lr": 1e-2 / step})

    loop.before = before
    return loop


@silent(
    "hard",
    "GPT-2: the head is the embedding",
    "embedding and head are one tensor; two ranks, accumulation, clipping, and a dropout of each rank",
    None,
    ranks=2,
)
def tied_embedding(**_broken: bool) -> Loop:
    model = DistributedDataParallel(TinyTransformer(dropout=0.2, tied=True))
    loop = language(model, micro_steps=2)
    loop.between = clips(model)
    return loop


class _Watcher(nn.Module):
    """A network with a copy of itself that follows slowly: BYOL's target, DQN's target network."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.predict = nn.Linear(WIDTH, WIDTH)
        self.target = copy.deepcopy(self.online).requires_grad_(requires_grad=False)

    def forward(self, ids: Tensor, following: Tensor) -> Tensor:
        with torch.no_grad():
            aim = self.target(following)
        return functional.mse_loss(self.predict(self.online(ids)), aim) + 0.1 * self._spread(ids)

    def _spread(self, ids: Tensor) -> Tensor:
        return (1 - self.online(ids).flatten(0, 1).std(0)).clamp(min=0).mean()


@silent(
    "hard",
    "BYOL, DQN",
    "a target network has no optimizer and takes over the weights every ten steps",
    None,
)
def target_network(**_broken: bool) -> Loop:
    model = _Watcher()
    trained = [*model.online.parameters(), *model.predict.parameters()]
    loop = Loop(
        model=model,
        optimizer=torch.optim.Adam(trained, lr=3e-3),
        batch=tasks.words,
        loss_of=lambda watched, batch: watched(*batch),
        steps=60,
    )

    def after(step: int) -> None:
        if step % 10 == 9:
            model.target.load_state_dict(model.online.state_dict())

    loop.after = after
    return loop


@silent(
    "hard",
    "federated averaging with a server's optimizer",
    "two ranks take five steps each from common weights; then rank 0 sends out what it makes of the mean",
    None,
    ranks=2,
)
def sent_out_by_a_server(**_broken: bool) -> Loop:
    loop = language(model := TinyLstm(), sgd(model, 1.0))
    common = [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def after(step: int) -> None:
        for held, parameter in zip(common, model.parameters(), strict=True) if step % 5 == 4 else ():
            mean: Any = mean_over_ranks(parameter.detach().clone())
            held += 1.2 * (mean - held)
            dist.broadcast(held, 0)
            parameter.copy_(held)

    loop.after = after
    return loop


@silent(
    "hard",
    "weight clipping of the first WGAN, max-norm constraints",
    "after each update all weights are cut to within bounds, outside of the optimizer",
    None,
)
def weights_within_bounds(**_broken: bool) -> Loop:
    loop = classifier(model := TinyMlp(), sgd(model))

    @torch.no_grad()
    def after(_step: int) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.3, 0.3)

    loop.after = after
    return loop
