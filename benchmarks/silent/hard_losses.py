"""Healthy programs with several losses or optimizers, skipped steps, repeated batches, or branches not taken."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.silent import tasks
from benchmarks.silent.case import silent
from benchmarks.silent.ddp_wrapper import quiet_when
from benchmarks.silent.loop import Loop, rank_of_job
from benchmarks.silent.models import (
    CLASSES,
    NUMBERS,
    WIDTH,
    ConvNet,
    MixerNet,
    PreNormBlock,
    TinyLstm,
    TinyMlp,
    TinyTransformer,
)
from benchmarks.silent.plain_optimizer import adam, classifier, clips, language, sgd


class _Adversaries(nn.Module):
    """A generator of rows, and what tells them from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, NUMBERS))
        self.discriminator = nn.Sequential(nn.Linear(NUMBERS, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


class _Adversarial(Loop):
    """A step of the discriminator, and then one of the generator."""

    def _step(self, monitor: Any, step: int) -> float:
        generator, discriminator = self.model.generator, self.model.discriminator
        real, _ = self.batch(step, 0)
        made = generator(torch.randn(len(real), 8))
        self.second.zero_grad()
        lost = (functional.softplus(-discriminator(real)) + functional.softplus(discriminator(made.detach()))).mean()
        lost.backward()
        self.second.step()
        self.optimizer.zero_grad()
        loss = functional.softplus(-discriminator(made)).mean()
        loss.backward()
        self.optimizer.step()
        monitor.record(loss=loss, discriminator_loss=lost)
        return float(loss.item())

    second: Any = None


@silent(
    "hard",
    "pytorch/examples dcgan",
    "a generator and a discriminator train against each other; the generator's optimizer is the one that is watched",
    None,
)
def adversaries(**_broken: bool) -> Loop:
    model = _Adversaries()
    first, second = (torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.999)) for part in model.children())
    loop = _Adversarial(model=model, optimizer=first, batch=tasks.table, loss_of=tasks.classified, steps=60)
    loop.second = second
    return loop


class _Goodness(nn.Module):
    """Layers that are trained one by one, each to tell rows with their own label from rows with another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(NUMBERS + CLASSES, 32), nn.Linear(32, 32)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.relu(layer(functional.normalize(x)))
        return x


class _ForwardForward(Loop):
    """Each layer has an optimizer and a loss of its own; nothing is sent back to the layer before."""

    others: Any = ()

    def _step(self, monitor: Any, step: int) -> float:
        rows, labels = self.batch(step, 0)
        wrong = (labels + torch.randint(1, CLASSES, labels.shape)) % CLASSES
        good, bad = (torch.cat([rows, functional.one_hot(each, CLASSES).float()], 1) for each in (labels, wrong))
        total = 0.0
        for layer, optimizer in zip(self.model.layers, (*self.others, self.optimizer), strict=True):
            good, bad = (functional.relu(layer(functional.normalize(x.detach()))) for x in (good, bad))
            for_good, for_bad = (x.square().mean(1) for x in (good, bad))
            loss = functional.softplus(torch.cat([1 - for_good, for_bad - 1])).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        monitor.record(loss=total)
        return total


@silent(
    "hard",
    "Hinton's forward-forward, mnist_forward_forward of pytorch/examples",
    "each layer has a loss and an optimizer of its own; the monitor watches the last one's",
    None,
)
def forward_forward(**_broken: bool) -> Loop:
    model = _Goodness()
    first, last = (torch.optim.Adam(layer.parameters(), lr=0.02) for layer in model.layers)
    loop = _ForwardForward(model=model, optimizer=last, batch=tasks.table, loss_of=tasks.classified, steps=60)
    loop.others = (first,)
    return loop


@silent(
    "hard",
    "nanoGPT, accelerate's accumulation",
    "eight micro batches a step on two ranks with no_sync, clipped, with warm-up and decay of the learning rate",
    None,
    ranks=2,
)
def accumulation(**_broken: bool) -> Loop:
    model = DistributedDataParallel(TinyTransformer(dropout=0.1))
    loop = language(model, micro_steps=8, context=quiet_when(model, lambda _step, micro: micro < 7))
    warm = torch.optim.lr_scheduler.LinearLR(loop.optimizer, 0.1, 1.0, total_iters=10)
    down = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, T_max=30)
    schedule = torch.optim.lr_scheduler.SequentialLR(loop.optimizer, [warm, down], milestones=[10])
    loop.between = clips(model)
    loop.after = lambda _step: schedule.step()
    return loop


@silent(
    "hard",
    "pytorch AMP examples",
    "a loss scale that starts too high and grows every six steps, so that steps are skipped again and again",
    None,
)
def scaler_skips(**_broken: bool) -> Loop:
    loop = classifier(model := TinyMlp(), steps=60)
    loop.batch = tasks.table
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=6)

    def loss_of(trained: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            logits = trained(batch[0])
        return functional.cross_entropy(logits.float(), batch[1])

    def update(_step: int) -> None:
        scaler.unscale_(loop.optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(loop.optimizer)
        scaler.update()

    loop.backward = lambda loss: scaler.scale(loss).backward()
    loop.loss_of, loop.update = loss_of, update
    return loop


class _Deep(TinyTransformer):
    """Blocks are left out at random in training, of each rank others."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.blocks = nn.ModuleList(_Dropped() for _ in range(4))


