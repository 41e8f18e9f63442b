"""The verdicts on a dump on one screen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from trainermon.accuracy.judge import WRITTEN, Judgement, Status
from trainermon.analysis.check.checking import CallsCheck, CheckedCall
from trainermon.dump.files.reader import gap_notes

MAX_BLAMED = 10
MAX_REASONS = 6


def render_text(checks: Sequence[CallsCheck], unread: Mapping[Path, str] = MappingProxyType({})) -> str:
    """Return what `trainermon check run` prints: for each dump a headline, wrong calls in order, skipped ones.

    First of all what could not be read: why, by the folder of each dump.
    """
    lines = [*_unread_lines(checks, unread), *(line for check in checks for line in _lines(check))]
    return "\n".join(lines) + "\n"


def _unread_lines(checks: Sequence[CallsCheck], unread: Mapping[Path, str]) -> Iterator[str]:
    """Yield why dumps, of several, were not read or not as a whole; that of a single one is in its headline."""
    number = len(checks) + len(unread)
    partly = [f"{check.source}: {'; '.join(limits)}" for check in checks if (limits := _limits(check))]
    why = [*unread.values(), *partly] if number > 1 else []
    for at, text in enumerate(why):
        yield f"{f'{len(why)} of {number} dumps could not be read as a whole: ' if at == 0 else '  '}{text}"


def headline(check: CallsCheck) -> str:
    """Return the result in a line: `3 of 120 forward calls are wrong; first: Functional.linear.17.forward, t.py:88`.

    Where backwards were judged, it counts both: `3 of 230 calls (120 forward, 110 backward) are wrong; …`. What could
    not be read is said, too.
    """
    return "; ".join([_verdict(check), *_limits(check)])


def _limits(check: CallsCheck) -> list[str]:
    calls = "call" if check.num_unread == 1 else "calls"
    limits = [f"{check.num_unread:,} more {calls} could not be read"] if check.num_unread else []
    return [*limits, *(["the dump is not whole"] if is_cut(check) else [])]


def is_cut(check: CallsCheck) -> bool:
    """Return whether something is known to be missing in the dump."""
    return bool(gap_notes(Path(check.source)))


def _verdict(check: CallsCheck) -> str:
    judged = [call for call in check.calls if call.status is not Status.SKIP]
    errors, warnings = check.of(Status.ERROR), check.of(Status.WARNING)
    calls = _counted(judged)
    if errors:
        first = errors[0]
        at = f", {first.line}" if first.line else ""
        verb = "is" if len(errors) == 1 else "are"
        return f"{len(errors)} of {calls} {verb} wrong; first: {first.key}{at}"
    if not check.calls:
        return "no call to judge: none was recorded, or none is chosen (--only takes whole keys, as '*.linear.*')"
    if not judged:
        return "no call could be judged"
    if warnings:
        verb = "has" if len(warnings) == 1 else "have"
        return f"none of {calls} is wrong; {len(warnings)} {verb} a warning"
    return f"all {calls} are right"


def _counted(calls: Sequence[CheckedCall]) -> str:
    backward = sum(call.is_backward for call in calls)
    if not backward:
        return f"{len(calls)} forward calls"
    return f"{len(calls)} calls ({len(calls) - backward} forward, {backward} backward)"


def _lines(check: CallsCheck) -> Iterator[str]:
    yield check.source + (f" against {check.reference}" if check.reference != "cpu" else "")
    yield f"  {headline(check)}"
    yield from (f"  {note}" for note in gap_notes(Path(check.source)))
    for status in (Status.ERROR, Status.WARNING):
        calls = check.of(status)
        for call in calls[:MAX_BLAMED]:
            yield f"  {status.value:<8}{call.key:<44} {described(call)}"
        if len(calls) > MAX_BLAMED:
            yield f"          and {len(calls) - MAX_BLAMED} more"
    writing = sum(any(one.reason == WRITTEN for one in call.judgements) for call in check.calls)
    if writing:
        yield f"  of {writing} of them not judged: what they write into their arguments, as running statistics"
    skipped = check.skipped.most_common()
    for reason, number in skipped[:MAX_REASONS]:
        yield f"  skipped {number}: {reason}"
    if len(skipped) > MAX_REASONS:
        yield f"  skipped {sum(number for _, number in skipped[MAX_REASONS:])} for other reasons: see the csv file"


def described(call: CheckedCall) -> str:
    """Return what is wrong with a call: `inexact: 12.4 × what is allowed at [3, 7]: 0.51, not 0.5; tile …`."""
    judgement = call.worst
    if judgement is None or judgement.index is None:
        return call.reason
    slot = call.slot_of(judgement)
    of = f" in the gradient of {slot}" if slot else ""
    place = f"; {judgement.place.text()}" if judgement.place and judgement.place.number > 1 else ""
    return f"{call.reason}{of}: {_excess(judgement)}at {list(judgement.index)}: {_values(judgement)}{place}"


def _excess(judgement: Judgement) -> str:
    return f"{judgement.worst:.3g} × what is allowed " if math.isfinite(judgement.worst) else ""


def _values(judgement: Judgement) -> str:
    return f"{_number(judgement.device_value)}, not {_number(judgement.golden_value)}"


def _number(value: complex | float) -> str:
    return f"{value:.6g}"
