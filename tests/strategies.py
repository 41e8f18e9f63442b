"""Hypothesis strategies for tensors, and the fixed way in which property tests draw from them.

An example is a few small numbers (sizes, a seed, the name of a pattern), not its elements: large tensors are drawn as
fast as small ones, and a failing example is short.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

# The same examples on every machine and in every run: a red test is red for everybody.
fixed = settings(derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)

# Rows longer than what a kernel gathers at once, and shorter.
LONG_ROWS = st.sampled_from((64, 1000, 4095, 4097, 9000))

Fill = Callable[[np.random.Generator, int], "np.ndarray[tuple[int], np.dtype[np.float64]]"]


def _mixed(generator: np.random.Generator, size: int) -> np.ndarray:
    """Every kind of value in stretches of random length, so that a block meets one kind, two, or all."""
    values = np.empty(size)
    start = 0
    while start < size:
        stop = start + int(generator.choice((1, 7, 40, 700, 9000, 70_000)))
        kind = generator.choice([name for name in PATTERNS if name != "mixed"])
        values[start:stop] = PATTERNS[kind](generator, min(stop, size) - start)
        start = stop
    return values


def _specials(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.choice((0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -3.5), size)


PATTERNS: dict[str, Fill] = {
    "normal": lambda generator, size: generator.standard_normal(size),
    "equal": lambda generator, size: np.full(size, generator.uniform(-1, 1)),
    "zeros": lambda generator, size: generator.choice((0.0, -0.0), size),
    "tiny": lambda generator, size: generator.standard_normal(size) * 1e-25,
    "huge": lambda generator, size: generator.standard_normal(size) * 1e25,
    "subnormal": lambda generator, size: generator.standard_normal(size) * 1e-40,
    "any magnitude": lambda generator, size: generator.choice((-1, 1), size) * 10.0 ** generator.uniform(-30, 30, size),
    "nan": lambda generator, size: np.full(size, np.nan),
    "inf": lambda generator, size: generator.choice((np.inf, -np.inf), size),
    "one nan": lambda generator, size: np.where(
        np.arange(size) == generator.integers(size), np.nan, generator.standard_normal(size)
    ),
    "specials": _specials,
    "mixed": _mixed,
}

# Around the sizes at which a kernel changes its way: vector lanes, blocks, chunks, work items.
SIZES = st.one_of(
    st.integers(0, 70),
    st.sampled_from((511, 512, 513, 4095, 4097, 65_535, 65_536, 65_537, 131_104)),
    st.integers(0, 200_000),
)


def fill(pattern: str, size: int, *, dtype: torch.dtype, seed: int) -> Tensor:
    """Return `size` elements of a pattern; of an integer dtype, random ones from its whole range."""
    generator = np.random.default_rng(seed)
    if not dtype.is_floating_point:
        low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        whole = generator.integers(low, high, size, dtype=np.int64, endpoint=True)
        return torch.from_numpy(np.where(generator.random(size) < 0.1, 0, whole)).to(dtype)
    values = PATTERNS[pattern](generator, size) if size else np.empty(0)
    with np.errstate(over="ignore"):
        return torch.from_numpy(values).to(dtype)


@st.composite
def flat_tensors(
    draw: st.DrawFn, *, dtypes: tuple[torch.dtype, ...] = FLOATS + INTEGERS, sizes: st.SearchStrategy[int] = SIZES
) -> Tensor:
    """One-dimensional contiguous tensors of any dtype, size and content."""
    return fill(
        draw(st.sampled_from(sorted(PATTERNS))),
        draw(sizes),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 1 << 16)),
    )


def _slice(tensor: Tensor, step: int) -> Tensor:
    return tensor[(..., slice(None, None, step))] if tensor.dim() else tensor


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.permute(tuple(reversed(range(tensor.dim())))),
    "first columns": lambda tensor: tensor[..., : (tensor.shape[-1] + 1) // 2] if tensor.dim() else tensor,
    "every third": lambda tensor: _slice(tensor, 3),
    "every second row": lambda tensor: tensor[::2] if tensor.dim() else tensor,
    "scattered": lambda tensor: _slice(tensor[::2], 2) if tensor.dim() else tensor,
    "offset": lambda tensor: tensor.reshape(-1)[1:],
    "expanded": lambda tensor: tensor.unsqueeze(0).expand(3, *tensor.shape),
    "expanded inside": lambda tensor: tensor.unsqueeze(-1).expand(*tensor.shape, 4),
    "expanded rows": lambda tensor: _slice(tensor, 2).unsqueeze(0).expand(2, *_slice(tensor, 2).shape),
    "windows": lambda tensor: tensor.reshape(-1).unfold(0, 3, 1) if tensor.numel() >= 3 else tensor,
    "channels last": lambda tensor: tensor.reshape(1, -1, 1, 1).to(memory_format=torch.channels_last),
}


@st.composite
def laid_out_tensors(draw: st.DrawFn, *, dtypes: tuple[torch.dtype, ...] = FLOATS + INTEGERS) -> Tensor:
    """Tensors of any dtype, 0 to 4 dimensions, and any way to lie in memory."""
    shape = tuple(draw(st.one_of(st.lists(st.integers(0, 9), max_size=4), st.tuples(st.integers(0, 20), LONG_ROWS))))
    pattern = draw(st.sampled_from(("normal", "specials", "tiny", "mixed")))
    flat = fill(pattern, int(np.prod(shape)), dtype=draw(st.sampled_from(dtypes)), seed=draw(st.integers(0, 1 << 16)))
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](flat.reshape(shape))
