"""A comparison on one screen: how many rows differ, where it began, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainermon.analysis.compare.answer.descriptions import described, literal_of
from trainermon.analysis.compare.answer.drift import drift_of, first_in_script, is_weight
from trainermon.analysis.compare.answer.recomputation import BlamedPlace, doubted
from trainermon.analysis.compare.answer.remarks import first_differing, incomparable, without_blame
from trainermon.analysis.compare.answer.structure import is_replaced, lone_before
from trainermon.analysis.compare.answer.sums import one_of_each_sum
from trainermon.analysis.compare.answer.whereabouts import module_around, placed_in
from trainermon.analysis.compare.comparison import Comparison, Mode
from trainermon.analysis.compare.items import MODULE, OUTPUT
from trainermon.analysis.compare.merging.beginnings import Beginning, beginning_of
from trainermon.analysis.compare.verdicts import (
    ERROR,
    NOT_COMPARED,
    PASS,
    UNMATCHED,
    WARNING,
    CallResult,
    ResultRow,
    all_compared,
    differs,
)
from trainermon.core.terminal.escapes import printable
from trainermon.dump.files.reader import split_key, stack_of
from trainermon.dump.files.records import FORWARD

RESULTS = (ERROR, WARNING, PASS, UNMATCHED, NOT_COMPARED)
MAX_BLAMED = 8
MAX_NOTES = 6
_MAX_LINES = 40
_MAX_DUMPS = 12
_NUMBERED = re.compile(r"([a-z]+)(\d+)")
SIZES = {
    Mode.STATISTICS: "a share of the tensor's size: of max, min, mean and norm, that which differs most",
    Mode.TENSOR: "a share of the tensor's size: the norm of the difference over the larger norm",
}
"""What a number is by which something differs, by what is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOutcome:
    """What is kept of a comparison once its files are written: small enough to come back from another process.

    Attributes:
        target: Path of the dump in question.
        golden: Path of the dump taken to be right.
        label: Step and rank, `step3 rank1`.
        mode: What was compared: tensor, checksum, statistics.
        headline: The result in one line.
        rows: Number of rows by result.
        calls: Number of calls by result.
        only_target: Calls that only the target has.
        only_golden: Calls that only the golden dump has.
        blamed: The calls where a difference arose, in the order in which they ran: (key, a few words on it).
        within: What is odd within the first of them (see `odd_within`).
        called_in: The line of the user's code that called the first of them.
        began: When the first difference began; None: no call is to blame.
        files: The files that were written.
        notes: Those of the comparison.
        gaps: What is known to be missing in the dumps.
        failure: Why the dumps could not be compared; "" if they were.
    """

    target: str
    golden: str
    label: str
    mode: str
    headline: str
    rows: Mapping[str, int]
    calls: Mapping[str, int]
    only_target: int
    only_golden: int
    blamed: tuple[tuple[str, str], ...]
    within: tuple[str, ...]
    called_in: str
    began: Beginning | None = None
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    failure: str = ""

    @property
    def whole(self) -> bool:
        """Whether every row of both dumps was compared, and nothing is known to be missing in them."""
        return not self.gaps and all_compared(self.rows)

    @property
    def differs(self) -> bool:
        """Whether a row is more than rounding apart."""
        return differs(self.rows)


def summarise(comparison: Comparison, files: tuple[Path, ...] = ()) -> ComparisonOutcome:
    """Return the outcome of a comparison, of which `files` were written."""
    rows, calls = comparison.row_counts(), comparison.call_counts()
    causes = causes_of(comparison)
    only_target, only_golden = unmatched_sides(comparison)
    return ComparisonOutcome(
        target=str(comparison.target),
        golden=str(comparison.golden),
        label=comparison.label,
        mode=comparison.mode.value,
        headline=headline(comparison),
        rows={result: rows[result] for result in RESULTS},
        calls={result: calls[result] for result in RESULTS},
        only_target=only_target,
        only_golden=only_golden,
        blamed=tuple((one.call.key, one.words) for one in causes),
        within=odd_within(comparison, causes[0].call) if causes else (),
        called_in=called_in(comparison, causes[0].call) if causes else "",
        began=began_of(comparison),
        files=files,
        notes=comparison.notes,
        gaps=comparison.gaps,
    )


