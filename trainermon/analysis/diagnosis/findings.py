"""What a diagnosis says. The JSON form (`values.as_plain`) is described field by field in README.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trainermon.analysis.diagnosis.against.gradient_chain import GradientLink
from trainermon.analysis.diagnosis.against.run_verdicts import RunVerdict
from trainermon.core.values import TextEnum
from trainermon.dump.files.verdicts import OperationVerdict, Reproducibility

SCHEMA_VERSION = 2


class DiagnosisVerdict(TextEnum):
    """How far a diagnosis got.

    `located`: the origin is known. `consequence`: what is bad follows from an earlier step. `not_reproduced`: the
    replay was clean. `finite`: nothing is wrong. `alerted`: all values were finite, but an alert fired. `equal`:
    nothing differs from the reference. `no_evidence`: too little was recorded.
    """

    LOCATED = "located"
    CONSEQUENCE = "consequence"
    NOT_REPRODUCED = "not_reproduced"
    FINITE = "finite"
    ALERTED = "alerted"
    EQUAL = "equal"
    NO_EVIDENCE = "no_evidence"


class Symptom(TextEnum):
    """The kind of fault that came first.

    `nonfinite`: NaN or Inf. `exploded`: far larger than usual. `died`: zero, or far smaller than usual. `diverged`:
    unlike that of its peers. `breaks_law`: what holds in every correct training does not. `differs`: not what the
    reference run has. `none`: nothing is wrong.
    """

    NONE = "none"
    NONFINITE = "nonfinite"
    EXPLODED = "exploded"
    DIED = "died"
    DIVERGED = "diverged"
    BREAKS_LAW = "breaks_law"
    DIFFERS = "differs"


class PlaceLevel(TextEnum):
    """The levels at which a fault's place can be known, from the coarsest, `step`, to the finest, `api` (a function).

    `domain` is a part of the job, as the ranks of one pipeline stage.
    """

    STEP = "step"
    MICRO_STEP = "micro_step"
    DOMAIN = "domain"
    RANK = "rank"
    MODULE = "module"
    API = "api"


class FaultPhase(TextEnum):
    """The part of the step in which the first bad value stood. `before_step`: between backward and optimizer."""

    PARAMETER = "parameter"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCTION = "reduction"
    BEFORE_STEP = "before_step"
    OPTIMIZER = "optimizer"
    UNKNOWN = "unknown"


class RankRole(TextEnum):
    """A rank's part in the fault.

    `origin`: the bad value arose there. `reached`: it came to the rank within the step's computation. `innocent`: only
    the reduction of gradients brought it. `unknown`: nothing tells.
    """

    ORIGIN = "origin"
    REACHED = "reached"
    INNOCENT = "innocent"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BadTensor:
    """A tensor with NaN or Inf in it, as a diagnosis shows it.

    Attributes:
        slot: Its place: `output.0`, `parameters.weight`, `input.0`.
        dtype: Type of its elements; "": not known.
        shape: Its shape.
        count: Number of elements; -1: not known.
        nans: Number of NaNs; -1: not known.
        infs: Number of infinities; -1: not known.
        max: Largest finite element; None without any.
        min: Smallest finite element; None without any.
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
    """One call on the way of the non-finite values from their origin.

    Attributes:
        module: The module.
        class_name: Its class.
        direction: `forward` or `backward`.
        call: Number of the module's call.
        tensor: The first bad tensor of the call.
        omitted: How many links were left out right before this one.
    """

    module: str
    class_name: str
    direction: str
    call: int
    tensor: BadTensor
    omitted: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankFinding:
    """What is known of one rank on the step.

    Attributes:
        rank: The rank.
        role: Its part in the fault.
        replay: `nonfinite`, `clean`, `refused` or `failed` (given up before its end, for `replay_reason`), `unfinished`
            (cut off by the end of the process) or `none` (no replay dump).
        replay_reason: Why it was refused or failed.
        unreduced: Number of gradients (parameters) with a non-finite element before the reduction; None: not stored.
        reduced: The same after the reduction.
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
    """A value beside what it should be: that of the reference run, or what the same series usually is.

    Attributes:
        rank: The rank; None: of the whole job.
        place: Its name in the files: `grad_unreduced h.0.up.weight`, `Module.h.0.up.Linear.forward.0.output.0`.
        value: Statistics by name (`max`, `min`, `mean`, `norm`, `rms`); None: not known.
        usual: What they should be, likewise.
        relative: The size of the difference; NaN: finite on one side alone, None: not known.
        expected: What rounding explains; None: not known.
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
    """The result of `trainermon diagnose`: where the first bad value came from, as far as the run's files tell.

    Attributes:
        verdict: How far the diagnosis got.
        run_id: The run.
        headline: The result in one line.
        reason: Why, in one or two sentences.
        step: The step; None: not known. So with the next two.
        attempt: The start of the job.
        rank: The rank on which it arose.
        module: Its plain name in the user's model; `(input)`, `(loss)` and `(optimizer)` stand for what is outside of
            it, "" for unknown.
        class_name: The module's class.
        call: Number of the module's call.
        micro_step: Number of the forward and backward within the step; None: not known.
        phase: The part of the step in which it arose.
        tensor: The first bad tensor; None: not known.
        source: The line of the user's code that called the module.
        candidates: Modules that the evidence cannot tell apart.
        chain: The calls from the origin to the loss (forward) or to the model's input (backward).
        ranks: What is known of each rank.
        parameters: Parameters that were bad before the forward.
        consequences: Sentences on what followed.
        evidence: Sentences on what was looked at.
        dump: The origin rank's dump, relative to the run directory; None: there is none.
        classification: Why the first bad operation's result was not finite; None: nothing to classify.
        reproducibility: Whether the step gave the same when it was run again; None: no replay.
        reproducibility_reason: Why, in words.
        symptom: What was wrong with the value.
        api: Key of the first bad call of a function; "" if no dump has functions.
        reference: Directory of the run that this one was compared with; "" if none.
        levels: What was found on the way from the step down to the function.
        contrasts: The first bad values beside what they should be.
        collect: What to record to get further; None: nothing to add.
        run_verdicts: Whether losses and gradient norms of two runs are apart over all their steps; () unless both sides
            are runs.
        gradient_chain: Where along the gradients' way two runs part; () likewise.
        setting_differences: Settings of two runs that differ and may change numbers, each as a text; () likewise.
        firing: Alerts of the run that still fire, each as a text (`straggler (rank 1, since step 131)`); () unless
            nothing was found in the whole run, or an alert is in the headline.
        causes: What usually brings about what was found, the most frequent first; () unless a law is broken.
        look_at: What to look at first; "" likewise.
        unread: What the diagnosis says nothing of, as it could not be read or compared: folders of dumps, or in words;
            () also where something was found.
        version: Version of this form.
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
    setting_differences: tuple[str, ...] = ()
    firing: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    look_at: str = ""
    unread: tuple[str, ...] = ()
    version: int = SCHEMA_VERSION
