"""Silent errors of DeepSpeed: what is scaled, clipped, reduced, accumulated, updated and gathered, at stages 1 to 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.silent import tasks
from benchmarks.silent.case import Mechanism, silent
from benchmarks.silent.deepspeed_zero.layout import Settings, runtime, training
from benchmarks.silent.loop import Loop, rank_of_job
from benchmarks.silent.megatron_core.layout import replace

COPIES = ("copies", "replica", "differ between ranks", "differ across ranks", "differ on ranks", "out of sync")
MOVES = ("does not move", "do not move", "not change", "unchanged", "not updated", "stands still")
UPDATED = ("optimizer", "parameter", "forward")
REDUCED = ("backward", "before_step", "optimizer")


@silent(
    "deepspeed",
    "accelerate 3533; Megatron-DeepSpeed PR 42",
    "the script divides the loss by the number of accumulated batches, and the engine does so again",
    Mechanism.SCALE,
    phrases=("accumulat", "scaled", "half of", "halved", "twice", "divided"),
    modules=("head", "(loss)"),
    phases=("backward", "before_step", "optimizer"),  # not visible: a weight of the loss may be meant
    ranks=2,
)
def loss_divided_twice(*, broken: bool) -> Loop:
    loop: Any = training(Settings(stage=1, clip=0.5))
    loop.share = 0.5 if broken else 1.0
    return loop


@silent(
    "deepspeed",
    "transformers and accelerate: gradient_accumulation_steps of script and configuration differ",
    "the engine is told to accumulate one batch, the script gives it two in each step, and both are steps",
    Mechanism.SETTINGS,
    phrases=("accumulat", "each micro", "grad_acc_steps", "steps of the optimizer"),
    modules=("head", "embed", "blocks"),
    phases=(*REDUCED, "forward"),
    visible=True,  # what the script says and what the engine does differ
    ranks=2,
)
def steps_of_accumulation(*, broken: bool) -> Loop:
    return training(Settings(stage=2, accumulated=1 if broken else 2))


@silent(
    "deepspeed",
    "deepspeed 1801, 8475, with the norm of each rank",
    "each rank clips its part by the norm of that part alone",
    Mechanism.SCALE,
    phrases=("clip", "gradient norm", "norm of all gradients", "norm of the gradients"),
    modules=("head", "embed", "blocks"),
    phases=("optimizer", "before_step"),
    visible=True,  # the norm is not that of the gradients, and another one on each rank
    ranks=2,
)
def clip_of_each_rank(*, broken: bool) -> Loop:
    loop = training(Settings(stage=2, clip=0.3))
    comm = runtime("zero.stage_1_and_2").dist

    def made(norm: Callable[..., Any]) -> Callable[..., Any]:
        def own(*arguments: Any, **options: Any) -> Any:
            kept, comm.all_reduce = comm.all_reduce, lambda *_, **__: None
            try:
                return norm(*arguments, **options)
            finally:
                comm.all_reduce = kept

        return own

    if broken:
        replace(loop.model.optimizer, "get_grad_norm_direct", made)
    return loop


@silent(
    "deepspeed",
    "transformers 24860; deepspeed 1483: parameters that are not updated",
    "one rank never updates its part",
    Mechanism.STILL,
    phrases=(*MOVES, "no update", "one rank"),
    modules=("head", "embed", "blocks"),
    phases=UPDATED,
    visible=True,  # weights with gradients do not move
    ranks=2,
)
def part_of_one_rank_frozen(*, broken: bool) -> Loop:
    loop = training(Settings(stage=1))
    if broken and rank_of_job() == 1:
        loop.model.optimizer._optimizer_step = lambda _group: None
    return loop


@silent(
    "deepspeed",
    "deepspeed 5545, 5523: race of `overlap_comm`",
    "where reduction and backward pass overlap, half of a bucket is reduced as the bucket before left it",
    Mechanism.DATA,
    phrases=("stale", "overlap", "bucket", "buffer", "not the mean", "not the average", "wrongly reduced"),
    phases=REDUCED,
    modules=("head", "embed", "blocks"),
    visible=True,  # what is reduced is not what was computed
    ranks=2,
)
def bucket_of_before(*, broken: bool) -> Loop:
    loop = training(Settings(stage=2, overlap=True, bucket=1500))
    before: list[Tensor] = []

    def made(average: Callable[..., Any]) -> Callable[..., Any]:
        def late(tensor: Tensor, *arguments: Any) -> Any:
            own = tensor.clone()
            if before:
                size = min(len(before[0]), len(tensor)) // 2
                tensor[:size] = before[0][:size]
            before[:] = [own]
            return average(tensor, *arguments)

        return late

    if broken:
        replace(loop.model.optimizer, "average_tensor", made)
    return loop


@silent(
    "deepspeed",
    "TTrace 9, at stage 2",
    "after updates no rank gathers what the others have updated",
    Mechanism.STILL,
    phrases=(*COPIES, *MOVES, "not gathered"),
    phases=UPDATED,
    visible=True,  # weights that should be copies differ
    ranks=2,
)
def parts_never_gathered(*, broken: bool) -> Loop:
    if broken:
        replace(runtime("zero.stage_1_and_2"), "all_gather_dp_groups", lambda _: lambda **_options: None)
    return training(Settings(stage=2))


@silent(
    "deepspeed",
    "deepspeed PR 2059: main copies go to the wrong place",
    "main copies in float32 are updated, but the first parameter's never reaches the model",
    Mechanism.STILL,
    phrases=(*MOVES, "main copy", "main copies", "master", "stale"),
    modules=("embed", "position", "blocks"),
    phases=UPDATED,
    visible=True,  # a weight with gradients does not move
    ranks=2,
)
def main_copy_never_written(*, broken: bool) -> Loop:
    loop = training(Settings(stage=1, dtype="bf16"))
    stale = next(iter(loop.model.module.parameters()))

    def made(update: Callable[..., None]) -> Callable[..., None]:
        def but_one(*arguments: Any, **options: Any) -> None:
            kept = stale.detach().clone()
            update(*arguments, **options)
            stale.data.copy_(kept)

        return but_one

    if broken:
        replace(loop.model.optimizer, "step", made)
    return loop


@silent(
    "deepspeed",
    "deepspeed PR 1219: copies of ZeRO-Offload race",
    "the forward pass runs before the offloaded weights have come back, with those of the step before",
    Mechanism.STILL,
    phrases=("stale", "previous step", "step before", "main copy", "main copies", "master", "too late", "offload"),
    modules=("embed", "blocks", "head"),
    phases=UPDATED,
    visible=True,  # the weights are not those that the optimizer holds
    ranks=2,
)
def offloaded_weights_late(*, broken: bool) -> Loop:
    loop = training(Settings(stage=2, dtype="bf16", offload=True))
    optimizer = loop.model.optimizer

    def made(update: Callable[..., None]) -> Callable[..., None]:
        kept: list[Tensor] = [flat.detach().clone() for flat in optimizer.bit16_groups_flat]

        def late(*arguments: Any, **options: Any) -> None:
            update(*arguments, **options)
            for flat, old in zip(optimizer.bit16_groups_flat, kept, strict=True):
                new = flat.detach().clone()
                flat.data.copy_(old)
                old.copy_(new)

        return late

    if broken:
        replace(optimizer, "step", made)
    return loop


@silent(
    "deepspeed",
    "deepspeed PR 7981: all backward passes but the last one are lost",
    "the last of a step's batches overwrites the gradients of those before it",
    Mechanism.DATA,
    phrases=("accumulat", "overwrit", "lost", "only the last"),
    modules=("head", "embed", "blocks"),
    phases=REDUCED,
    visible=True,  # what the optimizer is given is not the sum of what was computed
    ranks=2,
)
def last_batch_overwrites(*, broken: bool) -> Loop:
    loop = training(Settings(stage=3))
    optimizer = loop.model.optimizer

    def made(partition: Callable[..., Any]) -> Callable[..., Any]:
        def first(*arguments: Any) -> Any:
            optimizer.micro_step_id = 0
            return partition(*arguments)

        return first

    if broken:
        replace(optimizer, "partition_grads", made)
    return loop


@silent(
    "deepspeed",
    "TTrace 9, at stage 3",
    "small parameters, which stay whole on each rank, are not gathered again after updates",
    Mechanism.STILL,
    phrases=(*COPIES, *MOVES, "not gathered", "stale", "persistent"),
    modules=("ln", "bias", "blocks"),
    phases=UPDATED,
    visible=True,  # weights with gradients do not move
    ranks=2,
)
def small_parameters_stale(*, broken: bool) -> Loop:
    loop = training(Settings(stage=3))
    small = loop.model.optimizer.persistent_parameters
    first: list[Tensor] = []

    def between(_step: int) -> None:
        first[:] = first or [parameter.detach().clone() for parameter in small]

    def after(_step: int) -> None:
        for parameter, value in zip(small, first, strict=True):
            parameter.data.copy_(value)

    if broken:
        loop.between, loop.after = between, after
    return loop


@silent(
    "deepspeed",
    "VERDICT 3 and 4, at stage 3",
    "gradients are scattered without being reduced: each rank's part is its own",
    Mechanism.UNREDUCED,
    phrases=(
        "not reduced",
        "never reduced",
        "unreduced",
        "reduce_scatter",
        "reduce-scatter",
        "own gradient",
        "not the mean",
    ),
    phases=REDUCED,
    modules=("head", "embed", "blocks"),
    visible=True,  # what the optimizer is given is not the mean over ranks
    ranks=2,
)
def scattered_without_reduction(*, broken: bool) -> Loop:
    def own(tensors: list[Tensor], group: Any = None) -> list[Tensor]:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        parts = []
        for tensor in tensors:
            length = -(-tensor.numel() // size)
            padded = torch.zeros(length * size, dtype=tensor.dtype)
            padded[: tensor.numel()] = tensor.reshape(-1)
            parts.append(padded.chunk(size)[rank].clone())
        return parts

    if broken:
        replace(runtime("zero.stage3"), "reduce_scatter_coalesced", lambda _: own)
    return training(Settings(stage=3))


@silent(
    "deepspeed",
    "deepspeed PR 1823",
    "the step that Adam corrects its means by is counted once for each sub-group of parameters",
    Mechanism.SETTINGS,
    phrases=("bias correction", "count of steps", "step count", "number of steps", "steps of adam"),
    first_wrong=1,
    phases=("optimizer",),
    modules=("head", "embed", "blocks"),
    visible=True,  # the optimizer's count of steps is not how many there were
    ranks=2,
)
def steps_counted_by_sub_group(*, broken: bool) -> Loop:
    loop = training(Settings(stage=3, sub_group=2000))
    optimizer = loop.model.optimizer
    count = [0]

    def made(update: Callable[[int], None]) -> Callable[[int], None]:
        def counted(sub_group: int) -> None:
            state = optimizer.optimizer.state[optimizer.fp32_partitioned_groups_flat[sub_group]]
            if "step" in state:
                state["step"] = torch.full_like(state["step"], count[0])
            update(sub_group)
            count[0] += 1

        return counted

    if broken:
        replace(optimizer, "_optimizer_step", made)
    return loop


@silent(
    "deepspeed",
    "PyTorch's AMP examples: unscale before clipping",
    "the norm of scaled gradients is compared with the limit for gradients, so that all are clipped to next to nothing",
    Mechanism.SCALE,
    phrases=("clip", "loss scale", "unscal", "gradient norm"),
    modules=("head", "embed", "blocks"),
    phases=("optimizer", "before_step"),
    visible=True,  # what is clipped is 256 times below the limit
    ranks=2,
)
def scaled_norm_clipped(*, broken: bool) -> Loop:
    loop = training(Settings(stage=2, dtype="fp16"))
    optimizer = loop.model.optimizer

    def made(clip: Callable[..., None]) -> Callable[..., None]:
        return lambda gradients, norm: clip(gradients, norm * optimizer.loss_scale)

    if broken:
        replace(optimizer, "unscale_and_clip_grads", made)
    return loop


@silent(
    "deepspeed",
    "DeepSpeed's page of `training_data`: a loader of one's own needs a distributed sampler",
    "both ranks are given the same batches",
    Mechanism.DATA,
    phrases=("same batch", "same data", "same input", "duplicate", "sampler", "equal on"),
    modules=("embed", "(model)", "position"),
    phases=("forward",),
    visible=True,  # inputs and losses of both ranks are equal
    ranks=2,
)
def same_batches(*, broken: bool) -> Loop:
    def batch(step: int, micro: int) -> Any:
        return tasks.words(step, micro, 0 if broken else None)

    return training(Settings(stage=2), batch=batch)


@silent(
    "deepspeed",
    "deepspeed PR 5104",
    "a step of the optimizer without gradients when it is made counts as its first one",
    Mechanism.SETTINGS,
    phrases=("bias correction", "count of steps", "step count", "number of steps", "steps of adam"),
    phases=("optimizer",),
    modules=("head", "embed", "blocks"),
    visible=True,  # the optimizer's count of steps is not how many there were
    ranks=2,
)
def step_when_made(*, broken: bool) -> Loop:
    loop = training(Settings(stage=1))
    inner = loop.model.optimizer.optimizer
    if broken:
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        inner.step()
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
    return loop
