"""Why the result of an operation is not finite: the operation once more, from the same inputs, in wider types.

Decides between range (the mathematics overflows), precision (float32 would have held it) and kernel (the result fits,
so the device or its kernel is to blame). The reference is the CPU in float64: on another device it is independent of
the kernel that is judged, on the CPU it is another instance of it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall, RepeatableCall
from trainermon.dump.files.verdicts import NonfiniteCause

# An operation on more than that is not run again: its inputs in float64 are copied to the host.
MAX_ELEMENTS = 1 << 28
_NARROW_BITS = 32


class OperationJudgement(NamedTuple):
    """Why an operation's result was NaN or Inf.

    Attributes:
        cause: `range`, `precision`, `kernel` …
        reason: The same in a sentence.
        collect: If the cause is unknown, what to record to find out.
    """

    cause: NonfiniteCause
    reason: str
    collect: str = ""


def judge(called: OperationCall, result: Any) -> OperationJudgement:
    """Run an operation again in wider types on the CPU; return why its `result` was NaN or Inf.

    Nothing given is written to, no generator is moved. Cost: up to three calls on the CPU.
    """
    inputs = pytree.tree_leaves((list(called.args), dict(called.kwargs)))
    number = next((value for value in inputs if not is_finite_number(value)), None)
    if number is not None:
        return OperationJudgement(NonfiniteCause.INHERITED, f"the script gave it the number {number}")
    if not all(map(_is_sound, inputs)):
        return OperationJudgement(NonfiniteCause.INHERITED, "what it was given was not finite")
    if sum(value.numel() for value in inputs if isinstance(value, Tensor)) > MAX_ELEMENTS:
        return OperationJudgement(
            NonfiniteCause.UNKNOWN, f"its inputs have more than {MAX_ELEMENTS:,} elements: not run again"
        )
    state = torch.get_rng_state()
    try:
        return _judge(RepeatableCall(called), called, result)
    finally:
        torch.set_rng_state(state)


class TensorHealth(enum.Enum):
    """The state of a tensor's elements.

    `FINITE`: all are finite. `MASKED`: some are minus infinity, as scores under a mask. `BAD`: NaN or plus infinity.
    """

    FINITE = enum.auto()
    MASKED = enum.auto()
    BAD = enum.auto()


def health(tensor: Tensor) -> TensorHealth:
    """Return FINITE, MASKED (minus infinity, but neither NaN nor plus infinity) or BAD. Waits for the device.

    A finite tensor costs one pass: a sum that is finite has no part that is not.
    """
    plain = tensor.float() if tensor.element_size() == 1 else tensor
    total = plain.sum(dtype=torch.float32 if plain.element_size() < 4 else None)
    if bool(total.isfinite()) or (plain.is_complex() and bool(plain.isfinite().all())):
        return TensorHealth.FINITE
    if plain.is_complex() or bool(plain.isnan().any()) or bool(plain.isposinf().any()):
        return TensorHealth.BAD
    return TensorHealth.MASKED if bool(plain.isneginf().any()) else TensorHealth.FINITE


def floating(value: Any) -> Iterator[Tensor]:
    """Yield the dense floating-point and complex tensors in what an operation took or gave, however nested."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and _has_numbers(leaf):
            yield leaf


def is_finite_number(value: Any) -> bool:
    """Return whether `value` is anything but a float that is NaN or infinite."""
    return not isinstance(value, float) or math.isfinite(value)


