"""An argument that differs, with equal statistics of all that its call took and gave, may be the cause of what follows.

`flip(0)` and `flip(1)` put the same elements in another order, and statistics do not show that. The next product does:
its inputs look equal, and its results are others. Then the argument is to blame, not the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainermon.analysis.compare.causes.literals import DEVICE
from trainermon.analysis.compare.flow import are_plain
from trainermon.analysis.compare.items import INPUT
from trainermon.analysis.compare.noise import PLAIN
from trainermon.analysis.compare.verdicts import ERROR, NOT_COMPARED, PASS, WARNING, CallResult, ResultRow
from trainermon.dump.files.records import FORWARD


def with_unseen_argument(calls: list[CallResult]) -> list[CallResult]:
    """Return `calls`, in the order in which they ran, with the call to blame whose argument is the first difference.

    Only where something behind it differs that no weight, no input and no other argument explains. `calls` are those
    of a comparison by statistics.
    """
    at = next((at for at, call in enumerate(calls) if call.result not in (PASS, NOT_COMPARED)), None)
    row = argument_of(calls[at]) if at is not None else None
    if at is None or row is None or row.target is None or not _has_followed(calls[at + 1 :]):
        return calls
    call = calls[at]
    rows = tuple(each._replace(result=ERROR) if each is row else each for each in call.rows)
    blamed = replace(call, rows=rows, result=ERROR, blamed=True, origin=row.target.place)
    return [*calls[:at], blamed, *calls[at + 1 :]]


def argument_of(call: CallResult, *, is_first: bool = False) -> ResultRow | None:
    """Return the row of the plain argument that a forward was given otherwise, if nothing else that it was given is.

    Not of a number that tensors may have made, unless nothing before differs (`is_first`).
    """
    if call.target is None or call.golden is None or call.target.direction != FORWARD:
        return None
    given = [row for row in call.rows if row.target and row.golden and row.target.state == INPUT and row.result != PASS]
    are_written = all(_is_argument(row) and (is_first or not _is_number(row)) for row in given)
    return given[0] if given and are_written and not _is_one_dimension(call, given) else None


def _is_argument(row: ResultRow) -> bool:
    """Return whether a row is of numbers, truth values or words, and not of a device, which is where a run is."""
    if row.target is None or row.golden is None or not are_plain(row.target, row.golden):
        return False
    values = row.target.max, row.golden.max
    return not any(isinstance(value, str) and DEVICE.fullmatch(value) for value in values)


def _is_number(row: ResultRow) -> bool:
    return row.target is not None and row.golden is not None and row.target.dtype == row.golden.dtype == PLAIN


def _is_one_dimension(call: CallResult, rows: Sequence[ResultRow]) -> bool:
    """Return whether -1 on one side is the last dimension by its number on the other."""
    shapes = [row.target.shape for row in call.rows if row.target and row.target.is_tensor and row.target.shape]
    if len(rows) != 1 or not shapes or rows[0].target is None or rows[0].golden is None:
        return False
    values = rows[0].target.max, rows[0].golden.max
    are_whole = all(type(value) is int for value in values)
    return are_whole and min(values) < 0 and abs(values[0] - values[1]) == len(shapes[0])


def _has_followed(calls: Sequence[CallResult]) -> bool:
    """Return whether what differs in `calls`, behind the argument, begins with results of equal inputs, or nowhere."""
    blamed = next((call for call in calls if call.blamed), None)
    if blamed is not None:
        return not blamed.origin
    return any(
        row.result in (ERROR, WARNING) and row.target is not None and row.target.is_tensor
        for call in calls
        for row in call.rows
    )
