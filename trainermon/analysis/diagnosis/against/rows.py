"""What stored rows alone tell of the first difference from a reference: step, rank, module and phase."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from trainermon.analysis.compare.items import DumpRow
from trainermon.analysis.diagnosis.against.row_differences import RowDifference, step_order
from trainermon.analysis.diagnosis.against.row_pairs import RowPair
from trainermon.analysis.diagnosis.against.scaling import describe as describe_scaling
from trainermon.analysis.diagnosis.against.sides import RunSide
from trainermon.analysis.diagnosis.domains import describe_domain
from trainermon.analysis.diagnosis.findings import (
    BadTensor,
    Contrast,
    Diagnosis,
    DiagnosisVerdict,
    FaultPhase,
    LevelFinding,
    PlaceLevel,
    RankFinding,
    RankRole,
    Symptom,
)
from trainermon.analysis.diagnosis.origin import LOSS, MODEL
from trainermon.analysis.diagnosis.rows.location import RowLocation, locate
from trainermon.analysis.diagnosis.wording import counted, rank_list
from trainermon.core.values import Kind

ROWS = "stored rows"
MAX_CONTRASTS = 6
_REFERENCE = "the reference"
_MOMENTS = (Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.STATE)
PHRASES: Mapping[FaultPhase, str] = {
    FaultPhase.PARAMETER: "a parameter differed before the forward",
    FaultPhase.FORWARD: "it arose in the forward",
    FaultPhase.BACKWARD: "it arose in the backward",
    FaultPhase.REDUCTION: "it arose in the reduction, before which the gradients agree",
    FaultPhase.BEFORE_STEP: "the gradient was written to between backward and optimizer step",
    FaultPhase.OPTIMIZER: "it arose in the optimizer step",
    FaultPhase.UNKNOWN: "it was there after the reduction of gradients, which does not tell where it arose",
}


def from_rows(ours: RunSide, rows: RowDifference) -> Diagnosis:
    """Return the diagnosis made from stored rows, of which at least one step must differ from the reference's."""
    ours = dataclasses.replace(ours, places={}) if rows.split else ours
    order = step_order(ours, rows.flows, has_unreduced=Kind.GRAD_UNREDUCED in rows.kinds)
    location = _without_forward(rows) or locate(rows.pairs, order, rows.called, [_size(pair) for pair in rows.pairs])
    assert location is not None
    location = _of_the_loss(rows, location) or location
    pair = rows.pairs[location.place]
    module = location.module
    rank = location.ranks[0] if len(location.ranks) == 1 and not rows.split else None
    where = (f" in {module}" if module else "") + ("" if rows.split else f" on {rank_list(location.ranks)}")
    return Diagnosis(
        verdict=DiagnosisVerdict.LOCATED,
        symptom=Symptom.DIFFERS,
        run_id=ours.run_id,
        headline=f"The run first differs from the reference{where} in step {rows.step}",
        reason=_whole_reason(rows, location, pair),
        step=rows.step,
        rank=rank,
        module=module,
        micro_step=pair.micro_step,
        phase=location.phase,
        candidates=location.candidates or _sharing(rows.pairs, pair),
        tensor=dataclasses.replace(tensor_of(pair.place, pair.ours), shape=()),
        ranks=() if rows.split else row_ranks(rows, location),
        levels=row_levels(ours, rows, location),
        contrasts=row_contrasts(rows, location),
    )


def _of_the_loss(rows: RowDifference, location: RowLocation) -> RowLocation | None:
    """Return the loss as the location if the backward began with all gradients off by one factor; else None.

    No module's own backward does that.
    """
    if location.phase is not FaultPhase.BACKWARD or rows.scaling is None:
        return None
    return dataclasses.replace(location, module=LOSS, candidates=())


def _scaled(rows: RowDifference, location: RowLocation) -> str:
    """Return by which factor all gradients are off, and who may have made it so; "" if they are not off by one."""
    if rows.scaling is None or location.phase in (FaultPhase.PARAMETER, FaultPhase.OPTIMIZER):
        return ""
    who = {
        FaultPhase.FORWARD: "",
        FaultPhase.BACKWARD: ", and no forward differs: the loss was scaled otherwise",
        FaultPhase.REDUCTION: ": they were summed, averaged or divided otherwise",
        FaultPhase.UNKNOWN: ": the loss was scaled, or they were summed or averaged, otherwise",
    }
    return f"{describe_scaling(rows.scaling)}{who.get(location.phase, '')}"


