"""What the backward of a call gives in float64, and how far a sound computation of it may be off.

The gradient of a tensor is the sum of what all calls that take it give back: the product of each one's derivative with
the gradients of its results. Kernels of a backward take what the forward saved in its own type, rounded, and that is
allowed to them like their inputs; what they round beyond that is judged as in a forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.allowances import HARD_TO_DIFFERENTIATE, gradient_allowance
from trainermon.accuracy.calls import OperationCall, cast, eps_of, mapped, plain
from trainermon.accuracy.families import Family
from trainermon.accuracy.inner_sums import error_of_paths
from trainermon.accuracy.reference import RoundoffMove, computing_roundoff, magnitude_of, stored_rounding, unit_roundoff
from trainermon.accuracy.whole_errors import allowed_norm, common_factor, is_swamped, most_likely

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
        return computing_roundoff(types)


def gradients_on(backward: BackwardCall, device: str) -> list[Tensor]:
    """Return the gradients that the backward of a call gives on `device`, in the order of `wanted`, sorted.

    Nothing given is written to. Raises whatever the operation raises.
    """
    return both_on(backward, device)[1]


def both_on(backward: BackwardCall, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a call gives on `device`, and the gradients that its backward gives there: see `gradients_on`."""

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
    return [plain(one) for one in made], _products(pairs, wanted)


