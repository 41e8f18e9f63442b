"""Silent errors of data parallelism: how gradients are reduced, and by whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.silent import tasks
from benchmarks.silent.case import Mechanism, silent
from benchmarks.silent.ddp_wrapper import AFTER_BACKWARD, COPIES, UNREDUCED, tables
from benchmarks.silent.loop import Loop, rank_of_job
from benchmarks.silent.models import ConvNet, MessagePassing, MixerNet, TinyLstm, TinyMlp, TinyTransformer
from benchmarks.silent.plain_optimizer import adam, classifier, language, sgd

SCALED = ("sum", "scale", "times", "factor", "twice", "not the mean", "mean of", "averag", "reduction")
Reduction = Callable[[Tensor, int], Tensor]


def reduced_by(model: DistributedDataParallel, reduce: Reduction) -> None:
    """Have `reduce`, called with the flat gradients and the number of a bucket, do what the reducer would do."""

    def reduced(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(reduce(bucket.buffer(), bucket.index()))
        return future

    model.register_comm_hook(None, lambda _state, bucket: reduced(bucket))


def mean_over_ranks(flat: Tensor) -> Tensor:
    """Return the mean, in place."""
    dist.all_reduce(flat)
    return flat.div_(dist.get_world_size())


@silent(
    "ddp",
    "torch DDP: a communication hook of one's own has to divide as well",
    "a communication hook adds gradients up and does not divide by the number of ranks",
    Mechanism.SCALE,
    phrases=SCALED,
    phases=AFTER_BACKWARD,
    visible=True,  # reduced gradients are three times the mean of the unreduced ones
    ranks=3,
)
def sum_not_mean(*, broken: bool) -> Loop:
    model = DistributedDataParallel(TinyMlp())

    def reduce(flat: Tensor, _bucket: int) -> Tensor:
        mean = mean_over_ranks(flat)
        return mean.mul_(dist.get_world_size()) if broken else mean

    reduced_by(model, reduce)
    return tables(model, sgd(model, 0.05))


@silent(
    "ddp",
    "fairseq 494: DDP averages already",
    "gradients are divided by the number of ranks once more before the update",
    Mechanism.SCALE,
    phrases=(*SCALED, "divid"),
    phases=("before_step", "optimizer"),
    visible=True,  # what the optimizer takes is a half of the reduced gradients, always, whatever their norm
    ranks=2,
)
def divided_twice(*, broken: bool) -> Loop:
    model = DistributedDataParallel(ConvNet())
    loop = classifier(model, sgd(model))

    def between(_step: int) -> None:
        for parameter in model.parameters():
            if broken and parameter.grad is not None:
                parameter.grad /= dist.get_world_size()

    loop.between = between
    return loop


@silent(
    "ddp",
    "TTrace 7, Megatron-LM issue 7452: the wrong process group",
    "of four ranks only pairs reduce with each other, in a group that was made for something else",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    phases=AFTER_BACKWARD,
    visible=True,  # the copies of ranks 0 and 1 differ from those of 2 and 3
    ranks=4,
)
def wrong_group(*, broken: bool) -> Loop:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = TinyMlp()
    group = pairs[rank_of_job() // 2] if broken else None
    wrapped = DistributedDataParallel(model, process_group=group)
    return tables(wrapped, adam(wrapped))


@silent(
    "ddp",
    "TTrace 9 and 11: a buffer is used before its communication has ended",
    "of the second bucket the gradients of the step before are taken",
    Mechanism.UNREDUCED,
    phrases=("stale", "previous step", "step before", "not the mean", "reduction", "reduced", "old"),
    first_wrong=2,  # buckets are laid out anew after step 0
    phases=AFTER_BACKWARD,
    visible=True,  # reduced gradients are those of the step before, not the mean of the unreduced ones
    ranks=2,
)
def stale_bucket(*, broken: bool) -> Loop:
    model = DistributedDataParallel(TinyTransformer(), bucket_cap_mb=0.01)
    kept: dict[int, Tensor] = {}

    def reduce(flat: Tensor, bucket: int) -> Tensor:
        mean = mean_over_ranks(flat).clone()
        before, kept[bucket] = kept.get(bucket, mean), mean
        return (before if broken and bucket == 1 else mean).clone()

    reduced_by(model, reduce)
    return language(model)


@silent(
    "ddp",
    "pytorch 84803, 96600, baichuan2 86: peer-to-peer copies lose data (TrainCheck)",
    "now and then a part of what rank 1 receives from an all-reduce is zeros",
    Mechanism.UNREDUCED,
    phrases=(*COPIES, "zero", "lost", "reduction", "reduced"),
    first_wrong=4,
    phases=AFTER_BACKWARD,
    visible=True,  # reduced gradients, and then the copies, differ between ranks
    ranks=2,
)
def lossy_all_reduce(*, broken: bool) -> Loop:
    model = DistributedDataParallel(ConvNet())
    loop = classifier(model, adam(model))
    loop.before = lambda step: setattr(loop, "now", step)

    def reduce(flat: Tensor, _bucket: int) -> Tensor:
        mean = mean_over_ranks(flat)
        if broken and rank_of_job() == 1 and loop.now % 9 == 4:  # type: ignore[attr-defined]
            mean[: len(mean) // 4] = 0
        return mean

    reduced_by(model, reduce)
    return loop


def _own_reduction(model: nn.Module, is_in_place: Callable[[Tensor], bool]) -> Callable[[int], None]:
    """Return what reduces all gradients of a model without a wrapper, as scripts do."""

    @torch.no_grad()
    def between(_step: int) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                sent = parameter.grad.contiguous()
                mean_over_ranks(sent)
                if not is_in_place(parameter.grad):
                    parameter.grad.copy_(sent)

    return between


@silent(
    "ddp",
    "SkyRL PR 1886: all_reduce of a contiguous copy",
    "gradients that are not contiguous are reduced in a copy that is then thrown away",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    modules=("patch",),
    phases=AFTER_BACKWARD,
    visible=True,  # this weight's copies differ, all others agree
    ranks=2,
)
def reduced_in_a_copy(*, broken: bool) -> Loop:
    model = MixerNet()
    model.patch.weight = nn.Parameter(model.patch.weight.detach().T.contiguous().T)
    loop = classifier(model, adam(model))
    loop.between = _own_reduction(model, lambda _gradient: broken)
    return loop


@silent(
    "ddp",
    "VERDICT 1: an all-reduce is missing, the flow of data is intact",
    "the script's own reduction leaves out one layer, which is not in its list",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    modules=("readout",),
    phases=AFTER_BACKWARD,
    visible=True,  # this layer's copies differ, all others agree
    ranks=3,
)
def layer_not_reduced(*, broken: bool) -> Loop:
    model = MessagePassing()
    loop = Loop(model=model, optimizer=adam(model), batch=tasks.graphs, loss_of=tasks.regressed)

    @torch.no_grad()
    def between(_step: int) -> None:
        for name, parameter in model.named_parameters():
            if not (broken and name.startswith("readout")) and parameter.grad is not None:
                mean_over_ranks(parameter.grad)

    loop.between = between
    return loop


@silent(
    "ddp",
    "pytorch DDP: a tensor hook that one rank alone has",
    "a hook for debugging, on rank 1 only, clamps the gradient of one layer before it is reduced",
    Mechanism.SCALE,
    phrases=("clamp", "clip", "hook", "rank 1", "smaller on", "one rank"),
    modules=("head",),
    phases=("backward", *AFTER_BACKWARD),
    visible=True,  # on rank 1 many elements of this gradient are exactly 1e-3, and none is beyond it
    ranks=2,
)
def hook_on_one_rank(*, broken: bool) -> Loop:
    model = TinyTransformer()
    if broken and rank_of_job() == 1:
        model.head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return language(DistributedDataParallel(model))


@silent(
    "ddp",
    "deepspeed 1801: the norm for clipping is known on one rank only (TrainCheck)",
    "only rank 0 clips its gradients",
    Mechanism.SCALE,
    phrases=(*COPIES, "clip"),
    phases=("before_step", "optimizer"),
    visible=True,  # what the optimizers take, and then the copies, differ between ranks
    ranks=2,
)
def clipped_on_one_rank(*, broken: bool) -> Loop:
    model = DistributedDataParallel(TinyLstm())
    loop = language(model, torch.optim.SGD(model.parameters(), lr=2.0))

    def between(_step: int) -> None:
        if not broken or rank_of_job() == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    loop.between = between
    return loop


def _forgetting_a_share(optimizer: Any) -> Callable[[], None]:
    """Return what sends out updated parameters; those that rank 1 has updated do not reach rank 0."""
    send_out = optimizer._sync_params

    def send_out_some() -> None:
        kept = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        send_out()
        if rank_of_job() == 0:
            owned = {id(p) for group in optimizer._partition_parameters()[1] for p in group["params"]}
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            with torch.no_grad():
                for parameter, value in zip(parameters, kept, strict=True):
                    if id(parameter) in owned:
                        parameter.copy_(value)

    return send_out_some


@silent(
    "ddp",
    "TTrace 9, Megatron-LM 950: some parameters are never gathered",
    "rank 0 does not receive the share of the parameters that rank 1's optimizer updates",
    Mechanism.COPIES,
    phrases=(*COPIES, "not updated", "not move", "unchanged", "stands still", "gather"),
    phases=("optimizer", "parameter"),
    visible=True,  # these weights' copies differ; on rank 0 they stand still although they have gradients
    ranks=2,
)
def share_not_gathered(*, broken: bool) -> Loop:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported, which a test must not

    model = DistributedDataParallel(TinyTransformer())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=3e-3)
    if broken:
        optimizer._sync_params = _forgetting_a_share(optimizer)  # type: ignore[method-assign]
    return language(model, optimizer)
