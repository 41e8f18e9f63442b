"""`trainermon check against`: what one device gave, beside what another did, from their files of details."""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trainermon.accuracy.judge import Status
from trainermon.accuracy.legacy_standards import NOT_COMPARED
from trainermon.accuracy.rules import Rules
from trainermon.analysis.check.against.pairs import PairVerdict, pair_verdict
from trainermon.analysis.check.details import BLANK, DECIMALS, METRIC_COLUMNS, NAME, safe_cell
from trainermon.analysis.check.details_rows import DetailsRow
from trainermon.core.errors import DumpError
from trainermon.core.terminal.results import writing_text

UNMATCHED = "unmatched"
RULES = (Rules.TRAINERMON, Rules.MSPROBE, Rules.MSPROBE8, Rules.CANN)
"""Those that two files can be judged by: torch's need the tensors."""
RESULT_COLUMNS = ("API Name", "Forward Test Success", "Backward Test Success", "Message")
# Columns that are a number and its verdict, by measure, in msprobe's order.
_GRADED = {
    "small_share": ("小值域错误比值", "小值域判定结果"),
    "rmse": ("均方根误差比值", "均方根误差判定结果"),
    "max_relative": ("相对误差最大值比值", "相对误差最大值判定结果"),
    "mean_relative": ("相对误差平均值比值", "相对误差平均值判定结果"),
    "balance": ("误差均衡性比值", "误差均衡性判定结果"),
    "nonfinite_share": (METRIC_COLUMNS["nonfinite_share"], "inf/nan判定结果"),
    "relative_share": (METRIC_COLUMNS["relative_share"], "相对误差判定结果"),
    "absolute_share": (METRIC_COLUMNS["absolute_share"], "绝对误差判定结果"),
    "unequal": (METRIC_COLUMNS["unequal"], "二进制一致错误率判定结果"),
    "ulp_mean": (METRIC_COLUMNS["ulp_mean"],),
    "ulp_share": (METRIC_COLUMNS["ulp_share"],),
    "ulp_ratio": ("ULP误差大于阈值占比比值",),
    "ulp": ("", "ULP误差判定结果"),
    "within_thousandth": (METRIC_COLUMNS["within_thousandth"], "双千指标判定结果"),
}
DETAIL_COLUMNS = (
    NAME,
    *(title for titles in _GRADED.values() for title in titles if title),
    "比对结果",
    "比对算法",
    "Message",
)
_WORST_FIRST = (Status.ERROR.value, Status.WARNING.value, UNMATCHED, Status.PASS.value)
_TOPK = "the target may ignore sorted=False of topk, and return sorted values where the CPU does not"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComparedResult:
    """One result of a call on two devices.

    Attributes:
        name: Its name, `Functional.linear.0.forward.output.0`.
        call: The call's, `Functional.linear.0`; "" if the name has another form.
        direction: `forward` or `backward`.
        dtype: Its type, `bfloat16`.
        verdict: The verdict; its status is `unmatched` where only one file has the result.
    """

    name: str
    call: str
    direction: str
    dtype: str
    verdict: PairVerdict


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComparedCall:
    """A call on two devices.

    Attributes:
        name: Its name, `Functional.linear.0`.
        forward: The worst verdict of its results; a blank if there is none.
        backward: The same of its gradients.
        message: Why.
    """

    name: str
    forward: str
    backward: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """What one device gave beside what another did.

    Attributes:
        results: In the order of the target's file; those that the golden one alone has come last.
        calls: In the same order.
    """

    results: tuple[ComparedResult, ...]
    calls: tuple[ComparedCall, ...]

    def of(self, status: str) -> list[ComparedCall]:
        """Return the calls that have this verdict, forward or backward."""
        return [call for call in self.calls if status in (call.forward, call.backward)]


def compare_details(target: Sequence[DetailsRow], golden: Sequence[DetailsRow], rules: Rules) -> Against:
    """Return the verdicts on each result of either file. One that a file has more than once is not judged."""
    results = tuple(_results(target, golden, rules))
    by_call: dict[str, list[ComparedResult]] = {}
    for result in results:
        by_call.setdefault(result.call or result.name, []).append(result)
    return Against(results=results, calls=tuple(_compared_call(name, found) for name, found in by_call.items()))


