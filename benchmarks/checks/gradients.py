"""Verdicts on sound and on broken gradients of the operator database."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.checks.database import DatabaseCall, database_calls
from benchmarks.checks.faults import result_faults
from benchmarks.checks.grid import Verdict, changed_by, differs, is_floating, verdict_on
from benchmarks.checks.healthy import eager, in_simpler_operations
from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import Judgement, Status, family_of_call, judge_gradient
from trainermon.accuracy.products import BackwardCall, GradientSum, VectorProduct, gradients_on

_ALL_OFF = ("a tenth larger", 1.1)


def sound_gradients(dtype: torch.dtype, samples: int) -> list[Verdict]:
    """Return the verdicts on sound backwards in one type, by every way to compute them."""
    return [verdict for each in database_calls(dtype, samples) for verdict in _sound(each)]


def broken_gradients(dtype: torch.dtype) -> list[Verdict]:
    """Return the verdicts on broken gradients in one type: one call of each operation, every gross fault."""
    return [verdict for each in database_calls(dtype, 1) for verdict in _broken(each)]


def _torch(backward: BackwardCall) -> list[Tensor]:
    return gradients_on(backward, "cpu")


def _decomposed(backward: BackwardCall) -> list[Tensor]:
    with in_simpler_operations():
        return gradients_on(backward, "cpu")


def _wide(backward: BackwardCall) -> list[Tensor]:
    """Return the gradients as float32 inside gives them, or float64 for wider types, each rounded once."""
    is_half = any(tensor.dtype.itemsize == 2 for tensor in backward.call.tensors if tensor.is_floating_point())

    def widened(value: object) -> object:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            wide = torch.float32 if is_half else torch.float64
            return value.to(wide.to_complex() if value.is_complex() else wide)
        return value

    call = backward.call
    args, kwargs = pytree.tree_map(widened, (list(call.args), dict(call.kwargs)))
    gradients = pytree.tree_map(widened, list(backward.gradients))
    found = gradients_on(backward._replace(call=call._replace(args=args, kwargs=kwargs), gradients=gradients), "cpu")
    taken = [call.tensors[number] for number in sorted(backward.wanted)]
    return [one.to(like.dtype) for one, like in zip(found, taken, strict=True)]


WAYS: Mapping[str, Callable[[BackwardCall], list[Tensor]]] = {
    "torch": _torch,
    "decompositions": _decomposed,
    "wider inside": _wide,
}


def _backward(each: DatabaseCall) -> BackwardCall | None:
    """Return the backward of a call with gradients drawn at random; None if it has none that is judged."""
    family = family_of_call(each.name, each.call)
    if family is Family.GAUGE:
        return None
    made = [leaf for leaf in pytree.tree_leaves(eager(each.call)) if isinstance(leaf, Tensor)]
    draws = torch.Generator().manual_seed(1)
    gradients = [_drawn(one, draws) if is_floating(one) else None for one in made]
    wanted = [number for number, tensor in enumerate(each.call.tensors) if is_floating(tensor)]
    if not wanted or all(one is None for one in gradients):
        return None
    return BackwardCall(each.call, gradients, family, wanted)


def _drawn(like: Tensor, draws: torch.Generator) -> Tensor:
    wide = torch.complex128 if like.is_complex() else torch.float64
    return torch.randn(like.shape, generator=draws, dtype=wide).to(like.dtype)


def _judged(backward: BackwardCall, product: VectorProduct, found: Sequence[Tensor]) -> list[Judgement]:
    return [
        judge_gradient(given, GradientSum([(product, number)], given), backward.coarsest)
        for number, given in zip(sorted(backward.wanted), found, strict=True)
    ]


def _sound(each: DatabaseCall) -> Iterator[Verdict]:
    """Yield the verdict on each way; nothing if the call cannot be differentiated, or not be computed in this way."""
    try:
        backward = _backward(each)
        product = VectorProduct(backward) if backward is not None else None
    except Exception:  # noqa: BLE001  # a sample for another device, or nothing that can be differentiated
        return
    if backward is None or product is None:
        return
    for what, compute in WAYS.items():
        try:
            found = _judged(backward, product, compute(backward))
        except Exception:  # noqa: BLE001  # no such rule, or no kernel of the type
            continue
        yield verdict_on(each, what, "healthy", 0, found)


def _broken(each: DatabaseCall) -> Iterator[Verdict]:
    try:
        backward = _backward(each)
        product = VectorProduct(backward) if backward is not None else None
        sound = gradients_on(backward, "cpu") if backward is not None else []
        if backward is None or product is None or not _is_sound(_judged(backward, product, sound)):
            return
    except Exception:  # noqa: BLE001  # a sample for another device, or nothing that can be differentiated
        return
    for what, wrong in _faulty(sound, each.key):
        if any(bool(differs(one, other).any()) for one, other in zip(wrong, sound, strict=True)):
            yield verdict_on(each, what, "gross", 0, _judged(backward, product, wrong))


def _faulty(sound: Sequence[Tensor], key: str) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield each fault with the gradients that it leaves: all off by a factor, or the first one with a gross fault."""
    what, factor = _ALL_OFF
    yield what, [(one.to(torch.promote_types(one.dtype, torch.float64)) * factor).to(one.dtype) for one in sound]
    for fault in result_faults():
        if fault.kind == "gross":
            yield fault.name, [changed_by(sound[0].detach(), fault, key), *sound[1:]]


def _is_sound(found: Sequence[Judgement]) -> bool:
    return all(one.status in (Status.PASS, Status.WARNING) for one in found)
