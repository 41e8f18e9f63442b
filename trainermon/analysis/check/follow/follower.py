"""Judges the steps of one folder as they come, and puts each where it belongs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from trainermon.accuracy.judge import Judgement, Status
from trainermon.analysis.check.checking import CallsCheck, CheckedCall
from trainermon.analysis.check.dumps import CheckOptions, check_dumps
from trainermon.analysis.check.follow.book import RankResult, StepBook, StepResult, StepVerdict
from trainermon.analysis.check.follow.steps import DumpedStep, StepFolder, info_of
from trainermon.analysis.check.journal import CheckJournal
from trainermon.analysis.check.tables import write_files
from trainermon.core.errors import DumpError

SecondOpinion = Callable[[Path, CallsCheck], tuple[CallsCheck, int]]
"""Has the calls of a rank's dump run elsewhere; returns the verdicts on both, and how many could not be run there."""
FORMATS = ("csv", "json")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FollowOptions:
    """How steps are judged, and what is left of them.

    Attributes:
        check: How calls are judged.
        max_kept: So many steps with a wrong call are kept, the first ones; of later ones only the tables.
        with_tables: Whether steps without a wrong call get tables, too.
        is_strict: Whether a warning counts as wrong.
        elsewhere: A second opinion of another host; None: none.
        say: Receives a line for the user.
    """

    check: CheckOptions
    max_kept: int
    with_tables: bool
    is_strict: bool
    elsewhere: SecondOpinion | None
    say: Callable[[str], None]


