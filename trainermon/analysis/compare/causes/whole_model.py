"""What the model as a whole returned, where all that its calls took and gave agrees: its own forward changed it.

No call of a dump is the model's: its calls stand on their own, as in msprobe's dumps. Where functions are dumped too,
they show what it does; at level L0, and without a backward, nothing else does.
"""

from __future__ import annotations

from trainermon.analysis.compare.items import OUTPUT, DumpCall, DumpRows
from trainermon.analysis.compare.matching import CallPair
from trainermon.analysis.compare.noise import SAFETY, rounding, roundoff
from trainermon.analysis.compare.verdicts import ERROR, WARNING, CallResult, Measure, ResultRow
from trainermon.dump.files.records import FORWARD

_GROWTH = 16.0
"""How many times the largest difference of a call's tensor that of the model's results may be by rounding alone."""


def with_whole_model(calls: list[CallResult], target: DumpRows, golden: DumpRows, measure: Measure) -> list[CallResult]:
    """Return `calls`, with the model's own behind them if these agree and what it returned differs beyond rounding.

    Nothing is added where a dump has not what the model returned, or other shapes. Cost: a few rows are measured.
    """
    if any(call.result in (ERROR, WARNING) for call in calls):
        return calls
    forwards = [call for call in calls if call.target and call.target.direction == FORWARD]
    seen = max((row.difference.relative or 0.0 for call in forwards for row in call.rows), default=0.0)
    theirs = {call.key: call for call in golden.whole}
    pairs = [(call, theirs[call.key]) for call in target.whole if call.key in theirs and call.direction == FORWARD]
    return [*calls, *(found for ours, others in pairs if (found := _judged(ours, others, measure, seen)) is not None)]


def _judged(ours: DumpCall, theirs: DumpCall, measure: Measure, seen: float) -> CallResult | None:
    limit = max(SAFETY * rounding(ours, 0, roundoff(ours.items)), _GROWTH * seen)
    both = [
        (one, other)
        for one, other in CallPair(ours, theirs).rows()
        if one and other and one.state == OUTPUT and one.is_tensor and one.shape == other.shape
    ]
    sizes = list(measure(both))
    rows = [
        ResultRow(one, other, size, ERROR, (f"error: differs by {size.relative:.2g} of its size.",))
        for (one, other), size in zip(both, sizes, strict=True)
        if size.relative is not None and not size.relative <= limit
    ]
    if not rows:
        return None
    error = max(row.difference.relative or 0.0 for row in rows)
    return CallResult(
        target=ours, golden=theirs, rows=tuple(rows), result=ERROR, output_error=error, expected=limit, blamed=True
    )
