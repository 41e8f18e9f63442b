"""Fused operators of accelerators as compositions of torch's own, by name: what their results are judged against.

Each takes the operator's arguments, in any floating type, and returns its tensors in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_MASKED = -10_000.0
_NO_LIMIT = 2**31 - 1
_TRIANGLES = (2, 3)  # causal, from the first key or up to the last one
_COLUMNS = 8  # of the maximum and the sum of a softmax, which attention returns


def fast_gelu(x: Tensor) -> Tensor:
    """Return x · sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def mish(x: Tensor) -> Tensor:
    """Return x · tanh(softplus(x))."""
    return x * torch.tanh(functional.softplus(x))


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """Return silu of the first half along `dim`, times the second half."""
    gate, value = x.chunk(2, dim)
    return functional.silu(gate) * value


def root_mean_square_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return x over its root mean square in the last dimensions, times `gamma`; and the inverse of that root."""
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    inverse = torch.rsqrt(x.square().mean(dims, keepdim=True) + epsilon)
    return x * inverse * gamma, inverse


def layer_norm_eval(
    x: Tensor, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    """Return layer normalisation."""
    return functional.layer_norm(x, list(normalized_shape), weight, bias, eps)


def group_norm_silu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """Return silu of a group normalisation, the means (batch, group), and the inverse standard deviations."""
    grouped = x.reshape(x.shape[0], group, -1)
    inverse = torch.rsqrt(grouped.var(-1, correction=0) + eps)
    return functional.silu(functional.group_norm(x, group, weight, bias, eps)), grouped.mean(-1), inverse


def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """Return x · r1 + turned(x) · r2, where halves, or neighbours (`interleave`), are turned by a right angle."""
    if rotary_mode == "interleave":
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    return x * r1 + turned * r2


def scaled_masked_softmax(
    x: Tensor,
    mask: Tensor,
    scale: float = 1.0,
    fixed_triu_mask: bool = False,  # noqa: FBT001, FBT002  # as the operator is called
) -> Tensor:
    """Return the softmax along the last dimension of scale · x, with -10 000 where the mask is true."""
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return (x * scale).masked_fill(mask.bool(), _MASKED).softmax(-1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias."""
    return functional.linear(x, weight, bias)


def confusion_transpose(
    x: Tensor,
    perm: Sequence[int],
    shape: Sequence[int],
    transpose_first: bool,  # noqa: FBT001  # as the operator is called
) -> Tensor:
    """Return a permutation, then reshaped; or the other way round."""
    return x.permute(*perm).reshape(*shape) if transpose_first else x.reshape(*shape).permute(*perm)


def sort_v2(x: Tensor, dim: int = -1, descending: bool = False) -> Tensor:  # noqa: FBT001, FBT002  # likewise
    """Return the sorted values without their places."""
    return x.sort(dim, descending).values


def moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each row of scores the k largest shares of its softmax, their experts, and numbers of the copies.

    A finished row has the number of experts in place of each of its own; copies are numbered down the columns.
    """
    shares, experts = x.softmax(-1).topk(k, -1)
    if finished is not None:
        experts = experts.masked_fill(finished.bool().reshape(*experts.shape[:-1], 1), x.shape[-1])
    rows = math.prod(x.shape[:-1])
    numbers = torch.arange(rows * k, device=x.device).reshape(k, rows).T.reshape(experts.shape)
    return shares, experts.to(torch.int32), numbers.to(torch.int32)


def apply_adam(  # noqa: PLR0913, PLR0917  # the operator's arguments
    beta1_power: float,
    beta2_power: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    use_locking: bool | None = None,  # noqa: ARG001, FBT001
    use_nesterov: bool | None = None,  # noqa: FBT001
    *,
    out: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return variable, first and second moment after a step of Adam; `out` are those before it."""
    variable, first, second = out
    first = beta1 * first + (1 - beta1) * grad
    second = beta2 * second + (1 - beta2) * grad.square()
    rate = lr * math.sqrt(1 - beta2_power) / (1 - beta1_power)
    ahead = beta1 * first + (1 - beta1) * grad if use_nesterov else first
    return variable - rate * ahead / (second.sqrt() + epsilon), first, second


