"""The values that cross a border between two parts of trainermon, and nothing else.

Everything here is frozen and made of standard-library types, so that the rank, the agent, the exporters and the offline
tools can share it without importing torch or numpy. A value is never turned into text and parsed back: text is made at
the outermost border (a label, a file name, a page) and only there.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Mapping
from typing import Any

_PLAIN = frozenset([str, int, bool, type(None)])


class TextEnum(str, enum.Enum):
    """A closed set of names: each is equal to its text, and shown as it. For Python 3.10, which has no `StrEnum`."""

    def __str__(self) -> str:
        return str(self.value)


class Kind(TextEnum):
    """The kind of quantity that a series is a statistic of.

    The value is the name that users of msprobe's monitor know.
    """

    LOSS = "loss"
    GRAD_UNREDUCED = "grad_unreduced"
    GRAD_REDUCED = "grad_reduced"
    PARAM_ORIGIN = "param_origin"
    PARAM_USED = "param_used"
    PARAM_UPDATED = "param_updated"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    STATE = "state"
    UPDATE = "update"
    RATIO = "ratio"
    MG_DIRECTION = "mg_direction"
    ACTV = "actv"
    ACTV_GRAD = "actv_grad"
    ACTV_RECOMPUTED = "actv_recomputed"
    COMM = "comm"
    CHECKSUM = "checksum"
    BUFFER = "buffer"
    FEATURE = "feature"
    STEP = "step"


@dataclasses.dataclass(frozen=True, slots=True)
class Moments:
    """Eight mergeable numbers that describe a set of elements; the columns of every row, in this order.

    `count` includes non-finite elements. `min`, `max`, `sum` and `sum_sq` are taken over the finite ones only; without
    any finite element they are +inf, -inf, 0 and 0, the neutral elements of a merge. `zeros` counts +0 and -0.
    """

    count: float
    min: float
    max: float
    sum: float
    sum_sq: float
    zeros: float
    nans: float
    infs: float

    @property
    def finite(self) -> float:
        """Number of finite elements."""
        return self.count - self.nans - self.infs

    @property
    def nonfinite(self) -> float:
        """Number of NaN and infinite elements."""
        return self.nans + self.infs

    @property
    def mean(self) -> float:
        """Mean of the finite elements; NaN if there is none."""
        return self.sum / self.finite if self.finite else math.nan

    @property
    def norm(self) -> float:
        """L2 norm of the finite elements; 0 if there is none."""
        return math.sqrt(self.sum_sq)

    @property
    def rms(self) -> float:
        """Root mean square of the finite elements; NaN if there is none."""
        return math.sqrt(self.sum_sq / self.finite) if self.finite else math.nan

    @property
    def std(self) -> float:
        """Population standard deviation of the finite elements; NaN if there is none."""
        if not self.finite:
            return math.nan
        return math.sqrt(max(0.0, self.sum_sq / self.finite - self.mean**2))

    @property
    def zero_ratio(self) -> float:
        """Share of zeros among all elements, 0 to 1; NaN for an empty set."""
        return self.zeros / self.count if self.count else math.nan

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the union of two disjoint sets of elements; exact up to rounding of the two sums."""
        return Moments(
            self.count + other.count,
            min(self.min, other.min),
            max(self.max, other.max),
            self.sum + other.sum,
            self.sum_sq + other.sum_sq,
            self.zeros + other.zeros,
            self.nans + other.nans,
            self.infs + other.infs,
        )


LEAST_EXPONENT, NUM_EXPONENTS = -45, 61
"""Which powers of two bound the bins of a histogram: 2^-45 (2.8e-14) to 2^16, from which on half precision ends."""
NUM_BINS = 2 * NUM_EXPONENTS + 6
ZERO_BIN, HIGHEST_BIN, NONFINITE_BIN = NUM_BINS // 2 - 1, NUM_BINS - 2, NUM_BINS - 1


def _bin_bounds() -> tuple[tuple[float, float], ...]:
    edges = [0.0, *(2.0 ** (LEAST_EXPONENT + place) for place in range(NUM_EXPONENTS + 1)), math.inf]
    above = list(itertools.pairwise(edges))
    return *((-high, 0.0 - low) for low, high in reversed(above)), (0.0, 0.0), *above, (math.nan, math.nan)


