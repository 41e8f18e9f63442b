"""Are the gradients right that msprobe recorded of one call? Of what they are, its dump does not say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from trainermon.accuracy.judge import Judgement, Review, Status, judge_gradient
from trainermon.accuracy.products import GradientSum, LastStep, VectorProduct
from trainermon.core.errors import DumpError

Reading = Callable[[], VectorProduct]
"""Returns what a call gives back in float64; raises DumpError if that cannot be computed."""


def judge_alone(
    given: Mapping[int, Tensor],
    slots: Sequence[str],
    readings: Iterable[Reading],
    review: Callable[[VectorProduct], Review | None],
) -> dict[str, Judgement]:
    """Return a judgement of each recorded gradient, by the place of its tensor: `input.0`.

    `given` are the gradients by their number among those recorded, `slots` the places of the tensors that the call
    takes. The first of `readings` counts by which all are right; if there is none, the first that has gradients of
    these shapes.

    Raises:
        DumpError: No reading has.
    """
    found: dict[str, Judgement] = {}
    refusal = "the CPU computes it in other steps"
    for reading in readings:
        try:
            product = reading()
        except DumpError as error:
            refusal = str(error)
            continue
        numbers = numbers_of(product, given)
        judged = {
            slot_of(product, number, slots): judge_gradient(
                given[recorded],
                GradientSum([(product, number)], given[recorded]),
                product.backward.coarsest,
                review(product),
            )
            for recorded, number in numbers.items()
        }
        if judged and all(one.status is not Status.ERROR for one in judged.values()):
            return judged
        found = found or judged
    if not found:
        raise DumpError(refusal)
    return found


def compared_alone(given: Mapping[int, Tensor], readings: Iterable[Reading]) -> list[tuple[Tensor, Tensor]]:
    """Return each recorded gradient and what it should be in float64, by the first reading that has such shapes.

    Raises:
        DumpError: None has.
    """
    for reading in readings:
        with contextlib.suppress(DumpError):
            product = reading()
            numbers = numbers_of(product, given)
            if numbers:
                pairs = [(given[recorded], (product, number)) for recorded, number in numbers.items()]
                return [(one, GradientSum([part], one).results[0]) for one, part in pairs]
    raise DumpError("the CPU computes it in other steps")


def numbers_of(product: VectorProduct, given: Mapping[int, Tensor]) -> dict[int, int]:
    """Return which of the product's gradients each recorded one is, by number; {} if they do not fit together."""
    made = [number for number, one in enumerate(product.results) if one is not None]
    if isinstance(product, LastStep):
        pairs = {number: number for number in made}
    else:
        pairs = dict(zip(sorted(given), made, strict=False)) if len(made) == len(given) else {}
    if pairs.keys() != given.keys():
        return {}
    is_alike = all(_shape(product, number) == given[recorded].shape for recorded, number in pairs.items())
    return pairs if is_alike else {}


def slot_of(product: VectorProduct, number: int, slots: Sequence[str]) -> str:
    """Return the place of the tensor that the gradient `number` is of; `intermediate.0`: made in the call."""
    place = product.argument(number)
    return f"intermediate.{number}" if place is None else slots[place]


def _shape(product: VectorProduct, number: int) -> object:
    found = product.results[number]
    return found.shape if found is not None else None
