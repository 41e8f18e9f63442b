"""What the backward of a call gives in float64, and how far a sound computation of it may be off.

The gradient of a tensor is the sum of what all calls that take it give back: the product of each one's derivative with
the gradients of its results. Kernels of a backward take what the forward saved in its own type, rounded, and that is
allowed to them like their inputs; what they round beyond that is judged as in a forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.allowances import HARD_TO_DIFFERENTIATE, gradient_allowance
from trainermon.accuracy.calls import OperationCall, cast, plain
from trainermon.accuracy.families import Family
from trainermon.accuracy.reference import RoundoffMove, magnitude_of, smallest_number, unit_roundoff

NUM_PROBES = 4
_SINGLE = 2.0**-24
_MASKS = 2.0**30
_Change = Callable[[Any], Any]


class BackwardCall(NamedTuple):
    """A call, and the gradients that its results were given.

    Attributes:
        call: The call with its inputs as the kernel saw them.
        gradients: That of each tensor of the result, in order; None: it has none.
        family: The family of the operation.
        wanted: The numbers of the tensors among the arguments that are differentiated.
        inside: The type that it computed in where that is coarser than float32 by intention (autocast).
    """

    call: OperationCall
    gradients: Sequence[Tensor | None]
    family: Family
    wanted: Collection[int]
    inside: torch.dtype | None = None

    @property
    def coarsest(self) -> float:
        """The largest unit roundoff of its types."""
        given = [*self.call.tensors, *(one for one in self.gradients if one is not None)]
        types = [tensor.dtype for tensor in given] + ([self.inside] if self.inside else [])
        return max(map(unit_roundoff, types), default=0.0)


def gradients_on(backward: BackwardCall, device: str) -> list[Tensor]:
    """Return the gradients that the backward of a call gives on `device`, in the order of `wanted`, sorted.

    Nothing given is written to. Raises whatever the operation raises.
    """

    def given(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to(device, copy=True)
        return torch.device(device) if isinstance(value, torch.device) else value

    args, kwargs = pytree.tree_map(given, (list(backward.call.args), dict(backward.call.kwargs)))
    taken = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    wanted = [taken[number].requires_grad_() for number in sorted(backward.wanted)]
    with torch.enable_grad():
        args, kwargs = pytree.tree_map_only(Tensor, torch.Tensor.clone, (args, kwargs))
        result = backward.call.function(*args, **kwargs)
    made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    pairs = [
        (one, given(gradient)) for one, gradient in zip(made, backward.gradients, strict=True) if gradient is not None
    ]
    return _products(pairs, wanted)


class VectorProduct:
    """The gradients that one call gives back to the tensors it takes, in float64 on the CPU.

    Args:
        backward: The call with the gradients of its results.

    Attributes:
        results: One for each tensor among the arguments; None of those that are not differentiated.

    Raises:
        Exception: Whatever the operation raises, if it cannot be run in float64 on the CPU, or not be differentiated.
    """

    def __init__(self, backward: BackwardCall) -> None:
        self.backward = backward
        self._choices: list[Tensor | None] = []
        self.results = self._run()
        self._probes: list[list[Tensor | None]] | None = None
        self._magnitudes: list[Tensor | None] | None = None
        self._from_saved: list[Tensor | None] | None = None
        self._turned: list[list[Tensor | None]] | None = None

    def chooses_as(self, made: Sequence[Tensor]) -> bool:
        """Return whether the call gave the same integers as in `made`: of equal elements it may choose either."""
        return all(
            one is None or one.shape != other.shape or torch.equal(one, plain(other).to(one.dtype))
            for one, other in zip(self._choices, made, strict=True)
        )

    def allowed(self, number: int, unit: float) -> Tensor:
        """Return the allowed error of the gradient of the tensor `number`, before it is rounded to its own type."""
        share = gradient_allowance(getattr(self.backward.call.function, "__name__", ""), self.backward.family)
        exact = _of(self.results, number).abs()
        inside = self.backward.inside
        allowed = 2 * (share.ulps * unit + (unit_roundoff(inside) if inside else 0.0)) * exact
        if self.backward.family is Family.CONTRACTION:
            self._magnitudes = self._magnitudes or self._run(lambda: magnitude_of)
            terms = _of(self._magnitudes, number).abs()
        else:
            terms = math.sqrt(self._num_terms(number)) * self._spread(number)
        allowed = allowed + share.sums * math.sqrt(self._num_terms(number)) * unit * terms
        if share.probes:
            moved = _floored(self._moved(number), share.floor) * (unit / _SINGLE)
            allowed = allowed + share.probes * moved + 2 * _floored(self._saved(number), 1.0)
        return allowed

    def alternatives(self, number: int) -> list[Tensor]:
        """Return the gradient of the tensor `number` in runs with slightly moved inputs, for results that jump."""
        if self.backward.family is Family.EXACT:
            return []
        return [_of(probe, number) for probe in self._probed()]

    def _num_terms(self, number: int) -> float:
        """Return about how many numbers are summed into an element, as far as the sizes tell."""
        made = max(1, _of(self.results, number).numel())
        tensors = self.backward.call.tensors
        given = sum(one.numel() for one in self.backward.gradients if one is not None)
        if self.backward.family is Family.CONTRACTION:
            others = [tensor.numel() for place, tensor in enumerate(tensors) if place != number]
            return max(1.0, given / made, math.sqrt(given * max(others, default=1) / made))
        picked = [tensor.numel() for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())]
        summed = max(1.0, given / made, max(picked, default=1))
        if self.backward.family in HARD_TO_DIFFERENTIATE:
            return max(summed, float(max(_of(self.results, number).shape, default=1)))
        return summed

    def _moved(self, number: int) -> Tensor:
        return _largest(self.alternatives(number), _of(self.results, number))

    def _spread(self, number: int) -> Tensor:
        """Return about the root of the sum of squares of the terms of each element.

        That is what the product comes to for gradients whose signs are drawn at random, where nothing cancels as a
        rule; of a product that sums nothing it is the magnitude.
        """
        if self._turned is None:
            generator = torch.Generator().manual_seed(1)
            turn = partial(_turned, generator=generator)
            self._turned = [self._run(turn=turn) for _ in range(NUM_PROBES)]
        found = [_of(one, number).abs() for one in (self.results, *self._turned)]
        return torch.stack(found).amax(0)

    def _saved(self, number: int) -> Tensor:
        """Return by how much it changes if the forward's results are kept in their own type for the backward."""
        if self._from_saved is None:
            shapes = {one.shape: one.dtype for one in self.backward.gradients if one is not None}
            with torch.autograd.graph.saved_tensors_hooks(lambda one: _kept(one, shapes), lambda one: one):
                self._from_saved = self._run()
        return _largest([_of(self._from_saved, number)], _of(self.results, number))

    def _probed(self) -> list[list[Tensor | None]]:
        if self._probes is None:
            generator = torch.Generator().manual_seed(0)
            with torch.autograd.graph.saved_tensors_hooks(lambda one: _blurred(one, generator), lambda one: one):
                found = [self._probe(partial(RoundoffMove, generator, probe)) for probe in range(NUM_PROBES)]
            self._probes = [probe for probe in found if probe is not None]
        return self._probes

    def _probe(self, moves: Callable[[], _Change]) -> list[Tensor | None] | None:
        """Return the product with every number moved by a roundoff; None if it cannot be, or has other shapes."""
        try:
            moved = self._run(moves)
        except Exception:  # noqa: BLE001  # whatever torch raises for an input that is out of range by a roundoff
            return None
        pairs = [(one, two) for one, two in zip(moved, self.results, strict=True) if one is not None]
        return moved if all(two is not None and one.shape == two.shape for one, two in pairs) else None

    def _run(self, changes: Callable[[], _Change] = lambda: _same, turn: _Change | None = None) -> list[Tensor | None]:
        """Return the product of changed arguments and gradients, each by one of `changes`; gradients by `turn`, too."""
        call, change = self.backward.call, changes()
        args, kwargs = pytree.tree_map(
            lambda value: change(cast(value, torch.float64)), (list(call.args), dict(call.kwargs))
        )
        taken = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        wanted = [leaf for number, leaf in enumerate(taken) if number in self.backward.wanted]
        for leaf in wanted:
            leaf.requires_grad_()
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            args, kwargs = pytree.tree_map_only(Tensor, torch.Tensor.clone, (args, kwargs))
            result = call.function(*args, **kwargs)
            made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            self._choices = self._choices or [_choice(one) for one in made]
            pairs = [
                (one, (turn or _same)(changes()(plain(gradient).to(one.dtype))))
                for one, gradient in zip(made, self.backward.gradients, strict=True)
                if gradient is not None and one.requires_grad
            ]
            found = iter(_products(pairs, wanted))
        return [next(found) if leaf.requires_grad else None for leaf in taken]


