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
from trainermon.accuracy.reference import OF_OWN_TYPE, unit_roundoff

_SINGLE = 2.0**-24
# What a result moves by when its inputs move by a roundoff, at least, in roundoffs of its root mean square.
_MOVED = 1.0
_UNJUDGED = (Family.RANDOM, Family.UNDEFINED, Family.GAUGE)


class QuickReference:
    """A call in a finer type on its own device, and bounds within which results are right.

    Cost: one run of the call in that type.

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
        device = tensors[0].device if tensors else torch.device("cpu")
        self.results = RepeatableCall(call, device).run(self.wide)
        self._bounds: dict[tuple[int, torch.dtype], Tensor] = {}

    def accepts(self, output: Any) -> bool:
        """Return whether every element of `output` is within its bound."""
        made = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        return len(made) == len(self.results) and all(
            self._accepts(given.detach(), number) for number, given in enumerate(made)
        )

    def bound(self, number: int, output: torch.dtype) -> Tensor:
        """Return how far each element of the result `number`, of type `output`, may be off without a closer look.

        It is not to be written to.
        """
        if (number, output) not in self._bounds:
            self._bounds[number, output] = self._new_bound(number, output)
        return self._bounds[number, output]

    def _new_bound(self, number: int, output: torch.dtype) -> Tensor:
        exact, share = self.results[number], self._share
        size = exact.abs()
        relative = 2 * unit_roundoff(output) + 2 * share.ulps * _SINGLE
        absolute = 2 * share.ones * _SINGLE + torch.finfo(output).tiny * torch.finfo(output).eps
        if self._family is not Family.FUNCTION and size.numel():
            spread = 1.5 * share.sums * math.sqrt(self._width) + _MOVED * share.probes * share.floor
            absolute += spread * _SINGLE * float(size.square().mean().sqrt())
        allowed = size.mul_(relative).add_(absolute if math.isfinite(absolute) else 0.0)
        if share.inputs and self._first is not None and self._first.shape == exact.shape:
            allowed += 2 * share.inputs * _SINGLE * self._first.detach().abs()
        return allowed.clamp_(max=torch.finfo(self.wide).max)  # an infinite error is within no bound

    def _accepts(self, given: Tensor, number: int) -> bool:
        exact = self.results[number]
        if given.shape != exact.shape or given.is_complex():
            return False
        if not given.is_floating_point():
            return torch.equal(given, exact)
        if self._family is Family.EXACT:
            return torch.equal(given, exact.to(given.dtype))
        error = given.to(self.wide).sub(exact).abs_()
        bound = self.bound(number, given.dtype)
        if bool((error <= bound).all()):
            return True
        same = given == exact.to(given.dtype)  # infinities of a mask
        return bool(((error <= bound) | same).all())
