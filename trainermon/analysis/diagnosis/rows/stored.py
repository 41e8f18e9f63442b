"""Where a fault arose, as far as stored statistics tell: for faults that no replay shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainermon.analysis.diagnosis.evidence import WEIGHT_KINDS, NonfiniteRow, StepEvidence
from trainermon.analysis.diagnosis.findings import BadTensor, FaultPhase
from trainermon.analysis.diagnosis.origin import LOSS
from trainermon.analysis.diagnosis.rows.location import senders
from trainermon.analysis.diagnosis.wording import counted, rank_list
from trainermon.core.catalogue import GRADIENT_AT_STEP
from trainermon.core.values import Kind


class StoredPlace(NamedTuple):
    """Where the stored rows say that the first NaN or Inf arose.

    Attributes:
        rank: None: they do not tell.
        module: "": they do not tell.
        phase: The part of the step.
        row: The row that shows it.
        reason: Why, in a sentence.
    """

    rank: int | None
    module: str
    phase: FaultPhase
    row: NonfiniteRow | None
    reason: str

    @property
    def tensor(self) -> BadTensor | None:
        """The tensor of the row as a diagnosis shows it; None without a row."""
        row = self.row
        if row is None:
            return None
        is_partly_finite = row.count > row.nans + row.infs
        return BadTensor(
            slot=row.slot or row.kind,
            count=row.count,
            nans=row.nans,
            infs=row.infs,
            max=row.max if is_partly_finite else None,
            min=row.min if is_partly_finite else None,
        )


def locate_in_rows(evidence: StepEvidence, suspect: int | None = None) -> StoredPlace:
    """Return rank, module, phase and row in which the first non-finite value of the step arose, by the stored rows.

    The rank is one whose own values are not finite: activations, loss, gradients before the reduction; of several it is
    one that sent its bad value to others. What is bad after the reduction alone was made by it, and what is bad after
    the step alone by what came before it, or by the optimizer. Within the rank the first module, in
    definition order, whose output is not finite while its inputs are, else the last parameter whose own gradient is not
    finite: a backward spoils all that lies before it.
    `suspect` is a rank whose forward is known to have been bad.
    """
    if suspect is not None:
        own = tuple(row for row in evidence.rows if row.rank == suspect)
        found = locate_in_rows(dataclasses.replace(evidence, rows=own, ranks=(suspect,)))
        phase = FaultPhase.FORWARD if found.phase is FaultPhase.UNKNOWN else found.phase
        return found._replace(rank=suspect, phase=phase)
    order = {name: place for place, name in enumerate(evidence.modules)}
    local = [row for row in evidence.rows if row.kind in _LOCAL_KINDS]
    if not local:
        return _only_reduced(evidence)
    ranks = sorted({row.rank for row in local})
    rank = senders(evidence.rows, ranks)[0]
    others = _others([other for other in ranks if other != rank])
    rows = [row for row in local if row.rank == rank]
    for locate in (_by_parameter, _by_buffer, _by_activation):
        place = locate(rows, order)
        if place is not None:
            return place._replace(reason=place.reason + others)
    place = _by_loss(rows, evidence) or _by_gradient(rows, order)
    if place is not None:
        return place._replace(reason=place.reason + others)
    return StoredPlace(rank, "", FaultPhase.UNKNOWN, rows[0], f"rank {rank}'s {rows[0].kind} was not finite")


def _others(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"; {rank_list(ranks)} {'is' if len(ranks) == 1 else 'are'} concerned, too"


_GRADIENTS = (Kind.GRAD_REDUCED, Kind.GRAD_UNREDUCED)
_LOCAL_KINDS = (*WEIGHT_KINDS, Kind.BUFFER, Kind.ACTV, Kind.LOSS, Kind.ACTV_GRAD, Kind.GRAD_UNREDUCED)


def _only_reduced(evidence: StepEvidence) -> StoredPlace:
    rows = [row for row in evidence.rows if row.kind not in _LOCAL_KINDS]
    for locate in (_by_reduction, _before_step, _by_optimizer):
        place = locate(rows, evidence)
        if place is not None:
            return place
    if not rows:
        return StoredPlace(None, "", FaultPhase.UNKNOWN, None, "no stored statistic tells more")
    kinds = ", ".join(sorted({row.kind for row in rows}))
    single = evidence.ranks[0] if len(evidence.ranks) == 1 else None
    names = sorted({row.name for row in rows})
    reason = (
        f"only {kinds} of {counted(len(names), 'tensor')} is known to be not finite, which does not tell where it arose"
    )
    return StoredPlace(single, "", FaultPhase.UNKNOWN, rows[0], reason)


def _by_reduction(rows: Sequence[NonfiniteRow], evidence: StepEvidence) -> StoredPlace | None:
    """Return what the reduction made of gradients that were finite on every rank before it."""
    bad = [row for row in rows if row.kind == Kind.GRAD_REDUCED]
    if not bad or len(evidence.ranks) < 2 or Kind.GRAD_UNREDUCED not in evidence.kinds:
        return None
    ranks = sorted({row.rank for row in bad})
    is_everywhere = len(ranks) == len(evidence.ranks)
    row = min(bad, key=_in_order(evidence))
    names = {other.name for other in bad}
    others = f" and of {counted(len(names) - 1, 'other parameter')}" if len(names) > 1 else ""
    where = "every rank" if is_everywhere else rank_list(ranks)
    reason = (
        f"before the reduction the gradients of every rank were finite; after it those of {row.name}{others} are not"
        f" on {where}"
    )
    rank = None if is_everywhere else ranks[0]
    return StoredPlace(rank, _owner(row.name), FaultPhase.REDUCTION, row, reason)


def _before_step(rows: Sequence[NonfiniteRow], evidence: StepEvidence) -> StoredPlace | None:
    """Return the gradient that was spoilt after the last backward, by what it was at the step or what became of it.

    A finite gradient cannot make both moments bad, nor can a bad moment make the other one so. Clipping spreads it to
    all gradients of the rank, or of all ranks.
    """
    # one bad gradient spoils the others of its rank where they are clipped
    given = {row.rank for row in rows if row.kind in _GRADIENTS}
    seen = [row for row in rows if row.slot == GRADIENT_AT_STEP and row.rank not in given]
    if seen:
        row = min(seen, key=_in_order(evidence))
        known = " was finite after the backward," if evidence.kinds.intersection(_GRADIENTS) else ""
        reason = (
            f"the gradient of {row.name}{known} was written to before the optimizer's step, and was not finite then"
        )
        ranks = sorted({other.rank for other in seen} - {row.rank})
        return StoredPlace(row.rank, _owner(row.name), FaultPhase.BEFORE_STEP, row, reason + _others(ranks))
    moments = {(row.rank, row.name, row.kind): row for row in rows if row.kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ)}
    both = [
        row
        for (rank, name, kind), row in moments.items()
        if kind == Kind.EXP_AVG and (rank, name, Kind.EXP_AVG_SQ) in moments
    ]
    if not both or not _gradients_were_finite(rows, evidence):
        return None
    return _of_moments(both, evidence)


def _of_moments(bad: Sequence[NonfiniteRow], evidence: StepEvidence) -> StoredPlace:
    row, ranks = min(bad, key=_in_order(evidence)), sorted({row.rank for row in bad})
    names = {other.name for other in bad}
    reason = f"the gradients were finite after the backward, but both moments of {row.name} are not after the step"
    rank = row.rank if len(ranks) == 1 or len(ranks) < len(evidence.ranks) else None
    if len(names) == 1:
        return StoredPlace(rank, _owner(row.name), FaultPhase.BEFORE_STEP, row, reason)
    reason += f", nor are those of {counted(len(names) - 1, 'other')}: clipping may have carried it there"
    return StoredPlace(rank, "", FaultPhase.BEFORE_STEP, row, reason)


def _gradients_were_finite(rows: Sequence[NonfiniteRow], evidence: StepEvidence) -> bool:
    return bool(evidence.kinds.intersection(_GRADIENTS)) and not any(row.kind in _GRADIENTS for row in rows)


def _in_order(evidence: StepEvidence) -> Callable[[NonfiniteRow], tuple[int, int]]:
    order = {name: place for place, name in enumerate(evidence.modules)}
    return lambda row: (row.rank, _place(_owner(row.name), order))


_MADE_BY_OPTIMIZER = (Kind.PARAM_UPDATED, Kind.UPDATE, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


def _by_optimizer(rows: Sequence[NonfiniteRow], evidence: StepEvidence) -> StoredPlace | None:
    """Return what the optimizer made of gradients that are known to be finite."""
    made = [row for row in rows if row.kind in _MADE_BY_OPTIMIZER]
    if not made or not _gradients_were_finite(rows, evidence):
        return None
    order = {name: place for place, name in enumerate(evidence.modules)}
    row = min(
        made, key=lambda row: (_MADE_BY_OPTIMIZER.index(Kind(row.kind)), row.rank, _place(_owner(row.name), order))
    )
    kinds = ", ".join(sorted({other.kind for other in made if (other.rank, other.name) == (row.rank, row.name)}))
    names = {other.name for other in made}
    others = f"; so were those of {counted(len(names) - 1, 'other')}" if len(names) > 1 else ""
    reason = f"the gradients were finite, but {kinds} of {row.name} were not after the optimizer's step{others}"
    ranks = sorted({other.rank for other in made} - {row.rank})
    return StoredPlace(row.rank, _owner(row.name), FaultPhase.OPTIMIZER, row, reason + _others(ranks))


def _by_loss(rows: Sequence[NonfiniteRow], evidence: StepEvidence) -> StoredPlace | None:
    """Return the loss if nothing that it was computed from is known to be bad, and would be.

    A bad activation is known by itself, or by the gradient that it spoils.
    """
    losses = [row for row in rows if row.kind == Kind.LOSS]
    kinds, bad = {Kind.ACTV}, {row.kind for row in rows}
    if Kind.ACTV not in evidence.kinds:
        kinds = {Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED}
        bad = {row.kind for row in evidence.rows}
    if not losses or not kinds & evidence.kinds or kinds & bad:
        return None
    what = "every stored output of a module" if Kind.ACTV in kinds else "every gradient"
    reason = f"the loss was not finite, though {what} was"
    return StoredPlace(losses[0].rank, LOSS, FaultPhase.FORWARD, losses[0], reason)


def _by_parameter(rows: Sequence[NonfiniteRow], order: dict[str, int]) -> StoredPlace | None:
    found = [row for row in rows if row.kind in WEIGHT_KINDS]
    if not found:
        return None
    row = min(found, key=lambda row: _place(_owner(row.name), order))
    return StoredPlace(
        row.rank, _owner(row.name), FaultPhase.PARAMETER, row, f"parameter {row.name} was not finite before the step"
    )


def _by_buffer(rows: Sequence[NonfiniteRow], order: dict[str, int]) -> StoredPlace | None:
    """Return the first bad buffer, unless the forward of another module is known to have gone wrong."""
    found = [row for row in rows if row.kind == Kind.BUFFER]
    forward = _by_activation(rows, order)
    if not found or (forward is not None and forward.module not in {_owner(row.name) for row in found}):
        return None
    row = min(found, key=lambda row: _place(_owner(row.name), order))
    names = {other.name for other in found}
    others = f" and {counted(len(names) - 1, 'other')}" if len(names) > 1 else ""
    reason = (
        f"the buffer {row.name}{others} held NaN or Inf when the forward of step {row.step} began, and did not when"
        " buffers were read before: a forward in between put it there"
    )
    return StoredPlace(row.rank, _owner(row.name), FaultPhase.PARAMETER, row, reason)


def _by_activation(rows: Sequence[NonfiniteRow], order: dict[str, int]) -> StoredPlace | None:
    outputs = [row for row in rows if row.kind == Kind.ACTV and row.slot.startswith("output")]
    spoiled = {
        (row.name, row.call, row.micro_step) for row in rows if row.kind == Kind.ACTV and row.slot.startswith("input")
    }
    found = [row for row in outputs if (row.name, row.call, row.micro_step) not in spoiled]
    if not found:
        return None
    row = min(found, key=lambda row: (row.micro_step or 0, _first_leaf(row, outputs, order)))
    reason = f"module {row.name} is the first stored one whose output is not finite while its inputs are"
    return StoredPlace(row.rank, row.name, FaultPhase.FORWARD, row, reason)


def _first_leaf(row: NonfiniteRow, outputs: Sequence[NonfiniteRow], order: dict[str, int]) -> tuple[bool, int]:
    """Order modules without a bad module inside before those around them."""
    around = any(other.name.startswith(f"{row.name}.") for other in outputs)
    return around, _place(row.name, order)


def _by_gradient(rows: Sequence[NonfiniteRow], order: dict[str, int]) -> StoredPlace | None:
    found = [row for row in rows if row.kind in (Kind.GRAD_UNREDUCED, Kind.ACTV_GRAD)]
    if not found:
        return None
    row = max(found, key=lambda row: _place(_module(row), order))
    if any(other.kind == Kind.LOSS for other in rows):
        reason = f"the loss of rank {row.rank} was not finite, but no activations are stored to follow its forward"
        return StoredPlace(row.rank, "", FaultPhase.UNKNOWN, row, reason)
    what = "module" if row.kind == Kind.ACTV_GRAD else "parameter"
    reason = f"{what} {row.name} is the last whose gradient was not finite on rank {row.rank} before the reduction"
    return StoredPlace(row.rank, _module(row), FaultPhase.BACKWARD, row, reason)


def _module(row: NonfiniteRow) -> str:
    return row.name if row.kind == Kind.ACTV_GRAD else _owner(row.name)


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _place(name: str, order: dict[str, int]) -> int:
    return order.get(name, len(order))
