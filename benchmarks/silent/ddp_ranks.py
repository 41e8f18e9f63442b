"""Silent errors of data parallelism: what one rank has, and another has otherwise."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.silent import tasks
from benchmarks.silent.case import Mechanism, silent
from benchmarks.silent.ddp_reduction import mean_over_ranks
from benchmarks.silent.ddp_wrapper import AFTER_BACKWARD, COPIES, tables
from benchmarks.silent.loop import Loop, rank_of_job
from benchmarks.silent.models import CLASSES, NUMBERS, ConvNet, MixerNet, TinyLstm, TinyMlp, TinyTransformer
from benchmarks.silent.plain_optimizer import adam, classifier, language, sgd

INPUT = ("(input)",)
SAME_DATA = ("same batch", "same data", "same input", "same samples", "batches are equal", "identical", "repeat")


@silent(
    "ddp",
    "VERDICT 7: one rank adds another constant",
    "the layer norms of rank 1 have an epsilon of 0.1 instead of 1e-5",
    Mechanism.SETTINGS,
    phrases=("norm", "epsilon", "another function", "settings", "configured", "ranks compute"),
    modules=("ln_1", "ln_2", "ln_f"),
    phases=("forward", "backward"),
    visible=True,  # what the layer norms of rank 1 return has not the mean square of their weights, on rank 0 it has
    ranks=2,
)
def another_epsilon(*, broken: bool) -> Loop:
    model = TinyTransformer()
    if broken and rank_of_job() == 1:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 0.1
    return language(DistributedDataParallel(model))


@silent(
    "ddp",
    "transformers 34242, Megatron-LM 4590: mean of the ranks' means",
    "ranks have 2 and 11 tokens of each text, and their means count alike",
    Mechanism.LOSS,
    phrases=("token", "weight of", "mean of means"),
    phases=("forward", "backward", "reduction"),
    ranks=2,  # not visible: that shorter batches count alike may be meant
)
def uneven_tokens(*, broken: bool) -> Loop:
    lengths = (2, 11)

    def batch(step: int, micro: int) -> tuple[Tensor, ...]:
        return tuple(side[:, : lengths[rank_of_job()]] for side in tasks.words(step, micro))

    def loss_of(model: Any, given: tuple[Tensor, ...]) -> Tensor:
        loss = tasks.continued(model, given)  # type: ignore[arg-type]
        mine = torch.tensor(float(given[1].numel()))
        return loss if broken else loss * mine / mean_over_ranks(mine.clone())

    loop = language(DistributedDataParallel(TinyTransformer()))
    loop.batch, loop.loss_of = batch, loss_of
    return loop


@silent(
    "ddp",
    "DALLE-pytorch 268: the plateau is that of each rank's own loss",
    "each rank lowers the learning rate by its own loss, so ranks have different ones",
    Mechanism.SETTINGS,
    phrases=("learning rate", *COPIES),
    first_wrong=4,
    phases=("optimizer",),
    visible=True,  # learning rates, and then the copies, differ between ranks
    ranks=2,
)
def plateau_of_each_rank(*, broken: bool) -> Loop:
    model = DistributedDataParallel(TinyMlp())
    loop = tables(model, sgd(model))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizer, factor=0.3, patience=1, cooldown=4)
    losses: list[Tensor] = []

    def loss_of(wrapped: Any, given: Any) -> Tensor:
        loss = tasks.classified(wrapped, given)
        losses.append(loss.detach().clone())
        return loss

    def after(_step: int) -> None:
        schedule.step(losses[-1] if broken else mean_over_ranks(losses[-1]))

    loop.loss_of, loop.after = loss_of, after
    return loop


@silent(
    "ddp",
    "pytorch forum and Lightning: rank-zero-only code that should run everywhere",
    "the schedule advances on rank 0 only",
    Mechanism.SETTINGS,
    phrases=("learning rate", *COPIES),
    first_wrong=1,
    phases=("optimizer",),
    visible=True,  # learning rates, and then the copies, differ between ranks
    ranks=3,
)
def schedule_on_one_rank(*, broken: bool) -> Loop:
    model = DistributedDataParallel(TinyLstm())
    loop = language(model, adam(model, 1e-2))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, T_max=2 * loop.steps)

    def after(_step: int) -> None:
        if not broken or rank_of_job() == 0:
            schedule.step()

    loop.after = after
    return loop


def _pool(batches: int) -> tuple[Tensor, Tensor]:
    drawn = [tasks.table(i, 0, rank=7) for i in range(batches)]
    return torch.cat([rows for rows, _ in drawn]), torch.cat([labels for _, labels in drawn])


@silent(
    "ddp",
    "torch.utils.data.distributed.DistributedSampler, transformers 4398: set_epoch is not called",
    "every epoch gives each rank the same samples in the same order",
    Mechanism.DATA,
    phrases=("same order", "epoch", "shuffl", *SAME_DATA),
    first_wrong=5,
    modules=INPUT,
    phases=("forward",),
    visible=True,  # from the second epoch on each batch of a rank is one that it had five steps before
    ranks=2,
)
def sampler_without_epoch(*, broken: bool) -> Loop:
    rows, labels = _pool(10)

    def batch(step: int, _micro: int) -> tuple[Tensor, Tensor]:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0 if broken else step // 5))
        mine = order[rank_of_job() :: dist.get_world_size()].view(5, -1)[step % 5]
        return rows[mine], labels[mine]

    model = DistributedDataParallel(TinyMlp())
    loop = tables(model, adam(model))
    loop.batch = batch
    return loop


@silent(
    "ddp",
    "pytorch DDP tutorials: no DistributedSampler",
    "all ranks read the same batches",
    Mechanism.DATA,
    phrases=("each rank", "all ranks", "shard", "sampler", *SAME_DATA),
    modules=INPUT,
    phases=("forward",),
    visible=True,  # losses, inputs and unreduced gradients of the ranks are equal
    ranks=2,
)
def same_shard(*, broken: bool) -> Loop:
    model = DistributedDataParallel(ConvNet())
    loop = classifier(model, sgd(model))
    loop.batch = lambda step, micro: tasks.images(step, micro, 0 if broken else None)
    return loop


@silent(
    "ddp",
    "IterableDataset: split between a rank's workers, not between ranks",
    "ranks 1 and 2 of three read the same stream",
    Mechanism.DATA,
    phrases=("shard", "sampler", "ranks 1 and 2", *SAME_DATA),
    modules=INPUT,
    phases=("forward",),
    visible=True,  # losses, inputs and unreduced gradients of two ranks are equal
    ranks=3,
)
def two_ranks_share_a_stream(*, broken: bool) -> Loop:
    model = DistributedDataParallel(TinyTransformer())
    loop = language(model)
    loop.batch = lambda step, micro: tasks.words(step, micro, min(rank_of_job(), 1) if broken else None)
    return loop


@silent(
    "ddp",
    "pytorch: numpy's seed is the same in the workers of all ranks (stackoverflow 67180955 over ranks)",
    "all ranks add the same noise to their different samples",
    Mechanism.DATA,
    phrases=("seed", "augment", "noise", "random"),
    modules=INPUT,
    phases=("forward",),
    ranks=2,  # not visible: nobody can tell the noise from the samples
)
def same_noise(*, broken: bool) -> Loop:
    def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
        images, labels = tasks.images(step, micro)
        noise = torch.randn(images.shape, generator=tasks.drawn(step, 50, 0 if broken else None))
        return images + noise, labels

    model = DistributedDataParallel(MixerNet())
    loop = classifier(model, adam(model))
    loop.batch = batch
    return loop


class Quantised(nn.Module):
    """A perceptron whose hidden row is drawn to the nearest of 8 codes, means of what was near them."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.head = nn.Linear(NUMBERS, 16), nn.Linear(16, CLASSES)
        self.register_buffer("codes", torch.randn(8, 16))
        self.is_shared = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encode(x)
        nearest = torch.cdist(hidden, self.codes).argmin(1)
        if self.training:
            self._follow(hidden.detach(), nearest)
        straight = hidden + (self.codes[nearest] - hidden).detach()
        logits: Tensor = self.head(hidden + 0.5 * straight)
        return logits

    def _follow(self, hidden: Tensor, nearest: Tensor) -> None:
        chosen = functional.one_hot(nearest, len(self.codes)).float()
        sums, counts = chosen.T @ hidden, chosen.sum(0)
        if self.is_shared:
            dist.all_reduce(sums)
            dist.all_reduce(counts)
        mean = sums / counts.clamp(min=1)[:, None]
        self.codes = torch.where(counts[:, None] > 0, 0.8 * self.codes + 0.2 * mean, self.codes)


