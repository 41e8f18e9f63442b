"""Silent errors of Megatron-Core: tensor parallel layers, what they reduce, and what each rank computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.silent.case import Mechanism, silent
from benchmarks.silent.loop import Loop
from benchmarks.silent.megatron_core.layout import Layout, core, replace, training

TENSOR = Layout(tp=2)
COPIES = ("copies", "replica", "differ between ranks", "differ across ranks", "differ on ranks", "out of sync")
UNREDUCED = (*COPIES, "not reduced", "never reduced", "unreduced", "not added up", "not summed")
CLIP = ("clip", "gradient norm", "norm of all gradients", "norm of the gradients")
FORWARD, BACKWARD = ("forward",), ("backward", "before_step")


def part(loop: Loop, name: str) -> Any:
    """Return the submodule of which the name ends so."""
    return next(module for chunk in loop.model for path, module in chunk.named_modules() if path.endswith(name))


def tensor_rank() -> int:
    """Return this process's rank among those that share a layer."""
    return int(core("parallel_state").get_tensor_model_parallel_rank())


class _ChangedGradient(torch.autograd.Function):
    """Hands its input on; what comes back is changed."""

    @staticmethod
    def forward(context: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        context.change = change
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return context.change(gradients[0]), None


def with_gradient(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `x`, of which the gradient is changed."""
    changed: Tensor = _ChangedGradient.apply(x, change)
    return changed


@silent(
    "megatron",
    "TTrace 1",
    "a rank does not blank the embeddings of tokens that other ranks hold, and adds its first row instead",
    Mechanism.LAYOUT,
    phrases=("mask", "vocabulary", "no row of", "not a row"),
    modules=("word_embeddings", "embedding"),
    phases=FORWARD,
    visible=True,  # what comes out of an embedding is no row of it
    ranks=2,
)
def tp_embedding_mask(*, broken: bool) -> Loop:
    loop = training(TENSOR)
    table = part(loop, "word_embeddings")

    def looked_up(ids: Tensor) -> Tensor:
        mine = ids - table.vocab_start_index
        mine[(ids < table.vocab_start_index) | (ids >= table.vocab_end_index)] = 0
        return core("tensor_parallel.mappings").reduce_from_tensor_model_parallel_region(
            table.weight[mine], group=table.tp_group
        )

    if broken:
        table.forward = looked_up
    return loop


@silent(
    "megatron",
    "Megatron-LM 1754, kin of TTrace 1",
    "each rank takes the last token that it holds for another rank's, so that it is embedded as zeros",
    Mechanism.LAYOUT,
    phrases=("mask", "vocabulary", "no row of", "not a row", "zeros"),
    modules=("word_embeddings", "embedding"),
    phases=FORWARD,
    visible=True,  # what comes out of an embedding is no row of it
    ranks=2,
)
def tp_embedding_range(*, broken: bool) -> Loop:
    loop = training(TENSOR)
    part(loop, "word_embeddings").vocab_end_index -= broken
    return loop


@silent(
    "megatron",
    "VERDICT 1",
    "the parts of an MLP's output are not added up over tensor parallel ranks",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    modules=("layers.1.mlp",),
    phases=FORWARD,
    visible=True,  # activations and weights that should be copies differ
    ranks=2,
)
def tp_output_unreduced(*, broken: bool) -> Loop:
    loop = training(TENSOR)
    part(loop, "layers.1.mlp.linear_fc2").explicit_expert_comm = broken
    return loop


@silent(
    "megatron",
    "VERDICT 5; Entangle missing_allreduce_under_wrong_config",
    "the gradient of the input of a column parallel layer is not added up over tensor parallel ranks",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    modules=("layers.1", "layers.0", "input_layernorm", "embedding"),
    phases=BACKWARD,
    visible=True,  # gradients of weights that should be copies differ
    ranks=2,
)
def tp_input_gradient_unreduced(*, broken: bool) -> Loop:
    loop = training(TENSOR)
    part(loop, "layers.1.self_attention.linear_qkv").explicit_expert_comm = broken
    return loop


@silent(
    "megatron",
    "VERDICT 7",
    "one rank's layer norm has another epsilon",
    Mechanism.SETTINGS,
    phrases=(*COPIES, "epsilon"),
    modules=("layers.0", "input_layernorm"),
    phases=FORWARD,
    visible=True,  # activations that should be copies differ
    ranks=2,
)
def tp_epsilon_of_one_rank(*, broken: bool) -> Loop:
    loop = training(TENSOR)
    if broken and tensor_rank() == 1:
        part(loop, "layers.0.input_layernorm").eps = 1e-2
    return loop


@silent(
    "megatron",
    "VERDICT 9",
    "the layer norm of all ranks has another epsilon",
    Mechanism.SETTINGS,
    phrases=("epsilon",),
    modules=("layers.0", "input_layernorm"),
    phases=FORWARD,  # not visible: any epsilon may be meant
    ranks=2,
)
def tp_epsilon_of_all_ranks(*, broken: bool) -> Loop:
    loop = training(TENSOR)
    if broken:
        part(loop, "layers.0.input_layernorm").eps = 1e-2
    return loop


@silent(
    "megatron",
    "VERDICT 10",
    "on one rank the backward pass loses the branch beside the residual connection",
    Mechanism.UNREDUCED,
    phrases=(*COPIES, "zero gradient", "no gradient", "gradient is zero"),
    modules=("layers.1", "layers.0", "embedding", "input_layernorm"),
    phases=BACKWARD,
    visible=True,  # gradients of weights that should be copies differ
    ranks=2,
)
def tp_branch_lost(*, broken: bool) -> Loop:
    loop = training(TENSOR)

    def made(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: forward(with_gradient(x, torch.zeros_like))

    if broken and tensor_rank() == 1:
        replace(part(loop, "layers.1.input_layernorm"), "forward", made)
    return loop


@silent(
    "megatron",
    "VERDICT 11",
    "the backward pass of rotary embeddings swaps its two halves",
    Mechanism.RECOMPUTED,
    phrases=("rotary", "not the derivative", "not the gradient of", "wrong gradient", "wrong backward"),
    modules=("linear_qkv", "self_attention"),
    phases=BACKWARD,
    visible=True,  # the gradient is no derivative of what was computed
    ranks=2,
)
def tp_rotary_backward(*, broken: bool) -> Loop:
    def made(rotated: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrong(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
            swapped = with_gradient(x, lambda g: g.roll(g.shape[-1] // 2, -1))
            return rotated(swapped, *arguments, **options)

        return wrong

    if broken:
        replace(core("transformer.attention"), "apply_rotary_pos_emb", made)
    return training(Layout(tp=2, rope=True))


def _scaled_output(loop: Loop, factor: float) -> Loop:
    def made(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *arguments, **options: factor * product(*arguments, **options)

    replace(part(loop, "layers.0.self_attention.linear_proj"), "_forward_impl", made)
    return loop


@silent(
    "megatron",
    "VERDICT 12",
    "rank 0 adds only half of its part of the attention's output",
    Mechanism.SCALE,
    phrases=("scaled", "half of", "halved", "0.5"),
    modules=("layers.0.self_attention", "linear_proj"),
    phases=FORWARD,
    visible=True,  # what a rank sends to the sum is not its input times its weight
    ranks=2,
)
def tp_scale_of_one_rank(*, broken: bool) -> Loop:
    return _scaled_output(training(TENSOR), 0.5 if broken and tensor_rank() == 0 else 1.0)


@silent(
    "megatron",
    "VERDICT 13",
    "all ranks add only half of their parts of the attention's output",
    Mechanism.SCALE,
    phrases=("scaled", "half of", "halved", "0.5"),
    modules=("layers.0.self_attention", "linear_proj"),
    phases=FORWARD,  # not visible: a factor may be meant
    ranks=2,
)
def tp_scale_of_all_ranks(*, broken: bool) -> Loop:
    return _scaled_output(training(TENSOR), 0.5 if broken else 1.0)


@silent(
    "megatron",
    "Megatron-Core's page of tensor_parallel.random",
    "ranks that share a layer draw different dropout where they hold copies",
    Mechanism.COPIES,
    phrases=(*COPIES, "dropout", "random numbers", "seed"),
    modules=("embedding", "layers.0"),
    phases=FORWARD,
    visible=True,  # activations and gradients that should be copies differ
    ranks=2,
)
def tp_dropout_of_each_rank(*, broken: bool) -> Loop:
    loop = training(Layout(tp=2, dropout=0.1))

    def before(step: int) -> None:
        torch.manual_seed(step + 1000 * (tensor_rank() if broken else 0))

    loop.before = before
    return loop


@silent(
    "megatron",
    "deepspeed 1801 (BLOOM-176B)",
    "only rank 0's copies of weights that are not spread are clipped",
    Mechanism.COPIES,
    phrases=(*COPIES, *CLIP),
    modules=("layernorm", "position_embeddings", "bias"),
    phases=("optimizer", "before_step", "parameter"),
    visible=True,  # weights that should be copies differ
    ranks=2,
)
def tp_clip_of_one_rank(*, broken: bool) -> Loop:
    optimizers = core("optimizer.optimizer")

    def made(clip: Callable[..., None]) -> Callable[..., None]:
        def clipped(parameters: list[Any], *arguments: Any, **options: Any) -> None:
            if tensor_rank():
                parameters = [p for p in parameters if getattr(p, "tensor_model_parallel", False)]
            clip(parameters, *arguments, **options)

        return clipped

    if broken:
        replace(optimizers, "clip_grad_by_total_norm_fp32", made)
    return training(Layout(tp=2, clip=0.3))


@silent(
    "megatron",
    "Megatron-LM 7452, finding 8",
    "learnable sinks of the attention are not marked as spread, so the clip norm leaves those of rank 1 out",
    Mechanism.SCALE,
    phrases=CLIP,
    modules=("softmax_offset", "core_attention"),
    phases=("optimizer", "before_step"),  # not visible: of this model's norm the sinks are a millionth, as rounding is
    ranks=2,
)
def tp_sinks_left_out_of_norm(*, broken: bool) -> Loop:
    layers = core("tensor_parallel.layers")

    def made(initialised: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(initialised)
        def marked(module: Any, *arguments: Any, **options: Any) -> None:
            initialised(module, *arguments, **options)
            layers.set_tensor_model_parallel_attributes(module.softmax_offset, is_parallel=True, dim=0, stride=1)

        return marked

    if not broken:
        replace(core("transformer.dot_product_attention").DotProductAttention, "__init__", made)
    loop = training(Layout(tp=2, sinks=True, clip=0.3))
    for layer in ("layers.0", "layers.1"):
        torch.nn.init.constant_(part(loop, f"{layer}.self_attention.core_attention").softmax_offset, 2.0)
    return loop


@silent(
    "megatron",
    "Megatron-LM 7452, finding 11, with norms of queries and keys",
    "the gradients of norms of queries and keys are not added up over the heads of all ranks",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    modules=("q_layernorm", "k_layernorm"),
    phases=("backward", "before_step", "optimizer"),
    visible=True,  # weights that should be copies differ
    ranks=2,
)
def tp_head_norms_unreduced(*, broken: bool) -> Loop:
    loop = training(Layout(tp=2, qk_norm=True))
    loop.model[0].config.qk_layernorm = not broken
    return loop


@silent(
    "megatron",
    "TTrace 7, with the sum of an output",
    "the parts of an output are added up over the wrong group, that of data parallel ranks",
    Mechanism.UNREDUCED,
    phrases=(*UNREDUCED, "wrong group", "other group", "another group"),
    modules=("layers.1.mlp", "linear_fc2"),
    phases=FORWARD,
    visible=True,  # activations and weights that should be copies differ
    ranks=4,
)
def tp_wrong_group(*, broken: bool) -> Loop:
    loop = training(TENSOR)
    if broken:
        part(loop, "layers.1.mlp.linear_fc2").tp_group = core("parallel_state").get_data_parallel_group()
    return loop


class _Quantised(torch.autograd.Function):
    """Rounds to float8; the gradient does not notice."""

    @staticmethod
    def forward(_context: Any, x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


@silent(
    "megatron",
    "TTrace 7",
    "the largest value for the scale of float8 is taken over data parallel ranks, not over those that share the tensor",
    Mechanism.SCALE,
    phrases=("float8", "fp8", "wrong group", "other group", "another group", "amax"),
    modules=("linear_fc2", "mlp"),
    phases=FORWARD,  # not visible: either is a scale that fits the tensor
    ranks=4,
)
def tp_float8_scale_of_wrong_group(*, broken: bool) -> Loop:
    loop, groups = training(TENSOR), core("parallel_state")
    group = groups.get_data_parallel_group() if broken else groups.get_tensor_model_parallel_group()

    def made(forward: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def quantised(x: Tensor) -> Any:
            largest = x.detach().abs().max()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            return forward(_Quantised.apply(x, 448 / largest))

        return quantised

    for layer in ("layers.0", "layers.1"):
        replace(part(loop, f"{layer}.mlp.linear_fc2"), "forward", made)
    return loop