BIN_BOUNDS = _bin_bounds()
"""For each of the 128 bins of a histogram, which elements are counted in it: those between two magnitudes of one sign.

In ascending order: negative elements, one bin for each power of two, between one for all that are larger and one for
all that are smaller; zeros, of either sign (bounds 0, 0); positive elements likewise; at the end those that are NaN or
infinite (bounds NaN). A magnitude that is itself a bound belongs to the larger one.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockHistograms:
    """The histograms of those series of a block that have one: how many elements are in which of `BIN_BOUNDS`.

    `places` are positions in the block's `series` (uint32 `[n]`), `counts` integers `[n, 128]`, C-contiguous, both as
    anything that supports the buffer protocol. The counts of the parts of a tensor add up to those of the whole one;
    those of a row add up to the number of its elements.
    """

    places: Any
    counts: Any


STATISTICS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Moments))
NO_ELEMENTS = Moments(0.0, math.inf, -math.inf, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's position in the job, on each axis of parallelism, and the size of each axis.

    Axes: `dp` data, `tp` tensor, `pp` pipeline, `cp` context, `ep` expert. `rank` counts all ranks, `local_rank` those
    of the node. Sizes are at least 1, positions count from 0.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    dp: int = 0
    dp_size: int = 1
    tp: int = 0
    tp_size: int = 1
    pp: int = 0
    pp_size: int = 1
    cp: int = 0
    cp_size: int = 1
    ep: int = 0
    ep_size: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class SeriesKey:
    """Identifies a series, the statistics of one tensor over all steps, on one rank.

    `kind` is what it is a statistic of. `name` is the parameter or module as the user's model names it, wrappers
    stripped (`h.3.mlp.fc.weight`). For activations `slot` says which tensor of the module (`input.0`, `output.0`) and
    `call` which call of the module in the (micro) step. `micro_step` is None for what exists once per step. `stage` is
    the virtual pipeline stage.
    """

    kind: Kind
    name: str
    slot: str = ""
    call: int = 0
    micro_step: int | None = None
    stage: int = 0

    @property
    def label(self) -> str:
        """Readable text for a page, a message or a label; not meant to be parsed."""
        text = f"{self.name}.{self.slot}" if self.slot else self.name
        if self.call:
            text += f"#{self.call}"
        if self.micro_step is not None:
            text += f"@{self.micro_step}"
        return f"{self.stage}:{text}" if self.stage else text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How the tensor that a rank holds relates to the whole one, so that rows of several ranks can be merged.

    `offset` and `length` are the range of the flattened whole tensor that this rank's elements are (`length` None: all
    of it). `replicated_over` and `partitioned_over` name axes of `Coordinates`. `in_global_norm` is true for exactly
    one copy of each element over the job. `scale` is what the true value was multiplied by (loss scale,
    1/accumulation).
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    length: int | None = None
    replicated_over: tuple[str, ...] = ()
    partitioned_over: tuple[str, ...] = ()
    in_global_norm: bool = True
    scale: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StatBlock:
    """All rows of one step of one rank: for each series the eight moments.

    `series` holds indices into the rank's series table (uint32), `values` the moments as a C-contiguous float64 array
    `[num_statistics, num_series]` (struct of arrays: one statistic of all series is a contiguous slice), both as
    anything that supports the buffer protocol. `time_s` is Unix time at the end of the step, for display only: order is
    (attempt, step). `histograms` are those that were taken on this step; None: none.
    """

    step: int
    time_s: float
    series: Any
    values: Any
    histograms: BlockHistograms | None = None


class AlertState(TextEnum):
    """Life of an alert: a condition holds (pending), has held long enough (firing), is over (resolved)."""

    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class Severity(TextEnum):
    """The urgency of an alert. `fatal`: the step itself is lost; the ranks replay it."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"
    FATAL = "fatal"


class AlertCondition(TextEnum):
    """The kind of condition that an alert's rule looks for; `alerts/conditions/criteria.py` says what each means."""

    NONFINITE = "nonfinite"
    THRESHOLD = "threshold"
    SPIKE = "spike"
    RELATIVE_TO_MEAN = "relative_to_mean"
    FLAT = "flat"
    DEAD = "dead"
    RATIO = "ratio"
    VANISHING = "vanishing"
    SATURATED = "saturated"
    NOT_DECREASING = "not_decreasing"
    SPREAD = "spread"
    DIFFERS = "differs"
    STRAGGLER = "straggler"
    DRIFT = "drift"
    EXCEEDS = "exceeds"
    FROZEN = "frozen"
    LAW = "law"
    REPORTED = "reported"
    CUSTOM = "custom"