class GradientSum:
    """The gradient of a tensor in float64: the sum of what each call that takes it gives back.

    Has what the judge asks of a reference, with one result.

    Args:
        parts: The calls, each with the number of the tensor among its own.
        shape: The shape of the tensor.

    Attributes:
        results: The gradient.
    """

    def __init__(self, parts: Sequence[tuple[VectorProduct, int]], like: Tensor) -> None:
        self._parts = parts
        self._zero = torch.zeros(like.shape, dtype=torch.complex128 if like.is_complex() else torch.float64)
        self.results = [self._sum([_of(product.results, number) for product, number in parts])]

    def allowed(self, number: int, output: torch.dtype, unit: float) -> Tensor:
        """Return the allowed error of each element of the gradient of type `output`; see `Reference.allowed`."""
        exact = self.results[number].abs()
        allowed = 2 * unit_roundoff(output) * exact + smallest_number(output)
        if len(self._parts) > 1:  # each is rounded, and so is each sum
            sizes = sum(_of(product.results, place).abs() for product, place in self._parts)
            allowed = allowed + len(self._parts) * unit_roundoff(output) * sizes
        for product, place in self._parts:
            allowed = allowed + product.allowed(place, unit)
        return allowed

    def allowed_norm(self, _number: int, _unit: float) -> float:
        """Return infinity: errors are not limited as a whole."""
        return math.inf

    def alternatives(self, _number: int) -> list[Tensor]:
        """Return the gradient for slightly moved inputs of the calls, several times."""
        found = [product.alternatives(place) for product, place in self._parts]
        return [self._sum(one) for one in zip(*found, strict=False)]

    def _sum(self, parts: Sequence[Tensor]) -> Tensor:
        return sum(parts, self._zero)