def as_call(backward: BackwardCall) -> OperationCall:
    """Return a backward as a call that takes arguments, keywords and gradients of results, and gives gradients."""

    def run(args: Sequence[Any], kwargs: Mapping[str, Any], gradients: Sequence[Tensor | None]) -> list[Tensor]:
        call = backward.call._replace(args=args, kwargs=kwargs)
        return gradients_on(backward._replace(call=call, gradients=gradients), "cpu")

    call = backward.call
    return OperationCall(run, [list(call.args), dict(call.kwargs), list(backward.gradients)], {}, call.is_custom)


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
        call = self.backward.call
        form = str(call.kwargs.get("approximate", "none"))
        name = getattr(call.function, "__name__", "")
        share = gradient_allowance(name, self.backward.family, form)
        exact = _of(self.results, number).abs()
        inside = self.backward.inside
        allowed = 2 * (share.ulps * unit + (unit_roundoff(inside) if inside else 0.0)) * exact
        if self.backward.family is Family.CONTRACTION:
            self._magnitudes = self._magnitudes or self._run(lambda: magnitude_of)
            terms = _of(self._magnitudes, number).abs()
        else:
            terms = math.sqrt(self._num_terms(number)) * self._spread(number)
        allowed = allowed + share.sums * math.sqrt(self._num_terms(number)) * unit * terms
        given = self.backward.gradients[0]
        if share.ones and given is not None and given.shape == exact.shape:
            allowed = allowed + 2 * share.ones * unit * plain(given).abs().double()
        if share.probes:
            moved = _floored(self._moved(number), share.floor) * (unit / _SINGLE)
            allowed = allowed + share.probes * moved + 2 * _floored(self._saved(number), 1.0)
        lost = error_of_paths(name, call, exact) if number == 0 else None
        return allowed if lost is None else allowed + unit * lost

    def alternatives(self, number: int) -> list[Tensor]:
        """Return the gradient of the tensor `number` in runs with slightly moved inputs, for results that jump."""
        if self.backward.family is Family.EXACT:
            return []
        return [_of(probe, number) for probe in self._probed()]

    def num_roundings(self, number: int) -> float:
        """Return how many numbers of the recorded type are added up in an element, with signs at random.

        Products keep their terms in float32; what is broadcast, or picked more than once, is added up.
        """
        return 1.0 if self.backward.family is Family.CONTRACTION else math.sqrt(self._num_terms(number))

    def is_swamped(self, number: int, unit: float) -> bool:
        """Return whether a sum that is rounded to `unit` may lose terms of the gradient of the tensor `number`."""
        turned = [_of(one, number).abs() for one in self._turns()]
        return is_swamped(_of(self.results, number), torch.stack(turned).square().mean(0).sqrt(), unit)

    def argument(self, number: int) -> int | None:
        """Return which tensor among the arguments the gradient `number` is of; None: of none of them."""
        return number

    def _num_terms(self, number: int) -> float:
        """Return about how many numbers are summed into an element, as far as the sizes tell."""
        made = max(1, _of(self.results, number).numel())
        tensors = self.backward.call.tensors
        given = sum(one.numel() for one in self.backward.gradients if one is not None)
        if self.backward.family is Family.CONTRACTION:
            others = [tensor.numel() for place, tensor in enumerate(tensors) if place != self.argument(number)]
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
        found = [_of(one, number).abs() for one in (self.results, *self._turns())]
        return torch.stack(found).amax(0)

    def _turns(self) -> list[list[Tensor | None]]:
        """Return the product for gradients whose signs are drawn at random, a few times."""
        if self._turned is None:
            generator = torch.Generator().manual_seed(1)
            self._turned = self._runs(turns=[partial(_turned, generator=generator)] * NUM_PROBES)
        return self._turned

    def _saved(self, number: int) -> Tensor:
        """Return by how much it changes if the forward's results are kept in their own type for the backward."""
        if self._from_saved is None:
            with torch.autograd.graph.saved_tensors_hooks(self._kept, lambda one: one):
                self._from_saved = self._run()
        return _largest([_of(self._from_saved, number)], _of(self.results, number))

    def _kept(self, tensor: Tensor) -> Tensor:
        """Return a saved tensor as it is kept in the type of a result of its shape.

        What is neither of a result's shape nor of an argument's was made on the way, as the mean of a row.
        """
        types = {one.shape: one.dtype for one in self.backward.gradients if one is not None}
        taken = {one.shape for one in self.backward.call.tensors}
        coarsest = max(types.values(), key=unit_roundoff, default=None)
        dtype = types.get(tensor.shape) or (None if tensor.shape in taken else coarsest)
        if dtype is None or not tensor.is_floating_point() or not dtype.is_floating_point:
            return tensor
        return tensor.detach().to(dtype).to(tensor.dtype)

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

    def _run(self, changes: Callable[[], _Change] = lambda: _same) -> list[Tensor | None]:
        """Return the product of changed arguments and gradients, each by one of `changes`."""
        [found] = self._runs(changes, [_same])
        return found

    def _runs(
        self, changes: Callable[[], _Change] = lambda: _same, turns: Sequence[_Change] = ()
    ) -> list[list[Tensor | None]]:
        """Return the products of changed arguments and gradients, these as each of `turns` has them; of one forward."""
        call, change = self.backward.call, changes()
        keywords = {**call.kwargs, **eps_of(call.function, call.args, call.kwargs)}
        args, kwargs = (
            mapped(lambda value: change(cast(value, torch.float64)), one) for one in (list(call.args), keywords)
        )
        taken = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        wanted = [leaf for number, leaf in enumerate(taken) if number in self.backward.wanted]
        for leaf in wanted:
            leaf.requires_grad_()
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            args, kwargs = (mapped(_cloned, one) for one in (args, kwargs))
            copies = [leaf.grad_fn for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            result = call.function(*args, **kwargs)
            made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            self._choices = self._choices or [_choice(one) for one in made]
            graded = [
                (one, changes()(plain(gradient).to(one.dtype)))
                for one, gradient in self._graded(made)
                if gradient is not None and one.requires_grad
            ]
            return [self._given_back([(one, turn(given)) for one, given in graded], taken, copies) for turn in turns]

    def _graded(self, made: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        """Return each result with its gradient."""
        return list(zip(made, self.backward.gradients, strict=True))

    def _given_back(
        self, pairs: Sequence[tuple[Tensor, Tensor]], taken: Sequence[Tensor], _copies: Sequence[Any]
    ) -> list[Tensor | None]:
        """Return what autograd gives for results with gradients: one for each tensor that the call takes."""
        found = iter(_products(pairs, [leaf for leaf in taken if leaf.requires_grad]))
        return [next(found) if leaf.requires_grad else None for leaf in taken]


class LastStep(VectorProduct):
    """What the operation that made the first result gives back: msprobe records that of each call, and no more.

    A call may be made of several operations: the last one of a cross entropy gives back the gradient of the logarithms.

    Attributes:
        results: One for each tensor that the operation takes; None of those that are not differentiated.
        arguments: For each of these its number among the tensors of the call's arguments; None: it is not one of them.
    """

    arguments: Sequence[int | None] = ()

    def argument(self, number: int) -> int | None:
        """Return which tensor among the arguments the gradient `number` is of; None: of one made on the way."""
        return self.arguments[number]

    def _graded(self, made: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        gradients, last = self.backward.gradients, made[0].grad_fn
        own = [one for one in made if one.grad_fn is last and one.output_nr < len(gradients)]
        return [(one, gradients[one.output_nr]) for one in own]

    def _given_back(
        self, pairs: Sequence[tuple[Tensor, Tensor]], taken: Sequence[Tensor], copies: Sequence[Any]
    ) -> list[Tensor | None]:
        last = pairs[0][0].grad_fn if pairs else None
        if last is None:
            raise ValueError("its first result has no gradient")
        edges = [edge for edge, _ in last.next_functions]
        self.arguments = [copies.index(edge) if edge is not None and edge in copies else None for edge in edges]
        found: list[Tensor | None] = []
        handle = last.register_hook(lambda given, _: found.extend(given))
        try:
            super()._given_back(pairs, taken, copies)
        finally:
            handle.remove()
        return [None if one is None else plain(one) for one in found]


class GivenBack(Protocol):
    """Interface of what one call gives back to the tensors it takes."""

    @property
    def results(self) -> Sequence[Tensor | None]:
        """What it gives back to each of them, in float64."""

    def allowed(self, number: int, unit: float) -> Tensor:
        """Return the allowed error of each element, see `VectorProduct.allowed`."""

    def num_roundings(self, number: int) -> float:
        """Return how many numbers of the recorded type are added up in an element, see `VectorProduct`."""

    def is_swamped(self, number: int, unit: float) -> bool:
        """Return whether a sum that is rounded to `unit` may lose terms."""

    def alternatives(self, number: int) -> list[Tensor]:
        """Return what it gives back for slightly moved inputs."""


class GradientSum:
    """The gradient of a tensor in float64: the sum of what each call that takes it gives back.

    Has what the judge asks of a reference, with one result.

    Args:
        parts: The calls, each with the number of the tensor among its own.
        shape: The shape of the tensor.

    Attributes:
        results: The gradient.
        num_roundings: How many numbers of the recorded type are added up in an element, with signs at random.
    """

    def __init__(self, parts: Sequence[tuple[GivenBack, int]], like: Tensor) -> None:
        self._parts = parts
        self.num_roundings = sum(product.num_roundings(place) for product, place in parts)
        self._output = like.dtype
        self._zero = torch.zeros(like.shape, dtype=torch.complex128 if like.is_complex() else torch.float64)
        self.results = [self._sum([_of(product.results, number) for product, number in parts])]

    def allowed(self, number: int, output: torch.dtype, unit: float) -> Tensor:
        """Return the allowed error of each element of the gradient of type `output`; see `Reference.allowed`."""
        exact = self.results[number].abs()
        allowed = stored_rounding(exact, output)
        if len(self._parts) > 1:  # each is rounded, and so is each sum
            sizes = sum(_of(product.results, place).abs() for product, place in self._parts)
            allowed = allowed + len(self._parts) * unit_roundoff(output) * sizes
        for product, place in self._parts:
            allowed = allowed + product.allowed(place, unit)
        return allowed

    def allowed_norm(self, number: int, unit: float) -> float:
        """Return the norm that the errors of all elements together may have."""
        return allowed_norm(self.allowed(number, self._output, unit))

    def is_scaled(self, _number: int, error: Tensor, unit: float) -> bool:
        """Return whether one of the calls gives back too much or too little by a factor that no rounding explains."""
        return any(
            common_factor(error, _of(product.results, place)).is_systematic(unit)
            and not product.is_swamped(place, unit)
            for product, place in self._parts
        )

    def culprit(self, given: Tensor) -> int | None:
        """Return the number of the part whose multiple explains why `given` is another gradient; None: none alone."""
        error = plain(given).to(self.results[0].dtype) - self.results[0]
        return most_likely(error, [_of(product.results, place) for product, place in self._parts])

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
        num_roundings: One: ranks send what they send.
    """

    num_roundings = 1.0

    def __init__(self, parts: Sequence[Tensor], factor: float = 1.0) -> None:
        wide = [plain(part).to(torch.complex128 if part.is_complex() else torch.float64) for part in parts]
        self.results = [torch.stack(wide).sum(0) * factor]
        self._magnitude = torch.stack(wide).abs().sum(0) * factor
        self._number = len(parts)

    def allowed(self, number: int, output: torch.dtype, _unit: float) -> Tensor:
        """Return the allowed error of each element: each addition, in any order, may round to that type."""
        sums = self._number * unit_roundoff(output) * self._magnitude
        return sums + stored_rounding(self.results[number].abs(), output)

    def allowed_norm(self, _number: int, _unit: float) -> float:
        """Return infinity: errors are not limited as a whole."""
        return math.inf

    def is_scaled(self, _number: int, _error: Tensor, _unit: float) -> bool:
        """Return False: each addition may round."""
        return False

    def alternatives(self, _number: int) -> list[Tensor]:
        """Return nothing: a sum does not jump."""
        return []


def _turned(gradient: Tensor, generator: torch.Generator) -> Tensor:
    return gradient * (2 * torch.randint(0, 2, gradient.shape, generator=generator, dtype=torch.int8) - 1)


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same(value: Any) -> Any:
    return value


def _products(pairs: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of `wanted` for pairs of a result and its gradient; zeros where it does not depend on it."""
    if not pairs or not wanted:
        return [torch.zeros_like(leaf) for leaf in wanted]
    results, gradients = zip(*pairs, strict=True)
    found: Sequence[Tensor | None] = torch.autograd.grad(
        results, wanted, gradients, retain_graph=True, allow_unused=True
    )
    return [torch.zeros_like(leaf) if one is None else plain(one) for leaf, one in zip(wanted, found, strict=True)]


def _choice(result: Tensor) -> Tensor | None:
    return None if result.is_floating_point() or result.is_complex() else result.clone()


def _of(results: Sequence[Tensor | None], number: int) -> Tensor:
    found = results[number]
    if found is None:
        raise ValueError(f"argument {number} is not differentiated")
    return found.detach()


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
