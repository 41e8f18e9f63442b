"""What the condition of an alert rule may say: one value per condition.

How it is read from YAML is decided in `reading`, how it is computed in `limits`, `spikes`, `drifts` and `trends`, and
in the folder `across_ranks`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from trainermon.alerts.extensions import CustomCondition
from trainermon.core.values import AlertCondition, AlertDirection, Kind, TextEnum


class Direction(TextEnum):
    """The side of the usual range on which a value is bad: both, above it or below it."""

    BOTH = "both"
    UP = "up"
    DOWN = "down"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Condition of a rule: some element of the tensor is NaN or infinite.

    Attributes:
        allow_initial_inf: Infinite elements do not count in a series that had some, but no NaN, when it was first seen:
            attention masks hold -inf by design.
        allow_initial: What a series held when the run first showed it does not count, be it NaN or infinities: buffers
            may begin with either, as a running maximum or a mark for what is not known yet.
    """

    allow_initial_inf: bool = False
    allow_initial: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """Condition of a rule: the mean of the last `over` values of the statistic is above `above` or below `below`.

    None: there is no limit on that side.
    """

    above: float | None = None
    below: float | None = None
    over: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """Condition of a rule: the statistic left its usual range.

    The score is the distance from a level that follows the last values, and from what their trend lets one expect, in
    robust standard deviations; statistics that cannot be negative are compared by their logarithms.

    Attributes:
        score: Above this score the condition holds.
        clear: Below this score it is over; at most `score`.
        window: How many values make the usual range.
        warmup: How many values a series must have shown before it is judged; at most `window`.
        direction: Which side counts.
        floor: The least standard deviation: a difference of logarithms (0.1 is about 10 %), or for statistics that may
            be negative a share of their usual magnitude.
        adopt: After so many values outside the usual range in a row, the new level is learned as the usual one.
        share_of_first: A value below this share of the level of the first ones does not matter, however unusual it is:
            to a loss that has come close to zero a single hard sample is many times the usual.
    """

    score: float
    clear: float
    window: int = 128
    warmup: int = 64
    direction: Direction = Direction.BOTH
    floor: float = 0.1
    adopt: int = 128
    share_of_first: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Condition of a rule: the statistic has moved away from where it was, too slowly for `Spike`.

    Compared are levels, medians of `steps` values each: the newest one with the least of the `levels` before it (going
    up) or the greatest (going down). Statistics that cannot be negative are compared by their logarithms.

    Attributes:
        factor: The level has become so many times as large, or as small, as it was.
        direction: Which side counts.
        steps: So many values make a level.
        levels: So many levels are remembered.
        warmup: So many levels are passed over first: at the start of a training everything moves.
        score: The level has also moved so many times as far as levels usually do from one to the next.
        share_of_first: A level matters as for `Spike`: by the distance that it has moved, or for logarithms by what
            it was or has become, the larger one of the two.
    """

    factor: float
    direction: Direction = Direction.UP
    steps: int = 16
    levels: int = 5
    warmup: int = 4
    score: float = 4.0
    share_of_first: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exceeds:
    """Condition of a rule: the statistic is at least `times` the largest value that it ever had before.

    Attributes:
        times: The factor.
        warmup: Number of first values that are only learned.
        adopt: After this many values in a row that exceed it, the new level is learned as the usual one.
    """

    times: float
    warmup: int = 16
    adopt: int = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """Condition of a rule: the statistic shows the very same value again and again, although it used to change.

    Attributes:
        lived: After so many values in a row that were all different from the one before, a series counts as one that
            changes: masks and positions never do.
    """

    lived: int = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RelativeToMean:
    """Condition of a rule: the magnitude of the statistic is far from the mean of its magnitudes so far.

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
    """Condition of a rule: the statistic hardly changes, it stayed within a share `relative_change` of one value."""

    relative_change: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """Condition of a rule: nearly all elements, in all parts of the tensor on this node, are zero.

    Attributes:
        zero_ratio: That share.
        lived: Only what has had less zeros for so many values in a row can die; 0: whatever has been dead from the
            start counts too.
    """

    zero_ratio: float = 1.0
    lived: int = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Condition of a rule: the statistic, divided by that of another kind with the same name, is beyond a limit.

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
    """Condition of a rule: the magnitude has sunk, however slowly, below a `share` of its first level.

    That is the level of its first `warmup` values.
    """

    share: float = 1e-4
    warmup: int = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saturated:
    """Condition of a rule: the largest magnitude is at least a `share` of the largest number of the tensor's type."""

    share: float = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NotDecreasing:
    """Condition of a rule: the mean over `steps` values is not less than the best such mean before.

    Less counts only by a share of at least `improvement`.
    """

    steps: int
    improvement: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Condition of a rule: one rank is far from its peers, which hold the same part of the model for other data.

    The score is the distance from the peers' median in robust standard deviations, as for `Spike`.

    Attributes:
        score: Above this score the condition holds.
        clear: Below this score it is over; at most `score`.
        floor: The least standard deviation, as for `Spike`.
        ranks: With fewer ranks to compare nothing is said. Of two or three, the one is named that has moved away from
            where it was, once it is known how far apart they usually are.
    """

    score: float
    clear: float
    floor: float = 0.1
    ranks: int = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Differs:
    """Condition of a rule: ranks differ that must be equal, as copies of the same elements.

    The value that most ranks have is taken for the right one. Where no value has a majority, the rank is named that has
    moved further away from what all had before, where that is known; else all of them.

    Attributes:
        tolerance: Values count as equal up to this share of the larger one.
        fewest: The values are counts, and on a tie those that have the smallest one are named.
    """

    tolerance: float = 0.0
    fewest: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Condition of a rule: a rank needs longer for its own work than its peers, or than it used to.

    Own work is the time of the `step` series less that of the `comm` series among those that the rule looks at, so that
    a rank that waits for another one is never blamed.

    Attributes:
        ratio: The condition holds above this ratio of its own work to the others' median.
        least_s: And only if it is more than so many seconds a step. A scheduler keeps a process waiting for a round of
            those that share its core, which Linux stretches to 24 ms on eight cores and more (6 ms x (1 + log2 of
            them), kernel/sched/fair.c): that is no trait of a rank, however much it is of a short step.
        lasts_s: And only if that has lasted for so many seconds: a scheduler that keeps a process waiting for several
            rounds is fair to it within a second or two. Of steps from 0.2 s on nothing is seen later for it.
        window: Of so many steps the median is taken.
    """

    ratio: float = 1.2
    least_s: float = 0.025
    lasts_s: float = 2.0
    window: int = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BreaksLaw:
    """Condition of a rule: rows of a step, of all ranks of the node, break a law; see alerts/laws/README.md.

    Attributes:
        law: Its name.
        settings: The numbers of the law that the rule sets otherwise.
    """

    law: str
    settings: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """Condition of rules that no statistic can judge, as `hang`: the agent itself says when it holds.

    See `reported.AgentStatement`.
    """