def began_of(comparison: Comparison) -> Beginning | None:
    """Return when the first difference of a comparison began; None: no call is to blame."""
    cause = next(iter(causes_of(comparison)), None)
    if cause is None:
        return None
    shown = cause.call if cause.call.target is not None else next(iter(comparison.blamed), first_differing(comparison))
    return None if shown is None else beginning_of(comparison, shown, is_made=not cause.place)


def failed(target: Path | str, golden: Path | str, label: str, failure: str) -> ComparisonOutcome:
    """Return the outcome of two dumps that could not be compared."""
    counts = dict.fromkeys(RESULTS, 0)
    return ComparisonOutcome(
        target=str(target),
        golden=str(golden),
        label=label,
        mode="none",
        headline=f"Not compared: {failure}",
        rows=counts,
        calls=counts,
        only_target=0,
        only_golden=0,
        blamed=(),
        within=(),
        called_in="",
        failure=failure,
    )


def render_text(outcomes: Sequence[ComparisonOutcome], *, colour: bool = False) -> str:
    """Return the summary of all comparisons for a terminal, at most 40 lines."""
    ranked = _ranked(outcomes)
    shown = ranked[0]
    overview = list(map(printable, _overview(ranked))) if len(ranked) > 1 else []
    title = printable(placed(shown.label, shown.headline) if len(ranked) > 1 else shown.headline)
    lines = [f"\033[1m{title}\033[0m" if colour else title, "", *overview, *_lines(shown)]
    return "\n".join(lines[:_MAX_LINES]) + "\n"


def _lines(outcome: ComparisonOutcome) -> Iterator[str]:
    return (printable(f"{name:<10}{text}") for name, text in details_of(outcome))


def first_different(outcomes: Sequence[ComparisonOutcome]) -> ComparisonOutcome:
    """Return the outcome to show first.

    It is that in which the first difference began, else one that differs, else one that failed, else one of which not
    all was compared, else one that has no other to be compared with.
    """
    return _ranked(outcomes)[0]


def placed(label: str, sentence: str) -> str:
    """Return a sentence on one of several dumps with the step and the rank that it is about.

    >>> placed("step3 rank41", "The first difference arose in fc.")
    'Step 3, rank 41: the first difference arose in fc.'
    """
    where = _NUMBERED.sub(r"\1 \2,", label).rstrip(",")
    return f"{where[:1].upper()}{where[1:]}: {sentence[:1].lower()}{sentence[1:]}" if where else sentence


def _ranked(outcomes: Sequence[ComparisonOutcome]) -> list[ComparisonOutcome]:
    """Return the outcomes, those with something to say first, in the order in which that began."""

    def rank(one: ComparisonOutcome) -> tuple[object, ...]:
        began = (one.began is None, one.began or Beginning(0, 0, False, 0, 0))  # noqa: FBT003
        is_lone = not (one.target and one.golden)
        return (*began, not one.blamed, not one.differs, not one.failure or is_lone, one.whole or is_lone, one.whole)

    return sorted(outcomes, key=rank)


def headline(comparison: Comparison) -> str:
    """Return the result of a comparison in one line: which call is to blame, or that everything is within rounding.

    It ends with the first tensor that could not be read, and, unless every row passes, with what was taken for granted
    of how ranks share the model.
    """
    assumed = () if comparison.row_counts().keys() <= {PASS} else comparison.assumed
    limits = [*_unread(comparison), *assumed]
    said = _answer(comparison)
    return f"{'; '.join([said.removesuffix('.'), *limits])}." if limits else said


def _unread(comparison: Comparison) -> Iterator[str]:
    """Yield how many tensors were not compared, as a file could not be read, and why the first was not."""
    why = [row.difference.unread for row in comparison.rows() if row.difference.unread]
    if why:
        verb, first = ("tensor was", "") if len(why) == 1 else ("tensors were", "the first: ")
        yield f"{len(why):,} {verb} not compared, {first}{why[0]}"


