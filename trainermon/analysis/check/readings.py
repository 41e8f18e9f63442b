"""What types a dumped call may have computed in: dumps do not always say."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.families import Family, family_of
from trainermon.accuracy.reference import unit_roundoff
from trainermon.replay.dumped_calls import DumpedCall

# They multiply on the way to their result.
_WITH_PRODUCTS = (
    *("gru", "gru_cell", "lstm", "lstm_cell", "rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell"),
    *("linear_cross_entropy", "multi_head_attention_forward", "scaled_dot_product_attention"),
)


def computed_in(dumped: DumpedCall, autocast: str) -> torch.dtype | None:
    """Return the type that autocast rounded a call's inputs to; None if it did not.

    `autocast` is the type that the dump names, "" where it names none, as msprobe's never do.
    """
    narrow = narrow_result(dumped)
    if narrow is not None and (autocast == str(narrow) or is_product(dumped.name)):
        return narrow
    said = getattr(torch, autocast.removeprefix("torch."), None) if autocast else None
    return said if isinstance(said, torch.dtype) and is_product(dumped.name) else None


def is_product(name: str) -> bool:
    """Return whether autocast gives an operation narrower inputs."""
    return family_of(name) is Family.CONTRACTION or name in _WITH_PRODUCTS


def narrow_result(dumped: DumpedCall) -> torch.dtype | None:
    """Return the type of a call's result if some of what it was given is finer, as autocast leaves it; else None."""
    made = [leaf for leaf in pytree.tree_leaves(dumped.result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    given = [unit_roundoff(tensor.dtype) for tensor in dumped.call.tensors if tensor.is_floating_point()]
    if not made or not given or min(given) >= unit_roundoff(made[0].dtype):
        return None
    return made[0].dtype


def rounded(call: OperationCall, dtype: torch.dtype) -> OperationCall:
    """Return the call with its floating tensors rounded to a type."""

    def narrowed(value: object) -> object:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    args, kwargs = pytree.tree_map(narrowed, (list(call.args), dict(call.kwargs)))
    return call._replace(args=args, kwargs=kwargs)