def _results(target: Sequence[DetailsRow], golden: Sequence[DetailsRow], rules: Rules) -> Iterator[ComparedResult]:
    numbers = [Counter(row.name for row in rows) for rows in (target, golden)]
    others = {row.name: row for row in golden}
    known = {row.name for row in target}
    seen: set[str] = set()
    for row in [*target, *(row for row in golden if row.name not in known)]:
        if row.name not in seen:
            seen.add(row.name)
            verdict = _unjudged(row, numbers) or pair_verdict(row, others[row.name], rules)
            yield ComparedResult(
                name=row.name, call=row.call, direction=row.direction, dtype=row.dtype, verdict=verdict
            )


def _unjudged(row: DetailsRow, numbers: Sequence[Counter[str]]) -> PairVerdict | None:
    """Return why a result cannot be judged; None if it can."""
    skip = Status.SKIP.value
    for side, found in zip(("target", "golden file"), numbers, strict=True):
        if found[row.name] > 1:
            return PairVerdict(status=skip, message=f"the {side} has {found[row.name]} rows of this name")
    for side, found in zip(("target", "golden file"), numbers, strict=True):
        if not found[row.name]:
            return PairVerdict(status=UNMATCHED, message=f"the {side} has no row of this name")
    if not row.call:
        return PairVerdict(status=skip, message="the name has another form than <call>.forward.output.<n>")
    return None


def _compared_call(name: str, results: Sequence[ComparedResult]) -> ComparedCall:
    by_direction = {
        direction: [result for result in results if result.direction == direction]
        for direction in ("forward", "backward", "")
    }
    forward = _worst(by_direction["forward"] or by_direction[""])
    messages = [result.verdict.message for result in results if result.verdict.status != Status.PASS.value]
    if results[-1].dtype in NOT_COMPARED and forward == Status.SKIP.value:
        messages = [f"results of type {results[-1].dtype} are not compared"]
    if forward == Status.ERROR.value and name.split(".")[1:2] == ["topk"]:
        messages.append(_TOPK)
    message = "; ".join(dict.fromkeys(filter(None, messages)))
    return ComparedCall(name=name, forward=forward, backward=_worst(by_direction["backward"]), message=message)


def _worst(results: Sequence[ComparedResult]) -> str:
    found = {result.verdict.status for result in results}
    if not found:
        return BLANK
    return next((status for status in _WORST_FIRST if status in found), Status.SKIP.value)


def write_against(against: Against, folder: Path, stamp: str) -> list[Path]:
    """Write `api_precision_compare_result_<stamp>.csv` and `…_details_…` into `folder`, and return their paths.

    Raises:
        DumpError: The folder cannot be written.
    """
    tables: dict[str, tuple[Sequence[str], Iterable[Sequence[str]]]] = {
        "result": (
            RESULT_COLUMNS,
            [(call.name, call.forward, call.backward, call.message or BLANK) for call in against.calls],
        ),
        "details": (DETAIL_COLUMNS, [_cells(result) for result in against.results]),
    }
    paths = [folder / f"api_precision_compare_{name}_{stamp}.csv" for name in tables]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, (columns, rows) in zip(paths, tables.values(), strict=True):
            with writing_text(path, encoding="utf-8-sig", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(columns)
                writer.writerows([safe_cell(cell) for cell in row] for row in rows)
    except OSError as error:
        raise DumpError(f"cannot write into {folder}: {error}") from error
    return paths


def _cells(result: ComparedResult) -> list[str]:
    cells = [result.name]
    for name, titles in _GRADED.items():
        graded = result.verdict.numbers.get(name)
        value = BLANK if graded is None else f"{graded.value:.{DECIMALS}f}"
        status = BLANK if graded is None else graded.status
        cells += [cell for title, cell in zip(titles, (value, status), strict=False) if title]
    verdict = result.verdict
    return [*cells, verdict.status, verdict.algorithm or BLANK, verdict.message or BLANK]


def render_against(against: Against, most: int = 10) -> str:
    """Return what `trainermon check against` prints: a headline, and the first calls that do not pass."""
    counts = {status: len(against.of(status)) for status in _WORST_FIRST[:3]}
    judged = sum(call.forward not in (Status.SKIP.value, UNMATCHED) for call in against.calls)
    told = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    told = told or ("all pass" if judged else "nothing to compare")
    lines = [f"{judged} of {len(against.calls)} calls compared: {told}"]
    for status in _WORST_FIRST[:3]:
        calls = against.of(status)
        lines += [f"  {status:<10}{call.name:<36} {call.message}" for call in calls[:most]]
        if len(calls) > most:
            lines.append(f"            and {len(calls) - most} more")
    return "\n".join(lines) + "\n"