def _answer(comparison: Comparison) -> str:
    if why := incomparable(comparison):
        return why
    causes = causes_of(comparison)
    for call, place, words in causes[:1]:
        drift = _drift_behind(causes)
        if call.result == UNMATCHED or (not (place or drift) and is_replaced(comparison, call)):
            return f"The first difference: {call.key}{placed_in(comparison, call)} {words}{drift}."
        if drift or literal_of(call):
            return f"The first difference: {call.key}{module_around(comparison, call)} {words}{drift}."
        where = placed_in(comparison, call)
        if place:
            return (
                f"The first difference came in with {call.key}.{place}{where}: {words}{_written(comparison, causes)}."
            )
        more = f"{_lone_function(comparison, call)}{_functions_unseen(comparison, call)}"
        return f"The first difference arose in {call.key}{where}: {words}{more}."
    return without_blame(comparison)


def _drift_behind(causes: Sequence[BlamedPlace]) -> str:
    """Return which parameters differ besides what the sentence is on, a setting or a call that may have done that."""
    drift = next((one for one in causes[1:] if is_weight(one)), None)
    if drift is None or is_weight(causes[0]):
        return ""
    return f"; {drift.call.key}.{drift.place}: {drift.words}"


def _written(comparison: Comparison, causes: Sequence[BlamedPlace]) -> str:
    """Return which plain argument differs besides a weight that came in otherwise."""
    written = next((one for one in causes if literal_of(one.call)), None)
    if written is None or not is_weight(causes[0]):
        return ""
    return f"; {written.call.key}{module_around(comparison, written.call)} {written.words}"


def causes_of(comparison: Comparison) -> list[BlamedPlace]:
    """Return where differences began, in the order in which that ran.

    An earlier step that went wrong leaves parameters different (see `drift_of`): these are one cause. What the script
    does otherwise in this step, it did in that one as well: so a setting that differs, and a call or argument of one
    side alone, come before them.
    """
    causes = doubted(comparison, one_of_each_sum(_with_lone_calls(comparison)))
    others = [one for one in causes if not literal_of(one.call)]
    drift = drift_of(comparison) if others and is_weight(others[0]) else None
    if drift is None:
        return causes
    written = [one for one in causes if literal_of(one.call)]
    first = first_in_script(comparison)
    if first is not None and first.call.key not in {one.call.key for one in written}:
        written.insert(0, first)
    named = {one.call.key for one in written}
    return [*written, drift, *(one for one in others if not is_weight(one) and one.call.key not in named)]


def _with_lone_calls(comparison: Comparison) -> list[BlamedPlace]:
    """Return the calls that are to blame, the first of them replaced by what one side alone did just before.

    So where what came in differs because of it, or no call is to blame. A module that is to blame for what it gave to a
    call within it stays, if only a function in it is another.
    """
    causes = [BlamedPlace(call, call.origin, described(comparison, call)) for call in comparison.blamed]
    lone = lone_before(comparison)
    if lone is None or (causes and causes[0].call.given_to and not lone.call.key.startswith("Module.")):
        return causes
    return [BlamedPlace(lone.call, "", f"{lone.words}{lone.onwards}"), *causes[1:]]


def _lone_function(comparison: Comparison, named: CallResult) -> str:
    """Return which function of one side alone made what the first difference is in, behind a sentence on another."""
    lone = lone_before(comparison)
    if lone is None or lone.call is named:
        return ""
    return f"; {lone.call.key}{placed_in(comparison, lone.call)} {lone.words}"


def _functions_unseen(comparison: Comparison, named: CallResult) -> str:
    """Return that dumps have modules alone, behind a sentence on what one did between two modules within it."""
    sides = (call for one in comparison.calls for call in (one.target, one.golden) if call is not None)
    if not named.given_to or any(call.family != MODULE for call in sides):
        return ""
    return "; the dumps have modules alone, and not the functions that it calls (level mix has both)"


def unmatched_sides(comparison: Comparison) -> tuple[int, int]:
    """Return the numbers of unmatched calls: (those only the target has, those only the golden dump has)."""
    lonely = [call for call in comparison.calls if call.result == UNMATCHED]
    return sum(call.golden is None for call in lonely), sum(call.target is None for call in lonely)