@silent(
    "ddp",
    "lucidrains vector-quantize-pytorch 10, espnet PR 6284: codes follow each rank's own batch",
    "the codebook, a buffer, is updated without an all-reduce, so every rank has one of its own",
    Mechanism.COPIES,
    phrases=(*COPIES, "buffer", "codes"),
    modules=("head",),
    phases=("forward", "parameter"),
    visible=True,  # what the same weights return of the codes differs, and so do the copies of the buffer
    ranks=2,
)
def codebook_of_each_rank(*, broken: bool) -> Loop:
    model = Quantised()
    model.is_shared = not broken
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    return tables(wrapped, sgd(wrapped, 0.05))


@silent(
    "ddp",
    "pytorch: a script's own data parallelism, without a broadcast of the first weights",
    "each rank starts from weights of its own; gradients are reduced properly",
    Mechanism.START,
    phrases=(*COPIES, "initial", "start"),
    phases=("parameter", "forward"),
    visible=True,  # the copies differ from the first step on, always by the same
    ranks=2,
)
def starts_differ(*, broken: bool) -> Loop:
    if broken:
        torch.manual_seed(rank_of_job())
    model = TinyMlp()
    loop = tables(model, sgd(model))

    def between(_step: int) -> None:
        for parameter in model.parameters():
            mean_over_ranks(parameter.grad)  # type: ignore[arg-type]

    loop.between = between
    return loop


