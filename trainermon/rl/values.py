"""What a step's comparison gives, as values that are written to files and read from them."""

from __future__ import annotations

import dataclasses
from typing import Literal

from trainermon.core.values import TextEnum
from trainermon.rl.measures import PolicyMeasures


class Verdict(TextEnum):
    """The verdict on a step.

    `consistent`: the two agree, and the weights are known to be the same or the difference is below what rounding
    was measured to give. `noise`: no more than rounding and kernels may give. `policy differs`: the engine samples
    from another policy. `bookkeeping`: what was logged is not what was sampled from. `not comparable`: tokens are
    missing or others.
    """

    CONSISTENT = "consistent"
    NOISE = "noise"
    POLICY_DIFFERS = "policy differs"
    BOOKKEEPING = "bookkeeping"
    NOT_COMPARABLE = "not comparable"


class Cause(TextEnum):
    """Why the two sides differ; `causes.py` has the rule of each."""

    TOKENS_DIFFER = "tokens differ"
    SHIFTED = "shifted"
    PADDING = "padding"
    TEMPERATURE = "temperature"
    TRUNCATED_SUPPORT = "truncated support"
    OTHER_CONTEXT = "other context"
    WEIGHTS_DIFFER = "weights differ"
    ONE_ENGINE = "one engine"
    STALE_CACHE = "stale cache"
    ROUTING = "routing"
    NUMERICS = "numerics"
    NONFINITE = "non-finite"
    UNEXPLAINED = "unexplained"