def _sharing(pairs: Sequence[RowPair], first: RowPair) -> tuple[str, ...]:
    """Return the modules that took the same tensor as `first`: its gradient is the sum of what they all gave back."""
    if first.kind != Kind.ACTV_GRAD or not first.slot.startswith("input"):
        return ()
    found = [
        pair.name
        for pair in pairs
        if (pair.kind, pair.micro_step, pair.stage, pair.rank)
        == (first.kind, first.micro_step, first.stage, first.rank)
        and pair.slot.startswith("input")
        and pair.fingerprint == first.fingerprint
    ]
    names = dict.fromkeys(found)
    return tuple(
        name for name in names if name != first.name and not any(other.startswith(f"{name}.") for other in names)
    )


def _size(pair: RowPair) -> float:
    """Return how far two rows are apart, of one that a side lacks as far as can be."""
    if pair.only_in or (pair.relative is not None and math.isnan(pair.relative)):
        return math.inf
    return pair.relative or 0.0


def _without_forward(rows: RowDifference) -> RowLocation | None:
    """Return the model as a whole as the location, if some ranks lack activations that the reference has; else None."""
    missing = _missing_activations(rows)
    present = {pair.rank for pair in rows.pairs if pair.kind == Kind.ACTV and pair.only_in != _REFERENCE}
    ranks = sorted({pair.rank for pair in missing} - present)
    if not ranks or rows.called - {pair.name for pair in missing}:
        return None
    place = rows.pairs.index(next(pair for pair in missing if pair.rank == ranks[0]))
    return RowLocation(place=place, phase=FaultPhase.FORWARD, module=MODEL, ranks=tuple(ranks))


def _missing_activations(rows: RowDifference) -> list[RowPair]:
    return [pair for pair in rows.pairs if pair.kind == Kind.ACTV and pair.only_in == _REFERENCE]


def _lost(rows: RowDifference) -> str:
    if not rows.lost:
        return ""
    steps = f"{rows.lost[0]} to {rows.lost[-1]}" if len(rows.lost) > 1 else str(rows.lost[0])
    which = f"steps {steps} are" if len(rows.lost) > 1 else f"step {steps} is"
    return f"Right before it {which} stored on one side only: it may have begun there"


def _whole_reason(rows: RowDifference, location: RowLocation, pair: RowPair) -> str:
    said = (_reason(rows, location, pair), _scaled(rows, location), _lost(rows), _other_batch(rows))
    return ". ".join(filter(None, said))


def _other_batch(rows: RowDifference) -> str:
    """Return that the batch may be what differs, where runs that are split otherwise cannot tell; else ""."""
    is_known = not rows.split or Kind.ACTV in rows.kinds or rows.num_before
    return "" if is_known else "The whole batch may be another one: what ranks were given was not compared"


def _reason(rows: RowDifference, location: RowLocation, pair: RowPair) -> str:
    if location.module == MODEL and pair.only_in == _REFERENCE and pair.kind == Kind.ACTV:
        return (
            f"None of the {len(_missing_activations(rows))} series of activations that the reference has on this step"
            " is there: a model that was left in eval() has none"
        )
    if pair.only_in:
        return f"{pair.place} is only in {pair.only_in}: {PHRASES[location.phase]}{_why_missing(pair)}"
    what = f"{pair.place} is the first series that differs{_by_how_much(rows, pair)}: {PHRASES[location.phase]}"
    if location.phase is FaultPhase.PARAMETER and rows.kept and rows.is_exact and rows.step is not None:
        copy = "; the optimizer holds something else, which agrees" if _is_of_model_alone(rows, pair) else ""
        return f"{what}; right after step {rows.step - 1} it agreed: it was written to between the steps{copy}"
    if location.is_given:
        return f"{what}; it was given so, and no stored module has made it"
    return what


def _by_how_much(rows: RowDifference, pair: RowPair) -> str:
    """Return how far a series is apart on the first common step, and what rounding explains; "" on a later one."""
    if rows.num_before or pair.relative is None or not math.isfinite(pair.relative):
        return ""
    beside = f", where rounding explains {rows.explained:.2g}" if rows.explained else ""
    types = [side.dtype for side in (pair.ours, pair.theirs)]
    other = f", of type {types[0]} (in the reference {types[1]})" if all(types) and types[0] != types[1] else ""
    return f"{other}, by {pair.relative:.2g}{beside}"


def _is_of_model_alone(rows: RowDifference, pair: RowPair) -> bool:
    """Return whether the weight is one that the forward used, and what the optimizer holds of it agrees."""
    held = {(one.name, one.stage) for one in rows.pairs if one.kind == Kind.PARAM_ORIGIN}
    return pair.kind == Kind.PARAM_USED and (pair.name, pair.stage) not in held


def _why_missing(pair: RowPair) -> str:
    if pair.only_in == _REFERENCE and pair.kind in _MOMENTS:
        return "; an optimizer that does not have the parameter keeps nothing of it"
    return ""