def odd_within(comparison: Comparison, blamed: CallResult) -> tuple[str, ...]:
    """Return a few words on each oddity directly within the blamed module, often the cause itself; () for a function.

    Oddities are calls that only one side made, and arguments other than tensors that differ, as an epsilon does.
    """
    if not blamed.key.startswith("Module.") or blamed.result == UNMATCHED:
        return ()
    module = split_key(blamed.key)[0]
    found: list[str] = []
    for result in comparison.calls:
        call = result.target or result.golden
        if call is None or call.scope != module or call.direction != FORWARD:
            continue
        if result.result == UNMATCHED:
            found.append(f"{call.key} ({'target' if result.target else 'golden dump'} only)")
        found += [f"{call.key} ({words})" for words in map(_argument, result.rows) if words]
    return tuple(found)


def _argument(row: ResultRow) -> str:
    """Return what a number, text or the like is on both sides, "" if it is not another, or no argument."""
    ours, theirs = row.target, row.golden
    if row.result != ERROR or ours is None or theirs is None or ours.state == OUTPUT:
        return ""
    if ours.is_tensor or theirs.is_tensor:
        return ""
    return f"{ours.place} is {ours.max}, {theirs.max} in the golden dump"


def called_in(comparison: Comparison, call: CallResult) -> str:
    """Return the innermost line of the user's own code in the call's stack, "" if it is not known."""
    frames = stack_of(comparison.stacks, call.key) if call.target is not None else ()
    own = next((frame for frame in frames if "site-packages" not in frame), "")
    return " ".join(own.split())


def _overview(outcomes: Sequence[ComparisonOutcome]) -> Iterator[str]:
    is_gap = any(one.rows[NOT_COMPARED] for one in outcomes)
    more = f"{NOT_COMPARED:>14}" if is_gap else ""
    yield f"{'dump':<18}{'error':>9}{'warning':>9}{'pass':>10}{'unmatched':>11}{more}  first to blame"
    told = [one for one in outcomes if one.differs or not one.whole or not one.rows[PASS]]
    for one in told[:_MAX_DUMPS]:
        rows = one.rows
        first = one.blamed[0][0] if one.blamed else "not compared" if one.failure else "–"
        numbers = f"{rows[ERROR]:>9,}{rows[WARNING]:>9,}{rows[PASS]:>10,}{rows[UNMATCHED]:>11,}"
        numbers += f"{rows[NOT_COMPARED]:>14,}" if is_gap else ""
        yield f"{one.label:<18}{numbers}  {first}"
    if len(told) > _MAX_DUMPS:
        yield f"and {len(told) - _MAX_DUMPS} more, in the files"
    if len(told) < len(outcomes):
        yield f"{len(outcomes) - len(told)} of {len(outcomes)} dumps agree"
    yield ""


def _counted(counts: Mapping[str, int]) -> str:
    told = [result for result in RESULTS if counts[result] or result != NOT_COMPARED]
    return ", ".join(f"{counts[result]:,} {result}" for result in told)


def details_of(outcome: ComparisonOutcome) -> Iterator[tuple[str, str]]:
    """Yield what there is to say below the headline, a line each: what it is about, and the text."""
    yield "target", outcome.target or "none"
    yield "golden", outcome.golden or "none"
    yield "mode", f"{outcome.mode}{f', {outcome.label}' if outcome.label else ''}"
    if outcome.differs and outcome.mode in SIZES:
        yield "differs", f"by {SIZES[Mode(outcome.mode)]}"
    yield "rows", _counted(outcome.rows)
    yield "calls", _counted(outcome.calls)
    if outcome.only_target or outcome.only_golden:
        yield "", f"only in the target: {outcome.only_target:,}, only in the golden dump: {outcome.only_golden:,}"
    yield from _named("to blame", [f"{key}: {words}" for key, words in outcome.blamed], MAX_BLAMED)
    if outcome.within:
        yield "within it", ", ".join(outcome.within[:3])
    if outcome.called_in:
        yield "called in", outcome.called_in
    yield from _named("note", outcome.notes, MAX_NOTES)


def _named(name: str, texts: Sequence[str], most: int) -> Iterator[tuple[str, str]]:
    """Yield the first texts, at most so many, the first of them with its name, and how many there are more."""
    for index, text in enumerate(texts[:most]):
        yield name if index == 0 else "", text
    if len(texts) > most:
        yield "", f"and {len(texts) - most} more"
