"""The numbers of a tensor's form: taken at once, over finite elements, non-finite ones counted."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trainermon.dump.encode import Leaf
from trainermon.monitor.statistics import moments
from trainermon.monitor.values import STATISTICS, Moments

# Beyond this many remembered tensors the memory starts afresh; most of them are long gone then.
MAX_REMEMBERED = 4096
NUMBERS = ("Max", "Min", "Mean", "Norm", "nans", "infs", "zeros")


_T = TypeVar("_T")


class TensorMemory(Generic[_T]):
    """Knows what was noted for a tensor that was met before and has not changed since (same object, same version).

    A module's output is the next one's input and often its parent's output: it need not be read again. Tensors are
    not kept alive.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, _T]] = {}

    def recall(self, tensor: Tensor) -> _T | None:
        """Return what was remembered for `tensor`, None if there is nothing that still holds."""
        known = self._seen.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != tensor._version:
            return None
        return known[2]

    def forget(self, tensor: Tensor) -> None:
        """Know `tensor` no more: something that torch does not count has written to it."""
        self._seen.pop(id(tensor), None)

    def remember(self, tensor: Tensor, note: _T) -> None:
        """Remember `note` for `tensor`; an inference tensor has no version and is never remembered."""
        if tensor.is_inference():
            return
        if len(self._seen) >= MAX_REMEMBERED:
            self._seen.clear()
        self._seen[id(tensor)] = (weakref.ref(tensor), tensor._version, note)


class Statistics:
    """Fills the forms of tensors.

    On a CPU the numbers stand in the form when `fill` returns. On an accelerator the statistic is taken on the device
    in stream order, and the numbers appear at the next `resolve`, which is the one synchronisation.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[list[dict[str, Any]], Tensor]] = []
        self._copies: list[tuple[dict[str, Any], dict[str, Any]]] = []

    @property
    def unresolved(self) -> bool:
        """Whether numbers are still on an accelerator."""
        return bool(self._pending)

    def fill(self, leaves: Iterable[Leaf]) -> None:
        """Take the statistics of all `leaves` as they are now; empty and meta tensors keep None."""
        groups: dict[torch.device, list[Leaf]] = {}
        for leaf in leaves:
            if leaf.tensor.numel() and has_elements(leaf.tensor):
                groups.setdefault(leaf.tensor.device, []).append(leaf)
        for device, group in groups.items():
            rows = torch.empty(len(group), len(STATISTICS), dtype=torch.float64, device=device)
            moments([_real(leaf.tensor) for leaf in group], rows)
            self._pending.append(([leaf.form for leaf in group], rows))
        if all(rows.device.type == "cpu" for _, rows in self._pending):
            self.resolve()

    def share(self, form: dict[str, Any], source: dict[str, Any]) -> None:
        """Give `form` the numbers of `source`, now or when they are known."""
        if self._pending or "nans" not in source:
            self._copies.append((form, source))
        else:
            _copy_numbers(form, source)

    def resolve(self) -> None:
        """Bring all pending numbers into their forms; waits for the device."""
        for forms, rows in self._pending:
            for form, row in zip(forms, rows.tolist(), strict=True):
                write_numbers(form, row)
        self._pending.clear()
        for form, source in self._copies:
            _copy_numbers(form, source)
        self._copies.clear()


def has_elements(tensor: Tensor) -> bool:
    """Return whether there is memory behind `tensor`; a meta or a fake one is only a shape."""
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def write_numbers(form: dict[str, Any], row: Sequence[float]) -> None:
    """Write the moments `row` into `form` as msprobe names them.

    Without a finite element all four are None. Integers and booleans stay what they are; a boolean has no mean and no
    norm, a complex tensor is described by its absolute values.
    """
    elements = Moments(*row)
    form.update(nans=int(elements.nans), infs=int(elements.infs), zeros=int(elements.zeros))
    if not elements.finite:
        return
    dtype = form["dtype"]
    if dtype == "torch.bool":
        form.update(Max=bool(elements.max), Min=bool(elements.min))
        return
    number = int if "int" in dtype else float
    form.update(Max=number(elements.max), Min=number(elements.min))
    form.update(Mean=_finite(elements.mean), Norm=_finite(elements.norm))


def _copy_numbers(form: dict[str, Any], source: dict[str, Any]) -> None:
    form.update((name, source[name]) for name in NUMBERS if name in source)


def _finite(value: float) -> float | None:
    """Return None for a sum of float64 values that does not fit float64."""
    return value if math.isfinite(value) else None


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):  # the whole of a DTensor is nowhere
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided:  # the elements that are stored; the others are zeros by definition
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        return tensor.abs()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
