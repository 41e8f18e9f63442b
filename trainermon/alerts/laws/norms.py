"""Which gradients a framework leaves out of its norm, or counts more than once: those whose squares are the difference.

Frameworks decide by marks on parameters which copies of a tensor count. A mark that is missing or wrong changes the
norm by the squares of some parameters, and clipping with it. Tried are single parameters, those that have the same name
in all layers, those that are spread over the ranks alike, experts, and all; left out, counted several times, or counted
on some ranks only. What explains the difference on several steps is no chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.core.values import Coordinates, Placement

AXES = ("tp", "pp", "cp", "dp", "ep")
MAX_NAMED = 3
_OF_DIFFERENCE = 2e-3
_OF_NORM = 4e-6  # frameworks sum squares in float32
_WORDS = ("norm", "bias", "expert", "router", "embed")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a layer's number, not that of fc1


class SquaredGradient(NamedTuple):
    """The sum of squares of what one rank contributes to the norm of one parameter's gradient.

    Attributes:
        name: The parameter.
        squares: The sum, scales divided out.
        place: Where the rank stands.
        placement: How the rank's part lies in the whole tensor.
    """

    name: str
    squares: float
    place: Coordinates
    placement: Placement


class NormExplanation(NamedTuple):
    """What a framework does with some gradients when it computes the norm, and should not.

    Attributes:
        names: The parameters.
        which: What they have in common.
        how: What is done with them.
    """

    names: tuple[str, ...]
    which: str
    how: str

    def __str__(self) -> str:
        names = ", ".join(self.names[:MAX_NAMED])
        more = f" and {len(self.names) - MAX_NAMED} more" if len(self.names) > MAX_NAMED else ""
        which = "" if self.which == names else f" ({self.which})"
        return f"{names}{more} {self.how}{which}"


def explain_norm(
    gradients: Sequence[SquaredGradient], squared_norm: float, among: Sequence[NormExplanation] | None = None
) -> tuple[NormExplanation, ...]:
    """Return what explains that a framework's `squared_norm` is not the sum of all squares, the simplest first.

    With `among` only what is one of these, as found on another step. Cost: some ten sums for each parameter.
    """
    squares = np.array([gradient.squares for gradient in gradients])
    missing = squared_norm - float(squares.sum())
    limit = _OF_DIFFERENCE * abs(missing) + _OF_NORM * squared_norm
    found: dict[tuple[tuple[str, ...], str], NormExplanation] = {}
    for which, chosen in _classes(gradients):
        names = tuple(dict.fromkeys(gradients[number].name for number in chosen))
        places = [gradients[number].place for number in chosen]
        for how, change in _changes(squares[chosen], places, is_all=len(chosen) == len(gradients)):
            if abs(change - missing) <= limit < abs(missing):
                found.setdefault((names, how), NormExplanation(names, which, how))
    return tuple(one for one in found.values() if among is None or one in among)


def _classes(gradients: Sequence[SquaredGradient]) -> Iterator[tuple[str, NDArray[np.intp]]]:
    """Yield sets of gradients, as positions, and what each has in common."""
    classes: dict[str, list[int]] = {}
    labels = (_names, _layouts, _words)
    for label_of in labels:
        for number, gradient in enumerate(gradients):
            for label in label_of(gradient):
                classes.setdefault(label, []).append(number)
    classes["all gradients"] = list(range(len(gradients)))
    for label, chosen in classes.items():
        yield label, np.array(chosen, np.intp)


def _names(gradient: SquaredGradient) -> Iterator[str]:
    yield gradient.name
    if (pattern := _NUMBER.sub("*", gradient.name)) != gradient.name:
        yield pattern


def _layouts(gradient: SquaredGradient) -> Iterator[str]:
    yield from (f"what {axis} ranks hold copies of" for axis in gradient.placement.replicated_over)
    yield from (f"what is split over {axis} ranks" for axis in gradient.placement.partitioned_over)


def _words(gradient: SquaredGradient) -> Iterator[str]:
    yield from (f"all with {word!r} in their names" for word in _WORDS if word in gradient.name)


def _changes(
    squares: NDArray[np.float64], places: Sequence[Coordinates], *, is_all: bool
) -> Iterator[tuple[str, float]]:
    """Yield what a framework may do with gradients, and by how much the sum of squares changes then."""
    total = float(squares.sum())
    sizes = {axis: int(getattr(places[0], f"{axis}_size")) for axis in AXES}
    if not is_all:
        yield "left out", -total
    for times in sorted({2, *sizes.values()} - {1}):
        yield f"counted {times} times", (times - 1) * total
        if is_all:
            yield f"divided by the root of {times}", (1 / times - 1) * total
    for axis in (*(axis for axis, size in sizes.items() if size > 1), "rank"):
        own = np.array([getattr(place, axis) for place in places])
        for place in np.unique(own).tolist() if np.ptp(own) else ():
            yield f"counted on {axis} {place} only", float(squares[own == place].sum()) - total
