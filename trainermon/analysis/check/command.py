"""`trainermon check`: is what each operation gave right?"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from pathlib import Path

from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import DumpCheck, check_dump, dumps_below
from trainermon.analysis.check.screen import render_text
from trainermon.analysis.check.tables import document, write_files
from trainermon.analysis.compare.progress import ProgressBar
from trainermon.core.errors import DumpError

FORMATS = ("csv", "json")
WRONG = 3
"""With --exit-code; 1 and 2 stand for what could not be done, as in every command."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon check`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run = actions.add_parser("run", help="judge every forward call of a dump against float64")
    run.add_argument("dump", type=Path, help="a dump with tensors (level L1 or mix), or a folder of steps and ranks")
    run.add_argument("-o", "--output", type=Path, metavar="DIR", help="write files into this folder")
    run.add_argument(
        "-f", "--format", action="append", choices=FORMATS, help="what to write, may be repeated (default: both)"
    )
    run.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="only calls whose keys match, as *.linear.*"
    )
    run.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="leave out calls whose keys match")
    run.add_argument("--exit-code", action="store_true", help=f"end with status {WRONG} if a call is wrong")
    run.add_argument("--strict", action="store_true", help="with --exit-code, count warnings as wrong")
    run.add_argument("--json", action="store_true", help="print the verdicts as JSON, see docs/check.md")


def main(args: argparse.Namespace) -> int:
    """Judge the calls of a dump (`trainermon check run`), print the result, and return the exit status.

    Raises:
        DumpError: There is no dump, or a file cannot be written. Damaged dumps are named, and the status is then 1.
    """
    progress = ProgressBar(sys.stderr)
    paths = dumps_below(args.dump)
    try:
        checks = [check for path in paths if (check := _check(path, args, progress)) is not None]
    finally:
        progress.close()
    if args.json:
        sys.stdout.write(json.dumps([document(check) for check in checks], indent=1) + "\n")
    else:
        sys.stdout.write(render_text(checks))
    if args.output is not None:
        _write(checks, args)
    if len(checks) < len(paths):
        return 1
    return WRONG if args.exit_code and _is_wrong(checks, strict=args.strict) else 0


def _check(path: Path, args: argparse.Namespace, progress: ProgressBar) -> DumpCheck | None:
    def wanted(key: str) -> bool:
        chosen = not args.only or any(fnmatch.fnmatchcase(key, pattern) for pattern in args.only)
        return chosen and not any(fnmatch.fnmatchcase(key, pattern) for pattern in args.skip)

    try:
        return check_dump(path, wanted=wanted, report=progress)
    except DumpError as error:
        progress.close()
        sys.stderr.write(f"trainermon check: {error}\n")
        return None


def _write(checks: list[DumpCheck], args: argparse.Namespace) -> None:
    stamp = time.strftime("%Y%m%d%H%M%S")
    for check in checks:
        place = check.directory.relative_to(args.dump) if check.directory != args.dump else Path()
        for path in write_files(check, args.output / place, args.format or FORMATS, stamp):
            if not args.json:
                sys.stdout.write(f"wrote {path}\n")


def _is_wrong(checks: list[DumpCheck], *, strict: bool) -> bool:
    counted = (Status.ERROR, Status.WARNING) if strict else (Status.ERROR,)
    return any(check.of(status) for check in checks for status in counted)
