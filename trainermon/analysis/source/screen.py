"""Lines of code and what is wrong with them, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from trainermon.analysis.diagnosis.wording import counted
from trainermon.analysis.graph.findings import NodeVerdict
from trainermon.analysis.source.lines import LineCalls, by_gravity
from trainermon.analysis.source.report import CodeDifference, SourceReport
from trainermon.core.errors import DumpError
from trainermon.core.terminal.escapes import printable

MARKS = {NodeVerdict.BLAMED: "▲", NodeVerdict.ERROR: "x", NodeVerdict.WARNING: "!", NodeVerdict.UNMATCHED: "+"}
_MAX_WRONG = 20
_MAX_DIFFERENT = 40
_MAX_TEXT = 110
_AROUND = 15


def render(report: SourceReport, name: str | None) -> str:
    """Return the screen: of the lines at fault, or of every line of the file `name`, `FILE` or `FILE:LINE`.

    Raises:
        DumpError: No call was made in that file, or nothing near that line was kept.
    """
    lines = [printable(report.sentence), ""]
    if report.differences:
        lines += [*_different(report.differences), ""]
    if name is None:
        lines += _worst(report)
    else:
        lines += _annotated(report, name)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _different(differences: Iterable[CodeDifference]) -> Iterator[str]:
    for one in differences:
        yield f"The code differs, too: {printable(one.file)}"
        yield from (f"  {printable(line)[:_MAX_TEXT]}" for line in one.lines[:_MAX_DIFFERENT])
        if len(one.lines) > _MAX_DIFFERENT:
            yield f"  … {len(one.lines) - _MAX_DIFFERENT:,} more lines, see the page (-o)"


def _worst(report: SourceReport) -> Iterator[str]:
    if not report.lines:
        yield "The dump tells no lines: it has no stacks."
        return
    wrong = by_gravity(report.lines)
    if not wrong:
        files = {line.file for line in report.lines}
        yield f"{counted(len(report.lines), 'line')} in {counted(len(files), 'file')} made calls; none is at fault."
        return
    shown: dict[str, list[LineCalls]] = {}  # the file of the worst line first
    for line in wrong[:_MAX_WRONG]:
        shown.setdefault(line.file, []).append(line)
    for file, of_file in shown.items():
        yield printable(file)
        yield _head(report)
        for line in of_file:
            yield _row(line.line, report.texts[file].get(line.line, line.code).strip(), line, report)
            yield from (f"{'':22}{printable(one.name)}: {printable(one.text)}" for one in line.messages[:3])
        yield ""
    if len(wrong) > _MAX_WRONG:
        yield f"… and {len(wrong) - _MAX_WRONG:,} more lines"


def _annotated(report: SourceReport, name: str) -> Iterator[str]:
    path, _, number = name.rpartition(":")
    at = int(number) if path and number.isdecimal() else None
    file = report.file_named(name if at is None else path)
    calls = {line.line: line for line in report.lines if line.file == file}
    if at is not None and not any(abs(line - at) <= _AROUND for line in report.texts[file]):
        kept = sorted(report.texts[file])
        raise DumpError(f"{file} has no line kept near {at}: expected one of those from {kept[0]} to {kept[-1]}")
    before = 0
    yield printable(file)
    yield _head(report)
    for line, text in report.texts[file].items():
        if at is not None and abs(line - at) > _AROUND:
            continue
        if before and line > before + 1:
            yield f"{'…':>7}"
        yield _row(line, text, calls.get(line), report)
        before = line


def _head(report: SourceReport) -> str:
    return f"{'line':>7}{'calls':>9}{'error' if report.has_golden else 'not finite':>12}"


def _row(number: int, text: str, line: LineCalls | None, report: SourceReport) -> str:
    mark = MARKS.get(line.verdict, " ") if line else " "
    calls = counts(line) if line else ""
    shown = measure(line, has_golden=report.has_golden) if line else ""
    return f"{mark:<2}{number:>5}{calls:>9}{shown:>12}  {printable(text.expandtabs(4))[:_MAX_TEXT]}"


def counts(line: LineCalls) -> str:
    """Return how often a line ran: `3`, or `3+3` with backwards."""
    return f"{line.forwards}+{line.backwards}" if line.backwards else str(line.forwards)


def measure(line: LineCalls, *, has_golden: bool) -> str:
    """Return the number that stands for what is wrong: the largest error, or how many calls were not finite."""
    if line.nonfinite and not (has_golden and math.isfinite(line.error)):
        return f"{line.nonfinite}"
    return f"{line.error:.2g}" if has_golden and line.error > 0 else ""
