"""What a call gives in float64, and how far a sound computation of it may be off.

The allowance of an element has four parts: rounding of the result; a few units of the function's approximation; the
error of a sum, which grows with the square root of its terms (Higham and Mary, "A New Approach to Probabilistic
Rounding Error Analysis", 2019), over the sum of their magnitudes; and what the result changes by if every input is
moved by one roundoff, measured by running the call again (TTrace, 2026, does that for whole programs). Which of them
count, and by how much, is decided by family in `allowances`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainermon.accuracy.allowances import Allowance, allowance_of
from trainermon.accuracy.calls import OperationCall, RepeatableCall, plain
from trainermon.accuracy.families import Family
from trainermon.accuracy.inner_sums import error_of_sums
from trainermon.accuracy.whole_errors import allowed_norm, common_factor

NUM_PROBES = 4
# Each pair of columns agrees in half of the rows: up to four arguments have every sign relative to the first.
_TURNS = ((1, 1, 1, 1), (1, -1, 1, -1), (1, 1, -1, -1), (1, -1, -1, 1))
_SINGLE = 2.0**-24
_COARSEST = 2.0**-8  # of bfloat16
_SAMPLED, _MOST = 1 << 16, 0.75
_PARTIAL_SUMS = 64
# In roundoffs: what one number that is rounded on the way, as a scale, makes all elements off by.
_FACTOR = 3.0
# They add to what is there, one after the other.
_ONE_BY_ONE = ("cumsum", "embedding_bag", "index_add", "scatter_add")
# What they give depends on the type that they are given, not only on the numbers in it.
OF_OWN_TYPE = frozenset(
    ["hash_tensor", "nan_to_num", "nextafter", "view", "view_copy", "frexp", "item", "type", "bincount"]
)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return half the distance from 1 to the next number of `dtype`; 0 if it is not a floating or complex type."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return torch.finfo(dtype).eps / 2


def computing_roundoff(types: Iterable[torch.dtype]) -> float:
    """Return the largest unit roundoff of those of `types` that torch computes in; 0 if none is floating.

    Numbers of 8 bits and less are stored, no more: what is made of them is computed in a type of 16 bits at least.
    """
    return min(max(map(unit_roundoff, types), default=0.0), _COARSEST)


def last_rounding(dtype: torch.dtype) -> float:
    """Return by how much of its size a number may be off that was rounded to `dtype` once: a step of that type.

    At most a half, so that nothing is allowed that is next to zero (of `float8_e8m0fnu` a step is as much as that).
    """
    return min(2 * unit_roundoff(dtype), 0.5)


class Reference:
    """A call in float64 on the CPU: its results, and the error that each of their elements is allowed.

    Runs the call once for its results, and up to five times more, when an allowance is asked for.

    Args:
        call: The call with its inputs as the kernel saw them.
        family: The family of the operation.
        name: The operation's name.

    Attributes:
        results: Every tensor of the result, in order; floating ones in float64.
        num_roundings: How many numbers below the smallest of float16 may be lost in an element: none, of a forward.

    Raises:
        Exception: Whatever the operation raises, if it cannot be run in float64 on the CPU.
    """

    num_roundings = 0.0

    def __init__(self, call: OperationCall, family: Family, name: str = "") -> None:
        self._again = RepeatableCall(call)
        self._call, self._name = call, name.rpartition(".")[2]
        self._family = family
        self._is_sparse = any(tensor.layout is not torch.strided for tensor in call.tensors)
        self._sizes = [tensor.numel() for tensor in call.tensors]
        first = next((tensor for tensor in call.tensors if tensor.is_floating_point()), None)
        self._first = None if first is None else plain(first).double().abs()
        self._widths = [max(tensor.shape, default=1) for tensor in call.tensors]
        self._has_float_numbers = any(isinstance(value, float) for value in (*call.args, *call.kwargs.values()))
        self._share = allowance_of(name, family)
        own_type = name.rpartition(".")[2].rstrip("_") in OF_OWN_TYPE
        self.results = self._again.run(None if own_type else torch.float64)
        if not self._sizes and self.results and self.results[0].is_floating_point() and self.results[0].numel():
            self._first = self.results[0].abs().amax().expand(self.results[0].shape)
        self._probes: list[list[Tensor]] | None = None
        self._magnitudes: list[Tensor] | None = None

    def allowed(self, number: int, output: torch.dtype, unit: float) -> Tensor:
        """Return the allowed error of each element of the result `number`, in float64.

        `output` is the type of the result as it was recorded, `unit` the roundoff of the computation: that of float32,
        or a coarser one.
        """
        exact = self.results[number].abs()
        share = self._share
        allowed = stored_rounding(exact, output)
        if share.ulps:
            allowed = allowed + 2 * share.ulps * unit * exact
        if share.inputs and self._first is not None and self._first.shape == exact.shape:
            allowed = allowed + 2 * share.inputs * unit * self._first
        if share.tails and self._first is not None and self._first.shape == exact.shape:
            normal = torch.finfo(torch.float64 if output is torch.float64 else torch.float32).tiny
            allowed = allowed + share.tails * normal * self._first
        if share.ones:
            allowed = allowed + 2 * share.ones * unit
        if share.sums:
            allowed = allowed + share.sums * unit * self._error_of_sum(number, unit)
        if share.probes and (self._family is not Family.ROUNDED or self._has_float_numbers):
            moved = self._moved(number) * (unit / _SINGLE)
            allowed = allowed + share.probes * floored(moved, share)
        lost = error_of_sums(self._name, self._call, exact)
        return allowed if lost is None else allowed + unit * lost

    def _error_of_sum(self, number: int, unit: float) -> Tensor:
        """Return how many roundoffs of what is summed a sum may be off by, of each element.

        In float32 sums are taken in parts, and these are added: where signs are mixed, no partial sum comes near the
        sum of all magnitudes.
        """
        terms, size = self._num_terms(number), self._magnitude(number)
        one_by_one = math.sqrt(terms) * size
        if self._family is not Family.SUM or unit > _SINGLE or self._name.rstrip("_") in _ONE_BY_ONE:
            return one_by_one
        in_parts = torch.maximum(math.sqrt(terms) * self.results[number].abs(), math.log2(2 * terms) * size)
        return torch.minimum(one_by_one, in_parts)

    def allowed_norm(self, number: int, unit: float) -> float:
        """Return the norm that the errors of the result `number` together may have.

        A sum that is rounded to `unit` after each term is off by that share of what it has come to so far. With signs
        at random that is the root of the sum of squares of its terms, which the call gives for its squared inputs.
        Products round a few partial sums, whatever their length. Of other operations each error is far below what it
        is allowed, in most elements.
        """
        if self._is_sparse:
            return math.inf
        if self._family not in (Family.CONTRACTION, Family.SUM):
            return allowed_norm(self.allowed(number, torch.float64, unit))
        squares = self._again.run(torch.float64, _squared)[number].abs()
        walk = max(float(squares.sum().sqrt()), float(self.results[number].abs().norm()))
        terms = self._num_terms(number)
        return 2 * math.sqrt(min(terms, _PARTIAL_SUMS) if self._family is Family.CONTRACTION else terms) * unit * walk

    def is_scaled(self, number: int, error: Tensor, unit: float) -> bool:
        """Return whether all elements are off by one factor that rounding to `unit` does not explain."""
        found = common_factor(error, self.results[number])
        return self._family is not Family.WINDOW and found.is_systematic(unit, _FACTOR)

    def alternatives(self, number: int) -> list[Tensor]:
        """Return the result `number` of runs with slightly moved inputs, for results that jump; [] if it is exact."""
        return [] if self._family is Family.EXACT else [probe[number] for probe in self._probed()]

    def _num_terms(self, number: int) -> float:
        """Return about how many numbers are summed into an element, as far as the sizes tell."""
        made = max(1, self.results[number].numel())
        if self._family is Family.CONTRACTION:
            largest = sorted(self._sizes)[-2:] or [1]
            return max(1.0, math.sqrt(math.prod(largest) / made))
        return max(1.0, max(self._sizes, default=1) / made, *self._widths)

    def _magnitude(self, number: int) -> Tensor:
        """Return the sum of the magnitudes of the terms: the same call of the absolute values of what it takes."""
        if self._family not in (Family.CONTRACTION, Family.SUM):
            return self.results[number].abs()
        if self._magnitudes is None:
            self._magnitudes = [result.abs() for result in self._again.run(torch.float64, magnitude_of)]
        return self._magnitudes[number]

    def _moved(self, number: int) -> Tensor:
        """Return by how much an element changed at most when every input was moved by a roundoff of float32."""
        exact = self.results[number]
        moved = torch.zeros_like(exact.abs())
        for probe in self._probed():
            change = (probe[number] - exact).abs()
            moved = torch.maximum(moved, torch.where(change.isfinite(), change, 0.0))
        return moved

    def _probed(self) -> list[list[Tensor]]:
        if self._probes is None:
            generator = torch.Generator().manual_seed(0)
            found = [self._probe(RoundoffMove(generator, number)) for number in range(NUM_PROBES)]
            self._probes = [probe for probe in found if probe is not None]
        return self._probes

    def _probe(self, move: RoundoffMove) -> list[Tensor] | None:
        """Return the results of a run with every number moved by a roundoff up or down; None if it has other shapes."""
        try:
            results = self._again.run(torch.float64, move)
        except Exception:  # noqa: BLE001  # whatever torch raises for an input that is out of range by a roundoff
            return None
        same = len(results) == len(self.results) and all(
            one.shape == other.shape for one, other in zip(results, self.results, strict=True)
        )
        return results if same else None


def floored(moved: Tensor, share: Allowance) -> Tensor:
    """Return changes of elements, of none less than the floor that is a share of what all of them change by."""
    floor = share.floor * float(moved.square().mean().sqrt()) if moved.numel() else 0.0
    if share.usual and moved.numel():
        flat = moved.flatten()[:: 1 + moved.numel() // _SAMPLED]
        floor = min(floor, share.usual * float(flat.quantile(_MOST)))
    return moved.clamp(min=floor if math.isfinite(floor) else 0.0)


class RoundoffMove:
    """Moves every number of a call by a roundoff of float32, up or down.

    Up or down is drawn for each element of a shape; from one number of arguments to the next it is turned round, in
    another way in each of the four probes. So at each element of an operation with up to three arguments, one probe
    has all three effects in the same direction. Tensors of signs stay, other than the first: labels are compared with
    one.
    """

    def __init__(self, generator: torch.Generator, probe: int) -> None:
        self._generator = generator
        self._turns = itertools.cycle(_TURNS[probe % NUM_PROBES])
        self._signs: dict[torch.Size, Tensor] = {}

    def __call__(self, value: Any) -> Any:
        """Return an argument moved; integers and whole numbers stay."""
        match value:
            case Tensor() if value.is_floating_point() or value.is_complex():
                if self._signs and bool((value.abs() == 1).all()):
                    return value
                # 1 plus a roundoff of float32 would be 1 again: signs are of no wider type
                steps = _finite(value) * self._signs_of(value.shape)
                return torch.add(value, steps, alpha=next(self._turns) * _SINGLE)
            case float() if math.isfinite(value) and not value.is_integer():
                return value * (1 + next(self._turns) * _SINGLE)
            case _:
                return value

    def _signs_of(self, shape: torch.Size) -> Tensor:
        if shape not in self._signs:
            self._signs[shape] = (
                2
                * torch.randint(0, 2, shape, generator=self._generator, dtype=torch.int8, device=self._generator.device)
                - 1
            )
        return self._signs[shape]


def _finite(value: Tensor) -> Tensor:
    """Return the numbers, with zeros for those that are not finite: an infinite one of a mask stays where it is."""
    return value if bool(value.isfinite().all()) else torch.where(value.isfinite(), value, 0.0)


def magnitude_of(value: Any) -> Any:
    """Return an argument with the magnitudes of its numbers; integers stay."""
    if isinstance(value, Tensor):
        return value.abs() if value.is_floating_point() or value.is_complex() else value
    return abs(value) if isinstance(value, float | complex) else value


def _squared(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.abs().square() if value.is_floating_point() or value.is_complex() else value
    return abs(value) ** 2 if isinstance(value, float | complex) else value


def stored_rounding(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return by how much each number, of these magnitudes, may be off when it is rounded to `dtype` once."""
    return last_rounding(dtype) * exact + smallest_number(dtype)


def smallest_number(dtype: torch.dtype) -> float:
    """Return the smallest number above zero of a floating type, 0 of others."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    info = torch.finfo(dtype)
    return info.tiny * info.eps
