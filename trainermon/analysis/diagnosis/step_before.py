"""What the step before tells of a parameter that is not finite when the forward begins."""

from __future__ import annotations

import math

from trainermon.analysis.diagnosis.evidence import StepEvidence
from trainermon.analysis.diagnosis.findings import FaultPhase


def made_by_update(evidence: StepEvidence, rank: int, parameter: str) -> tuple[FaultPhase, str]:
    """Return the phase in which a parameter became bad, and why, by gradients and learning rates of the step before.

    The reason is "" if the step right before is not stored, or its gradients were not finite.
    """
    update, before = evidence.updates_before.get(rank), evidence.step_before
    if update is None or before is None or evidence.step != before + 1:
        return FaultPhase.PARAMETER, ""
    if parameter in update.finite:
        reason = (
            f"It was finite behind the optimizer's step {before}: something wrote to it between that and the forward"
        )
        return FaultPhase.PARAMETER, reason
    if update.grad_norm is None or not math.isfinite(update.grad_norm):
        return FaultPhase.PARAMETER, ""
    gradients = f"finite gradients (norm {update.grad_norm:.3g})"
    bad = next((rate for rate in update.rates if not math.isfinite(rate)), None)
    if bad is not None:
        rate = "NaN" if math.isnan(bad) else "infinite"
        return (
            FaultPhase.OPTIMIZER,
            f"The optimizer's step {before} made it of {gradients}: its learning rate was {rate}",
        )
    rates = f" with learning rate {', '.join(f'{rate:.3g}' for rate in dict.fromkeys(update.rates))}" * bool(
        update.rates
    )
    return (
        FaultPhase.PARAMETER,
        f"Step {before} had {gradients}: the optimizer made it of them{rates}, or something wrote to it afterwards",
    )