class AlertDirection(TextEnum):
    """Whether an alert's worst value is above what is usual (`up`) or below it (`down`).

    `none`: the condition has no sides.
    """

    UP = "up"
    DOWN = "down"
    NONE = "none"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One series of an alert.

    Attributes:
        series: Which.
        value: Its worst value.
        baseline: What is usual; NaN: not known.
    """

    series: SeriesKey
    value: float
    baseline: float = math.nan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert: what one rule found on one rank, from one step on, for all series concerned.

    Attributes:
        id: Depends on rule, rank, attempt and first step only: evaluating the same records again gives the same id.
        rule: Name of the rule.
        severity: How urgent it is.
        state: Pending, firing or resolved.
        attempt: The start of the job.
        rank: The rank.
        step: The step of this state change.
        first_step: The step on which the condition began.
        time_s: Unix time of this state change.
        kind: Kind of the worst series.
        value: Value of the worst series.
        baseline: What is usual for it; NaN: not known.
        num_series: Number of series concerned.
        findings: The worst of them.
        message: The alert in words.
        condition: What the rule looks for; None: not known (an alert of a user's rule, logged by a version that did not
            write it).
        direction: On which side of what is usual the value is.
        law: The law that is broken; "" if the rule watches none.
    """

    id: str
    rule: str
    severity: Severity
    state: AlertState
    attempt: int
    rank: int
    step: int
    first_step: int
    time_s: float
    kind: Kind
    value: float
    baseline: float
    num_series: int
    findings: tuple[Finding, ...]
    message: str
    condition: AlertCondition | None = None
    direction: AlertDirection = AlertDirection.NONE
    law: str = ""


class Action(TextEnum):
    """What a command asks of a rank: collect statistics, dump, take a new configuration, or stop dumping."""

    COLLECT = "collect"
    DUMP = "dump"
    CONFIGURE = "configure"
    STOP = "stop"


class GradientLevel(TextEnum):
    """What is written of each gradient: a checksum (L0), its signs (L1), or signs and distribution (L2)."""

    L0 = "L0"
    L1 = "L1"
    L2 = "L2"


class SourceMode(TextEnum):
    """What a dump keeps of the source code that ran."""

    FUNCTIONS = "functions"
    FILES = "files"
    OFF = "off"


class DumpTask(TextEnum):
    """How much a dump writes of each tensor: `statistics`, or `tensor` (all elements too). What writes more is last."""

    STATISTICS = "statistics"
    TENSOR = "tensor"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command from the agent to a rank: collect or dump for `num_steps` steps from `first_step` on, for example.

    A rank that is already past `first_step` when it reads the command does nothing and says so (`late`): nothing ever
    waits.

    Attributes:
        id: Name of the command, and of its dump.
        action: Collect, dump, configure or stop.
        first_step: The first step that it is about.
        num_steps: For how many steps.
        level: `L0`: modules.
        task: What a dump writes.
        scope: Names or patterns of modules; (): every module.
        max_bytes: The most that this command may write on this rank.
        reason: What it is for, in words.
        config: For `configure`: the whole new configuration as the text of a JSON object.
    """

    id: str
    action: Action
    first_step: int
    num_steps: int = 1
    level: str = "L0"
    task: DumpTask = DumpTask.STATISTICS
    scope: tuple[str, ...] = ()
    max_bytes: int = 1 << 30
    reason: str = ""
    config: str = ""


def well_formed(text: str) -> str:
    r"""Return `text` with lone surrogates, which UTF-8 cannot encode, written out as escapes.

    A name with one cannot be stored, sent or printed by anything behind the rank.

    >>> well_formed("layer\ud800")
    'layer\\ud800'
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def as_plain(value: Any) -> Any:
    """Return `value` (dataclasses, enums, paths …) as lists, dicts, strings and numbers that JSON can hold.

    Works for every value of this module, nested in lists and dicts too. Non-finite floats, which JSON does not have,
    become the text 'NaN', 'Infinity' or '-Infinity'.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return _nonfinite_name(value) if isinstance(value, float) and not math.isfinite(value) else value


def measured_as_plain(value: float | None) -> float | str | None:
    """Return what was measured on a step as JSON has it: None of nothing, 'NaN' of what was not finite.

    `value` is NaN (or None) where nothing was recorded, and infinite where something was NaN or infinite: which of the
    two, the statistics of a step do not keep.

    >>> [measured_as_plain(value) for value in (2.5, float("nan"), float("inf"))]
    [2.5, None, 'NaN']
    """
    if value is None or math.isnan(value):
        return None
    return value if math.isfinite(value) else "NaN"


def _nonfinite_name(value: float) -> str:
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