@silent(
    "ddp",
    "mlcommons algorithmic-efficiency 412: the other ranks have no folder to load from",
    "after a restart rank 0 alone loads the checkpoint, after the model was wrapped",
    Mechanism.RESTART,
    phrases=(*COPIES, "restart", "resume", "checkpoint"),
    first_wrong=20,
    phases=("parameter", "forward", "optimizer"),
    visible=True,  # the copies differ from the restart on; those of rank 1 are the very first ones
    ranks=2,
    restart=20,
)
def loaded_on_one_rank(*, broken: bool) -> Loop:
    model = DistributedDataParallel(TinyTransformer())
    loop = language(model)

    def restore(saved: dict[str, Any]) -> None:
        if not broken or rank_of_job() == 0:
            model.load_state_dict(saved["model"])
            loop.optimizer.load_state_dict(saved["optimizer"])

    loop.restore = restore
    return loop


@silent(
    "ddp",
    "deepspeed 5489, 6771 over ranks: the optimizer's state is saved by rank 0 only",
    "after a restart all ranks have the weights, and rank 0 alone has moments",
    Mechanism.RESTART,
    phrases=(*COPIES, "moment", "restart", "resume", "state"),
    first_wrong=20,
    phases=AFTER_BACKWARD,
    visible=True,  # moments, and then the copies, differ between ranks from the restart on
    ranks=2,
    restart=20,
)
def moments_on_one_rank(*, broken: bool) -> Loop:
    model = DistributedDataParallel(ConvNet())
    loop = classifier(model, adam(model))

    def restore(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        if not broken or rank_of_job() == 0:
            loop.optimizer.load_state_dict(saved["optimizer"])

    loop.restore = restore
    return loop