class StepFollower:
    """Judges the steps of one folder.

    What happens to a step happens in this order, so that it can be interrupted anywhere: verdicts, call by call, into a
    journal; tables; the line in the book; last the step itself is moved or deleted.

    Args:
        folder: The folder.
        output: Where book and tables go.
        options: How steps are judged.

    Attributes:
        book: What became of each step.

    Raises:
        DumpError: The output cannot be written, or another process follows the folder.
    """

    def __init__(self, folder: StepFolder, output: Path, options: FollowOptions) -> None:
        self.book = StepBook(output)
        self._folder, self._output, self._options = folder, output, options
        try:
            folder.finish_deleting()
        except FileNotFoundError:  # the training has not begun
            pass
        except OSError as error:
            self.book.close()
            raise DumpError(f"cannot delete in {folder.path}: {error}") from error

    def turn(self) -> int:
        """Judge every step that is complete; return how many were.

        Raises:
            DumpError: Something cannot be read or written; what was not judged is still there.
        """
        number = 0
        for step in self._folder.ready():
            result = self.book.result_of(step.identity)
            if result is None:
                result = self._judged(step)
                self.book.add(result)
                self._say(result)
                number += 1
            self._put_away(step, result)
        return number

    @property
    def num_left(self) -> int:
        """How many steps are there that are not judged."""
        return self._folder.num_waiting()

    def close(self) -> None:
        """Let another process follow the folder."""
        self.book.close()

    def _judged(self, step: DumpedStep) -> StepResult:
        place = StepResult(step=step.name, stamp=step.stamp, identity=step.identity, verdict=StepVerdict.UNJUDGED)
        if step.link is not None:
            return dataclasses.replace(place, reason=f"{step.link} is a link or no file: it is not followed")
        checks, lost, trouble = self._checks(step)
        if not trouble and all(call.status is Status.SKIP for check in checks for call in check.calls):
            reasons = [reason for check in checks for reason, _ in check.skipped.most_common(1)]
            trouble = f"no call could be judged: {reasons[0] if reasons else 'the dump has none'}"
        if trouble:
            self._clear(step)
            return dataclasses.replace(place, reason=trouble)
        ranks = tuple(self._summary(*found) for found in zip(step.ranks, checks, lost, strict=True))
        is_wrong = any(rank.errors for rank in ranks)
        kept = self._folder.kept_name(step) if is_wrong and self._folder.num_kept() < self._options.max_kept else ""
        if is_wrong or self._options.with_tables:
            self._write(step, checks, kept)
        self._clear(step)
        verdict = StepVerdict.FAILED if is_wrong else StepVerdict.GOOD
        return dataclasses.replace(place, verdict=verdict, kept=kept, ranks=ranks)

    def _checks(self, step: DumpedStep) -> tuple[list[CallsCheck], list[int], str]:
        """Return the verdicts on each rank, how many calls were not run elsewhere, and why none of it counts, or ""."""
        options, troubles = self._options.check, list[str]()
        about = options.about(step.path, step.ranks)
        resumes = self._journal_of(step).is_file()
        output = self._output / step.name
        try:
            journal = CheckJournal.resume(output, about, step.stamp) if resumes else None
        except DumpError:  # of a dump that has been replaced, or of another version
            journal = None
        journal = journal or CheckJournal.begin(output, step.stamp, about)
        try:
            checks = list(
                check_dumps(step.ranks, options, journal=journal, complain=lambda _, error: troubles.append(str(error)))
            )
        finally:
            journal.close()
        if troubles or self._options.elsewhere is None:
            return checks, [0] * len(checks), "; ".join(troubles)
        both = [self._options.elsewhere(rank, check) for rank, check in zip(step.ranks, checks, strict=True)]
        return [check for check, _ in both], [lost for _, lost in both], ""

    def _clear(self, step: DumpedStep) -> None:
        """Remove the journal of a step, and its folder if it has no tables."""
        journal = self._journal_of(step)
        journal.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # there are tables
            journal.parent.rmdir()

    def _journal_of(self, step: DumpedStep) -> Path:
        return CheckJournal.place(self._output / step.name, step.stamp)

    def _summary(self, rank: Path, check: CallsCheck, lost: int) -> RankResult:
        wrong = [call for call in check.calls if self._is_wrong(call)]
        skipped = info_of(rank).get("skipped_steps", 0)
        passed, not_judged = len(check.of(Status.PASS)), len(check.of(Status.SKIP))
        return RankResult(
            rank=int(rank.name.removeprefix("rank")),
            errors=len(wrong),
            warnings=len(check.calls) - len(wrong) - passed - not_judged,
            passed=passed,
            skipped=not_judged,
            first=wrong[0].key if wrong else "",
            reason=_reason(wrong[0])[:300] if wrong else "",
            skipped_steps=skipped if isinstance(skipped, int) else 0,
            lost=lost,
        )

    def _is_wrong(self, call: CheckedCall) -> bool:
        """Return whether what the device of the training gave is wrong; what another host gave is its own matter."""
        counted = (Status.ERROR, Status.WARNING) if self._options.is_strict else (Status.ERROR,)
        return any(one.status in counted for one in call.judgements)

    def _write(self, step: DumpedStep, checks: Sequence[CallsCheck], kept: str) -> None:
        for rank, check in zip(step.ranks, checks, strict=True):
            source = self._folder.path / kept / rank.name if kept else rank
            found = dataclasses.replace(check, source=str(source))
            write_files(found, self._output / step.name / rank.name, FORMATS, step.stamp)

    def _put_away(self, step: DumpedStep, result: StepResult) -> None:
        try:
            if result.verdict is StepVerdict.UNJUDGED:
                self._folder.left.add(step.identity)
            elif result.kept:
                self._folder.keep(step, result.kept)
            else:
                self._folder.delete(step)
        except OSError as error:
            raise DumpError(f"cannot move or delete {step.path}: {error}") from error

    def _say(self, result: StepResult) -> None:
        match result.verdict:
            case StepVerdict.UNJUDGED:
                self._options.say(f"{result.step} is left where it is: {result.reason}")
            case StepVerdict.FAILED:
                where = f"kept in {result.kept}" if result.kept else "not kept: --keep steps are"
                wrong = next(rank for rank in result.ranks if rank.errors)
                number = sum(rank.errors for rank in result.ranks)
                self._options.say(
                    f"{result.step}: {number} calls are wrong, first on rank {wrong.rank} {wrong.first}: "
                    f"{wrong.reason}; {where}"
                )
            case StepVerdict.GOOD:
                pass


def _reason(call: CheckedCall) -> str:
    """Return why a call is wrong: of its first wrong result, and where that is known the line and the cause."""
    judged: Judgement = max(call.judgements, key=lambda one: one.status is Status.ERROR)
    return "; ".join(filter(None, [judged.reason, call.cause, call.line and f"called in {call.line}"]))
