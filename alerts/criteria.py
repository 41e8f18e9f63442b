"""What the condition of an alert rule may say, and how it is read from YAML: one value and one reader per condition.

How a condition is computed is decided in `conditions`, `spikes`, `trends`, `ratios` and `across`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType

from trainermon.alerts.document import Node, nearest
from trainermon.alerts.extensions import Custom, conditions_of_others
from trainermon.monitor.values import Kind


class Direction(str, enum.Enum):
    """Which side of the usual range counts."""

    BOTH = "both"
    UP = "up"
    DOWN = "down"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Some element is NaN or infinite.

    Attributes:
        allow_initial_inf: Infinite elements do not count in a series that had some, but no NaN, when it was first seen:
            attention masks hold -inf by design.
    """

    allow_initial_inf: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """The mean of the last `over` values of the statistic is greater than `above` or less than `below`."""

    above: float | None = None
    below: float | None = None
    over: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """The statistic left its usual range.

    The score is the distance from the median of the last values, in robust standard deviations (1.4826 times the median
    absolute deviation); statistics that cannot be negative are compared by their logarithms.

    Attributes:
        score: Above this score the condition holds.
        clear: Below this score it is over; at most `score`.
        window: How many values make the usual range.
        warmup: How many values a series must have shown before it is judged; at most `window`.
        direction: Which side counts.
        floor: The least standard deviation: a difference of logarithms (0.1 is about 10 %), or for statistics that may
            be negative a share of the median.
        adopt: After so many values outside the usual range in a row, the new level is learned as the usual one.
    """

    score: float
    clear: float
    window: int = 128
    warmup: int = 64
    direction: Direction = Direction.BOTH
    floor: float = 0.1
    adopt: int = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RelativeToMean:
    """The magnitude of the statistic is far from the mean of its magnitudes so far.

    Attributes:
        threshold: The condition holds above `1 + threshold` times the mean, and below the mean divided by that.
        beta: Share of the old mean in the new one, the rest is the new magnitude.
        direction: Which side counts.
        floor: Magnitudes below this share of the tensor's rms count as that share: the mean of a tensor hovers around
            zero, where any ratio is large.
    """

    threshold: float
    beta: float = 0.99
    direction: Direction = Direction.BOTH
    floor: float = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """The statistic stayed within `relative_change` of one value."""

    relative_change: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """The share of zeros is at least `zero_ratio`."""

    zero_ratio: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The statistic, divided by that of the series of kind `over` with the same name, is beyond a limit.

    Attributes:
        over: Kind of the divisor.
        above: The condition holds above this ratio.
        below: It holds below this one.
        times_rate: The ratio is multiplied by the largest learning rate of the step.
    """

    over: Kind
    above: float | None = None
    below: float | None = None
    times_rate: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Vanishing:
    """The magnitude has sunk, however slowly, below a `share` of the level of its first `warmup` values."""

    share: float = 1e-4
    warmup: int = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saturated:
    """The largest magnitude is at least a `share` of the largest number of the tensor's own type."""

    share: float = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NotDecreasing:
    """The mean over `steps` values is not less than the best such mean before, by a share of at least `improvement`."""

    steps: int
    improvement: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One rank is far from its peers: the ranks that hold the same part of the model for other data.

    The score is the distance from the peers' median in robust standard deviations, as for `Spike`.

    Attributes:
        score: Above this score the condition holds.
        clear: Below this score it is over; at most `score`.
        floor: The least standard deviation, as for `Spike`.
        ranks: With fewer ranks to compare nothing is said: of two that differ nobody knows which one is right.
    """

    score: float
    clear: float
    floor: float = 0.1
    ranks: int = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Differs:
    """Ranks differ that must not: copies of the same elements, or members of a group that count its collectives.

    The value that most ranks have is taken for the right one. With an equal number on both sides all of them are named.

    Attributes:
        tolerance: Values count as equal up to this share of the larger one.
    """

    tolerance: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank needs longer for its own work than its peers, or than it used to while they do not.

    Own work is the time of the `step` series less that of the `comm` series among those that the rule looks at, so that
    a rank that waits for another one is never blamed.

    Attributes:
        ratio: The condition holds above this ratio of its own work to the others' median.
        window: Of so many steps the median is taken.
    """

    ratio: float = 1.2
    window: int = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What only the agent can see holds: it says so itself, see `reported`."""


Criterion = (
    NonFinite
    | Threshold
    | Spike
    | RelativeToMean
    | Flat
    | Dead
    | Ratio
    | Vanishing
    | Saturated
    | NotDecreasing
    | Spread
    | Differs
    | Straggler
    | Reported
    | Custom
)

MAX_WINDOW = 100_000
"""So many values a rule may keep of every series: 8 bytes each."""

ACROSS_RANKS = (Spread, Differs, Straggler)
"""Conditions that compare the ranks of a node; all others look at one rank alone."""

IMPLIED: Mapping[type[Criterion], str] = MappingProxyType(
    {
        NonFinite: "nonfinite",
        Dead: "zero_ratio",
        Saturated: "absmax",
        Straggler: "sum",
        Reported: "value",
    }
)
"""The statistic of conditions that are on one only."""


def criterion_names() -> tuple[str, ...]:
    """Return what may stand under `when`: the built-in conditions, then those of installed packages."""
    return (*READERS, *(name for name in conditions_of_others() if name not in READERS))


def read_criterion(node: Node) -> Criterion:
    """Return the condition of a rule, whose mapping is `node`.

    Raises:
        RuleError: There is not exactly one, or it cannot be meant as written.
    """
    known = criterion_names()
    when = node.child("when", known)
    given = when.only(known)
    keep = node.child("keep", ("steps", "score")) if "keep" in node else None
    if keep and "score" in keep and given not in ("spike", "spread"):
        raise keep.fail("score", f"stands beside when.{given}: only spike and spread have a score; use keep.steps")
    if given in _SCORED:
        return _SCORED[given](when, keep)
    if given in READERS:
        return READERS[given](when)
    return Custom(name=given, settings=when.plain(given))


def _nonfinite(when: Node) -> NonFinite:
    if when.raw("nonfinite") is True:
        return NonFinite()
    node = when.child("nonfinite", ("allow_initial_inf",))
    return NonFinite(allow_initial_inf=node.flag("allow_initial_inf", default=False))


def _limits(node: Node) -> tuple[float | None, float | None]:
    above = node.number("above") if "above" in node else None
    below = node.number("below") if "below" in node else None
    if above is None and below is None:
        raise node.error(node.path, "found neither above nor below, expected at least one of them")
    if above is not None and below is not None and below > above:
        raise node.fail("below", f"found {below:g}, which is more than above ({above:g}): every value would count")
    return above, below


def _threshold(when: Node) -> Threshold:
    node = when.child("threshold", ("above", "below", "over"))
    above, below = _limits(node)
    return Threshold(above=above, below=below, over=node.whole("over", 1, at_least=1, at_most=MAX_WINDOW))


def _clear(node: Node, keep: Node | None, score: float) -> float:
    clear = keep.number("score", score / 2, above=0.0) if keep else score / 2
    if keep and clear > score:
        raise keep.fail("score", f"found {clear:g}, expected at most {node.path}.score ({score:g})")
    return clear


def _spike(when: Node, keep: Node | None) -> Spike:
    node = when.child("spike", ("score", "window", "warmup", "direction", "floor", "adopt"))
    score = node.number("score", above=0.0)
    clear = _clear(node, keep, score)
    window = node.whole("window", 128, at_least=8, at_most=MAX_WINDOW)
    warmup = node.whole("warmup", min(64, window), at_least=8)
    if warmup > window:
        raise node.fail("warmup", f"found {warmup}, expected at most window ({window}): it would never be reached")
    return Spike(
        score=score,
        clear=clear,
        window=window,
        warmup=warmup,
        direction=_direction(node),
        floor=node.number("floor", 0.1, above=0.0),
        adopt=node.whole("adopt", 128, at_least=1),
    )


def _direction(node: Node) -> Direction:
    return Direction(node.choice("direction", tuple(Direction), Direction.BOTH))


def _relative_to_mean(when: Node) -> RelativeToMean:
    node = when.child("relative_to_mean", ("threshold", "beta", "direction", "floor"))
    beta = node.number("beta", 0.99, above=0.0)
    if beta >= 1.0:
        raise node.fail("beta", f"found {beta:g}, expected less than 1: nothing would ever be learned")
    threshold = node.number("threshold", above=0.0)
    floor = node.number("floor", 0.1, above=-1e-300)
    return RelativeToMean(threshold=threshold, beta=beta, direction=_direction(node), floor=floor)


def _flat(when: Node) -> Flat:
    return Flat(relative_change=when.child("flat", ("relative_change", "steps")).number("relative_change", above=0.0))


def _share(node: Node, key: str, default: float) -> float:
    share = node.number(key, default, above=0.0)
    if share > 1.0:
        raise node.fail(key, f"found {share:g}, expected a share, at most 1")
    return share


def _dead(when: Node) -> Dead:
    return Dead(zero_ratio=_share(when.child("dead", ("zero_ratio", "steps")), "zero_ratio", 1.0))


def _ratio(when: Node) -> Ratio:
    node = when.child("ratio", ("over", "above", "below", "times_learning_rate"))
    over = node.text("over")
    kinds = tuple(kind.value for kind in Kind)
    if over not in kinds:
        raise node.fail("over", f"found {over!r}{nearest(over, kinds)}")
    above, below = _limits(node)
    times_rate = node.flag("times_learning_rate", default=False)
    return Ratio(over=Kind(over), above=above, below=below, times_rate=times_rate)


def _vanishing(when: Node) -> Vanishing:
    node = when.child("vanishing", ("share", "warmup"))
    return Vanishing(share=_share(node, "share", 1e-4), warmup=node.whole("warmup", 64, at_least=1))


def _saturated(when: Node) -> Saturated:
    return Saturated(share=_share(when.child("saturated", ("share",)), "share", 0.5))


def _not_decreasing(when: Node) -> NotDecreasing:
    node = when.child("not_decreasing", ("steps", "improvement"))
    improvement = node.number("improvement", 0.0, above=-1e-300)
    return NotDecreasing(steps=node.whole("steps", at_least=2), improvement=improvement)


def _spread(when: Node, keep: Node | None) -> Spread:
    node = when.child("spread", ("score", "floor", "ranks"))
    score = node.number("score", above=0.0)
    clear = _clear(node, keep, score)
    ranks = node.whole("ranks", 4, at_least=3)
    return Spread(score=score, clear=clear, floor=node.number("floor", 0.1, above=0.0), ranks=ranks)


def _differs(when: Node) -> Differs:
    if when.raw("differs") is True:
        return Differs()
    return Differs(tolerance=when.child("differs", ("tolerance",)).number("tolerance", 0.0, above=-1e-300))


def _straggler(when: Node) -> Straggler:
    node = when.child("straggler", ("ratio", "window"))
    window = node.whole("window", 10, at_least=1, at_most=MAX_WINDOW)
    return Straggler(ratio=node.number("ratio", 1.2, above=1.0), window=window)


def _reported(when: Node) -> Reported:
    if when.raw("reported") is not True:
        raise when.fail("reported", "expected true: the agent itself says when it holds")
    return Reported()


_SCORED: Mapping[str, Callable[[Node, Node | None], Criterion]] = MappingProxyType({"spike": _spike, "spread": _spread})

READERS: Mapping[str, Callable[[Node], Criterion]] = MappingProxyType(
    {
        "nonfinite": _nonfinite,
        "threshold": _threshold,
        "spike": lambda when: _spike(when, None),
        "relative_to_mean": _relative_to_mean,
        "flat": _flat,
        "dead": _dead,
        "ratio": _ratio,
        "vanishing": _vanishing,
        "saturated": _saturated,
        "not_decreasing": _not_decreasing,
        "spread": lambda when: _spread(when, None),
        "differs": _differs,
        "straggler": _straggler,
        "reported": _reported,
    }
)
"""The built-in conditions by name."""