Criterion = (
    NonFinite
    | Threshold
    | Spike
    | Drift
    | Exceeds
    | Frozen
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
    | BreaksLaw
    | Reported
    | CustomCondition
)

MAX_WINDOW = 100_000
"""So many values a rule may keep of every series: 8 bytes each."""

ACROSS_RANKS = (Spread, Differs, Straggler, Dead, BreaksLaw)
"""Conditions that compare the ranks of a node; all others look at one rank alone."""

IMPLIED: Mapping[type[Criterion], str] = MappingProxyType(
    {
        NonFinite: "nonfinite",
        Dead: "zero_ratio",
        Frozen: "sum",
        Saturated: "absmax",
        Straggler: "sum",
        BreaksLaw: "value",
        Reported: "value",
    }
)
"""The statistic of conditions that are on one only."""

_CONDITIONS: Mapping[type[Criterion], AlertCondition] = MappingProxyType(
    {
        NonFinite: AlertCondition.NONFINITE,
        Threshold: AlertCondition.THRESHOLD,
        Spike: AlertCondition.SPIKE,
        RelativeToMean: AlertCondition.RELATIVE_TO_MEAN,
        Flat: AlertCondition.FLAT,
        Dead: AlertCondition.DEAD,
        Ratio: AlertCondition.RATIO,
        Vanishing: AlertCondition.VANISHING,
        Saturated: AlertCondition.SATURATED,
        NotDecreasing: AlertCondition.NOT_DECREASING,
        Spread: AlertCondition.SPREAD,
        Differs: AlertCondition.DIFFERS,
        Straggler: AlertCondition.STRAGGLER,
        BreaksLaw: AlertCondition.LAW,
        Drift: AlertCondition.DRIFT,
        Exceeds: AlertCondition.EXCEEDS,
        Frozen: AlertCondition.FROZEN,
        Reported: AlertCondition.REPORTED,
        CustomCondition: AlertCondition.CUSTOM,
    }
)

_SIDES: Mapping[type, AlertDirection] = MappingProxyType(
    {
        **dict.fromkeys(
            (NonFinite, Flat, Frozen, Dead, NotDecreasing, Differs, BreaksLaw, Reported), AlertDirection.NONE
        ),
        **dict.fromkeys((Exceeds, Saturated, Straggler), AlertDirection.UP),
        Vanishing: AlertDirection.DOWN,
    }
)
"""Of conditions whose settings cannot change it."""


def condition_of(criterion: Criterion) -> AlertCondition:
    """Return the enum value that names a rule's condition: `AlertCondition.SPIKE` for `Spike`."""
    return _CONDITIONS[type(criterion)]


def direction_of(criterion: Criterion | None, *, value: float, baseline: float) -> AlertDirection:
    """Return on which side of what is usual `value` is.

    A condition that watches one side says so itself; of one that watches both, and of an unknown one (None), the value
    beside the baseline decides. NONE if one of the two is not finite, or the condition has no sides.

    >>> str(direction_of(Vanishing(), value=1e-9, baseline=1.0))
    'down'
    >>> str(direction_of(Spike(score=8.0, clear=4.0), value=9.0, baseline=1.0))
    'up'
    """
    if type(criterion) in _SIDES:
        return _SIDES[type(criterion)]
    match criterion:
        case Threshold(above=limit) | Ratio(above=limit):
            return AlertDirection.DOWN if limit is None or value <= limit else AlertDirection.UP
        case Spike(direction=side) | Drift(direction=side) | RelativeToMean(direction=side) if (
            side is not Direction.BOTH
        ):
            return AlertDirection(side.value)
        case RelativeToMean():  # the baseline is a mean of magnitudes
            return _side(abs(value), baseline)
    return _side(value, baseline)


def _side(value: float, baseline: float) -> AlertDirection:
    if not (math.isfinite(value) and math.isfinite(baseline)) or value == baseline:
        return AlertDirection.NONE
    return AlertDirection.UP if value > baseline else AlertDirection.DOWN
