"""The formulas of the features, as pure functions of tensors.

Shapes: B batch entries, H query heads, G key heads (H a multiple of G), Q queries, K keys, D depth of a head, N queries
looked at, E experts, T tokens, O and I rows and columns of a weight matrix. Nothing here waits for the device or uses
the global random state; every caller has gradients and autocast switched off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from trainermon.monitor.taps import pieces

# Attention logits that one look computes at most: 16 MiB in float32, three times that for a moment.
MAX_LOGITS = 1 << 22
# Power iterations at the first look at a weight, and at each one after it.
FIRST_ITERATIONS, NEXT_ITERATIONS = 10, 2
# Magnitudes up to which rounding to nearest even gives zero: half the smallest subnormal, OCP 8-bit floating point.
FP8_UNDERFLOW = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionInputs:
    """One computation of attention probabilities.

    Attributes:
        query: `[B, H, Q, D]`.
        key: `[B, G, K, D]`; query head h uses key head `h // (H / G)`.
        scale: What products of query and key are multiplied by.
        first: Query i sees keys from `i + first` on; None: from the first on.
        last: Query i sees keys up to `i + last`; None: up to the last.
        mask: Broadcasts to `[B, H, Q, K]`. Boolean: true where a key is seen. Else it is added to the logits.
    """

    query: Tensor
    key: Tensor
    scale: float
    first: int | None = None
    last: int | None = None
    mask: Tensor | None = None


def attention_rows(call: AttentionInputs, max_logits: int = MAX_LOGITS) -> tuple[Tensor, Tensor, Tensor]:
    """Return entropy, largest probability and largest logit of rows of the attention matrix, each `[B', H, N]`.

    Entropy: `-sum_k p_k ln p_k` in nats, 0 to ln K (Zhai et al., "Stabilizing Transformer Training by Preventing
    Attention Entropy Collapse", section 3). The logit is the argument of the softmax: scaled, biased, masked (Dehghani
    et al., "Scaling Vision Transformers to 22 Billion Parameters", section 2). A row that sees no key has entropy NaN
    and logit -inf.

    All rows are looked at where the logits are no more than `max_logits`; else all heads of as many batch entries and
    queries, evenly spread, as fit, and one at least. Computed in float32, float64 for float64.
    """
    num_batch, num_heads, num_queries, depth = call.query.shape
    num_groups, num_keys = call.key.shape[1:3]
    entries = _spread(num_batch, max_logits // (num_heads * num_keys), call.query)
    queries = _spread(num_queries, max_logits // (len(entries) * num_heads * num_keys), call.query)
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    query = _picked(_picked(call.query, 0, entries), 2, queries).to(dtype) * call.scale
    key = _picked(call.key, 0, entries).to(dtype)
    grouped = query.reshape(len(entries), num_groups, -1, depth)
    logits = (grouped @ key.transpose(-1, -2)).view(len(entries), num_heads, len(queries), num_keys)
    logits = _masked(logits, call, entries, queries)
    probabilities = logits.softmax(-1)
    return torch.special.entr(probabilities).sum(-1), probabilities.amax(-1), logits.amax(-1)


def _masked(logits: Tensor, call: AttentionInputs, entries: Tensor, queries: Tensor) -> Tensor:
    keys = torch.arange(logits.shape[-1], device=logits.device)
    if call.last is not None:
        logits = logits.masked_fill(keys > queries[:, None] + call.last, -torch.inf)
    if call.first is not None:
        logits = logits.masked_fill(keys < queries[:, None] + call.first, -torch.inf)
    if call.mask is None:
        return logits
    mask = call.mask if call.mask.dim() == 4 else call.mask[(None,) * (4 - call.mask.dim())]
    mask = mask if mask.shape[0] == 1 else _picked(mask, 0, entries)
    mask = mask if mask.shape[2] == 1 else _picked(mask, 2, queries)
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else logits + mask


def _picked(tensor: Tensor, dim: int, indices: Tensor) -> Tensor:
    return tensor if len(indices) == tensor.shape[dim] else tensor.index_select(dim, indices)


def _spread(length: int, count: int, like: Tensor) -> Tensor:
    """Return `count` indices, 1 to `length` of them, in the middles of equal parts of `range(length)`."""
    count = max(1, min(count, length))
    return (torch.arange(count, device=like.device) * 2 + 1) * length // (2 * count)


class SpectralNorm:
    """Estimates the largest singular value of a matrix by power iteration; the vector is kept from step to step.

    The estimate never exceeds the true value (except for rounding) and approaches it from look to look, fast where the
    two largest singular values are far apart.

    Source: Miyato et al., "Spectral Normalization for Generative Adversarial Networks", algorithm 1; Golub and Van
    Loan, "Matrix Computations", section 8.2.
    """

    def __init__(self) -> None:
        self._right: Tensor | None = None

    def of(self, weight_OI: Tensor) -> Tensor:  # noqa: N803  # the dimensions are part of the name
        """Iterate once more on the weight [O, I] and return the estimate, 0-d float32 (float64 for float64).

        NaN if a weight is not finite. Reads the matrix twice per iteration, in pieces where it is of lower precision
        than float32.
        """
        dtype = torch.promote_types(weight_OI.dtype, torch.float32)
        right, iterations = self._right, NEXT_ITERATIONS
        if right is None or right.shape[0] != weight_OI.shape[1] or right.device != weight_OI.device:
            right, iterations = _start(weight_OI, dtype), FIRST_ITERATIONS
        kept = right
        for _ in range(iterations):
            left = _unit(_product(weight_OI, right, dtype))
            right = _transposed_product(weight_OI, left, dtype)
            norm: Tensor = torch.linalg.vector_norm(right)
            right = _unit(right)
        # a weight that is not finite, or nothing but zeros, must not spoil the looks after it
        self._right = torch.where((norm > 0) & norm.isfinite(), right, kept)
        return norm


def _start(weight: Tensor, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(weight.device).manual_seed(weight.shape[1])
    return _unit(torch.randn(weight.shape[1], generator=generator, device=weight.device, dtype=dtype))


def _unit(vector: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(vector)
    return vector / norm.clamp(min=torch.finfo(vector.dtype).tiny)


def _product(weight: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat([piece.to(dtype) @ right for piece in _rows_of(weight, dtype)])


def _transposed_product(weight: Tensor, left: Tensor, dtype: torch.dtype) -> Tensor:
    rows = _rows_of(weight, dtype)
    parts = torch.split(left, len(rows[0]))
    return torch.stack([piece.to(dtype).t() @ part for piece, part in zip(rows, parts, strict=True)]).sum(0)


def _rows_of(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    length = len(weight) if weight.dtype is dtype else max(1, pieces.piece_size(weight) // weight.shape[1])
    rows: tuple[Tensor, ...] = torch.split(weight, length)
    return rows


def similarities(weight_EI: Tensor) -> Tensor:  # noqa: N803
    """Return the cosines of the angles between the weight vectors of all pairs of different experts, `[E, E - 1]`.

    A vector of zeros has cosine 0 with any other. One expert has no pair: `[1, 0]`.
    """
    num_experts = len(weight_EI)
    weight = weight_EI.to(torch.promote_types(weight_EI.dtype, torch.float32))
    norms: Tensor = torch.linalg.vector_norm(weight, dim=-1, keepdim=True)
    unit = weight / norms.clamp(min=torch.finfo(weight.dtype).tiny)
    cosines = (unit @ unit.t()).flatten()
    # without its first element, a row of E + 1 ends with an element of the diagonal
    return cosines[1:].view(num_experts - 1, num_experts + 1)[:, :-1].reshape(num_experts, num_experts - 1)


def choice_entropies(logits_TE: Tensor) -> Tensor:  # noqa: N803
    """Return, per token, the entropy in nats of the softmax of its logits over the experts, 0 to ln E; `[T]`."""
    dtype = torch.promote_types(logits_TE.dtype, torch.float32)
    entropies: Tensor = torch.special.entr(logits_TE.reshape(-1, logits_TE.shape[-1]).to(dtype).softmax(-1)).sum(-1)
    return entropies


def counts_of(indices: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert's number is among `indices` (any shape), int64 `[E]`.

    Deterministic on every device.
    """
    borders = torch.arange(num_experts + 1, device=indices.device, dtype=indices.dtype)
    return torch.searchsorted(indices.flatten().sort().values, borders).diff()


def underflows(format_name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of values and their scale: 1 where a value that is not zero becomes zero in FP8, else 0.

    Args:
        format_name: `e4m3` or `e5m2`.
    """
    limit = FP8_UNDERFLOW[format_name]
    return lambda values, scale: ((values != 0) & ((values.float() * scale).abs() <= limit)).float()
