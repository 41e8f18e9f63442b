"""The result table: msprobe's columns in msprobe's order, as numbers or as the texts that its csv files hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from trainermon.analysis.compare.comparison import Comparison, Mode
from trainermon.analysis.compare.items import DumpRow
from trainermon.analysis.compare.metrics import norm_ratio, statistics_columns
from trainermon.analysis.compare.verdicts import NOT_COMPARED, PASS, UNMATCHED, ResultRow

NOT_AVAILABLE = "N/A"
REACHED = "Accuracy Reached or Not"
"""What `Result` was called, of tensors, until msprobe 8: Yes, No or Unmatched."""
_REACHED = {PASS: "Yes", UNMATCHED: "Unmatched", NOT_COMPARED: NOT_AVAILABLE}
_BASIC = (
    *("NPU Name", "Bench Name", "NPU Dtype", "Bench Dtype", "NPU Tensor Shape", "Bench Tensor Shape"),
    *("NPU Requires_grad", "Bench Requires_grad"),
)
_STATISTICS = (
    *("NPU max", "NPU min", "NPU mean", "NPU l2norm"),
    *("Bench max", "Bench min", "Bench mean", "Bench l2norm"),
)
_METRICS = {
    Mode.STATISTICS: (
        *("Max diff", "Min diff", "Mean diff", "L2norm diff"),
        *("MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr"),
    ),
    Mode.CHECKSUM: ("NPU MD5", "BENCH MD5"),
    Mode.TENSOR: (
        *("Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr"),
        *("One Thousandth Err Ratio", "Five Thousandths Err Ratio"),
    ),
}
_LAST = ("Requires_grad Consistent", "Result", "Err_message", "NPU_Stack_Info")
_OURS = {
    Mode.STATISTICS: ("Norm Ratio", "NPU nonfinite", "Bench nonfinite"),
    Mode.CHECKSUM: (),
    Mode.TENSOR: ("MeanRelativeErr", "Max ULP", "Norm Ratio", "NPU nonfinite", "Bench nonfinite"),
}
_NONE = (NOT_AVAILABLE,) * 3
_TEXT_METRICS = 4  # of the statistics, the first four are differences and the others shares in per cent


def header(mode: Mode) -> tuple[str, ...]:
    """Return the column names of the result table for a mode: msprobe's, then those that only this tool has."""
    statistics = () if mode is Mode.CHECKSUM else _STATISTICS
    data_name = ("Data_name",) if mode is Mode.TENSOR else ()
    reached = (REACHED,) if mode is Mode.TENSOR else ()
    return (*_BASIC, *_METRICS[mode], *statistics, *_LAST, *data_name, *_OURS[mode], "Relative difference", *reached)


class NamedRow(NamedTuple):
    """A row of the result table with the names of its calls.

    Attributes:
        keys: Key of the call in the target and in the golden dump; "" if there is none.
        row: What was compared, and the result.
        stack: The lines of the script that made the call, if this is the call's first row; else None.
    """

    keys: tuple[str, str]
    row: ResultRow
    stack: tuple[str, ...] | None


def named_rows(comparison: Comparison) -> Iterator[NamedRow]:
    """Yield every row with the keys of its calls on both sides; the first row of a call has its stack too."""
    for call in comparison.calls:
        stack = comparison.stacks.get(call.key)
        keys = call.target.key if call.target else "", call.golden.key if call.golden else ""
        for row in call.rows:
            yield NamedRow(keys, row, stack)
            stack = None


def table(comparison: Comparison) -> Iterator[tuple[Any, ...]]:
    """Yield, for every row of the result table, its cells as texts and numbers."""
    return (cells_of(comparison.mode, named) for named in named_rows(comparison))


