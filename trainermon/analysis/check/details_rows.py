"""Files of details as they are read: those of msprobe 8 and 26, and ours."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from trainermon.accuracy.legacy_metrics import LegacyMetrics
from trainermon.accuracy.legacy_standards import operation_of
from trainermon.analysis.check.details import DTYPE, MESSAGE, METRIC_COLUMNS, NAME, SHAPE, STATUS
from trainermon.core.errors import DumpError

WORST = "Worst"
_NEEDED = (NAME, DTYPE, SHAPE, *METRIC_COLUMNS.values(), STATUS, MESSAGE)
_DIRECTIONS = ("forward", "backward")
_STATUSES = ("", "pass", "warning", "error", "skip")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DetailsRow:
    """A row of a file of details: one result of a call.

    Attributes:
        name: The result's name, `Functional.linear.0.forward.output.0`.
        dtype: Its type, `bfloat16`; "" where nothing was compared.
        shape: Its shape as text, `(2, 3)`.
        metrics: msprobe's measures; None where the cell is blank.
        status: The word of the file: `pass`, `warning`, `error` or `SKIP`.
        message: What the file says.
        worst: Largest error in allowances, where the file is ours; else NaN.
        is_ours: The file has our columns.
    """

    name: str
    dtype: str
    shape: str
    metrics: LegacyMetrics
    status: str
    message: str
    worst: float = math.nan
    is_ours: bool = False

    @property
    def call(self) -> str:
        """The call's name, `Functional.linear.0`; "" if the row's name has another form."""
        return self._parts[0]

    @property
    def direction(self) -> str:
        """`forward` or `backward`; "" if the row's name has another form."""
        return self._parts[1]

    @property
    def operation(self) -> str:
        """What msprobe calls the operation, `linear`; "" if the row's name has another form."""
        return operation_of(self.call)

    @property
    def _parts(self) -> tuple[str, str]:
        call, _, rest = self.name.rpartition(".output.")[0].rpartition(".")
        return (call, rest) if rest in _DIRECTIONS and operation_of(call) else ("", "")


def read_details(path: Path) -> list[DetailsRow]:
    """Return the rows of a file of details, in order.

    Raises:
        DumpError: There is no such file, it has other columns, or a row is wider or narrower than the first.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            _require_columns(path, header)
            return [_row(f"{path}, line {reader.line_num}", header, cells) for cells in reader if cells]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DumpError(f"cannot read {path} as a file of details: {error}") from error


def _require_columns(path: Path, header: Sequence[str]) -> None:
    missing = [name for name in _NEEDED if name not in header]
    doubled = sorted({name for name in header if header.count(name) > 1})
    if missing:
        kind = "accuracy_checking_details_<time>.csv of msprobe or of `trainermon check run -o`"
        raise DumpError(f"{path} lacks the column {missing[0]!r} (of {len(missing)}): expected {kind}")
    if doubled:
        raise DumpError(f"{path} has the column {doubled[0]!r} more than once")


def _row(place: str, header: Sequence[str], cells: Sequence[str]) -> DetailsRow:
    if len(cells) != len(header):
        raise DumpError(f"{place}: found {len(cells)} cells, expected {len(header)} as in the first line")
    named = dict(zip(header, cells, strict=True))
    metrics = {name: _number(place, column, named[column]) for name, column in METRIC_COLUMNS.items()}
    status = named[STATUS].strip()
    if status.lower() not in _STATUSES:
        raise DumpError(f"{place}, column {STATUS!r}: found {status[:40]!r}, expected pass, warning, error or SKIP")
    return DetailsRow(
        name=named[NAME].strip(),
        dtype=named[DTYPE].strip().removeprefix("torch."),
        shape=named[SHAPE].strip(),
        metrics=LegacyMetrics(**metrics),
        status=status if status == "SKIP" else status.lower(),  # version 8 writes Warning
        message=named[MESSAGE].strip(),
        worst=_or_nan(_number(place, WORST, named.get(WORST, ""))),
        is_ours=WORST in named,
    )


def _number(place: str, column: str, text: str) -> float | None:
    if not text.strip():
        return None
    try:
        return float(text)
    except ValueError as error:
        raise DumpError(f"{place}, column {column!r}: found {text[:40]!r}, expected a number or a blank") from error


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
