"""A quick look at a call that has just run: is its result so near to a finer one that no judge need be asked?

The finer run is made where the tensors are, in float32 for results of 16 bits and in float64 for others. The bounds
are parts of the allowance that cost no further run, and estimates of the rest from the size of the result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.allowances import allowance_of
from trainermon.accuracy.calls import OperationCall, RepeatableCall
from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import family_of_call
from trainermon.accuracy.reference import OF_OWN_TYPE, RoundoffMove, last_rounding, unit_roundoff

_SINGLE = 2.0**-24
# What a result moves by when its inputs move by a roundoff, at least, in roundoffs of its root mean square.
_MOVED = 1.0
_UNJUDGED = (Family.RANDOM, Family.UNDEFINED, Family.GAUGE)


class QuickReference:
    """A call in a finer type on its own device, and bounds within which results are right.

    Cost: one run of the call in that type; two where a result is off by more than is usual.

    Args:
        name: The operation's name.
        call: The call with its inputs as the kernel saw them.
        output: What the call gave.

    Attributes:
        results: Every tensor of the finer result, in order.

    Raises:
        ValueError: The operation has no result to compare with: it is random, or not unique.
        Exception: Whatever the operation raises in that type.
    """

    def __init__(self, name: str, call: OperationCall, output: Any) -> None:
        self._family = family_of_call(name, call)
        if self._family in _UNJUDGED or name.rpartition(".")[2].rstrip("_") in OF_OWN_TYPE:
            raise ValueError(f"{name} has no finer result")
        made = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        units = [unit_roundoff(tensor.dtype) for tensor in made if tensor.is_floating_point() or tensor.is_complex()]
        self.wide = torch.float32 if units and min(units) > _SINGLE else torch.float64
        self._share = allowance_of(name, self._family)
        tensors = call.tensors
        self._first = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        self._width = max((max(tensor.shape, default=1) for tensor in tensors), default=1)
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._again = RepeatableCall(call, self._device)
        self.results = self._again.run(self.wide)
        self._bounds: dict[tuple[int, torch.dtype], Tensor] = {}
        self._sizes: dict[tuple[int, torch.dtype], float] = {}
        self._moved: list[Tensor] | None = None

    def accepts(self, output: Any) -> bool:
        """Return whether every element of `output` is within its bound.

        If not, bounds are widened by what moving the inputs by a roundoff changes, measured once, where that counts.
        """
        made = [leaf.detach() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if len(made) != len(self.results):
            return False
        rest = [number for number, given in enumerate(made) if not self._accepts(given, number)]
        is_moved = self.wide is torch.float64 and self._moved is None and self._share.probes and self._share.floor
        if not rest or not is_moved:
            return not rest
        self._moved = self._measured()
        self._bounds.clear()
        return all(self._accepts(made[number], number) for number in rest)

    def within(self, given: Tensor, number: int, factor: float = 1.0) -> bool:
        """Return whether each element of a floating tensor is within `factor` bounds of the result `number`."""
        off = given - self.results[number]
        if not off.numel():
            return True
        low, high = torch.aminmax(off)
        if bool(torch.maximum(-low, high) <= factor * self._absolute(number, given.dtype)):
            return True
        return bool((off.abs_() <= factor * self.bound(number, given.dtype)).all())

    def bound(self, number: int, output: torch.dtype) -> Tensor:
        """Return how far each element of the result `number`, of type `output`, may be off without a closer look.

        It is not to be written to.
        """
        if (number, output) not in self._bounds:
            self._bounds[number, output] = self._new_bound(number, output)
        return self._bounds[number, output]

    def _new_bound(self, number: int, output: torch.dtype) -> Tensor:
        exact, share = self.results[number], self._share
        relative = last_rounding(output) + 2 * share.ulps * _SINGLE
        allowed = exact.abs().mul_(relative).add_(self._absolute(number, output))
        if self._moved is not None:
            moved = self._moved[number]
            least = share.floor * float(torch.linalg.vector_norm(moved)) / math.sqrt(max(1, moved.numel()))
            allowed += share.probes * (moved.clamp(min=least) if math.isfinite(least) else moved)
        if share.inputs and self._first is not None and self._first.shape == exact.shape:
            allowed += 2 * share.inputs * _SINGLE * self._first.detach().abs()
        return allowed.clamp_(max=torch.finfo(self.wide).max)  # an infinite error is within no bound

    def _absolute(self, number: int, output: torch.dtype) -> float:
        """Return the part of the bounds that is the same for all elements."""
        if (number, output) not in self._sizes:
            exact, share = self.results[number], self._share
            absolute = 2 * share.ones * _SINGLE + torch.finfo(output).tiny * torch.finfo(output).eps
            if self._family is not Family.FUNCTION and exact.numel():
                spread = 1.5 * share.sums * math.sqrt(self._width) + _MOVED * share.probes * share.floor
                absolute += spread * _SINGLE * float(torch.linalg.vector_norm(exact)) / math.sqrt(exact.numel())
            self._sizes[number, output] = absolute if math.isfinite(absolute) else 0.0
        return self._sizes[number, output]

    def _measured(self) -> list[Tensor]:
        """Return by how much each result changes if every input is moved by a roundoff: the judge's first probe."""
        move = RoundoffMove(torch.Generator(self._device).manual_seed(0), 0)
        pairs = zip(self._again.run(self.wide, move), self.results, strict=True)
        return [(one - other).abs_().nan_to_num_(0.0, 0.0, 0.0) for one, other in pairs]

    def _accepts(self, given: Tensor, number: int) -> bool:
        exact = self.results[number]
        if given.shape != exact.shape or given.is_complex():
            return False
        if not given.is_floating_point():
            return torch.equal(given, exact)
        if self._family is Family.EXACT:
            return torch.equal(given, exact.to(given.dtype))
        if self.within(given, number):
            return True
        same = given == exact.to(given.dtype)  # infinities of a mask
        return bool((((given - exact).abs_() <= self.bound(number, given.dtype)) | same).all())
