"""`trainermon check against TARGET.csv GOLDEN.csv`: is one device about as good as another?"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from trainermon.accuracy.judge import Status
from trainermon.accuracy.rules import Rules
from trainermon.analysis.check.against.comparison import (
    RULES,
    UNMATCHED,
    Against,
    ComparedCall,
    compare_details,
    render_against,
    write_against,
)
from trainermon.analysis.check.details_rows import read_details
from trainermon.core.errors import ConfigError
from trainermon.core.terminal.statuses import add_exit_code, exit_status
from trainermon.core.values import as_plain


def add_against(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `trainermon check against`."""
    parser = actions.add_parser("against", help="compare what two devices gave, from their files of details")
    described = "accuracy_checking_details_<time>.csv of"
    parser.add_argument("target", type=Path, nargs="?", help=f"{described} the device in question")
    parser.add_argument("golden", type=Path, nargs="?", help=f"{described} the device that is trusted")
    parser.add_argument("-npu", "--npu_csv_path", type=Path, dest="npu", metavar="FILE", help="the target (msprobe)")
    parser.add_argument("-gpu", "--gpu_csv_path", type=Path, dest="gpu", metavar="FILE", help="the golden (msprobe)")
    parser.add_argument("-o", "--output", "--out_path", type=Path, metavar="DIR", help="write both tables here")
    parser.add_argument(
        "--rules",
        choices=[rules.value for rules in RULES],
        default=Rules.TRAINERMON.value,
        help="whose rules give the verdict (default: ours)",
    )
    add_exit_code(parser, "a call is wrong", "none is, and a call is in one file only, or was judged in one only")
    parser.add_argument("--strict", action="store_true", help="with --exit-code, count warnings and unmatched calls")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON, see docs/check.md")
    parser.set_defaults(run=run_against)


def run_against(args: argparse.Namespace) -> int:
    """Compare two files of details, print the result, and return the exit status.

    Raises:
        ConfigError: A file is not named, or named twice.
        DumpError: A file cannot be read or written.
    """
    target, golden = _paths(args)
    against = compare_details(read_details(target), read_details(golden), Rules(args.rules))
    if args.json:
        sys.stdout.write(json.dumps({"schema": 1, **as_plain(against)}, indent=1) + "\n")
    else:
        sys.stdout.write(render_against(against))
    if args.output is not None:
        for path in write_against(against, args.output, time.strftime("%Y%m%d%H%M%S")):
            if not args.json:
                sys.stdout.write(f"wrote {path}\n")
    is_wrong = _is_wrong(against, strict=args.strict)
    if args.exit_code and not is_wrong and not any(map(_is_judged, against.calls)):
        return 1
    return exit_status(args, found=is_wrong, whole=not against.of(UNMATCHED))


def _paths(args: argparse.Namespace) -> tuple[Path, Path]:
    named = [path for path in (args.target, args.golden) if path is not None]
    named += [path for path in (args.npu, args.gpu) if path is not None]
    if len(named) != 2 or (args.npu is None) != (args.gpu is None):
        expected = "`trainermon check against TARGET.csv GOLDEN.csv`, or -npu TARGET.csv -gpu GOLDEN.csv"
        raise ConfigError(f"found {len(named)} files of details, expected two: {expected}")
    return named[0], named[1]


def _is_judged(call: ComparedCall) -> bool:
    return call.forward not in (Status.SKIP.value, UNMATCHED)


def _is_wrong(against: Against, *, strict: bool) -> bool:
    counted = (Status.ERROR.value, *((Status.WARNING.value, UNMATCHED) if strict else ()))
    return any(against.of(status) for status in counted)