def step_level(rows: RowDifference) -> LevelFinding:
    """Return the level "step" of the way down: which step, and how it was found."""
    before = f"{counted(rows.num_before, 'step')} before it that both runs have agree"
    how = "to the bit" if rows.is_exact else f"but for noise of up to {rows.noise:.2g}"
    different = f"{len(rows.pairs):,} of {rows.num_rows:,} series differ"
    if rows.lost:
        different += f", and {counted(len(rows.lost), 'step')} right before it are on one side only"
    reason = f"{before} {how}; {different}" if rows.num_before else f"the first step that was compared; {different}"
    return LevelFinding(level=PlaceLevel.STEP, answer=str(rows.step), reason=reason, source=ROWS)


def _why_no_domain(rows: RowDifference) -> str:
    return "ranks were merged" if rows.split else "the run has one rank, or does not tell its groups"


def row_levels(ours: RunSide, rows: RowDifference, location: RowLocation) -> tuple[LevelFinding, ...]:
    """Return the levels of the way down, from the step to the function, as far as stored rows reach."""
    pair = rows.pairs[location.place]
    micro_steps = sorted({one.micro_step for one in rows.pairs if one.micro_step is not None})
    micro = f"micro steps {', '.join(map(str, micro_steps))} differ" if micro_steps else "none is told apart"
    domain, why = describe_domain(location.ranks, ours.places)
    answers = (
        (PlaceLevel.MICRO_STEP, "" if pair.micro_step is None else str(pair.micro_step), micro),
        (PlaceLevel.DOMAIN, domain, why or _why_no_domain(rows)),
        (PlaceLevel.RANK, ", ".join(map(str, location.ranks)), f"{pair.place} differs there"),
        (PlaceLevel.MODULE, location.module, PHRASES[location.phase]),
        (PlaceLevel.API, "", "stored rows know of modules only"),
    )
    below = (LevelFinding(level=level, answer=answer, reason=why, source=ROWS) for level, answer, why in answers)
    return (step_level(rows), *below)


def row_ranks(rows: RowDifference, location: RowLocation) -> tuple[RankFinding, ...]:
    """Return, of each rank that differs, its role and how many gradients differ before and after the reduction."""
    return tuple(
        RankFinding(
            rank=rank,
            role=RankRole.ORIGIN if rank in location.ranks else RankRole.REACHED,
            replay="none",
            unreduced=_count(rows, Kind.GRAD_UNREDUCED)[rank],
            reduced=_count(rows, Kind.GRAD_REDUCED)[rank],
        )
        for rank in sorted({pair.rank for pair in rows.pairs})
    )


def _count(rows: RowDifference, kind: Kind) -> Counter[int]:
    pairs = {(pair.rank, pair.name) for pair in rows.pairs if pair.kind == kind}
    return Counter(rank for rank, _ in pairs)


def row_contrasts(rows: RowDifference, location: RowLocation) -> tuple[Contrast, ...]:
    """Return both sides' statistics of the first series that differs, and of its module's others on its rank."""
    first = rows.pairs[location.place]
    same = [
        pair
        for pair in rows.pairs
        if pair is not first and (pair.kind, pair.name, pair.rank) == (first.kind, first.name, first.rank)
    ]
    return tuple(_contrast(pair) for pair in (first, *same)[:MAX_CONTRASTS])


def _contrast(pair: RowPair) -> Contrast:
    return Contrast(
        rank=pair.rank,
        place=pair.place,
        value=statistics_of(pair.ours),
        usual=statistics_of(pair.theirs),
        relative=pair.relative,
    )


def statistics_of(item: DumpRow) -> dict[str, float | None]:
    """Return max, min, mean, norm and the like of a row by name; None where there is no number."""
    values = {"max": item.max, "min": item.min, "mean": item.mean, "norm": item.norm}
    numbers = {name: float(value) if isinstance(value, int | float) else None for name, value in values.items()}
    return numbers | {name: float(count) for name, count in (("nans", item.nans), ("infs", item.infs)) if count}


def tensor_of(slot: str, item: DumpRow) -> BadTensor:
    """Return type, shape and counts of a row's tensor in `slot` (`output.0`), as a diagnosis shows them."""
    numbers = statistics_of(item)
    unknown = -1 if item.nonfinite else 0  # msprobe counts neither
    return BadTensor(
        slot=slot,
        dtype=(item.dtype or "").removeprefix("torch."),
        shape=(item.shape or ()) if item.dtype else (),
        count=item.num_elements,
        nans=unknown if item.nans is None else item.nans,
        infs=unknown if item.infs is None else item.infs,
        max=numbers["max"],
        min=numbers["min"],
    )
