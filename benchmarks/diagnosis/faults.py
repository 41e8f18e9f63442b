"""Puts a fault into a training for one step.

What a module computes is changed inside of its `forward`, so that hooks of others see it as the module's own doing;
what a module's backward gives is changed by an autograd function in there, not by a hook.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.cases import Case
from benchmarks.diagnosis.jobs import Job, local, weight_of
from benchmarks.diagnosis.model import Change, unchanged


def effect_of(case: Case) -> Change:
    """Return what happens to a value: nothing in a clean case."""
    return functools.partial(_EFFECTS[case.effect], case.number) if case.effect in _EFFECTS else unchanged


@contextlib.contextmanager
def injected(job: Job, case: Case) -> Iterator[None]:
    """Have the fault of `case` in the training as long as this lasts; what is broken for good stays so."""
    change = effect_of(case)
    module = job.modules.get("" if case.module == "(model)" else case.module)
    with contextlib.ExitStack() as stack:
        if case.site in ("loss", "batch"):
            stack.enter_context(_attribute(job.script, case.site, change))
        elif case.site == "loss-gradient":
            stack.enter_context(_attribute(job.script, "loss", functools.partial(in_backward, change=change)))
        elif case.site in ("own-operation", "own-gradient"):
            assert module is not None
            own = change if case.site == "own-operation" else functools.partial(in_backward, change=change)
            stack.enter_context(job.own(module, own))
        elif case.site in ("weight", "huge"):
            assert module is not None
            _spoil(job.weight_of(module), case, columns=_width(module))
        elif case.site in ("reduction", "between"):
            assert module is not None
            name = "reduced" if case.site == "reduction" else "between"
            spoil = functools.partial(_spoil_gradient, weight_of(module), change)
            stack.enter_context(_attribute(job.script, name, spoil))
        elif case.site == "moment":
            assert module is not None
            _spoil(job.moments_of(module)["exp_avg_sq" if case.effect == "sign-flip" else "exp_avg"], case)
        elif module is not None:
            stack.enter_context(_attribute(module, "forward", _forward(module, case, change)))
        yield


def _width(module: nn.Module) -> int:
    """Return how long the rows of an embedding are: a word that does not occur does no harm; else 0."""
    return module.embedding_dim if isinstance(module, nn.Embedding) else 0


@torch.no_grad()
def _spoil_gradient(weight: nn.Parameter, change: Change, reduced: Any = None, gradient: Tensor | None = None) -> None:
    """Change the gradient of `weight`: the one that was `reduced` if it is it, else the one that is there."""
    if gradient is None:
        gradient = local(weight.grad)
    elif reduced is not weight:
        return
    gradient.copy_(change(gradient))


def _forward(module: nn.Module, case: Case, change: Change) -> Callable[..., Any]:
    inner = module.forward
    if case.site == "weight-gradient":
        return functools.partial(_with_bad_weight_gradient, module, inner, change)
    if case.site == "gradient":
        change = functools.partial(in_backward, change=change)
    elif case.site == "output-once":
        change = functools.partial(_once, change, [])
    return functools.partial(_changed_output, inner, change)


def _changed_output(inner: Callable[..., Any], change: Change, *args: Any, **kwargs: Any) -> Any:
    output = inner(*args, **kwargs)
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def _once(change: Change, calls: list[int], x: Tensor) -> Tensor:
    """Change `x` on the first call, by operations that are the same on every one: a recomputation must save as much."""
    calls.append(1)
    with torch.no_grad():
        difference = (change(x) if len(calls) == 1 else x) - x
    return x + difference


def _with_bad_weight_gradient(module: nn.Module, inner: Callable[..., Any], change: Change, *args: Any) -> Any:
    """Compute with a copy of the weight through whose gradient `change` passes."""
    held = module._parameters
    name, weight = next((name, weight) for name, weight in held.items() if weight is not None)
    if isinstance(module, nn.Linear):
        return functional.linear(*args, in_backward(weight, change=change), module.bias)
    held[name] = in_backward(weight, change=change)  # type: ignore[assignment]
    try:
        return inner(*args)
    finally:
        held[name] = weight


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Change) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.change(gradient), None


def in_backward(x: Tensor, change: Change) -> Tensor:
    """Return `x`; `change` happens to the gradient when it passes."""
    found: Tensor = _InBackward.apply(x, change)  # type: ignore[no-untyped-call]
    return found


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of this very object, and put back what was there."""
    had, before = name in vars(owner), vars(owner).get(name)
    vars(owner)[name] = value
    try:
        yield
    finally:
        vars(owner).pop(name)
        if had:
            vars(owner)[name] = before


