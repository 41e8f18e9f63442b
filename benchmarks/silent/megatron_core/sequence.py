"""Silent errors of Megatron-Core: sequences spread over ranks, whether tensor or context parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.silent.case import Mechanism, silent
from benchmarks.silent.loop import Loop
from benchmarks.silent.megatron_core.layout import Layout, core, replace, substitute, training
from benchmarks.silent.megatron_core.tensor import BACKWARD, CLIP, COPIES, FORWARD, UNREDUCED, part

SPLIT = Layout(tp=2, sp=True)
REDUCED = ("backward", "before_step", "optimizer")


@silent(
    "megatron",
    "TTrace 12; Megatron-LM 1446",
    "gradients of the last layer norm are not added up over the parts of the sequence",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    modules=("final_layernorm",),
    phases=REDUCED,
    visible=True,  # weights that should be copies differ
    ranks=2,
)
def sp_final_layernorm(*, broken: bool) -> Loop:
    loop = training(SPLIT)
    for parameter in part(loop, "final_layernorm").parameters():
        parameter.sequence_parallel = not broken
    return loop


@silent(
    "megatron",
    "SkyRL, review of PR 1886",
    "sums of gradients of layer norms are made in a copy, and never written back",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    modules=("layernorm",),
    phases=REDUCED,
    visible=True,  # weights that should be copies differ
    ranks=2,
)
def sp_sum_left_in_copy(*, broken: bool) -> Loop:
    if broken:
        replace(
            core("distributed.finalize_model_grads"), "_unflatten_dense_tensors", lambda _: lambda _flat, parts: parts
        )
    return training(SPLIT)


@silent(
    "megatron",
    "TTrace 14; Megatron-LM 1528",
    "gradients of layer norms are added up twice, and so are as many times too large as there are ranks",
    Mechanism.SCALE,
    phrases=("twice", "times too large", "scaled", "more than once", "not the derivative"),
    modules=("layernorm",),
    phases=REDUCED,
    visible=True,  # the gradient is no derivative of what was computed
    ranks=2,
)
def sp_layernorm_reduced_twice(*, broken: bool) -> Loop:
    def made(reduce: Callable[..., None]) -> Callable[..., None]:
        def twice(*arguments: Any) -> None:
            reduce(*arguments)
            reduce(*arguments)

        return twice

    if broken:
        replace(core("distributed.finalize_model_grads"), "_allreduce_non_tensor_model_parallel_grads", made)
    return training(SPLIT)


@silent(
    "megatron",
    "TTrace 11; TransformerEngine 1616",
    "a weight's gradient is computed before the other ranks' inputs have arrived in the buffer, from what lay there",
    Mechanism.DATA,
    phrases=("stale", "overlap", "buffer", "not the derivative", "too early", "wrong gradient"),
    modules=("linear_qkv", "linear_fc1", "output_layer"),
    phases=BACKWARD,
    visible=True,  # the gradient is no derivative of what was computed
    ranks=2,
)
def sp_overlap_reads_too_early(*, broken: bool) -> Loop:
    def made(gather: Callable[..., Any]) -> Callable[..., Any]:
        def late(buffer: Tensor, mine: Tensor, group: Any, async_op: bool = False) -> Any:  # noqa: FBT001, FBT002
            before = buffer.clone()
            handle = gather(buffer, mine, group=group, async_op=async_op)
            if async_op:  # the backward pass
                handle.wait()
                before.chunk(group.size())[group.rank()].copy_(mine)
                buffer.copy_(before)
            return handle

        return late

    if broken:
        replace(core("tensor_parallel.layers"), "dist_all_gather_func", made)
    return training(SPLIT)


@silent(
    "megatron",
    "Megatron-LM 7452, finding 7 (and 5)",
    "embeddings are scattered over the wrong group, so that both ranks have the first half of the sequence",
    Mechanism.LAYOUT,
    phrases=("wrong group", "scatter", "same part", "same tokens", "same positions", "equal on"),
    modules=("embedding", "layers.0"),
    phases=FORWARD,
    visible=True,  # parts that should be different positions are the same
    ranks=4,
)
def sp_scattered_over_wrong_group(*, broken: bool) -> Loop:
    loop = training(SPLIT)
    if broken:
        part(loop, "embedding").tp_group = core("parallel_state").get_data_parallel_group()
    return loop


@silent(
    "megatron",
    "TTrace 6; Megatron-LM 599; Entangle missing_switchmlp_allreduce",
    "gradients of the router are not added up over the parts of the sequence",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    modules=("router",),
    phases=REDUCED,
    visible=True,  # weights that should be copies differ
    ranks=2,
)
def sp_router_unreduced(*, broken: bool) -> Loop:
    loop = training(Layout(tp=2, sp=True, experts=4))
    for layer in ("layers.0", "layers.1"):
        part(loop, f"{layer}.mlp.router").weight.sequence_parallel = not broken
    return loop


@silent(
    "megatron",
    "TTrace 3; Megatron-LM 673, 906",
    "the loss is not multiplied by the number of context parallel ranks, over which gradients are averaged",
    Mechanism.SCALE,
    phrases=("scaled", "context parallel", "half of", "halved", "loss scale"),
    modules=("(loss)", "output_layer"),
    phases=("backward", "before_step", "forward"),  # not visible: a weight of the loss may be meant
    ranks=2,
)
def cp_loss_scale(*, broken: bool) -> Loop:
    loop = training(Layout(cp=2, clip=0.5))

    def made(calculated: Callable[..., Any]) -> Callable[..., Any]:
        def unscaled(*arguments: Any) -> Any:
            return calculated(*(1 if position == 8 else value for position, value in enumerate(arguments)))

        return unscaled

    if broken:
        replace(core("pipeline_parallel.schedules"), "forward_step_calc_loss", made)
    return loop


class _PartAttention(torch.autograd.Function):
    """Attention of a part of the queries to all keys in blocks; backward as written by hand."""

    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, keeps_all: bool) -> Tensor:  # noqa: FBT001
        scores = (q @ k.transpose(-1, -2)).masked_fill(hidden, float("-inf"))
        blocks = scores.chunk(2, -1)
        whole = scores.logsumexp(-1, keepdim=True)
        last = next(each for each in (b.logsumexp(-1, keepdim=True) for b in blocks[::-1]) if each.isfinite().all())
        weights = (scores - whole).exp()
        context.save_for_backward(q, k, v, scores, whole if keeps_all else last, weights @ v)
        return weights @ v

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Any, ...]:
        q, k, v, scores, statistics, out = context.saved_tensors
        (gradient,) = gradients
        weights = (scores - statistics).exp()
        inner = gradient @ v.transpose(-1, -2) - (gradient * out).sum(-1, keepdim=True)
        scored = weights * inner
        return scored @ k, scored.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ gradient, None, None


@silent(
    "megatron",
    "TTrace 13; Megatron-LM 1464; TransformerEngine 1557",
    "the backward pass of attention over parts takes the softmax statistics of the last block for those of all",
    Mechanism.RECOMPUTED,
    phrases=("softmax", "not the derivative", "not the gradient of", "wrong gradient", "wrong backward"),
    modules=("linear_qkv", "self_attention", "core_attention"),
    phases=BACKWARD,
    visible=True,  # the gradient is no derivative of what was computed
    ranks=2,
)
def cp_attention_backward(*, broken: bool) -> Loop:
    loop = training(Layout(cp=2))
    group, gathered = core("parallel_state").get_context_parallel_group(), substitute("GatherSequence").apply

    def attended(scale: float) -> Callable[..., Tensor]:
        def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any) -> Tensor:
            keys, values = (gathered(x, group).permute(1, 2, 0, 3) for x in (key, value))
            length, batch = query.shape[:2]
            hidden = mask[..., group.rank() * length : (group.rank() + 1) * length, :]
            mixed = _PartAttention.apply(query.permute(1, 2, 0, 3) * scale, keys, values, hidden, not broken)
            return mixed.permute(2, 0, 1, 3).reshape(length, batch, -1)

        return forward

    for layer in ("layers.0", "layers.1"):
        attention = part(loop, f"{layer}.self_attention.core_attention")
        attention.forward = attended(attention.scale)
    return loop


@silent(
    "megatron",
    "TransformerEngine 1615, kin of TTrace 13",
    "the gradient of keys and values lacks what the queries of other context parallel ranks add to it",
    Mechanism.UNREDUCED,
    phrases=("not reduced", "unreduced", "not added up", "not the derivative", "wrong gradient", "wrong backward"),
    modules=("linear_qkv", "self_attention", "core_attention"),
    phases=BACKWARD,
    visible=True,  # the gradient is no derivative of what was computed
    ranks=2,
)
def cp_keys_gradient_unreduced(*, broken: bool) -> Loop:
    loop = training(Layout(cp=2))

    def own(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(context.group.size())[context.group.rank()].contiguous(), None

    if broken:
        substitute("GatherSequence").backward = staticmethod(own)
    return loop


@silent(
    "megatron",
    "TTrace 7, with gradients of context parallel ranks",
    "gradients are reduced over data parallel ranks without the context parallel ones",
    Mechanism.UNREDUCED,
    phrases=(*UNREDUCED, "wrong group", "other group", "another group"),
    phases=REDUCED,
    visible=True,  # weights that should be copies differ
    ranks=2,
)
def cp_left_out_of_reduction(*, broken: bool) -> Loop:
    loop = training(Layout(cp=2))
    if broken:
        alone = core("parallel_state").get_data_parallel_group(with_context_parallel=False)
        for group in loop.model[0].bucket_groups:
            group.data_parallel_group = alone
    return loop


@silent(
    "megatron",
    "Megatron-LM 1628",
    "gradients of different experts are averaged, as if ranks held copies of them",
    Mechanism.LAYOUT,
    phrases=("different experts", "wrong group", "averaged", "not the derivative", "equal gradients"),
    modules=("experts", "mlp"),
    phases=REDUCED,
    visible=True,  # the gradients of different weights are equal
    ranks=2,
)
def ep_experts_averaged(*, broken: bool) -> Loop:
    loop = training(Layout(ep=2, experts=4))

    def between(_step: int) -> None:
        for name, parameter in loop.model[0].named_parameters():
            if "local_experts" in name:
                dist.all_reduce(parameter.main_grad)
                parameter.main_grad /= 2

    if broken:
        loop.between = between
    return loop


@silent(
    "megatron",
    "Megatron-LM PR 5916; radixark/Megatron-LM PR 80",
    "the clip norm leaves out the experts",
    Mechanism.SCALE,
    phrases=(*COPIES, *CLIP),
    modules=("experts", "mlp"),
    phases=("optimizer", "before_step"),
    visible=True,  # the norm is not that of the gradients
    ranks=2,
)
def ep_norm_without_experts(*, broken: bool) -> Loop:
    def made(found: Callable[[Any], list[Tensor]]) -> Callable[[Any], list[Tensor]]:
        def dense(optimizer: Any) -> list[Tensor]:
            is_dense = all(getattr(p, "allreduce", True) for p in optimizer.get_parameters())
            return found(optimizer) if is_dense else []

        return dense

    if broken:
        replace(core("optimizer.optimizer").MegatronOptimizer, "get_main_grads_for_grad_norm", made)
    return training(Layout(ep=2, experts=4, clip=0.3))


@silent(
    "megatron",
    "Megatron-LM 7452, finding 10",
    "the count of tokens is added up in place, so that the loss which balances experts is twice too large",
    Mechanism.SCALE,
    phrases=("auxiliary", "balanc", "twice", "doubled"),
    modules=("router", "mlp"),
    phases=("backward", "before_step", "forward"),  # not visible: a weight of that loss may be meant
    ranks=2,
)
def sp_balance_counted_twice(*, broken: bool) -> Loop:
    def made(attach: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda router, probs, coefficient, loss, *rest, **options: attach(
            router, probs, coefficient, 2 * loss, *rest, **options
        )

    if broken:
        replace(core("transformer.moe.router").TopKRouter, "attach_and_log_load_balancing_loss", made)
    return training(Layout(tp=2, sp=True, experts=4, balance=0.05))