class RankSum:
    """The sum of what ranks give, in float64; has what the judge asks of a reference.

    Args:
        parts: What each rank gives, of one shape and type.
        factor: Of the sum: one over their number where the mean is taken.

    Attributes:
        results: The sum.
    """

    def __init__(self, parts: Sequence[Tensor], factor: float = 1.0) -> None:
        wide = [plain(part).to(torch.complex128 if part.is_complex() else torch.float64) for part in parts]
        self.results = [torch.stack(wide).sum(0) * factor]
        self._magnitude = torch.stack(wide).abs().sum(0) * factor
        self._number = len(parts)

    def allowed(self, number: int, output: torch.dtype, _unit: float) -> Tensor:
        """Return the allowed error of each element: each addition, in any order, may round to that type."""
        sums = self._number * unit_roundoff(output) * self._magnitude
        return sums + 2 * unit_roundoff(output) * self.results[number].abs() + smallest_number(output)

    def allowed_norm(self, _number: int, _unit: float) -> float:
        """Return infinity: errors are not limited as a whole."""
        return math.inf

    def alternatives(self, _number: int) -> list[Tensor]:
        """Return nothing: a sum does not jump."""
        return []


def _turned(gradient: Tensor, generator: torch.Generator) -> Tensor:
    return gradient * (2 * torch.randint(0, 2, gradient.shape, generator=generator, dtype=torch.int8) - 1)


def _same(value: Any) -> Any:
    return value


def _products(pairs: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of `wanted` for pairs of a result and its gradient; zeros where it does not depend on it."""
    if not pairs or not wanted:
        return [torch.zeros_like(leaf) for leaf in wanted]
    results, gradients = zip(*pairs, strict=True)
    found: Sequence[Tensor | None] = torch.autograd.grad(results, wanted, gradients, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else plain(one) for leaf, one in zip(wanted, found, strict=True)]


def _choice(result: Tensor) -> Tensor | None:
    return None if result.is_floating_point() or result.is_complex() else result.clone()


def _of(results: Sequence[Tensor | None], number: int) -> Tensor:
    found = results[number]
    if found is None:
        raise ValueError(f"argument {number} is not differentiated")
    return found.detach()


def _kept(tensor: Tensor, types: dict[torch.Size, torch.dtype]) -> Tensor:
    """Return a saved tensor as it is kept in the type of a result of its shape."""
    dtype = types.get(tensor.shape)
    if dtype is None or not tensor.is_floating_point() or not dtype.is_floating_point:
        return tensor
    return tensor.detach().to(dtype).to(tensor.dtype)


def _blurred(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return a saved tensor with every element moved by a quarter of a roundoff of what its elements are on average.

    Where elements cancel, as one less a probability near 1, the forward has an error that does not shrink with them.
    Masks with the largest number of their type stay: their average says nothing of an element.
    """
    if not (tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel()):
        return tensor
    size = float(tensor.detach().square().mean().sqrt())
    if not 0 < size < _MASKS:
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8)
    return tensor.detach() + (2 * signs - 1) * (_SINGLE / 4 * size)


def _largest(others: Sequence[Tensor], exact: Tensor) -> Tensor:
    """Return by how much the finite elements of `others` differ from `exact` at most."""
    largest = torch.zeros_like(exact.abs())
    for other in others:
        change = (other - exact).abs()
        largest = torch.maximum(largest, torch.where(change.isfinite(), change, 0.0))
    return largest


def _floored(moved: Tensor, share: float) -> Tensor:
    floor = share * float(moved.square().mean().sqrt()) if moved.numel() else 0.0
    return moved.clamp(min=floor if math.isfinite(floor) else 0.0)
