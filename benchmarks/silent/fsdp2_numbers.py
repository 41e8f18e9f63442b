"""Silent errors of FSDP2: by what gradients and weights are multiplied, rounded and bounded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.silent import tasks
from benchmarks.silent.case import Mechanism, silent
from benchmarks.silent.ddp_reduction import SCALED
from benchmarks.silent.ddp_wrapper import AFTER_BACKWARD
from benchmarks.silent.fsdp2_shards import local, sharded
from benchmarks.silent.loop import Loop
from benchmarks.silent.models import ConvNet, MixerNet, TinyLstm, TinyTransformer
from benchmarks.silent.plain_optimizer import classifier, language, sgd


def divide_by(module: Any, factor: float) -> None:
    """Divide the sums of gradients over ranks by `factor`; gloo knows no reduction that does so itself."""
    module.set_force_sum_reduction_for_comms(enable=True)
    module.set_gradient_divide_factor(factor)


@silent(
    "fsdp2",
    "pytorch 170862, LoongForge PR 152: the norm for clipping is that of the local shards",
    "each rank clips its shards by their own norm, so they are scaled differently",
    Mechanism.SCALE,
    phrases=("clip", "scaled differently", "differs between ranks", "differ between ranks", "norm"),
    phases=("before_step", "optimizer"),
    visible=True,  # what the optimizer takes is another part of the reduced gradient on either rank
    ranks=2,
)
def clipped_by_local_norm(*, broken: bool) -> Loop:
    model: Any = sharded(TinyLstm())
    loop = language(model, torch.optim.SGD(model.parameters(), lr=2.0))

    @torch.no_grad()
    def between(_step: int) -> None:
        parts = [local(parameter.grad) for parameter in model.parameters()]
        square = sum((part.square().sum() for part in parts), torch.zeros(()))
        if not broken:
            dist.all_reduce(square)
        for part in parts:
            part.mul_((0.1 / (square.sqrt() + 1e-6)).clamp(max=1.0))

    loop.between = between
    return loop


@silent(
    "fsdp2",
    "torch set_gradient_divide_factor: gradients are divided although the loss is by all tokens already",
    "the loss is divided by the tokens of all ranks, and the reduction takes the mean over ranks besides",
    Mechanism.SCALE,
    phrases=(*SCALED, "divid"),
    phases=("reduction", "backward"),
    ranks=2,  # not visible: a reduction that takes the mean is the usual one
)
def divided_by_tokens_and_ranks(*, broken: bool) -> Loop:
    model: Any = sharded(TinyTransformer())
    for module in (*model.blocks, model):
        divide_by(module, dist.get_world_size() if broken else 1)
    loop = language(model, sgd(model, 0.5))
    loop.backward = lambda loss: (loss / dist.get_world_size()).backward()
    return loop


@silent(
    "fsdp2",
    "torch set_gradient_divide_factor: it is set on the module that it is called on, and on no other",
    "the gradients of one block are summed over ranks, all others averaged",
    Mechanism.SCALE,
    phrases=SCALED,
    modules=("blocks.1",),
    phases=AFTER_BACKWARD,
    visible=True,  # reduced gradients of this block are twice the mean of the unreduced ones
    ranks=2,
)
def one_block_is_summed(*, broken: bool) -> Loop:
    model: Any = sharded(TinyTransformer())
    for module in (*model.blocks, model):
        divide_by(module, 1 if broken and module is model.blocks[1] else dist.get_world_size())
    return language(model, sgd(model, 0.3))


@silent(
    "fsdp2",
    "torchtitan MixedPrecisionPolicy: reduce_dtype follows param_dtype where it is not given",
    "gradients are reduced in bfloat16 instead of float32",
    Mechanism.SETTINGS,
    phrases=("bfloat16", "bf16", "dtype", "precision", "rounded"),
    phases=("reduction", "backward", "before_step", "optimizer"),
    ranks=2,  # not visible: gradients with eight bits may be meant
)
def reduced_in_bfloat16(*, broken: bool) -> Loop:
    reduced = torch.bfloat16 if broken else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    loop = language(sharded(TinyTransformer(), mp_policy=policy))
    loop.loss_of = lambda model, batch: tasks.continued(lambda ids: model(ids).float(), batch)
    return loop


@silent(
    "fsdp2",
    "Lightning and torch AMP trackers: a loss scale of float16 whose gradients are never unscaled",
    "gradients keep the loss scale of 128 when they are clipped, so that every step is clipped to the same length",
    Mechanism.SCALE,
    phrases=("unscal", "loss scale", "clip"),
    phases=("before_step", "optimizer"),
    visible=True,  # the optimizer takes 1/250 and less of every reduced gradient
    ranks=2,
)
def clipped_with_loss_scale(*, broken: bool) -> Loop:
    model: Any = sharded(MixerNet())
    loop = classifier(model, sgd(model, 0.3))
    loop.backward = lambda loss: (128 * loss).backward()

    @torch.no_grad()
    def between(_step: int) -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        for gradient in gradients if not broken else ():
            gradient.div_(128)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for gradient in gradients if broken else ():
            gradient.div_(128)

    loop.between = between
    return loop


@silent(
    "fsdp2",
    "torch FSDPModule.unshard: what is written to unsharded parameters is lost",
    "weights are to be kept within bounds after each update, but that is done to gathered copies",
    Mechanism.SETTINGS,
    phrases=("bound", "clamp", "constraint", "lost"),
    first_wrong=0,
    modules=("stem", "body"),
    phases=("parameter", "optimizer"),
    ranks=2,  # not visible: that there are bounds to be kept is known to their author alone
)
def bounds_are_lost(*, broken: bool) -> Loop:
    model: Any = sharded(ConvNet())
    loop = classifier(model, sgd(model))

    @torch.no_grad()
    def after(_step: int) -> None:
        if broken:
            model.unshard()
        for layer in (model.stem, model.body):
            local(layer.weight).clamp_(-0.1, 0.1)
        if broken:
            model.reshard()

    loop.after = after
    return loop


@silent(
    "fsdp2",
    "vllm speculators PR 942, Megatron-LM 2417: a mean over each rank's own valid tokens",
    "rank 0 has three valid tokens of a text and rank 1 twelve; their means are averaged",
    Mechanism.LOSS,
    phrases=("token", "weight of", "mean of means"),
    phases=("forward", "backward", "reduction"),
    ranks=2,  # not visible: that fewer valid tokens count alike may be meant
)
def mean_over_own_tokens(*, broken: bool) -> Loop:
    model: Any = sharded(TinyTransformer())
    loop = language(model)

    def loss_of(engine: Any, batch: Any) -> Tensor:
        losses = nn.functional.cross_entropy(engine(batch[0]).mT, batch[1], reduction="none")
        valid = torch.zeros_like(losses)
        valid[:, : 3 if dist.get_rank() == 0 else 12] = 1
        number = valid.sum()
        if not broken:
            dist.all_reduce(number)
            number /= dist.get_world_size()
        return (losses * valid).sum() / number

    loop.loss_of = loss_of
    return loop