def has_memory(tensor: Tensor) -> bool:
    """Return whether the elements of `tensor` can be read; FSDP takes the memory away from parameters in between."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _has_numbers(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and has_memory(tensor)


def _run(again: RepeatableCall, dtype: torch.dtype) -> list[Tensor] | Exception:
    """Return the floating results of a run in `dtype`, or why there are none."""
    try:
        return list(floating(again.run(dtype)))
    except Exception as error:  # noqa: BLE001  # whatever a foreign kernel raises: there is no such kernel
        return error


def _judge(again: RepeatableCall, called: OperationCall, result: Any) -> OperationJudgement:
    recorded = list(floating(result))
    exact = _run(again, torch.float64)
    if isinstance(exact, Exception) or len(exact) < len(recorded):
        why = str(exact).splitlines()[0][:120] if isinstance(exact, Exception) else "it returns something else there"
        return OperationJudgement(
            NonfiniteCause.UNKNOWN,
            f"it cannot be run in float64 on the CPU ({why})",
            "compare it with a reference implementation on the dumped inputs (task tensor)",
        )
    places = [_NonfiniteResult(old, new, is_random=called.is_random) for old, new in zip(recorded, exact, strict=False)]
    fitting = [number for number, place in enumerate(places) if place.is_bad and place.exact_finite]
    if not fitting:
        return _not_finite_in_float64(places, is_custom=called.is_custom)
    place = places[fitting[0]]
    return _judge_type(again, place, fitting[0], is_custom=called.is_custom)


class _NonfiniteResult:
    """One result of an operation, as it was and in float64, where it was not finite."""

    def __init__(self, recorded: Tensor, exact: Tensor, *, is_random: bool) -> None:
        self.dtype = recorded.dtype
        bad = ~recorded.detach().isfinite().cpu()
        self.is_bad = bool(bad.any())
        self.where = torch.ones_like(bad) if is_random or bad.shape != exact.shape else bad
        values = exact[self.where] if self.where.shape == exact.shape else exact
        finite = values[values.isfinite()]
        self.exact_finite = bool(finite.numel())
        self.largest = float(finite.abs().max()) if finite.numel() else float("nan")
        self.is_nan = bool(values.isnan().any())

    def is_finite_in(self, results: list[Tensor], number: int) -> bool:
        """Return whether another run has finite values where float64 has."""
        values = results[number]
        values = values[self.where] if self.where.shape == values.shape else values
        return bool(values.isfinite().any()) if self.is_nan else bool(values.isfinite().all())


def _not_finite_in_float64(places: Sequence[_NonfiniteResult], *, is_custom: bool) -> OperationJudgement:
    what = "NaN" if any(place.is_nan and place.is_bad for place in places) else "infinite"
    reason = f"in float64 the result is {what} too"
    if not is_custom:
        return OperationJudgement(NonfiniteCause.RANGE, f"{reason}: for these inputs it has no finite value")
    return OperationJudgement(
        NonfiniteCause.UNKNOWN,
        f"{reason}; as it is no operation of torch's, that is its mathematics or its kernel",
        "compare it with a reference implementation on the dumped inputs (task tensor)",
    )


def _judge_type(again: RepeatableCall, place: _NonfiniteResult, number: int, *, is_custom: bool) -> OperationJudgement:
    """Return the cause of a result that is finite in float64, and the reason in words."""
    dtype = torch.float64 if place.dtype.is_complex else place.dtype
    name, limit = str(place.dtype).removeprefix("torch."), torch.finfo(dtype).max
    single = _run(again, torch.float32)
    holds = not isinstance(single, Exception) and place.is_finite_in(single, number)
    is_narrow = torch.finfo(dtype).bits < _NARROW_BITS
    exact = f"exactly it reaches {place.largest:.3g}"
    if place.largest > limit:
        beyond = f"{exact}, {name} ends at {limit:.3g}"
        return (
            OperationJudgement(NonfiniteCause.PRECISION, f"{beyond}; float32 holds it")
            if is_narrow and holds
            else OperationJudgement(NonfiniteCause.RANGE, f"{beyond}; float64 holds it")
        )
    own = single if dtype is torch.float32 else _run(again, place.dtype)
    if isinstance(own, Exception) and is_narrow and not holds:
        return OperationJudgement(
            NonfiniteCause.UNKNOWN, f"{exact}, which {name} holds, but the CPU cannot repeat it in {name}"
        )
    if is_custom or isinstance(own, Exception) or place.is_finite_in(own, number):
        return OperationJudgement(
            NonfiniteCause.KERNEL, f"{exact}, which {name} holds: the device or its kernel is to blame"
        )
    between = f"{exact}, which {name} holds, but what is computed on the way leaves {name}"
    if is_narrow and holds:
        return OperationJudgement(NonfiniteCause.PRECISION, f"{between}; float32 suffices")
    return OperationJudgement(NonfiniteCause.RANGE, f"{between}; float64 suffices")


def _is_sound(value: Any) -> bool:
    """Return whether an input is finite, or is not on purpose."""
    return is_finite_number(value) and all(health(tensor) is not TensorHealth.BAD for tensor in floating(value))
