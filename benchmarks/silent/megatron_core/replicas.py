"""Silent errors of Megatron-Core: data parallel copies, the distributed optimizer, recomputation, main copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.silent.case import Mechanism, silent
from benchmarks.silent.loop import Loop
from benchmarks.silent.megatron_core.layout import Layout, core, program, replace, training
from benchmarks.silent.megatron_core.tensor import BACKWARD, COPIES, FORWARD, UNREDUCED, part

MOVES = ("does not move", "do not move", "not change", "unchanged", "not updated", "stands still")
SHARDED = Layout(sharded=True, overlap=True, bucket=4000)
REDUCED = ("backward", "before_step", "optimizer")


@silent(
    "megatron",
    "TTrace 4; Megatron-LM 2417, 4590",
    "each copy takes the mean over its own tokens, one copy has a third as many, and the means are averaged",
    Mechanism.LOSS,
    phrases=("token", "mean of means", "uneven", "padding"),
    modules=("(loss)", "output_layer"),
    phases=("backward", "before_step", "forward"),  # not visible: each copy may be meant to count alike
    ranks=2,
)
def dp_mean_of_means(*, broken: bool) -> Loop:
    return training(Layout(per_token=not broken), batch=program().uneven_words)


@silent(
    "megatron",
    "Megatron-LM 7452, finding 3",
    "gradients are divided by each copy's own count of tokens, not by that of all",
    Mechanism.SCALE,
    phrases=(*COPIES, "token", "uneven"),
    phases=REDUCED,
    visible=True,  # gradients and weights that should be copies differ
    ranks=2,
)
def dp_own_count_of_tokens(*, broken: bool) -> Loop:
    loop = training(Layout(per_token=True), batch=program().uneven_words)
    finalize = core("distributed.finalize_model_grads")

    def made(reduced: Callable[..., Any]) -> Callable[..., Any]:
        def unless_count(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            if tensor.numel() == 1 and tensor.dtype == torch.int:
                return None
            return reduced(tensor, *arguments, **options)

        return unless_count

    if broken:
        own = made(dist.all_reduce)
        loop.model[0].config.finalize_model_grads_func = _with_all_reduce(finalize.finalize_model_grads, own)
    return loop


def _with_all_reduce(call: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any, **options: Any) -> None:
        kept, dist.all_reduce = dist.all_reduce, own
        try:
            call(*arguments, **options)
        finally:
            dist.all_reduce = kept

    return called


@silent(
    "megatron",
    "VERDICT 14",
    "gradients are reduced after the first micro batch, and those of the second one only added on each rank",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    phases=REDUCED,
    visible=True,  # weights that should be copies differ
    ranks=2,
)
def dp_reduced_too_early(*, broken: bool) -> Loop:
    loop: Any = training(Layout())
    groups = loop.model[0].bucket_groups
    reduced = [group.finish_grad_sync for group in groups]
    loss_of, seen = loop.loss_of, [0]

    def counted(losses: Tensor, counts: Tensor) -> Tensor:
        seen[0] += 1
        if seen[0] % 2 == 0:  # the forward pass of the last micro batch
            for reduce in reduced:
                reduce()
        return loss_of(losses, counts)

    if broken:
        loop.loss_of = counted
        for group in groups:
            group.finish_grad_sync = lambda **_: None
    return loop


@silent(
    "megatron",
    "TTrace 9; Megatron-LM 663",
    "parameters of the last bucket are not gathered after the update: each rank has only its own part anew",
    Mechanism.STILL,
    phrases=(*COPIES, *MOVES, "not gathered", "bucket"),
    phases=("optimizer", "parameter", "forward"),
    visible=True,  # weights that should be copies differ
    ranks=2,
)
def zero_bucket_never_gathered(*, broken: bool) -> Loop:
    loop = training(SHARDED)
    if broken:
        loop.model[0].bucket_groups[-1].start_param_sync = lambda **_: None
    return loop


@silent(
    "megatron",
    "Megatron-LM 950, kin of TTrace 9",
    "the forward pass begins before parameters of a bucket have arrived, and uses those of the step before",
    Mechanism.STILL,
    phrases=("stale", "previous step", "step before", "not gathered", *COPIES),
    modules=("embedding", "layers", "output_layer"),
    phases=FORWARD,
    visible=True,  # what a layer computes is not what its weights make of its input
    ranks=2,
)
def zero_weights_of_step_before(*, broken: bool) -> Loop:
    loop: Any = training(SHARDED)
    group = loop.model[0].bucket_groups[-1]
    gathered, loss_of, waiting = group.start_param_sync, loop.loss_of, [False]

    def later(**_: Any) -> None:
        waiting[0] = True

    def arrived(losses: Tensor, counts: Tensor) -> Tensor:
        if waiting[0]:
            gathered()
            waiting[0] = False
        return loss_of(losses, counts)

    if broken:
        group.start_param_sync, loop.loss_of = later, arrived
    return loop


@silent(
    "megatron",
    "dlrover 584, 585: the optimizer updates what the model does not use",
    "main copies in float32 are updated, but never copied to the weights of the first layer",
    Mechanism.STILL,
    phrases=(*MOVES, "main copy", "main copies", "master", "stale"),
    modules=("layers.0", "linear_qkv"),
    phases=("optimizer", "parameter", "forward"),
    visible=True,  # weights with gradients do not move
    ranks=2,
)
def main_copy_never_written(*, broken: bool) -> Loop:
    loop: Any = training(Layout(bf16=True))
    stale = part(loop, "layers.0.self_attention.linear_qkv").weight

    def made(copied: Callable[[], None]) -> Callable[[], None]:
        def but_one() -> None:
            before = stale.detach().clone()
            copied()
            stale.data.copy_(before)

        return but_one

    if broken:
        for optimizer in getattr(loop.optimizer, "chained_optimizers", [loop.optimizer]):
            replace(optimizer, "_copy_main_params_to_model_params", made)
    return loop


def _recomputing(run: Callable[[Any, Tensor, Any], Tensor]) -> None:
    """Have blocks of layers run and computed again by `run`, which is given the block, its input and the mask."""
    tensor_parallel = core("tensor_parallel")

    def forward(block: Any, hidden_states: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        def custom(hidden: Tensor) -> Tensor:
            return run(block, hidden, attention_mask)

        found: Tensor = tensor_parallel.checkpoint(custom, False, hidden_states)  # noqa: FBT003
        return found

    core("transformer.transformer_block").TransformerBlock._checkpointed_forward = forward


@silent(
    "megatron",
    "TTrace 2; Megatron-LM PR 290",
    "where two layers are recomputed as one piece, the second one is given the input of the first one",
    Mechanism.RECOMPUTED,
    phrases=(
        "recompute",
        "recomputation",
        "checkpoint",
        "no gradient",
        "zero gradient",
        "without gradient",
        "never",
        *MOVES,
    ),
    modules=("layers.0", "layers.1"),
    phases=FORWARD,
    visible=True,  # a layer has no gradients
    ranks=2,
)
def recompute_start_for_each_layer(*, broken: bool) -> Loop:
    def run(block: Any, start: Tensor, mask: Tensor) -> Tensor:
        hidden = start
        for layer in block.layers:
            hidden, _ = layer(hidden_states=start if broken else hidden, attention_mask=mask)
        return hidden

    _recomputing(run)
    return training(Layout(recompute=2))


@silent(
    "megatron",
    "TTrace 2",
    "the second layer is computed again from the first one's input, so that gradients are of another forward pass",
    Mechanism.RECOMPUTED,
    phrases=("recompute", "recomputation", "not the derivative", "computed again", "wrong gradient"),
    modules=("layers.1", "layers.0"),
    phases=(*BACKWARD, "forward"),
    visible=True,  # what is computed again is not what was computed
    ranks=2,
)
def recompute_other_input(*, broken: bool) -> Loop:
    def run(block: Any, start: Tensor, mask: Tensor) -> Tensor:
        first, second = block.layers
        hidden, _ = first(hidden_states=start, attention_mask=mask)
        if broken and torch.is_grad_enabled():  # the second time
            hidden = start + 0 * hidden
        return second(hidden_states=hidden, attention_mask=mask)[0]

    _recomputing(run)
    return training(Layout(recompute=2))


@silent(
    "megatron",
    "TTrace 8; TransformerEngine 1047",
    "the float8 copy of a weight is made once, and not again after updates",
    Mechanism.STILL,
    phrases=("stale", "cache", "float8", "fp8", *MOVES),
    first_wrong=1,
    modules=("linear_fc1", "mlp"),
    phases=FORWARD,
    visible=True,  # what a layer computes is not what its weights make of its input
    ranks=2,
)
def float8_weight_stale(*, broken: bool) -> Loop:
    loop: Any = training(Layout())

    def cast(module: Any) -> Callable[[], Tensor]:
        kept: list[Tensor] = []

        def once() -> Tensor:
            if not kept or not broken:
                weight = module.weight.detach()
                scale = 448 / weight.abs().max()
                kept[:] = [(weight * scale).to(torch.float8_e4m3fn).float() / scale]
            return kept[0]

        return once

    def made(module: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        copy = cast(module)
        return lambda forward: lambda x, **_: forward(x, weight=module.weight + (copy() - module.weight).detach())

    for layer in ("layers.0", "layers.1"):
        module = part(loop, f"{layer}.mlp.linear_fc1")
        replace(module, "forward", made(module))
    return loop


@silent(
    "megatron",
    "VERDICT 12, kin of TTrace 4",
    "the loss of one of two copies counts half",
    Mechanism.SCALE,
    phrases=("scaled", "half of", "halved", "0.5", "smaller than", "differ between ranks", "differ across ranks"),
    modules=("(loss)", "output_layer"),
    phases=("backward", "before_step"),
    visible=True,  # a rank's gradients are half of the other's, step for step
    ranks=2,
)
def dp_loss_of_one_copy(*, broken: bool) -> Loop:
    loop: Any = training(Layout())

    def made(scaled: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda loss: 0.5 * scaled(loss)

    if broken and dist.get_rank() == 0:
        replace(loop.model[0].config, "grad_scale_func", made)
    return loop


@silent(
    "megatron",
    "Megatron-LM 1532, kin of TTrace 4",
    "gradients that the reduction averages are divided by the number of copies once more",
    Mechanism.SCALE,
    phrases=("scaled", "half of", "halved", "average", "twice"),
    phases=REDUCED,
    visible=True,  # the sum over copies is not what is reduced
    ranks=2,
)
def dp_averaged_twice(*, broken: bool) -> Loop:
    loop = training(Layout(clip=0.5))
    if broken:
        for group in loop.model[0].bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor /= 2
    return loop