def cells_of(mode: Mode, named: NamedRow) -> tuple[Any, ...]:
    """Return the cells of one row as texts and finite numbers."""
    (key, their_key), row, stack = named
    ours, theirs = row.target, row.golden
    metrics = row.difference.columns
    if ours and theirs and mode is Mode.STATISTICS:
        metrics = (*statistics_columns(ours, theirs), norm_ratio(ours, theirs), *nonfinite_counts(ours, theirs))
    elif not metrics:
        metrics = (None,) * (len(_METRICS[mode]) + len(_OURS[mode]))
    own = metrics[len(_METRICS[mode]) :]
    cells: list[Any] = [
        f"{key}.{ours.place}" if ours else NOT_AVAILABLE,
        f"{their_key}.{theirs.place}" if theirs else NOT_AVAILABLE,
        *kind_of(ours, theirs),
    ]
    cells += [_metric(mode, index, value) for index, value in enumerate(metrics[: len(_METRICS[mode])])]
    if mode is not Mode.CHECKSUM:
        cells += _statistics(ours)
        cells += _statistics(theirs)
    same = (ours.requires_grad if ours else None) == (theirs.requires_grad if theirs else None)
    cells += [str(same), row.result, str(list(row.messages)) if row.messages else "[]", stack_text(stack)]
    if mode is Mode.TENSOR:
        cells.append(str([_data_name(ours), _data_name(theirs)]))
    reached = (_REACHED.get(row.result, "No"),) if mode is Mode.TENSOR else ()
    return (*cells, *map(plain, own), plain(row.difference.relative), *reached)


def nonfinite_counts(ours: DumpRow, theirs: DumpRow) -> tuple[int | None, int | None]:
    """Return how many elements of a row are NaN or infinite: (ours, theirs), None where that was not counted."""
    return ours.num_nonfinite, theirs.num_nonfinite


@lru_cache(maxsize=4096)
def stack_text(stack: tuple[str, ...] | None) -> str:
    """Return the cell with the script's lines that made a call, as msprobe writes it; `N/A` for None."""
    return str(list(stack)) if stack else NOT_AVAILABLE


def _data_name(item: DumpRow | None) -> str:
    if item is None:
        return NOT_AVAILABLE
    return item.data_name or "-1"


def kind_of(ours: DumpRow | None, theirs: DumpRow | None) -> tuple[str, ...]:
    """Return the six cells with dtype, shape and requires_grad of both sides."""
    kind, their_kind = (_kind(item.dtype, item.shape, item.requires_grad) if item else _NONE for item in (ours, theirs))
    return kind[0], their_kind[0], kind[1], their_kind[1], kind[2], their_kind[2]


@lru_cache(maxsize=4096)
def _kind(dtype: str | None, shape: tuple[int, ...] | None, requires_grad: object) -> tuple[str, str, str]:
    return (
        dtype or NOT_AVAILABLE,
        NOT_AVAILABLE if shape is None else str(list(shape)),
        NOT_AVAILABLE if requires_grad is None else str(requires_grad),
    )


def _statistics(item: DumpRow | None) -> tuple[Any, ...]:
    if item is None:
        return (NOT_AVAILABLE,) * 4
    return _statistic(item.max), _statistic(item.min), _statistic(item.mean), _statistic(item.norm)


def _statistic(value: Any) -> Any:
    if value.__class__ is float and -math.inf < value < math.inf:
        return value
    if value is None or isinstance(value, bool):
        return str(value)
    return plain(value)


def _metric(mode: Mode, index: int, value: Any) -> Any:
    if mode is Mode.STATISTICS and index >= _TEXT_METRICS and isinstance(value, float) and math.isfinite(value):
        return f"{value}%" if value else 0
    return plain(value)


def plain(value: Any) -> Any:
    """Return a cell's value as msprobe writes it: `N/A` for None, `Nan` and `inf` for numbers that are not finite."""
    if value is None:
        return NOT_AVAILABLE
    if isinstance(value, float) and not math.isfinite(value):
        return "Nan" if math.isnan(value) else f"{value}"
    return value