class _Dropped(PreNormBlock):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and torch.rand(()) < 0.4 else super().forward(x)


@silent(
    "hard",
    "stochastic depth, LayerDrop",
    "each rank leaves out blocks at random, whose parameters have no gradient in that step",
    None,
    ranks=2,
)
def stochastic_depth(**_broken: bool) -> Loop:
    return language(DistributedDataParallel(_Deep(), find_unused_parameters=True))


@silent(
    "hard",
    "Karpathy's recipe: overfit a single batch",
    "every step has the same batch, on purpose",
    None,
)
def one_batch_overfitted(**_broken: bool) -> Loop:
    loop = language(model := TinyTransformer(), steps=60)
    loop.optimizer = adam(model, 1e-2)
    batch = tasks.words(0, 0)
    loop.batch = lambda _step, _micro: batch
    return loop


@silent(
    "hard",
    "fine-tuning on a small set",
    "ten epochs over six batches, shuffled anew in each, with augmentation",
    None,
)
def epochs_over_a_small_set(**_broken: bool) -> Loop:
    drawn = [tasks.images(i, 0) for i in range(6)]
    images, labels = (torch.cat([batch[side] for batch in drawn]) for side in range(2))

    def batch(step: int, _micro: int) -> tuple[Tensor, Tensor]:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(step // 6))
        chosen = order.view(6, -1)[step % 6]
        flips = torch.rand(len(chosen), 1, 1, 1) < 0.2
        return torch.where(flips, images[chosen].flip(3), images[chosen]), labels[chosen]

    loop = classifier(model := MixerNet(), steps=60)
    loop.optimizer = adam(model)
    loop.batch = batch
    return loop


class _TwoTasks(nn.Module):
    """A shared trunk with a head for each of two tasks that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(NUMBERS, 32), nn.ReLU(), nn.Linear(32, WIDTH), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        y: Tensor = self.heads[task](self.trunk(x))
        return y


@silent(
    "hard",
    "multi-task training in turns",
    "two heads take turns, so in each step one of them has no gradient",
    None,
)
def tasks_in_turns(**_broken: bool) -> Loop:
    model = _TwoTasks()

    def loss_of(trained: Any, batch: Any) -> Tensor:
        rows, labels, task = batch
        if task:
            return functional.mse_loss(trained(rows, 1)[:, 0], rows.mean(1))
        return functional.cross_entropy(trained(rows, 0), labels)

    def batch(step: int, micro: int) -> tuple[Any, ...]:
        return (*tasks.table(step, micro), step % 2)

    return Loop(model=model, optimizer=adam(model), batch=batch, loss_of=loss_of, steps=60)


@silent(
    "hard",
    "sparsely used rows: torch.nn.Embedding of rare words",
    "ranks speak different languages, so each uses rows of the embedding that the other never does",
    None,
    ranks=2,
)
def languages_of_ranks(**_broken: bool) -> Loop:
    def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
        inputs, targets = tasks.words(step, micro)
        return inputs // 2 + 16 * rank_of_job(), targets

    model = DistributedDataParallel(TinyLstm())
    loop = language(model, torch.optim.SGD(model.parameters(), lr=1.0))
    loop.batch = batch
    return loop


@silent(
    "hard",
    "sharpness-aware minimisation (davda54/sam)",
    "each step has two forwards and backwards, and the weights are moved up the slope and back between them",
    None,
)
def sharpness_aware(**_broken: bool) -> Loop:
    model = ConvNet()
    loop = classifier(model, sgd(model, 0.05))
    last: list[Any] = []

    def loss_of(trained: Any, batch: Any) -> Tensor:
        last[:] = [batch]
        return tasks.classified(trained, batch)

    def between(_step: int) -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = torch.stack([gradient.norm() for gradient in gradients if gradient is not None]).norm()
        moves = [0.05 * gradient / norm for gradient in gradients if gradient is not None]
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter += move
        loop.optimizer.zero_grad()
        tasks.classified(model, last[0]).backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter -= move

    loop.loss_of, loop.between = loss_of, between
    return loop


@silent(
    "hard",
    "PowerSGD, a communication hook of torch",
    "two ranks reduce gradients as products of thin matrices, and carry over to the next step what these leave out",
    None,
    ranks=2,
)
def compressed_reduction(**_broken: bool) -> Loop:
    model = DistributedDataParallel(TinyTransformer())
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=5, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook)
    return language(model)


@silent(
    "hard",
    "differentially private SGD (opacus)",
    "gradients are clipped, and two ranks then add the same noise to them, which is as long as they are",
    None,
    ranks=2,
)
def noise_on_gradients(**_broken: bool) -> Loop:
    model = DistributedDataParallel(TinyMlp())
    loop = classifier(model, sgd(model), steps=60)
    loop.batch = tasks.table
    clip, generator = clips(model), torch.Generator().manual_seed(0)

    def between(step: int) -> None:
        clip(step)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad += 0.02 * torch.randn(parameter.shape, generator=generator)

    loop.between = between
    return loop
