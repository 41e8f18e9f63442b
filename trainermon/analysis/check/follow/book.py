"""What a follower has judged, a line for each step in `followed_steps.jsonl`; whoever comes next goes on behind it."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from trainermon.analysis.check.journal import from_plain
from trainermon.core.errors import DumpError
from trainermon.core.private_files import make_private_folder
from trainermon.core.values import TextEnum, as_plain

BOOK_FILE = "followed_steps.jsonl"


class StepVerdict(TextEnum):
    """What became of a step."""

    GOOD = "pass"
    FAILED = "failed"
    UNJUDGED = "unjudged"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What was found in the dump of one rank.

    Attributes:
        rank: Its number.
        errors: How many calls are wrong on this device.
        warnings: How many others have a warning, or are wrong only elsewhere.
        passed: How many are right.
        skipped: How many were not judged.
        first: Key of the first of these; "": none.
        reason: What is wrong with it.
        skipped_steps: How many steps the rank had not dumped until then, as others waited to be judged.
        lost: How many calls another host was to run again, and has not.
    """

    rank: int
    errors: int = 0
    warnings: int = 0
    passed: int = 0
    skipped: int = 0
    first: str = ""
    reason: str = ""
    skipped_steps: int = 0
    lost: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What became of one step.

    Attributes:
        step: Its folder, `step40`.
        stamp: When it was dumped.
        identity: Tells it from another dump of the step with the same number.
        verdict: Whether a call is wrong, or why nothing can be said.
        reason: Why it was not judged; "" if it was.
        kept: Where it is kept, below the folder; "": deleted, or left in its place if it was not judged.
        ranks: One for each.
    """

    step: str
    stamp: str
    identity: str
    verdict: StepVerdict
    reason: str = ""
    kept: str = ""
    ranks: tuple[RankResult, ...] = ()

    @property
    def number(self) -> int:
        """The number of the step."""
        return int(self.step.removeprefix("step"))


class StepBook:
    """The file, held by one process at a time.

    Args:
        folder: The folder of the results.

    Attributes:
        results: What became of each step, in the order in which they were judged.
        told: Identities of the steps of which the agent knows.

    Raises:
        DumpError: The folder cannot be written, or another process has it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / BOOK_FILE
        self.results: list[StepResult] = []
        self.told: set[str] = set()
        try:
            make_private_folder(folder)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError as error:
            raise DumpError(f"{self._path}: another process follows this folder") from error
        except OSError as error:
            raise DumpError(f"cannot write {self._path}: {error}") from error

    def add(self, result: StepResult) -> None:
        """Write down what became of a step.

        Raises:
            DumpError: The disk is full, for example.
        """
        self._write({"result": result})
        self.results.append(result)

    def note_told(self, identity: str) -> None:
        """Write down that the agent knows of a step."""
        self._write({"told": identity})
        self.told.add(identity)

    def result_of(self, identity: str) -> StepResult | None:
        """Return what became of a dump of a step; None if it is new."""
        return next((one for one in reversed(self.results) if one.identity == identity), None)

    def close(self) -> None:
        """Let another process go on."""
        os.close(self._file)

    def _read(self) -> None:
        content = os.pread(self._file, os.fstat(self._file).st_size, 0)
        length = 0
        for line in content.split(b"\n")[:-1]:
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError):
                break  # damaged: what stands behind it is judged again
            length += len(line) + 1
        os.ftruncate(self._file, length)  # a last line was cut off
        os.lseek(self._file, length, os.SEEK_SET)

    def _take(self, value: Any) -> None:
        if "told" in value:
            self.told.add(str(value["told"]))
        else:
            self.results.append(from_plain(StepResult, value["result"]))

    def _write(self, line: Any) -> None:
        try:
            left = f"{json.dumps(as_plain(line))}\n".encode()
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            raise DumpError(f"cannot write {self._path}: {error}") from error
