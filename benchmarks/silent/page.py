"""The judgements as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.silent.case import FRAMEWORKS, HALVES, SilentCase
from benchmarks.silent.judge import SilentVerdict

MARK = "<!-- The rest is written by `make bench-silent`. -->\n"
Judged = Sequence[tuple[SilentCase, SilentVerdict]]


def written(page: str, found: Judged, *, reveals: bool) -> str:
    """Return the page with everything below the mark written anew."""
    return page.partition(MARK)[0] + MARK + "\n" + "\n".join(lines_of(found, reveals=reveals)) + "\n"


def lines_of(found: Judged, *, reveals: bool) -> Iterator[str]:
    """Yield totals, and a row for each case; of the unseen half only if `reveals`."""
    yield from _totals(found)
    shown = [(case, verdict) for case, verdict in found if reveals or case.half == "seen"]
    if rows := [_row(case, verdict) for case, verdict in shown if case.mechanism is not None]:
        yield from (
            "",
            "| case | published as | what is wrong | kind | visible alone | found by, step | named | located |",
        )
        yield "|---|---|---|---|---|---|---|---|"
        yield from rows
    yield from _hard_totals([(case, verdict) for case, verdict in found if case.mechanism is None])
    if rows := [_hard_row(case, verdict) for case, verdict in shown if case.mechanism is None]:
        yield from ("", "| healthy program | what makes it hard | false alarms |", "|---|---|---|", *rows)


def _totals(found: Judged) -> Iterator[str]:
    faults = [(case, verdict) for case, verdict in found if case.mechanism is not None]
    yield "| | cases | found alone | of those visible alone | named | located | twins with false alarms | not judged |"
    yield "|---|---|---|---|---|---|---|---|"
    for half in HALVES:
        yield _total(half, [pair for pair in faults if pair[0].half == half])
    for framework in FRAMEWORKS:
        if of_framework := [pair for pair in faults if pair[0].framework == framework]:
            yield _total(framework, of_framework)
    yield _total("all", faults)
    delays = [min(v.found_by.values()) - case.first_wrong for case, v in faults if v.found_by]
    if delays:
        yield from ("", f"Steps from the first wrong one to the first alert: median {statistics.median(delays):.0f}.")
    loud = sum(not verdict.is_silent for _, verdict in faults if not verdict.error)
    yield from ("", f"In {loud} of the broken runs the loss does not fall.")


def _hard_totals(programs: Judged) -> Iterator[str]:
    if programs:
        yield from ("", "| healthy programs | number | with false alarms | not judged |", "|---|---|---|---|")
    for half in HALVES if programs else ():
        verdicts = [verdict for case, verdict in programs if case.half == half]
        numbers = (
            len(verdicts),
            sum(bool(each.false) for each in verdicts),
            sum(bool(each.error) for each in verdicts),
        )
        yield f"| {half} | {' | '.join(map(str, numbers))} |"


def _total(name: str, pairs: Judged) -> str:
    judged = [(case, verdict) for case, verdict in pairs if not verdict.error]
    visible = [verdict for case, verdict in judged if case.is_visible]
    cells = [
        f"{sum(verdict.is_found for _, verdict in judged)}",
        f"{sum(verdict.is_found for verdict in visible)} of {len(visible)}",
        *(f"{sum(getattr(verdict, field) for _, verdict in judged)}" for field in ("is_named", "is_located")),
        f"{sum(bool(verdict.false) for _, verdict in judged)}",
        f"{len(pairs) - len(judged)}",
    ]
    return f"| {name} | {len(pairs)} | {' | '.join(cells)} |"


def _row(case: SilentCase, verdict: SilentVerdict) -> str:
    found = ", ".join(f"`{rule}` {step}" for rule, step in verdict.found_by.items())
    found = found or ("refused when attached" if verdict.refused else "–")
    mechanism = case.mechanism.value if case.mechanism else ""
    marks = [_mark(is_true=verdict.is_named), _mark(is_true=verdict.is_located)]
    seen = _mark(is_true=case.is_visible)
    return f"| {case.name} | {case.source} | {case.wrong} | {mechanism} | {seen} | {found} | {' | '.join(marks)} |"


def _hard_row(case: SilentCase, verdict: SilentVerdict) -> str:
    false = ", ".join(f"`{rule}` {step}" for rule, step in verdict.false.items()) or verdict.error[:80] or "none"
    return f"| {case.name} | {case.wrong} | {false} |"


def _mark(*, is_true: bool) -> str:
    return "yes" if is_true else "–"
