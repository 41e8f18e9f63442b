"""Dumps whose check is timed: many small calls, a block of a real size, a large product, the operator database."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.checks.database import database_calls
from trainermon import PrecisionDebugger

WIDTH, HEADS, TOKENS, SIZE = 1024, 16, 2048, 8192
_FEW_CALLS = 4


def dumped(folder: Path, step: Callable[[], object]) -> Path:
    """Run `step`, and return the folder that has its calls with all tensors."""
    debugger = PrecisionDebugger(dump_path=str(folder), task="tensor", level="L1")
    debugger.start()
    step()
    debugger.stop()
    debugger.step()
    PrecisionDebugger.close()
    return next(folder.rglob("dump.json")).parent


def small_calls(number: int) -> None:
    """Make `number` calls of a few thousand numbers, and their backwards."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64).requires_grad_()
    x = torch.randn(16, 64)
    for _ in range(number // _FEW_CALLS):
        y = functional.gelu(functional.linear(x, weight))
        functional.softmax(functional.layer_norm(y, [64]), -1).backward(torch.randn(16, 64))


def block(dtype: torch.dtype = torch.bfloat16) -> None:
    """Run a transformer block of hidden size 1024 on 2048 tokens, forward and backward."""
    torch.manual_seed(0)
    scale = WIDTH**-0.5
    sizes = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))
    weights = [(torch.randn(size) * scale).to(dtype).requires_grad_() for size in sizes]
    x = torch.randn(1, TOKENS, WIDTH).to(dtype).requires_grad_()

    def norm(one: Tensor) -> Tensor:
        return functional.layer_norm(one, [WIDTH])

    parts = functional.linear(norm(x), weights[0]).view(1, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
    y = x + functional.linear(mixed.transpose(1, 2).reshape(1, TOKENS, WIDTH), weights[1])
    y = y + functional.linear(functional.gelu(functional.linear(norm(y), weights[2])), weights[3])
    y.backward(torch.randn(1, TOKENS, WIDTH).to(dtype))


def product(*, backward: bool = False) -> Callable[[], None]:
    """Return what multiplies two matrices of 8192 rows and columns in bfloat16, and with `backward` goes back."""
    torch.manual_seed(0)
    left, right, gradient = (torch.randn(SIZE, SIZE).to(torch.bfloat16) for _ in range(3))

    def step() -> None:
        with _SummedInSingle():
            made = torch.matmul(left.requires_grad_(backward), right.requires_grad_(backward))
            if backward:
                made.backward(gradient)

    return step


class _SummedInSingle(TorchDispatchMode):
    """Multiplies matrices of 16 bits in float32, as accelerators do: many a CPU takes an hour for it else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            return torch.mm(args[0].float(), args[1].float()).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def database(dtype: torch.dtype, every: int = 1) -> Callable[[], None]:
    """Return what calls every `every`-th operation of the database, but random ones and those of undefined results."""
    warnings.simplefilter("ignore")
    calls = [one.call for one in database_calls(dtype, 1, every)]

    def step() -> None:
        for call in calls:
            with contextlib.suppress(Exception):  # whatever a kernel raises that this torch was built without
                call.function(*call.args, **call.kwargs)

    return step
