"""Whether a whole run is apart from its reference: by its losses and by the norms of its gradients, step by step.

Two rules of thumb, known from msprobe's users: the mean relative error of the loss is to be at most 1 %, and the
gradient norm of no step is to be apart by more than its own size. A norm that is half or twice the reference's on most
steps is within that, and no noise: its median ratio is to be at most 1.25, or its inverse. They say that two runs part,
not where.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainermon.analysis.diagnosis.against.trained_sets import TrainedSets
from trainermon.analysis.diagnosis.evidence import open_store
from trainermon.analysis.diagnosis.wording import counted

if TYPE_CHECKING:
    import duckdb

LOSS_LIMIT = 0.01
GRAD_NORM_LIMIT = 1.0
RATIO_LIMIT = 1.25
LOSS, GRAD_NORM = "loss", "grad_norm"
_RATIO = "median ratio"

_SERIES = """
    SELECT step, loss, grad_norm, global_grad_norm
    FROM steps LEFT JOIN (
        SELECT attempt, step, max(global_grad_norm) AS global_grad_norm FROM step_values GROUP BY attempt, step
    ) USING (attempt, step) ORDER BY step
"""
_Values = Mapping[int, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """How far one number of every step is from the reference's.

    `quantity` is `loss` or `grad_norm`, `measure` what `value` is: the mean relative error over the steps, the largest
    relative difference of a step, or the median ratio to the reference, which its `limit` bounds either way. `value` is
    None if no step has a reference that is finite and not zero. `differs` tells that it is beyond `limit`, or that the
    number is finite on one side only on `num_one_sided` steps. `step` is the first step that is beyond the limit by
    itself or finite on one side only, else None; `worst_step` the one that is farthest apart.
    """

    quantity: str
    measure: str
    value: float | None
    limit: float
    differs: bool
    num_steps: int
    num_one_sided: int
    step: int | None
    worst_step: int | None


class _RunRule(NamedTuple):
    quantity: str
    measure: str
    limit: float
    is_mean: bool


_LOSS_RULE = _RunRule(LOSS, "mean relative error", LOSS_LIMIT, is_mean=True)
_NORM_RULE = _RunRule(GRAD_NORM, "largest relative difference", GRAD_NORM_LIMIT, is_mean=False)


def judge_run(run_dir: Path, reference: Path, trained: TrainedSets | None = None) -> tuple[RunVerdict, ...]:
    """Compare loss and gradient norm of two runs over all steps that both have stored; return a verdict on each.

    A quantity that one of them lacks has no verdict. Where other parameters are `trained`, the norms are those of what
    both have.
    """
    with open_store(run_dir) as ours, open_store(reference) as theirs:
        if ours is None or theirs is None:
            return ()
        losses, norms, global_norms = zip(_read(ours), _read(theirs), strict=True)
    if trained is not None:
        here, there = ({step: norm for (step, _), norm in side.items()} for side in trained.norms)
        norms = global_norms = here, there
    # a norm of our own where both have one: it is before clipping on every framework
    chosen = norms if norms[0].keys() & norms[1].keys() else global_norms
    verdicts = (_judge(_LOSS_RULE, *losses), _with_ratio(_judge(_NORM_RULE, *chosen), *chosen))
    return tuple(verdict for verdict in verdicts if verdict is not None)


def _read(connection: duckdb.DuckDBPyConnection) -> tuple[_Values, _Values, _Values]:
    """Return loss, gradient norm and the framework's own norm, each by step; a step without has no entry."""
    rows = connection.execute(_SERIES).fetchall()
    loss, norm, global_norm = (
        {row[0]: float(row[place]) for row in rows if row[place] is not None} for place in (1, 2, 3)
    )
    return loss, norm, global_norm


def _judge(rule: _RunRule, ours: _Values, theirs: _Values) -> RunVerdict | None:
    steps = sorted(ours.keys() & theirs.keys())
    if not steps:
        return None
    one_sided = [step for step in steps if math.isfinite(ours[step]) != math.isfinite(theirs[step])]
    apart = {
        step: abs(ours[step] - theirs[step]) / abs(theirs[step])
        for step in steps
        if math.isfinite(ours[step]) and math.isfinite(theirs[step]) and theirs[step]
    }
    values = list(apart.values())
    value = (math.fsum(values) / len(values) if rule.is_mean else max(values)) if values else None
    beyond = sorted([*one_sided, *(step for step, size in apart.items() if size > rule.limit)])
    return RunVerdict(
        quantity=rule.quantity,
        measure=rule.measure,
        value=value,
        limit=rule.limit,
        differs=bool(one_sided) or (value is not None and value > rule.limit),
        num_steps=len(steps),
        num_one_sided=len(one_sided),
        step=beyond[0] if beyond else None,
        worst_step=one_sided[0] if one_sided else max(apart, key=apart.__getitem__, default=None),
    )


def _with_ratio(verdict: RunVerdict | None, ours: _Values, theirs: _Values) -> RunVerdict | None:
    """Return the verdict on the ratio of two norms where no step tells but the ratio does, else `verdict`."""
    ratios = {
        step: ours[step] / theirs[step] for step in ours.keys() & theirs.keys() if _are_positive(ours, theirs, step)
    }
    if verdict is None or verdict.differs or not ratios:
        return verdict
    sizes = {step: max(ratio, 1 / ratio) for step, ratio in ratios.items()}
    value = statistics.median(ratios.values())
    if max(value, 1 / value) <= RATIO_LIMIT:
        return verdict
    return dataclasses.replace(
        verdict,
        measure=_RATIO,
        value=value,
        limit=RATIO_LIMIT,
        differs=True,
        step=min(step for step, size in sizes.items() if size > RATIO_LIMIT),
        worst_step=max(sizes, key=sizes.__getitem__),
    )


def _are_positive(ours: _Values, theirs: _Values, step: int) -> bool:
    return all(0 < side[step] < math.inf for side in (ours, theirs))


def word_of(verdict: RunVerdict) -> str:
    """Return `differs`, or `close`: within the limit, which need not be equal."""
    return "differs" if verdict.differs else "close"


def describe(verdict: RunVerdict) -> str:
    """Return a run verdict in words: `differs: mean relative error 3 % over 20 steps, beyond 1 %`."""
    share = verdict.quantity == LOSS
    limit = f"{100 * verdict.limit:g} %" if share else f"{verdict.limit:g}"
    if verdict.value is None:
        size = f"no step of {verdict.num_steps} has a reference to divide by"
    else:
        number = f"{verdict.value:.3g}" if not share else f"{100 * verdict.value:.3g} %"
        is_beyond = verdict.value > verdict.limit or verdict.measure == _RATIO
        beyond = "beyond" if is_beyond else "within"
        steps = "where both are finite" if verdict.num_one_sided else f"over {counted(verdict.num_steps, 'step')}"
        size = f"{verdict.measure} {number} {steps}, {beyond} {limit}"
        size += " either way" if verdict.measure == _RATIO else ""
    said = [word_of(verdict), f": {size}"]
    if verdict.num_one_sided:
        said.append(f"; finite on one side only on {verdict.num_one_sided} of {counted(verdict.num_steps, 'step')}")
    if verdict.step is not None:
        said.append(f"; first {'apart' if verdict.num_one_sided else 'beyond it'} on step {verdict.step}")
    if verdict.worst_step not in (None, verdict.step):
        said.append(f", most on step {verdict.worst_step}")
    return "".join(said)
