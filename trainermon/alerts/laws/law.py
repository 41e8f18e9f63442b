"""What a law is, and what it is given to judge.

A law relates rows of one step, of all ranks of a node, and holds in every correct training up to rounding. Which rows,
which relation and which exceptions is data (`Law`); the relations stand in `updates`, `reductions`, `inputs` and
`gradients`, and `comparison` is what applies all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from trainermon.alerts.conditions.condition import Mask
from trainermon.core.derived import Array
from trainermon.core.values import Coordinates, Kind, Placement, SeriesKey

StepPhase = Literal["input", "forward", "backward", "reduction", "before_step", "optimizer"]
"""The parts of a step; `input`: the data that it is given, `before_step`: between the reduction and the optimizer."""


_COLLECTED_BY = MappingProxyType(
    {
        Kind.PARAM_ORIGIN: "param_distribution",
        Kind.PARAM_UPDATED: "param_distribution",
        Kind.PARAM_USED: "param_distribution",
        Kind.ACTV: "xy_distribution",
        Kind.ACTV_RECOMPUTED: "xy_distribution",
        Kind.GRAD_REDUCED: "wg_distribution",
        Kind.STATE: "wg_distribution",  # what laws look at of it
        Kind.GRAD_UNREDUCED: "wg_distribution",
    }
)


class TensorPlace(NamedTuple):
    """What rows of different kinds have in common that are about the same tensor; see `SeriesKey`.

    Attributes:
        name: The parameter, the module, or the quantity of the step.
        stage: The virtual pipeline stage.
        slot: Which tensor of the module, or which parameter group.
        call: Which call of the module.
        micro_step: The micro step; None for what exists once a step.
    """

    name: str
    stage: int
    slot: str
    call: int
    micro_step: int | None

    @classmethod
    def of(cls, key: SeriesKey) -> TensorPlace:
        """Return the place of a series."""
        return cls(key.name, key.stage, key.slot, key.call, key.micro_step)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LawStep:
    """What all ranks of a node show of one step, lined up by tensor.

    Attributes:
        step: Its number.
        attempt: The start of the job.
        places: Where each rank stands in the job.
        tensors: The tensors, one for each column.
        rows: By kind, the moments `[ranks, 8, tensors]`, float64; NaN where a rank shows no such row.
        placements: By kind, how each rank's part of each tensor lies in the whole one, `[ranks][tensors]`; None where
            the rank has no such series.
    """

    step: int
    attempt: int
    places: Sequence[Coordinates]
    tensors: Sequence[TensorPlace]
    rows: Mapping[Kind, Array]
    placements: Mapping[Kind, Sequence[Sequence[Placement | None]]]


def are_the_same(placements: Sequence[Sequence[Placement | None]], known: Sequence[Sequence[Placement | None]]) -> bool:
    """Return whether the placements of a kind are the very ones of an earlier step: no series has come since."""
    return len(placements) == len(known) and all(a is b for a, b in zip(placements, known, strict=True))


class LawVerdict(NamedTuple):
    """What a law says of the tensors of one step.

    Attributes:
        size: How far each is from what the law says, `[ranks, tensors]`.
        explained: What rounding explains of that, likewise.
        judged: Of which anything can be said. The law is broken where the size is larger than what is explained.
    """

    size: Array
    explained: Array
    judged: Mask

    @property
    def broken(self) -> Mask:
        """Where the law is broken."""
        return self.judged & ~(self.size <= self.explained)


class LawRelation:
    """Judges a law on one step after the other; remembers what it needs. Base class of all relations.

    Args:
        settings: The numbers that the law lets a rule set.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        self.settings = settings

    def judge(self, step: LawStep) -> LawVerdict | None:
        """Return the verdict on the rows of the law's first kind; None if nothing can be said of this step."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A law: which rows, which relation, which tolerance, which exceptions.

    Attributes:
        name: Lower case words joined by hyphens; what a rule says under `when.law`.
        sentence: What holds, in one sentence.
        broken: What has gone wrong where it does not, as a headline without the full stop; "": the sentence tells.
        is_of_the_whole: The tensors that show that it is broken do not tell where: it is broken for the rank.
        rows: The kinds of rows that it relates; the verdict is on those of the first one.
        phase: The part of the step in which it is broken, if it is.
        also: Kinds that it looks at where they are collected.
        relation: Makes what judges it.
        names: Shell patterns of the series, unless a rule says others.
        holds_for_sums: It holds for sums of tensors as for each of them: the controller judges it over all nodes.
        settings: The numbers that a rule may set, with their defaults.
        counts_steps: Its size is for how many steps it has been broken.
        seen_after: How many steps before the first on which it is seen to be broken it was last seen to hold; 0: it is
            seen at once.
        tolerance: What rounding explains, in words.
        exceptions: Where it is not judged, or may be broken by design.
        causes: What usually breaks it, the most frequent one first. One that begins with the slot of a series and a
            colon is said alone where that series breaks it.
        look_at: What to look at first.
    """

    name: str
    sentence: str
    rows: tuple[Kind, ...]
    phase: StepPhase
    relation: Callable[[Mapping[str, float]], LawRelation]
    tolerance: str
    exceptions: tuple[str, ...]
    causes: tuple[str, ...]
    look_at: str
    broken: str = ""
    is_of_the_whole: bool = False
    counts_steps: bool = False
    seen_after: int = 0
    also: tuple[Kind, ...] = ()
    names: tuple[str, ...] = ("*",)
    holds_for_sums: bool = False
    settings: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def headline(self) -> str:
        """What has gone wrong where it is broken, without a full stop."""
        return self.broken or f"This does not hold: {self.sentence[:1].lower()}{self.sentence[1:]}".rstrip(".")

    @property
    def needs(self) -> tuple[str, ...]:
        """The keys of the monitor's configuration without which it is not judged."""
        return tuple(dict.fromkeys(_COLLECTED_BY[kind] for kind in self.rows if kind in _COLLECTED_BY))
