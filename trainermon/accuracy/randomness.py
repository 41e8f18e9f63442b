"""Whether what a random call gave can be what it should have drawn, and what it gives back to its argument.

Without the state of the generator only the distribution can be judged, at five standard deviations: of sound calls one
in a million fails. What a dropout keeps is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainermon.accuracy.calls import OperationCall, plain
from trainermon.accuracy.reference import smallest_number, unit_roundoff

_SIGMAS = 5.0
_NO_CHANCE = math.log(1e-12)
# What the statistic of Kolmogorov and Smirnov times the root of the number exceeds with the probability of five sigmas.
_DISTANCE = 2.75
# Where chance makes so large a distance, numbers are too few to tell: zeros are a half from a normal distribution.
_TELLS_NOTHING = 0.5
_DROPOUTS = {"dropout": 0, "dropout1d": 2, "dropout2d": 2, "dropout3d": 2, "feature_dropout": 2}
_UNBATCHED = {"dropout1d": 2, "dropout3d": 4}
# By operation the places of the share that is dropped and of whether it is training, with what they are by default.
_INNER: Mapping[str, tuple[int, str, int | None, str]] = {
    "scaled_dot_product_attention": (4, "dropout_p", None, ""),
    "multi_head_attention_forward": (10, "dropout_p", 13, "training"),
    "lstm": (5, "dropout", 6, "train"),
    "gru": (5, "dropout", 6, "train"),
    "rnn_tanh": (5, "dropout", 6, "train"),
    "rnn_relu": (5, "dropout", 6, "train"),
}

_PARAMETERS = {
    "uniform": (("from", 0.0), ("to", 1.0)),
    "normal": (("mean", 0.0), ("std", 1.0)),
    "exponential": (("lambd", 1.0),),
}


class _Dropout(NamedTuple):
    taken: Tensor
    share: float


def is_drawn(name: str, call: OperationCall) -> bool:
    """Return whether a call that need not be random drops something inside, as attention with dropout does."""
    places = _INNER.get(_last(name))
    if places is None:
        return False
    share = _argument(call, places[0], places[1], 0.0)
    is_training = places[2] is None or bool(_argument(call, places[2], places[3], default=True))
    return bool(share) and is_training


def is_idle(name: str, call: OperationCall) -> bool:
    """Return whether a dropout drops nothing: it is not training, or its share is zero."""
    found = _dropout_of(name, call)
    return found is not None and found.share == 0


class DroppedElements(NamedTuple):
    """What a dropout kept of each element, and where that shows: of a zero it does not."""

    kept: Tensor
    known: Tensor
    share: float

    def repeats(self, other: DroppedElements) -> bool:
        """Return whether two dropouts dropped the same, and it cannot be chance (one in a million million)."""
        known = self.known & other.known
        if self.kept.shape != other.kept.shape or bool(((self.kept != other.kept) & known).any()):
            return False
        agree = self.share * other.share + (1 - self.share) * (1 - other.share)
        return float(known.sum()) * math.log(agree) < _NO_CHANCE


def dropped_elements(name: str, call: OperationCall, given: Any) -> DroppedElements | None:
    """Return what a dropout of single elements dropped; None of any other call, and of one that drops all or none."""
    dropout = _dropout_of(name, call)
    if dropout is None or _DROPOUTS[_last(name)] or not 0 < dropout.share < 1 or not isinstance(given, Tensor):
        return None
    if given.shape != dropout.taken.shape:
        return None
    return DroppedElements(plain(given) != 0, _shows(dropout.taken, given.dtype), dropout.share)


def odds_against(name: str, call: OperationCall, given: Tensor) -> str | None:
    """Return what is wrong with the result of a random call; "" if nothing is, None if that cannot be said."""
    given = plain(given)
    dropout = _dropout_of(name, call)
    if dropout is not None:
        return _wrong_dropout(dropout, given, _dims_of_draw(_last(name), given.dim()))
    distribution = _cumulated(_last(name), call, given)
    if distribution is None:
        return None
    if _is_alike(given):
        return "all numbers are alike"
    moved, allowed = 4 * unit_roundoff(given.dtype), _DISTANCE / math.sqrt(given.numel())
    if bool(((distribution < -moved) | (distribution > 1 + moved)).any()) or _distance(distribution) > allowed + moved:
        return "another distribution"
    return "" if allowed < _TELLS_NOTHING else None


def determined(name: str, call: OperationCall, given: Any, gradient: Tensor | None) -> OperationCall | None:
    """Return a call that is no dropout, and keeps what a dropout was seen to keep; None if that is not known.

    Where the argument is zero or nearly, whether it was kept shows in its `gradient` alone.
    """
    dropout = _dropout_of(name, call)
    if dropout is None or not isinstance(given, Tensor):
        return None
    kept = plain(given) != 0
    unknown = ~kept & ~_shows(dropout.taken, given.dtype)
    if bool(unknown.any()):
        if gradient is None:
            return None
        kept = torch.where(unknown, plain(gradient) != 0, kept)
    factors = kept.double() / max(1 - dropout.share, torch.finfo(torch.float64).tiny)
    argument = next(value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor))
    return OperationCall(lambda taken: taken * factors, [argument], {})


def _shows(taken: Tensor, dtype: torch.dtype) -> Tensor:
    """Return where a zero in a result of `dtype` can only be a dropped element.

    A device may flush what is below the type's smallest normal number.
    """
    return (taken.abs() >= torch.finfo(dtype).tiny) & taken.isfinite()


def _dropout_of(name: str, call: OperationCall) -> _Dropout | None:
    if _last(name) not in _DROPOUTS:
        return None
    taken = _argument(call, 0, "input", None)
    share = _argument(call, 1, "p", 0.5)
    is_training = bool(_argument(call, 2, "training", _argument(call, 2, "train", default=True)))
    if not isinstance(taken, Tensor) or not isinstance(share, int | float) or not 0 <= share <= 1:
        return None
    return _Dropout(plain(taken).double(), float(share) if is_training else 0.0)


def _dims_of_draw(last: str, dims: int) -> int:
    """Return how many dimensions a dropout draws along, 0 for all; an input without batch has one less."""
    return _DROPOUTS[last] - (_UNBATCHED.get(last) == dims)


def _wrong_dropout(dropout: _Dropout, given: Tensor, dims_of_draw: int) -> str:
    """Return what is wrong with the result of a dropout; with `dims_of_draw` it drops all that lies behind these."""
    taken, share = dropout
    if given.shape != taken.shape:
        return f"shape: {tuple(taken.shape)} in float64"
    exact = taken / (1 - share) if share < 1 else torch.zeros_like(taken)
    error = (given.double() - exact).abs()
    allowed = 4 * unit_roundoff(given.dtype) * exact.abs() + smallest_number(given.dtype)
    rounded = exact.to(given.dtype)
    kept = (error <= allowed) | (given == rounded) | (given.isnan() & rounded.isnan())
    dropped = given == 0
    if not bool((kept | dropped).all()):
        return "what it kept is not what it took, scaled"
    seen = _shows(taken, given.dtype)
    drops = (dropped & seen).double()
    if dims_of_draw and taken.dim() > dims_of_draw:
        drops, seen = drops.flatten(dims_of_draw).amax(-1), seen.flatten(dims_of_draw).any(-1)
    drops = drops[seen]
    if _is_unlikely(drops, share):
        return f"a share of {float(drops.mean()):.3g} is dropped"
    if drops.numel() > 1 and _is_unlikely(drops[1:] * drops[:-1], share * share, correlated=True):
        return "what is dropped depends on its neighbour"
    return ""


def _is_unlikely(events: Tensor, chance: float, *, correlated: bool = False) -> bool:
    """Return whether the number of true events is too far from what `chance` makes of them."""
    number = events.numel()
    if not number:
        return False
    variance = chance * (1 - chance) * (3 if correlated else 1)  # of neighbours each one counts in two pairs
    return abs(float(events.sum()) - number * chance) > _SIGMAS * math.sqrt(number * variance) + (0 < chance < 1)


def _cumulated(last: str, call: OperationCall, given: Tensor) -> Tensor | None:
    """Return for each element of the sorted result the share that should lie below it; None if that is not known.

    Beyond the range of a distribution it is less than 0, or more than 1.
    """
    if not given.is_floating_point() or not given.numel():
        return None
    values = given.double().flatten().sort().values
    found: Tensor | None = None
    if last in ("rand", "rand_like"):
        found = values
    elif last in ("randn", "randn_like"):
        found = torch.special.ndtr(values)
    elif len(_floats(call)) == 1:  # what it writes to: the parameters are numbers
        low, high = _numbers(call, *_PARAMETERS.get(last, ()))
        if last == "uniform" and high > low:
            found = (values - low) / (high - low)
        elif last == "normal" and high > 0:
            found = torch.special.ndtr((values - low) / high)
        elif last == "exponential":
            found = 1 - (-low * values).exp()
    return found


def _is_alike(given: Tensor) -> bool:
    """Return whether all elements are one number, which no draw from a range gives (one in a million million)."""
    enough = given.numel() > 1 + _NO_CHANCE / math.log(unit_roundoff(given.dtype))
    return enough and bool((given == given.flatten()[0]).all())


def _distance(cumulated: Tensor) -> float:
    """Return how far the elements are from a distribution, as Kolmogorov and Smirnov have it."""
    if not bool(cumulated.isfinite().all()):
        return math.inf
    number = cumulated.numel()
    below = torch.arange(number, dtype=torch.float64) / number
    distance = torch.maximum((cumulated - below).abs(), (cumulated - below - 1 / number).abs()).max()
    return float(distance)


def _numbers(call: OperationCall, *named: tuple[str, float]) -> tuple[float, float]:
    """Return the two numbers that follow the tensor which a call writes to, by place and name; 0 where one lacks."""
    found = [float(_argument(call, place, name, default)) for place, (name, default) in enumerate(named, 1)]
    first, second, *_ = [*found, 0.0, 0.0]
    return first, second


def _floats(call: OperationCall) -> list[Tensor]:
    return [tensor for tensor in call.tensors if tensor.is_floating_point()]


def _argument(call: OperationCall, place: int, name: str, default: Any) -> Any:
    return call.args[place] if len(call.args) > place else call.kwargs.get(name, default)


def _last(name: str) -> str:
    return name.rpartition(".")[2].rstrip("_")
