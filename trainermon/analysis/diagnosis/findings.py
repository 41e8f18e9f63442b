"""What a diagnosis says. The JSON form (`values.as_plain`) is described field by field in README.md."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from trainermon.analysis.diagnosis.against.gradient_chain import GradientLink
from trainermon.analysis.diagnosis.against.run_verdicts import RunVerdict
from trainermon.dump.files.verdicts import OperationVerdict, Reproducibility

SCHEMA_VERSION = 2


class DiagnosisVerdict(str, enum.Enum):
    """How far a diagnosis got.

    `located`: the origin is known. `consequence`: what is bad follows from an earlier step. `not_reproduced`: the
    replay was clean. `finite`: nothing is wrong. `equal`: nothing differs from the reference. `no_evidence`: too little
    was recorded.
    """

    LOCATED = "located"
    CONSEQUENCE = "consequence"
    NOT_REPRODUCED = "not_reproduced"
    FINITE = "finite"
    EQUAL = "equal"
    NO_EVIDENCE = "no_evidence"

    def __str__(self) -> str:
        return self.value


class Symptom(str, enum.Enum):
    """The kind of fault that came first.

    `nonfinite`: NaN or Inf. `exploded`: far larger than usual. `died`: zero, or far smaller than usual. `diverged`:
    unlike that of its peers. `differs`: not what the reference run has. `none`: nothing is wrong.
    """

    NONE = "none"
    NONFINITE = "nonfinite"
    EXPLODED = "exploded"
    DIED = "died"
    DIVERGED = "diverged"
    DIFFERS = "differs"

    def __str__(self) -> str:
        return self.value


class PlaceLevel(str, enum.Enum):
    """The levels at which a fault's place can be known, from the coarsest, `step`, to the finest, `api` (a function).

    `domain` is a part of the job, as the ranks of one pipeline stage.
    """

    STEP = "step"
    MICRO_STEP = "micro_step"
    DOMAIN = "domain"
    RANK = "rank"
    MODULE = "module"
    API = "api"

    def __str__(self) -> str:
        return self.value


class FaultPhase(str, enum.Enum):
    """The part of the step in which the first bad value stood. `before_step`: between backward and optimizer."""

    PARAMETER = "parameter"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCTION = "reduction"
    BEFORE_STEP = "before_step"
    OPTIMIZER = "optimizer"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


class RankRole(str, enum.Enum):
    """A rank's part in the fault.

    `origin`: the bad value arose there. `reached`: it came to the rank within the step's computation. `innocent`: only
    the reduction of gradients brought it. `unknown`: nothing tells.
    """

    ORIGIN = "origin"
    REACHED = "reached"
    INNOCENT = "innocent"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BadTensor:
    """A tensor with non-finite elements. `slot` is its place (`output.0`, `parameters.weight`, `input.0`).

    `count`, `nans` and `infs` are numbers of elements, -1 where the source does not tell; `max` and `min` are those of
    the finite elements, None without any.
    """

    slot: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    count: int = -1
    nans: int = -1
    infs: int = -1
    max: float | None = None
    min: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PathLink:
    """One module on the way of the non-finite values. `omitted` links were left out right before this one."""

    module: str
    class_name: str
    direction: str
    call: int
    tensor: BadTensor
    omitted: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankFinding:
    """What is known of one rank on the step.

    `replay` is `nonfinite`, `clean`, `refused` or `failed` (given up before its end, for `replay_reason`), `unfinished`
    (cut off by the end of the process) or `none` (no replay dump). `unreduced` and `reduced` are the numbers of
    gradients (parameters) with a non-finite element before and after the reduction, None where none is stored.
    """

    rank: int
    role: RankRole
    replay: str
    replay_reason: str = ""
    unreduced: int | None = None
    reduced: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BadParameter:
    """A parameter that held NaN or Inf before the forward of the step, on the rank where the fault arose.

    `count`, `nans` and `infs` are numbers of elements.
    """

    name: str
    count: int
    nans: int
    infs: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LevelFinding:
    """What a diagnosis found at one level of the way from the step down to the function.

    Attributes:
        level: Step, micro step, part of the job, rank, module or function.
        answer: What was found; "" where nothing tells.
        reason: Why.
        source: The files that tell.
    """

    level: PlaceLevel
    answer: str
    reason: str
    source: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A value beside what it should be: that of the reference, or what the same series usually is.

    `place` names it as the files do (`grad_unreduced h.0.up.weight`, `Module.h.0.up.Linear.forward.0.output.0`).
    `value` and `usual` give statistics by name (`max`, `min`, `mean`, `norm`, `rms`; None: not known). `relative` is
    the size of the difference (NaN: finite on one side alone, None: not known), `expected` what rounding explains.
    """

    rank: int | None
    place: str
    value: Mapping[str, float | None]
    usual: Mapping[str, float | None]
    relative: float | None = None
    expected: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NextCollection:
    """What to record in another run to get further with a diagnosis.

    Attributes:
        reason: Why, in a sentence.
        debugger: A configuration that `PrecisionDebugger` reads (config.json); None: it has nothing to add.
        monitor: A configuration that `TrainerMon` reads; None likewise.
    """

    reason: str
    debugger: Mapping[str, Any] | None = None
    monitor: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Where the first bad value of a step came from, as far as the run's files tell.

    `module` is the plain name in the user's model; `(input)`, `(loss)` and `(optimizer)` stand for what is outside of
    it, "" for unknown. `step`, `attempt` and `rank` are None where nothing is known. `headline` is one line, `reason`
    one or two sentences, `source` the line of the user's code that called the module. `candidates` are modules that
    the evidence cannot tell apart. `chain` runs from the origin to the loss (forward) or to the model's input
    (backward). `dump` is the origin rank's dump, relative to the run directory. `classification` says why the first
    bad operation's result was not finite, `reproducibility` whether the step gave the same when it was run again; None
    where there is nothing to classify, or no replay.

    `symptom` is what was wrong with the value, `api` the key of the first bad call of a function, "" if no dump has
    functions. `levels` is the way down from the step to the API, `contrasts` the first bad values beside what they
    should be, `reference` the directory that the run was held against, "" if none. `collect` is None if there is
    nothing to add. `run_verdicts` say of two runs whether losses and gradient norms are apart over all their steps,
    `gradient_chain` where along the gradients' way they part; () unless both sides are runs.
    """

    verdict: DiagnosisVerdict
    run_id: str
    headline: str
    reason: str
    step: int | None = None
    attempt: int | None = None
    rank: int | None = None
    module: str = ""
    class_name: str = ""
    call: int = 0
    micro_step: int | None = None
    phase: FaultPhase = FaultPhase.UNKNOWN
    tensor: BadTensor | None = None
    source: str = ""
    candidates: tuple[str, ...] = ()
    chain: tuple[PathLink, ...] = ()
    ranks: tuple[RankFinding, ...] = ()
    parameters: tuple[BadParameter, ...] = ()
    consequences: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    dump: str | None = None
    classification: OperationVerdict | None = None
    reproducibility: Reproducibility | None = None
    reproducibility_reason: str = ""
    symptom: Symptom = Symptom.NONE
    api: str = ""
    reference: str = ""
    levels: tuple[LevelFinding, ...] = ()
    contrasts: tuple[Contrast, ...] = ()
    collect: NextCollection | None = None
    run_verdicts: tuple[RunVerdict, ...] = ()
    gradient_chain: tuple[GradientLink, ...] = ()
    version: int = SCHEMA_VERSION
