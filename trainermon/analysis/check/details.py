"""The csv file of details: a row for each result of a call, msprobe's 23 columns first, ours after them."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainermon.accuracy.judge import Judgement
from trainermon.accuracy.legacy_metrics import LegacyMetrics
from trainermon.analysis.check.checking import CallsCheck, CheckedCall
from trainermon.core.terminal.results import writing_text

BLANK = " "
"""What a cell holds whose value was not computed; msprobe tells it from an empty one."""
NAME, GOLDEN_DTYPE, DTYPE, SHAPE, STATUS, MESSAGE = (
    "API Name",
    "Bench Dtype",
    "DEVICE Dtype",
    "Shape",
    "Status",
    "Message",
)
METRIC_COLUMNS = {
    "cosine": "余弦相似度",
    "max_absolute": "最大绝对误差",
    "within_hundredth": "双百指标",
    "within_thousandth": "双千指标",
    "within_ten_thousandth": "双万指标",
    "unequal": "二进制一致错误率",
    "balance": "误差均衡性",
    "rmse": "均方根误差",
    "small_share": "小值域错误占比",
    "max_relative": "相对误差最大值",
    "mean_relative": "相对误差平均值",
    "nonfinite_share": "inf/nan错误率",
    "relative_share": "相对误差错误率",
    "absolute_share": "绝对误差错误率",
    "ulp_max": "ULP误差最大值",
    "ulp_mean": "ULP误差平均值",
    "ulp_share": "ULP误差大于阈值占比",
}
LEGACY_COLUMNS = (NAME, GOLDEN_DTYPE, DTYPE, SHAPE, *METRIC_COLUMNS.values(), STATUS, MESSAGE)
OWN_COLUMNS = (
    "Standard",
    "Worst",
    "Worst Index",
    "Device Value",
    "Golden Value",
    "NaN/Inf Device",
    "NaN/Inf Golden",
    "Share Above",
    "Digits",
    "Bias",
    "Where",
    "Reason",
    "Origin",
    "Source",
    "msprobe Status",
    "Rerun Status",
    "Rerun Worst",
    "Cause",
)
DECIMALS = 14
_FORMULA = ("=", "+", "-", "@")
_RECORDED = "recorded"


def write_details(check: CallsCheck, path: Path, decimals: int = DECIMALS) -> None:
    """Write a row for each result of each call, and one for a call that was not judged; `decimals` of its measures.

    Raises:
        OSError: The file cannot be written.
    """
    with writing_text(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*LEGACY_COLUMNS, *OWN_COLUMNS])
        for call in _by_call(check.calls):
            rows.writerows([safe_cell(cell) for cell in row] for row in _rows(call, decimals))


def safe_cell(text: str) -> str:
    """Return a cell's text so that no spreadsheet runs it: an apostrophe goes before a sign that starts no number."""
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def _by_call(calls: Sequence[CheckedCall]) -> Iterator[CheckedCall]:
    """Yield each forward with its backward behind it: msprobe takes neighbouring rows for those of one call."""
    directions: dict[str, list[CheckedCall]] = {}
    for call in calls:
        directions.setdefault(call.stem, []).append(call)
    for found in directions.values():
        yield from found


def _rows(call: CheckedCall, decimals: int) -> Iterator[list[str]]:
    for number, judgement in enumerate(call.judgements):
        name = f"{call.key}.output.{number}"
        again = call.rerun[number] if len(call.rerun) == len(call.judgements) else None
        rerun = [again.status.value, _number(again.worst)] if again is not None else [BLANK, BLANK]
        yield [name, *_legacy_cells(judgement, decimals), *_own_cells(judgement, call), *rerun, call.cause or BLANK]
    if not call.judgements:
        legacy = [BLANK] * (len(LEGACY_COLUMNS) - 3)
        own = [BLANK] * OWN_COLUMNS.index("Origin")
        name = f"{call.key}.output.0"
        own += [call.line or BLANK, _RECORDED, *[BLANK] * 3, call.cause or BLANK]
        yield [name, *legacy, call.status.value, call.reason, *own]


def _legacy_cells(judgement: Judgement, decimals: int) -> list[str]:
    legacy = judgement.legacy
    metrics = dataclasses.asdict(legacy.metrics if legacy else LegacyMetrics())
    return [
        legacy.golden_dtype if legacy else BLANK,
        f"torch.{judgement.dtype}" if judgement.dtype and legacy else BLANK,
        str(tuple(judgement.shape)) if legacy else BLANK,
        *(BLANK if metrics[name] is None else f"{metrics[name]:.{decimals}f}" for name in METRIC_COLUMNS),
        judgement.status.value,
        judgement.reason or BLANK,
    ]


def _own_cells(judgement: Judgement, call: CheckedCall) -> list[str]:
    found = judgement.index is not None
    return [
        judgement.standard or BLANK,
        _number(judgement.worst),
        str(list(judgement.index)) if judgement.index is not None else BLANK,
        f"{judgement.device_value:.9g}" if found else BLANK,
        f"{judgement.golden_value:.9g}" if found else BLANK,
        str(judgement.device_nonfinite),
        str(judgement.golden_nonfinite),
        _number(judgement.share_above),
        _number(judgement.digits),
        _number(judgement.bias),
        judgement.place.text() if judgement.place else BLANK,
        judgement.reason or BLANK,
        call.line or BLANK,
        _RECORDED,
        judgement.legacy.status if judgement.legacy else BLANK,
    ]


def _number(value: complex | float) -> str:
    return BLANK if isinstance(value, float) and math.isnan(value) else f"{value:.9g}"


def _is_number(text: str) -> bool:
    try:
        complex(text)
    except ValueError:
        return False
    return True
