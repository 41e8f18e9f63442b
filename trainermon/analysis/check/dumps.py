"""The dumps of a check, one after the other: here or in workers, from the beginning or from where it stopped."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

import trainermon
from trainermon.accuracy.judge import Status
from trainermon.accuracy.rules import ChosenRules
from trainermon.analysis.check.checker_config import CheckerConfig
from trainermon.analysis.check.checking import CallsCheck, CheckedCall, DumpChecker, dumps_below
from trainermon.analysis.check.devices import require_device
from trainermon.analysis.check.inputs.options import DEFAULT_INPUTS, CallInputs
from trainermon.analysis.check.inputs.references import DEFAULT_REFERENCE, ReferenceChoice
from trainermon.analysis.check.journal import CheckJournal
from trainermon.analysis.check.repeats import repeated_calls
from trainermon.analysis.check.runner import Workers, run_calls
from trainermon.analysis.check.tables import write_files
from trainermon.core.errors import DumpError
from trainermon.core.terminal.progress import Report, no_report
from trainermon.dump.files.reader import load_raw
from trainermon.dump.files.records import DUMP_FILE, PARTIAL_FILE, TENSOR_FOLDER

_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class CallChoice:
    """Chooses calls by key.

    Attributes:
        only: Patterns of which a key must match one; (): any key.
        skip: Patterns of which it may match none.
        config: msprobe's lists of operations.
        left_out: Names of calls that are not wanted, `Functional.linear.3`.
    """

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    config: CheckerConfig = dataclasses.field(default_factory=CheckerConfig)
    left_out: frozenset[str] = frozenset()

    def __call__(self, key: str) -> bool:
        """Return whether the call with this key is wanted."""
        if not self.config.allows(key) or key.rpartition(".")[0] in self.left_out:
            return False
        chosen = not self.only or any(fnmatchcase(key, pattern) for pattern in self.only)
        return chosen and not any(fnmatchcase(key, pattern) for pattern in self.skip)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """How the calls of dumps are judged.

    Attributes:
        choice: Which of them.
        unique: Leave out calls that repeat an earlier one.
        rules: Whose rules give the verdict, see `check_dump`.
        max_elements: A call whose tensors have more elements together is not judged; None: no limit.
        workers: The worker processes; None: none, it happens here.
        devices: Where forward calls are run again, each call on one of them; (): nowhere.
        inputs: What they are given there.
        reference: What forward calls are judged against.
    """

    choice: CallChoice = CallChoice()
    unique: bool = False
    rules: ChosenRules | None = None
    max_elements: int | None = None
    workers: Workers | None = None
    devices: tuple[str, ...] = ()
    inputs: CallInputs = DEFAULT_INPUTS
    reference: ReferenceChoice = DEFAULT_REFERENCE

    def choice_in(self, directory: Path) -> CallChoice:
        """Return the choice of calls for the dump in `directory`.

        Raises:
            DumpError: There is no dump, or it is damaged.
        """
        if not self.unique:
            return self.choice
        return dataclasses.replace(self.choice, left_out=frozenset(repeated_calls(load_raw(directory).data)))

    def about(self, dump: Path, directories: Iterable[Path]) -> dict[str, Any]:
        """Return what a check must have in common with the one that it resumes, in JSON values.

        Raises:
            DumpError: A dump cannot be read.
        """
        return {
            "version of trainermon": trainermon.__version__,
            "version of torch": torch.__version__,
            "dump": str(dump.resolve()),
            "content of the dump": _digest(directories),
            "choice of calls": {
                **dataclasses.asdict(self.choice),
                "left_out": self.unique,
                "config": str(self.choice.config),
            },
            "rules": self.rules.rules.value if self.rules is not None else None,
            "devices": list(self.devices),
            "reference": [self.reference.source, *self.reference.lengths],
            "inputs": [self.inputs.data.value, *self.inputs[1:]],
            "limit of elements": self.max_elements,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class CheckReport:
    """The verdicts on the calls of a dump, or of all dumps below a folder.

    Attributes:
        dump: The folder, or the dump.json.
        checks: One for each step and rank.
    """

    dump: Path
    checks: tuple[CallsCheck, ...]

    @property
    def calls(self) -> tuple[CheckedCall, ...]:
        """Every call, one dump after the other."""
        return tuple(call for found in self.checks for call in found.calls)

    def of(self, status: Status) -> list[CheckedCall]:
        """Return the calls with this verdict."""
        return [call for call in self.calls if call.status is status]

    def save(self, folder: str | Path, formats: Sequence[str] = ("csv", "json")) -> list[Path]:
        """Write the files of `trainermon check run -o` into `folder`, and return their paths.

        `formats` are of csv, json, html and md.

        Raises:
            DumpError: The folder cannot be written.
        """
        stamp = time.strftime("%Y%m%d%H%M%S")
        paths = []
        for found in self.checks:
            below = Path(found.source).relative_to(self.dump) if self.dump.is_dir() else Path()
            paths += write_files(found, Path(folder) / below, formats, stamp)
        return paths


def check(
    dump: str | Path,
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    devices: Sequence[str] = (),
    jobs: int | None = None,
) -> CheckReport:
    """Return the verdicts on every call of a dump with tensors, or of all dumps below a folder, against float64.

    `only` and `skip` are patterns of keys, `Functional.linear.*`; on `devices` (`cuda:0`) each call is run again and
    judged, too. With `jobs` the calls are judged in that many processes, which need `if __name__ == "__main__"` in a
    script. Cost: one to six runs of each call in float64.

    Raises:
        DumpError: There is no dump, or one is damaged.
        ConfigError: A device is not there.
    """
    for device in devices:
        require_device(device)
    needs_workers = jobs is not None or len(devices) > 1
    options = CheckOptions(
        choice=CallChoice(tuple(only), tuple(skip)),
        rules=ChosenRules(),
        workers=Workers(jobs or 1) if needs_workers else None,
        devices=tuple(devices),
    )

    def refuse(_: Path, error: DumpError) -> None:
        raise error

    return CheckReport(Path(dump), tuple(check_dumps(dumps_below(Path(dump)), options, complain=refuse)))


def check_dumps(
    directories: Iterable[Path],
    options: CheckOptions = CheckOptions(),
    *,
    journal: CheckJournal | None = None,
    complain: Callable[[Path, DumpError], None],
    report: Report = no_report,
) -> Iterator[CallsCheck]:
    """Yield the verdicts on the calls of each dump; one that is damaged is only given to `complain`, with its folder.

    What `journal` holds is not judged again, the rest is written into it.

    Raises:
        DumpError: The journal cannot be written, or a worker cannot start.
    """
    for directory in directories:
        try:
            openers = _openers(directory, options)
            checker = openers[0]()
        except DumpError as error:
            complain(directory, error)
            continue
        calls = _known(directory, checker, journal)
        for number, call in _judged(checker, openers, [n for n in range(len(checker.keys)) if n not in calls], options):
            calls[number] = call
            if journal is not None:
                journal.add(str(directory), number, call)
            report(len(calls), len(checker.keys), "calls")
        judged = tuple(call for _, call in sorted(calls.items()))
        yield CallsCheck(source=str(directory), calls=judged, reference=options.reference.source)


def _openers(directory: Path, options: CheckOptions) -> list[Callable[[], DumpChecker]]:
    """Return what opens the dump, for each device."""
    choice = options.choice_in(directory)
    return [
        functools.partial(
            DumpChecker,
            directory,
            wanted=choice,
            rules=options.rules,
            max_elements=options.max_elements,
            device=device,
            inputs=options.inputs,
            reference=options.reference,
        )
        for device in options.devices or ("",)
    ]


def _known(directory: Path, checker: DumpChecker, journal: CheckJournal | None) -> dict[int, CheckedCall]:
    known = journal.known.items() if journal is not None else ()
    return {number: call for (source, number), call in known if source == str(directory) and number < len(checker.keys)}


def _judged(
    checker: DumpChecker, openers: Sequence[Callable[[], DumpChecker]], numbers: Sequence[int], options: CheckOptions
) -> Iterator[tuple[int, CheckedCall]]:
    if options.workers is None:
        yield from ((number, checker.check(number)) for number in numbers)
        return
    for number, found in run_calls(openers, numbers, options.workers):
        yield number, checker.lost(number, found) if isinstance(found, str) else found


def _digest(directories: Iterable[Path]) -> str:
    """Return a checksum of the files that list the calls, and of names, sizes and times of those with tensors."""
    digest = hashlib.sha256()
    try:
        for directory in directories:
            for path in filter(Path.is_file, (directory / DUMP_FILE, directory / PARTIAL_FILE)):
                with path.open("rb") as file:
                    while chunk := file.read(_CHUNK):
                        digest.update(chunk)
            for path in sorted((directory / TENSOR_FOLDER).glob("*")):
                found = path.stat()
                digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    except OSError as error:
        raise DumpError(f"the dump cannot be read: {error}") from error
    return digest.hexdigest()[:16]