def apply_adam_w(  # noqa: PLR0913, PLR0917  # the operator's arguments
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None = None,
    amsgrad: bool | None = None,  # noqa: FBT001
    maximize: bool | None = None,  # noqa: FBT001
    *,
    out: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return variable, first and second moment after a step of AdamW; `out` are those before it.

    The powers are those of the step before. With `amsgrad` the largest second moment so far (`max_grad_norm`) counts.
    """
    variable, first, second = out
    grad = -grad if maximize else grad
    first = beta1 * first + (1 - beta1) * grad
    second = beta2 * second + (1 - beta2) * grad.square()
    largest = torch.maximum(second, max_grad_norm) if amsgrad and max_grad_norm is not None else second
    spread = (largest / (1 - beta2_power * beta2)).sqrt() + epsilon
    mean = first / (1 - beta1_power * beta1)
    return variable * (1 - lr * weight_decay) - lr * mean / spread, first, second


def fusion_attention(  # noqa: PLR0913, PLR0917  # the operator's arguments
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,  # noqa: ARG001
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _NO_LIMIT,  # noqa: ARG001  # they limit bands alone
    next_tockens: int = _NO_LIMIT,  # noqa: ARG001
    inner_precise: int = 0,  # noqa: ARG001
    prefix: Sequence[int] | None = None,  # noqa: ARG001
    actual_seq_qlen: Sequence[int] | None = None,  # noqa: ARG001  # of layout TND alone
    actual_seq_kvlen: Sequence[int] | None = None,  # noqa: ARG001
    sparse_mode: int = 0,
    **_others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return attention, the maximum and the sum of each softmax (eight times), and an empty tensor.

    Layouts BNSD, BSND, BSH and SBH; fewer heads of keys than of queries are repeated. A true element of the mask is
    left out. The position encoding `pse` is added before the scale is applied, as the documentation of
    aclnnFlashAttentionScore has it. Raises ValueError for what draws random numbers, and for other layouts and kinds of
    sparsity.
    """
    if keep_prob != 1.0 or sparse_mode not in (0, 1, *_TRIANGLES):
        raise ValueError(f"keep_prob {keep_prob} and sparse_mode {sparse_mode} have no composition")
    heads = query.shape[-1] // head_num
    q, k, v = (_by_heads(one, input_layout, heads) for one in (query, key, value))
    k, v = (one.repeat_interleave(head_num // one.shape[1], 1) for one in (k, v))
    scores = (q @ k.mT if pse is None else q @ k.mT + pse) * scale
    if sparse_mode in _TRIANGLES:  # the mask is a part of a triangle
        first = 1 if sparse_mode == _TRIANGLES[0] else 1 + scores.shape[-1] - scores.shape[-2]
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(first), -math.inf)
    elif atten_mask is not None:
        scores = scores.masked_fill(atten_mask.bool(), -math.inf)
    most = scores.amax(-1, keepdim=True)
    powers = (scores - most).exp()
    sums = powers.sum(-1, keepdim=True)
    found = _in_layout((powers / sums) @ v, input_layout)
    return found, most.expand(*most.shape[:-1], _COLUMNS), sums.expand(*sums.shape[:-1], _COLUMNS), query.new_empty(0)


def _by_heads(tensor: Tensor, layout: str, size: int) -> Tensor:
    """Return a tensor as (batch, heads, sequence, size); `size` is that of a head where the layout does not say so."""
    match layout:
        case "BNSD":
            return tensor
        case "BSND":
            return tensor.transpose(1, 2)
        case "BSH":
            return tensor.reshape(*tensor.shape[:2], -1, size).transpose(1, 2)
        case "SBH":
            return tensor.reshape(*tensor.shape[:2], -1, size).permute(1, 2, 0, 3)
        case _:
            raise ValueError(f"layout {layout} has no composition")


def _in_layout(tensor: Tensor, layout: str) -> Tensor:
    match layout:
        case "BSND":
            return tensor.transpose(1, 2)
        case "BSH":
            return tensor.transpose(1, 2).flatten(-2)
        case "SBH":
            return tensor.permute(2, 0, 1, 3).flatten(-2)
        case _:
            return tensor


COMPOSITIONS: dict[str, Callable[..., Any]] = {
    "fast_gelu": fast_gelu,
    "npu_apply_adam": apply_adam,
    "npu_apply_adam_w": apply_adam_w,
    "npu_confusion_transpose": confusion_transpose,
    "npu_fast_gelu": fast_gelu,
    "npu_fusion_attention": fusion_attention,
    "npu_group_norm_silu": group_norm_silu,
    "npu_layer_norm_eval": layer_norm_eval,
    "npu_linear": linear,
    "npu_mish": mish,
    "npu_moe_gating_top_k_softmax": moe_gating_top_k_softmax,
    "npu_rms_norm": root_mean_square_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_scaled_masked_softmax": scaled_masked_softmax,
    "npu_silu": functional.silu,
    "npu_sort_v2": sort_v2,
    "npu_swiglu": swiglu,
}
"""By the operator's name."""