@torch.no_grad()
def _spoil(tensor: Tensor, case: Case, *, columns: int = 0) -> None:
    """Change an element of a stored tensor for good; with `columns`, one in each row of so many."""
    flat = tensor.view(-1)
    if columns and case.family and not case.against:
        flat[case.number % columns :: columns] = _SPOILT[case.effect]
        return
    index = (7 * case.number + 3) % flat.numel()
    if case.against:
        flat.copy_(_EFFECTS[case.effect](case.number, flat))
        return
    if case.effect == "bit-flip":
        flat[index].clamp_(1.0, 1.9)  # weights of norms begin at 1
        flat.view(torch.int32)[index] ^= 1 << 30
    elif case.effect == "sign-flip":
        flat[index] = -flat[index].abs().clamp(min=1e-3)
    else:
        flat[index] = _SPOILT[case.effect]


_SPOILT = {"nan": torch.nan, "inf": torch.inf, "huge": 1e37}


def _one(value: float, _number: int, x: Tensor) -> Tensor:
    """Spoil the largest element: others may not count, as what a router says of experts that it does not choose."""
    largest = x.detach().abs().argmax()
    x = x.clone(memory_format=torch.contiguous_format)
    x.view(-1)[largest] = value
    return x


def _float16_overflow(_number: int, x: Tensor) -> Tensor:
    """Scale such that the largest element has no place in half precision, and compute there."""
    largest = x.detach().abs().max().clamp(min=1e-30)
    return (x / largest * 1e5).half().to(x.dtype)


def _division_by_zero(_number: int, x: Tensor) -> Tensor:
    return x / torch.zeros_like(x)


def _stale_memory(number: int, x: Tensor) -> Tensor:
    """Return what may stand in memory that nobody has written: any bits."""
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(-(1 << 31), 1 << 31, x.shape, generator=generator).to(torch.int32)
    stale = words.view(torch.float32).to(x.dtype)
    stale.view(-1)[0] = torch.nan  # of few elements none may be
    return x + (stale - x.detach())


def _one_bit(_number: int, x: Tensor) -> Tensor:
    """Flip a high bit of the mantissa of the largest element."""
    flipped = x.detach().clone(memory_format=torch.contiguous_format)
    flipped.view(torch.int32).view(-1)[flipped.abs().argmax()] ^= 1 << 21
    return x + (flipped - x.detach())


def _stale_buffer(_number: int, x: Tensor) -> Tensor:
    """Return what another row of the batch has."""
    return x + (x.roll(1, 0) - x).detach()


def _wrong_scale(_number: int, x: Tensor) -> Tensor:
    return x * 1.5


def _zeroed(_number: int, x: Tensor) -> Tensor:
    return x * 0.0


def _dead_end(_number: int, x: Tensor) -> Tensor:
    return x / 0.0


def _large_values(_number: int, x: Tensor) -> Tensor:
    return x * 1e10


_EFFECTS: dict[str, Callable[[int, Tensor], Tensor]] = {
    "nan": functools.partial(_one, torch.nan),
    "inf": functools.partial(_one, torch.inf),
    "float16-overflow": _float16_overflow,
    "division-by-zero": _division_by_zero,
    "stale-memory": _stale_memory,
    "wrong-scale": _wrong_scale,
    "zeroed": _zeroed,
    "one-bit": _one_bit,
    "stale-buffer": _stale_buffer,
    "dead-end": _dead_end,
    "large-values": _large_values,
}
