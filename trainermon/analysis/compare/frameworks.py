"""What MindSpore calls things that PyTorch has too: functions, parameters and dtypes.

Source: the API mapping table of the MindSpore documentation ("PyTorch and MindSpore API Mapping Table").
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

MINDSPORE = "mindspore"
PYTORCH = "pytorch"

# Functions of MindSpore that have another name in PyTorch; all others are looked for under their own.
FUNCTIONS: Mapping[str, str] = MappingProxyType(
    {
        "assign": "copy_",
        "bidense": "bilinear",
        "broadcast_to": "expand",
        "cast": "to",
        "concat": "cat",
        "dense": "linear",
        "equal": "eq",
        "expand_dims": "unsqueeze",
        "floor_div": "floor_divide",
        "gather_elements": "gather",
        "greater": "gt",
        "greater_equal": "ge",
        "invert": "bitwise_not",
        "less": "lt",
        "less_equal": "le",
        "not_equal": "ne",
        "reduce_max": "amax",
        "reduce_mean": "mean",
        "reduce_min": "amin",
        "reduce_sum": "sum",
        "reverse": "flip",
        "select": "where",
        "size": "numel",
        "tensor_scatter_elements": "scatter",
        "top_k": "topk",
        "truncate_div": "div",
    }
)
PARAMETERS: Mapping[str, str] = MappingProxyType(
    {
        "beta": "bias",
        "embedding_table": "weight",
        "gamma": "weight",
        "moving_mean": "running_mean",
        "moving_variance": "running_var",
    }
)
# Where PyTorch may have a function: first the family that corresponds, then those that also offer it.
_FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Mint": ("Torch", "Functional", "Tensor"),
        "MintFunctional": ("Functional", "Torch", "Tensor"),
        "MintDistributed": ("Distributed",),
        "Functional": ("Functional", "Torch", "Tensor"),
        "Primitive": ("Functional", "Torch", "Tensor"),
        "Tensor": ("Tensor", "Torch", "Functional"),
    }
)


def function_name(family: str, name: str, known: Collection[str]) -> str:
    """Return PyTorch's name for the function `name` of MindSpore: the first of the possible ones that is in `known`.

    `family` is the first part of its key in a dump (`Mint`, `Functional`).

    >>> function_name("Mint", "concat", {"Torch.cat"}), function_name("Functional", "abs", {"Torch.abs"})
    ('Torch.cat', 'Torch.abs')
    """
    possible = list(_possible(family, name))
    return next((full for full in possible if full in known), possible[0])


def _possible(family: str, name: str) -> Iterator[str]:
    for other in _FAMILIES.get(family, (family,)):
        yield f"{other}.{FUNCTIONS.get(name, name)}"
        yield f"{other}.{name}"


def parameter_name(name: str) -> str:
    """Return PyTorch's name for a parameter of a MindSpore cell.

    >>> parameter_name("gamma"), parameter_name("bias")
    ('weight', 'bias')
    """
    return PARAMETERS.get(name, name)


def dtype_name(dtype: str | None) -> str:
    """Return a dtype's name without its framework, as both frameworks write it; "" for None.

    >>> dtype_name("torch.bfloat16"), dtype_name("BFloat16"), dtype_name("mindspore.float32")
    ('bfloat16', 'bfloat16', 'float32')
    """
    return (dtype or "").rpartition(".")[2].lower()
