"""Verdicts on sound and on broken results of the operator database."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.checks.database import DatabaseCall, database_calls
from benchmarks.checks.faults import ResultFault, result_faults
from benchmarks.checks.healthy import IMPLEMENTATIONS, compiled, eager
from benchmarks.checks.wrong_kernels import WrongKernel, wrong_kernels
from trainermon.accuracy.judge import Judgement, Status, judge_call

# Against float64 a result in float64 cannot be judged to its own roundoffs.
_AS_REFERENCE = (torch.float64, torch.complex128)
_ORDER = (Status.ERROR, Status.WARNING, Status.PASS, Status.SKIP)


class Verdict(NamedTuple):
    """The verdict on one call.

    Attributes:
        key: The call's key in the database, `name|variant|type|number`.
        is_held_out: Whether constants may not be fitted on it.
        what: The implementation or the fault.
        kind: `healthy`, or the kind of fault.
        roundoffs: The fault's size; 0 if it has none.
        status: The worst status of its results.
        reason: Of the first result with that status.
        worst: How many times what is allowed, of that result.
        is_placed: Whether the worst element is one that the fault changed; None where there is no place.
    """

    key: str
    is_held_out: bool
    what: str
    kind: str
    roundoffs: int
    status: str
    reason: str
    worst: float
    is_placed: bool | None = None

    @property
    def dtype(self) -> str:
        """Type of the call."""
        return self.key.split("|")[2]

    @property
    def name(self) -> str:
        """The operation."""
        return self.key.split("|")[0]


def healthy_verdicts(dtype: torch.dtype, samples: int) -> list[Verdict]:
    """Return the verdicts on sound results in one type, by every way to compute them."""
    return [
        verdict
        for each in database_calls(dtype, samples)
        for what, compute in IMPLEMENTATIONS.items()
        for verdict in _judged(each, what, compute)
    ]


def compiled_verdicts(dtype: torch.dtype, every: int) -> list[Verdict]:
    """Return the verdicts on what torch's compiler makes of every `every`-th operation."""
    return [verdict for each in database_calls(dtype, 1, every) for verdict in _judged(each, "compiled", compiled)]


def faulty_verdicts(dtype: torch.dtype) -> list[Verdict]:
    """Return the verdicts on broken results in one type, one call of each operation, all faults."""
    return [verdict for each in database_calls(dtype, 1) for verdict in _broken(each)]


def wrong_kernel_verdicts(
    dtype: torch.dtype, seeds: int, kernels: Callable[[torch.dtype, int], Iterator[WrongKernel]] = wrong_kernels
) -> list[Verdict]:
    """Return the verdicts on kernels that compute something else; their kind is `right` or `wrong`, as the verdict."""
    found = []
    for seed in range(seeds):
        for each in kernels(dtype, seed):
            worst = _worst(judge_call(each.name, each.call, each.result))
            kind = "right" if worst.status.value in each.expected else "wrong"
            case = DatabaseCall(each.name, f"{each.name}||{str(dtype).removeprefix('torch.')}|{seed}", each.call)
            found.append(verdict_on(case, each.what, kind, 0, [worst]))
    return found


def _judged(each: DatabaseCall, what: str, compute: Any) -> Iterator[Verdict]:
    """Yield the verdict; nothing if it cannot be computed in this way, or is not judged."""
    try:
        result = compute(each.call)
        found = judge_call(each.name, each.call, result)
    except Exception:  # noqa: BLE001  # a sample for another device, or no such rule
        return
    if _worst(found).status is not Status.SKIP:
        yield verdict_on(each, what, "healthy", 0, found)


def _broken(each: DatabaseCall) -> Iterator[Verdict]:
    try:
        sound = eager(each.call)
        if _worst(judge_call(each.name, each.call, sound)).status not in (Status.PASS, Status.WARNING):
            return
    except Exception:  # noqa: BLE001  # a sample for another device
        return
    leaves, form = pytree.tree_flatten(sound)
    at = next((number for number, leaf in enumerate(leaves) if is_floating(leaf)), None)
    if at is None:
        return
    for fault in result_faults():
        if fault.roundoffs and leaves[at].dtype in _AS_REFERENCE:
            continue
        changed = changed_by(leaves[at].detach(), fault, each.key)
        moved = differs(changed, leaves[at])
        if bool(moved.any()):
            result = pytree.tree_unflatten([*leaves[:at], changed, *leaves[at + 1 :]], form)
            found = judge_call(each.name, each.call, result)
            yield verdict_on(each, fault.name, fault.kind, fault.roundoffs, found, is_placed=_is_placed(found, moved))


def is_floating(leaf: Any) -> bool:
    """Return whether a value is a dense tensor of floating or complex numbers that is not empty."""
    floating = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    return floating and leaf.layout is torch.strided and bool(leaf.numel())


def changed_by(given: Tensor, fault: ResultFault, key: str) -> Tensor:
    """Return what a fault makes of a result; what it draws depends on the call's key."""
    seed = int.from_bytes(hashlib.sha256(f"{key}|{fault.name}".encode()).digest()[:4])
    return fault.change(given.clone(), torch.Generator().manual_seed(seed))


def differs(one: Tensor, other: Tensor) -> Tensor:
    """Return where two tensors differ; a NaN equals a NaN."""
    return (one != other) & ~(one.isnan() & other.isnan())


def _is_placed(found: list[Judgement], moved: Tensor) -> bool | None:
    worst = _worst(found)
    if bool(moved.all()) or worst.status is not Status.ERROR or worst.index is None:
        return None
    return worst.shape == tuple(moved.shape) and bool(moved[worst.index])


def _worst(found: list[Judgement]) -> Judgement:
    if not found:
        return Judgement(status=Status.SKIP)
    return min(found, key=lambda one: _ORDER.index(one.status))


def verdict_on(
    each: DatabaseCall, what: str, kind: str, roundoffs: int, found: list[Judgement], *, is_placed: bool | None = None
) -> Verdict:
    """Return the verdict on a call whose results have these judgements."""
    worst = _worst(found)
    return Verdict(
        each.key, each.is_held_out, what, kind, roundoffs, worst.status.value, worst.reason, worst.worst, is_placed
    )