VERDICT_OF: dict[Cause, Verdict] = {
    Cause.TOKENS_DIFFER: Verdict.NOT_COMPARABLE,
    Cause.SHIFTED: Verdict.BOOKKEEPING,
    Cause.PADDING: Verdict.BOOKKEEPING,
    Cause.TEMPERATURE: Verdict.BOOKKEEPING,
    Cause.TRUNCATED_SUPPORT: Verdict.BOOKKEEPING,
    Cause.OTHER_CONTEXT: Verdict.POLICY_DIFFERS,
    Cause.WEIGHTS_DIFFER: Verdict.POLICY_DIFFERS,
    Cause.ONE_ENGINE: Verdict.POLICY_DIFFERS,
    Cause.STALE_CACHE: Verdict.POLICY_DIFFERS,
    Cause.ROUTING: Verdict.POLICY_DIFFERS,
    Cause.NUMERICS: Verdict.POLICY_DIFFERS,
    Cause.NONFINITE: Verdict.BOOKKEEPING,
}
"""The verdict that follows from each cause; what is unexplained depends on the mean ratio."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the rollout engine samples, and what it logs.

    Attributes:
        temperature: What logits are divided by; 0: greedy, the likeliest token is taken.
        top_p: Share of the probability that is kept, above 0 to 1.
        top_k: How many tokens are kept; 0 or -1: all.
        logprobs: `processed`: logged after temperature and cutting, `raw`: of the model's logits as they are.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    logprobs: Literal["processed", "raw"] = "processed"

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature: found {self.temperature}, expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: found {self.top_p}, expected more than 0, up to 1")
        if self.logprobs not in ("processed", "raw"):
            raise ValueError(f"logprobs: found {self.logprobs!r}, expected 'processed' or 'raw'")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken; then nothing is sampled, and the mean ratio need not be 1."""
        return self.temperature == 0 or self.top_k == 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FoundCause:
    """A cause that holds.

    Attributes:
        cause: Which.
        evidence: The figures that show it, in words.
        advice: What to look at next.
    """

    cause: Cause
    evidence: str
    advice: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What rounding and kernels alone make of the mean of |Δ|, and how that is known.

    Attributes:
        mean_abs: Nats.
        source: `measured`: from a second computation of the trainer; `dtype`: a table.
    """

    mean_abs: float
    source: Literal["measured", "dtype"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnginePart:
    """The tokens that one engine sampled."""

    engine: str
    version: int | None
    tokens: int
    sequences: int
    mean_abs: float
    ratio: float
    ratio_z: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PositionPart:
    """The tokens of the positions `first` to `last` of their sequences, both included."""

    first: int
    last: int
    tokens: int
    mean_abs: float
    ratio: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequencePart:
    """One sequence.

    Attributes:
        sequence: Its number in the step.
        engine: The engine that sampled it; empty: not known.
        tokens: How many of its tokens count.
        mean_abs: Mean |Δ|.
        log_ratio: Sum of Δ: the logarithm of the sequence's ratio.
        first_diverging: Its first position with |Δ| above ten floors; None: there is none.
    """

    sequence: int
    engine: str
    tokens: int
    mean_abs: float
    log_ratio: float
    first_diverging: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenAt:
    """One token.

    Attributes:
        sequence: Number of its sequence in the step.
        position: Its number among the tokens of the sequence that count.
        id: The token id; None: not known.
        before: Ids of the tokens before it.
        rollout: Log-probability of the rollout.
        train: The trainer's.
    """

    sequence: int
    position: int
    id: int | None
    before: tuple[int, ...]
    rollout: float
    train: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightDifference:
    """A tensor of the trainer whose counterpart in an engine is not equal to it.

    Attributes:
        name: The trainer's name; several, joined by ` + `, where the engine holds them as one.
        engine: The engine.
        found: What was found instead, in words: all zeros, other numbers, values of an older version.
        version: The version that the engine's values are of; None: of no version that is known.
    """

    name: str
    engine: str
    found: str
    version: int | None = None


WITHIN_ROWS = "the order within rows was not checked"
"""What no digest tells of weights, wherever they are said to be equal: see `digest.py`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightCheck:
    """Whether the engines have the weights that were sent.

    Attributes:
        version: The version that was sent.
        engines: The engines that answered.
        equal: How many of the trainer's tensors are equal in every engine.
        differing: Those that are not.
        missing: Names that were sent, and that some engine has not.
        unexpected: Names that an engine has, and that were not sent.
        uncompared: Names that an engine holds in another type than they were digested in when they were sent.
        uncompared_types: The types in which engines hold these, as `float32`, sorted.
        unordered: Equal names of which only sums could be compared: rows, or fused parts, in each other's places would
            not be seen.
    """

    version: int
    engines: tuple[str, ...]
    equal: int
    differing: tuple[WeightDifference, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    uncompared_types: tuple[str, ...] = ()
    unordered: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether every tensor is there, and equal if it could be compared; False if none could."""
        return bool(self.equal) and not self.has_difference

    @property
    def has_difference(self) -> bool:
        """Whether a tensor is missing, or known to be another, or none was sent."""
        return bool(self.differing or self.missing) or not self.num_tensors

    @property
    def num_tensors(self) -> int:
        """How many tensors were sent."""
        differing = {name for each in self.differing for name in each.name.split(" + ")}
        return self.equal + len(differing.union(self.missing, self.uncompared))

    @property
    def advice(self) -> str:
        """What makes the rest comparable; empty if all was compared."""
        if not self.uncompared:
            return self._advice_on_order
        given = dict.fromkeys("float8" if name.startswith("float8") else name for name in self.uncompared_types)
        wanted = " or ".join(f'dtype="{name}"' for name in given)
        return (
            f"{len(self.uncompared)} of {self.num_tensors} tensors were not compared: engines hold them as "
            f"{', '.join(self.uncompared_types)}, and they were not sent as that; say so by rl.Watch({wanted})"
        )

    @property
    def _advice_on_order(self) -> str:
        if not self.unordered:
            return ""
        return (
            f"of {len(self.unordered)} of {self.num_tensors} tensors only sums were compared, as of "
            f"{self.unordered[0]}: parts in each other's places would not be seen; "
            "give the engine's side the watch's folder (`folder=`)"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is known of one step.

    Attributes:
        step: The step.
        verdict: See there.
        sentence: The verdict in one sentence.
        causes: Every cause that holds, the one that decides first; none where all is well.
        measures: Of all tokens; None where they could not be paired.
        floor: What noise is measured against.
        engines: By engine, in order of their names.
        positions: By position in the sequence.
        histogram: How many tokens have a |Δ| in each of the bins of `HISTOGRAM_EDGES`.
        sequences: The sequences with the largest mean |Δ|, largest first.
        worst: The tokens with the largest |Δ|, largest first.
        first_diverging: Median over sequences of the first position with |Δ| above ten floors; None: most have none.
        weights: The check of weights; None: there was none.
        version_lag: By how many versions the oldest engine is behind what was sent; None: not known.
        notes: What was left out or could not be told.
    """

    step: int
    verdict: Verdict
    sentence: str
    causes: tuple[FoundCause, ...] = ()
    measures: PolicyMeasures | None = None
    floor: Floor | None = None
    engines: tuple[EnginePart, ...] = ()
    positions: tuple[PositionPart, ...] = ()
    histogram: tuple[int, ...] = ()
    sequences: tuple[SequencePart, ...] = ()
    worst: tuple[TokenAt, ...] = ()
    first_diverging: int | None = None
    weights: WeightCheck | None = None
    version_lag: int | None = None
    notes: tuple[str, ...] = ()


HISTOGRAM_EDGES = tuple(10.0 ** (exponent / 2) for exponent in range(-12, 3))
"""Edges between the bins of |Δ|, nats: half decades from 1e-6 to 10; a bin lies below the first and above the last."""
