"""Tensors of every dtype of torch and every layout, made of the same numbers, sound and damaged."""

import warnings

import torch
from torch.masked import masked_tensor


def _one_element(numbers):
    changed = numbers.clone()
    changed[0, 0] = 5.0
    return changed


DAMAGES = {
    "one element": _one_element,
    "zeroed": lambda numbers: numbers * 0,
    "negated": lambda numbers: -numbers,
    "scaled": lambda numbers: numbers * 0.7,
    "others": lambda numbers: torch.randn(numbers.shape, generator=torch.Generator().manual_seed(9)),
}
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_MASK = torch.arange(64).view(8, 8) % 3 == 0


def all_dtypes():
    return sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


def numbers():
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(3))


def cast(values, dtype):
    """Return `values`, float32 [8, 8], in any dtype; unsigned types have their sizes."""
    if dtype in (torch.quint4x2, torch.quint2x4):
        return torch.quantize_per_channel(values, torch.full((8,), 0.5), torch.ones(8), 0, dtype)
    if dtype in (torch.quint8, torch.qint8, torch.qint32):
        return torch.quantize_per_tensor(values, 0.0625, 100 if dtype is torch.quint8 else 0, dtype)
    if dtype is torch.bool:
        return values > 0.3
    if dtype.is_complex or (dtype.is_floating_point and dtype is not getattr(torch, "float4_e2m1fn_x2", None)):
        return values.to(dtype)
    if dtype in _WHOLE:
        return (values * 40).to(dtype) if dtype.is_signed else (values * 40).abs().to(dtype)
    return (values * 40).to(torch.int16 if dtype.itemsize == 2 else torch.int8).view(dtype)  # not computed with


def _sparse(layout, **kwargs):
    return lambda values: torch.where(_MASK, values, 0.0).to_sparse(layout=layout, **kwargs)


LAYOUTS = {
    "not contiguous": lambda values: values.t()[::2],
    "conjugate": lambda values: torch.complex(values, values.flip(0) * 0.5).conj(),
    "negative": lambda values: torch.complex(values.flip(0), values).conj().imag,
    "scalar": lambda values: values[0, 0],
    "coo": _sparse(torch.sparse_coo),
    "csr": _sparse(torch.sparse_csr),
    "csc": _sparse(torch.sparse_csc),
    "bsr": _sparse(torch.sparse_bsr, blocksize=(2, 2)),
    "bsc": _sparse(torch.sparse_bsc, blocksize=(2, 2)),
    "complex coo": lambda values: (torch.where(_MASK, values, 0.0) * (1 + 2j)).to_sparse(),
    "jagged": lambda values: torch.nested.nested_tensor([values[:3], values[3:]], layout=torch.jagged),
    "nested": lambda values: torch.nested.nested_tensor([values[:3], values[3:]]),
    "masked": lambda values: masked_tensor(values, _MASK),
    "per channel": lambda values: torch.quantize_per_channel(
        values, torch.full((8,), 0.0625), torch.zeros(8, dtype=torch.int64), 0, torch.qint8
    ),
}


def every_kind(values):
    """Return tensors of `values`, float32 [8, 8], by name: one for every dtype and one for every layout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {str(dtype).removeprefix("torch."): cast(values, dtype) for dtype in all_dtypes()}
        return found | {name: make(values) for name, make in LAYOUTS.items()}


def saved_kinds(values):
    """Return those of `every_kind` that `torch.save` takes: not the integers of less than a byte."""
    narrow = {f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8)}
    return {name: tensor for name, tensor in every_kind(values).items() if name not in narrow}


def unchanged_by(damage):
    """Return the names of kinds that have no sign, where the damage is one of the sign alone."""
    unsigned = {"uint8", "uint16", "uint32", "uint64", "float8_e8m0fnu"}
    return unsigned if damage == "negated" else set()
