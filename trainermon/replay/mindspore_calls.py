"""Functions of MindSpore as torch has them: a dumped call of one is judged by an implementation that is not its own.

`mindspore.mint` is made to mean what torch means by the same names. Of `mindspore.ops`, of tensors' methods and of
primitives only those are here whose meaning is known to be the same; any other call is not judged, and says so.
Source: the API mapping table of the MindSpore documentation ("PyTorch and MindSpore API Mapping Table").
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

PREFIXES = ("Mint", "MintFunctional", "Functional", "Tensor", "Primitive")
_TENSOR = "mindspore.Tensor"
_SHORT_KEYWORDS = {"axis": "dim", "keep_dims": "keepdim", "keepdims": "keepdim", "x": "input"}
# The same name and the same arguments in `mindspore.ops`, and in torch or torch.nn.functional.
_SAME = frozenset([
    "abs", "acos", "acosh", "add", "all", "amax", "amin", "any", "asin", "asinh", "atan", "atan2", "atanh",
    "bitwise_and", "bitwise_or", "bitwise_xor", "bmm", "broadcast_to", "ceil", "clamp", "cos", "cosh", "div", "elu",
    "eq", "erf", "erfc", "exp", "expm1", "floor", "ge", "gelu", "gt", "isfinite", "isinf", "isnan", "layer_norm", "le",
    "lerp", "log", "log10", "log1p", "log2", "logical_and", "logical_not", "logical_or", "logical_xor", "logsigmoid",
    "lt", "masked_fill", "matmul", "maximum", "mean", "minimum", "mish", "mm", "mul", "ne", "neg", "permute", "pow",
    "reciprocal", "relu", "relu6", "reshape", "rsqrt", "selu", "sigmoid", "sign", "silu", "sin", "sinh", "softplus",
    "sqrt", "square", "squeeze", "stack", "sub", "swapaxes", "tan", "tanh", "tile", "tril", "triu", "trunc",
    "unsqueeze", "where",
])  # fmt: skip
_OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "concat": "cat",
        "equal": "eq",
        "expand_dims": "unsqueeze",
        "greater": "gt",
        "greater_equal": "ge",
        "less": "lt",
        "less_equal": "le",
        "not_equal": "ne",
    }
)
_FIRST_OF_PRIMITIVES = frozenset([
    "Abs", "Add", "Cos", "Div", "Equal", "Erf", "Exp", "ExpandDims", "Greater", "GreaterEqual", "Less", "LessEqual",
    "Log", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mul", "Neg", "NotEqual", "Pow", "Reciprocal",
    "Reshape", "Rsqrt", "Sigmoid", "Sin", "Sqrt", "Square", "Sub", "Tanh", "Tile",
])  # fmt: skip


def is_of_mindspore(form: object) -> bool:
    """Return whether a JSON form of a dump has a tensor of MindSpore in it."""
    if isinstance(form, dict):
        return form.get("type") == _TENSOR or any(map(is_of_mindspore, form.values()))
    return isinstance(form, list) and any(map(is_of_mindspore, form))


def torchs_function(
    prefix: str, name: str, attributes: Mapping[str, Any], find: Callable[[str, str], Callable[..., Any]]
) -> Callable[..., Any] | None:
    """Return what computes in torch what a function of MindSpore computes; None: it is not known.

    Args:
        prefix: The first part of its key, `Mint`.
        name: The rest, `add`; of a primitive attribute and class, `matmul.MatMul`.
        attributes: Those of a primitive, as the dump has them.
        find: Returns the function of torch that a prefix and a name lead to; raises if there is none.
    """
    if prefix == "Primitive":
        return _of_primitive(name.rpartition(".")[2], attributes, find)
    if prefix.startswith("Mint"):
        return _named(*_OWN[name]) if name in _LONG_INDICES else find("Functional", _OTHER_NAMES.get(name, name))
    if name.startswith("__"):
        return find("Tensor", name)
    if name in _OWN:
        return _named(*_OWN[name])
    name = _OTHER_NAMES.get(name, name)
    if name == "cat":
        return _with_torchs_keywords(torch.cat)
    home = "Tensor" if prefix == "Tensor" else "Functional"
    return _with_torchs_keywords(find(home, name)) if name in _SAME else None


def _of_primitive(
    kind: str, attributes: Mapping[str, Any], find: Callable[[str, str], Callable[..., Any]]
) -> Callable[..., Any] | None:
    if kind in _PRIMITIVES:
        return _named(*_PRIMITIVES[kind], attributes)
    if kind not in _FIRST_OF_PRIMITIVES:
        return None
    name = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in kind)[1:]
    return find("Functional", _OTHER_NAMES.get(name, name))


def _named(name: str, function: Callable[..., Any], *bound: Any) -> Callable[..., Any]:
    made = functools.partial(function, *bound)
    made.__name__ = name  # type: ignore[attr-defined]  # by it a call is judged
    return made


def _with_torchs_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{_SHORT_KEYWORDS.get(name, name): value for name, value in kwargs.items()})

    return called


def _softmax(input: Tensor, axis: int = -1, *, dtype: Any = None) -> Tensor:  # MindSpore's keyword
    return torch.softmax(input, axis, dtype=dtype)


def _log_softmax(logits: Tensor, axis: int = -1) -> Tensor:
    return torch.log_softmax(logits, axis)


def _sum(input: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:  # noqa: FBT001, FBT002
    axes = kwargs.get("axis", dim)
    return torch.sum(input, axes, kwargs.get("keepdims", keepdim), dtype=kwargs.get("dtype"))


def _cumsum(x: Tensor, axis: int, dtype: Any = None) -> Tensor:
    return torch.cumsum(x, axis, dtype=dtype)


def _to(tensor: Tensor, dtype: torch.dtype, copy: bool = True) -> Tensor:  # noqa: FBT001, FBT002
    return tensor.to(dtype, copy=copy)


def _permute(input: Tensor, *order: Any) -> Tensor:
    """Return what MindSpore calls `transpose`; it takes the order of all dimensions."""
    axes = order[0] if len(order) == 1 and isinstance(order[0], Sequence) else order
    return input.permute(*axes)


def _gather(input_params: Tensor, input_indices: Tensor, axis: int = 0, batch_dims: int = 0) -> Tensor:
    if batch_dims:
        raise TypeError(f"batch_dims {batch_dims}: only 0 can be computed with torch")
    axis %= input_params.dim()
    found = input_params.index_select(axis, input_indices.reshape(-1).long())
    return found.reshape(*input_params.shape[:axis], *input_indices.shape, *input_params.shape[axis + 1 :])


def _cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    names = ("weight", "ignore_index", "reduction", "label_smoothing")
    whole = target if target.is_floating_point() else target.long()
    return functional.cross_entropy(input, whole, **dict(zip(names, args, strict=False)), **kwargs)


def _mse_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return functional.mse_loss(input, target, reduction=reduction)


def _l1_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return functional.l1_loss(input, target, reduction=reduction)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(input, weight, bias)


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any) -> Tensor:
    return functional.embedding(input.long(), weight, padding_idx, *rest)


def _matmul(attributes: Mapping[str, Any], x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(_turned(x, attributes, "transpose_a"), _turned(y, attributes, "transpose_b"))


def _turned(tensor: Tensor, attributes: Mapping[str, Any], key: str) -> Tensor:
    return tensor.transpose(-1, -2) if attributes.get(key) else tensor


def _bias_add(attributes: Mapping[str, Any], x: Tensor, bias: Tensor) -> Tensor:
    """Return what `BiasAdd` gives: channels are the last dimension of NHWC, else the second."""
    shape = [1] * x.dim()
    shape[-1 if attributes.get("data_format") == "NHWC" else 1] = -1
    return x + bias.reshape(shape)


def _layer_norm(attributes: Mapping[str, Any], x: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    begin = int(attributes.get("begin_norm_axis", 1)) % x.dim()
    dims = tuple(range(begin, x.dim()))
    made = functional.layer_norm(x, x.shape[begin:], gamma, beta, float(attributes.get("epsilon", 1e-7)))
    return made, x.mean(dims, keepdim=True), x.var(dims, correction=0, keepdim=True)


# What torch calls it, and what computes it.
_OWN: Mapping[str, tuple[str, Callable[..., Any]]] = MappingProxyType(
    {
        "astype": ("to", _to),
        "cast": ("to", _to),
        "cross_entropy": ("cross_entropy", _cross_entropy),
        "cumsum": ("cumsum", _cumsum),
        "dense": ("linear", _linear),
        "embedding": ("embedding", _embedding),
        "gather": ("gather", _gather),
        "l1_loss": ("l1_loss", _l1_loss),
        "log_softmax": ("log_softmax", _log_softmax),
        "mse_loss": ("mse_loss", _mse_loss),
        "softmax": ("softmax", _softmax),
        "sum": ("sum", _sum),
        "transpose": ("permute", _permute),
    }
)
_LONG_INDICES = frozenset(["cross_entropy", "embedding"])  # of which torch takes no int32
# The same of primitives, from attributes and arguments.
_PRIMITIVES: Mapping[str, tuple[str, Callable[..., Any]]] = MappingProxyType(
    {
        "BatchMatMul": ("matmul", _matmul),
        "BiasAdd": ("add", _bias_add),
        "Cast": ("to", lambda _, x, dtype: _to(x, dtype)),
        "Gather": ("gather", lambda _, *args: _gather(*args)),
        "LayerNorm": ("layer_norm", _layer_norm),
        "MatMul": ("matmul", _matmul),
        "ReduceMean": ("mean", lambda made, x, axis=(): torch.mean(x, axis or None, bool(made.get("keep_dims")))),
        "ReduceSum": ("sum", lambda made, x, axis=(): torch.sum(x, axis or None, bool(made.get("keep_dims")))),
        "Softmax": ("softmax", lambda made, x: torch.softmax(x, _one(made.get("axis", -1)))),
        "Transpose": ("permute", lambda _, x, order: _permute(x, order)),
    }
)


def _one(axis: Any) -> int:
    return int(axis[0] if isinstance(axis, Sequence) else axis)
