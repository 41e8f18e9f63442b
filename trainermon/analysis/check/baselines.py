"""`trainermon check calibrate`: how far off a trusted device is, which `check run --baseline` allows."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainermon.accuracy.peers import PEER, SCHEMA_VERSION, baseline_text, excused, learn
from trainermon.analysis.check.checking import CallsCheck, CheckedCall, check_dump, dumps_below
from trainermon.core.errors import DumpError
from trainermon.core.terminal.progress import ProgressBar
from trainermon.core.terminal.results import write_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """How far off the results of a trusted device are.

    Attributes:
        worst: The largest error of an element, in allowances, by operation, direction and type:
            `linear.forward.bfloat16`.
    """

    worst: Mapping[str, float]

    def applied(self, check: CallsCheck) -> CallsCheck:
        """Return the verdicts with the errors that it excuses as warnings."""
        return dataclasses.replace(check, calls=tuple(map(self._applied, check.calls)))

    def _applied(self, call: CheckedCall) -> CheckedCall:
        judged = tuple(excused(call.key, one, self.worst) for one in call.judgements)
        return dataclasses.replace(call, judgements=judged)


def baseline_of(checks: Iterable[CallsCheck]) -> Baseline:
    """Return the baseline that the verdicts on dumps of a trusted device make; NaN and infinite errors are left out."""
    worst: dict[str, float] = {}
    for check in checks:
        for call in check.calls:
            for judgement in call.judgements:
                learn(call.key, judgement, worst)
    return Baseline(worst=worst)


def read_baseline(path: Path) -> Baseline:
    """Return the baseline in a file that `trainermon check calibrate` has written.

    Raises:
        DumpError: The file cannot be read, or is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA_VERSION:
            raise DumpError(f"{path} has schema {found['schema']}, expected {SCHEMA_VERSION}: calibrate again")
        return Baseline(worst={str(kind): float(worst) for kind, worst in found["worst"].items()})
    except OSError as error:
        raise DumpError(f"cannot read the baseline {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DumpError(f"{path} is no baseline: expected what `trainermon check calibrate` writes") from error


def write_baseline(baseline: Baseline, sources: Sequence[Path], path: Path) -> None:
    """Write a baseline as JSON: schema, version of torch, the dumps, and `worst`.

    Raises:
        DumpError: The file cannot be written.
    """
    try:
        write_text(path, baseline_text(baseline.worst, [str(source) for source in sources]))
    except OSError as error:
        raise DumpError(f"cannot write {path}: {error.strerror}") from error


def add_calibrate(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `trainermon check calibrate`."""
    parser = actions.add_parser("calibrate", help="learn from dumps of a device that is trusted how far off it is")
    parser.add_argument("dumps", type=Path, nargs="+", metavar="DUMP", help="dumps with tensors, or folders of them")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="write the baseline here, for --baseline"
    )
    parser.set_defaults(run=_calibrate)


def add_baseline(parser: argparse.ArgumentParser) -> None:
    """Add `--baseline` to `trainermon check run`."""
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE",
        help=f"what calibrate wrote: errors up to {PEER:g} times as large as a trusted device's become warnings",
    )


def _calibrate(args: argparse.Namespace) -> int:
    paths = [path for dump in args.dumps for path in dumps_below(dump)]
    with ProgressBar("reading dumps") as progress:
        baseline = baseline_of(check_dump(path, report=progress) for path in paths)
    write_baseline(baseline, paths, args.output)
    sys.stdout.write(f"wrote {args.output}: {len(baseline.worst)} kinds of calls of {len(paths)} dumps\n")
    return 0
