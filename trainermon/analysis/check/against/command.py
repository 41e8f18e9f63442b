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
    compare_details,
    render_against,
    write_against,
)
from trainermon.analysis.check.details_rows import read_details
from trainermon.core.errors import ConfigError
from trainermon.core.values import as_plain

WRONG = 3


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
    parser.add_argument("--exit-code", action="store_true", help=f"end with status {WRONG} if a call is wrong")
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
    if not args.exit_code:
        return 0
    if _is_wrong(against, strict=args.strict):
        return WRONG
    return 0 if any(call.forward not in (Status.SKIP.value, UNMATCHED) for call in against.calls) else 1


def _paths(args: argparse.Namespace) -> tuple[Path, Path]:
    named = [path for path in (args.target, args.golden) if path is not None]
    named += [path for path in (args.npu, args.gpu) if path is not None]
    if len(named) != 2 or (args.npu is None) != (args.gpu is None):
        expected = "`trainermon check against TARGET.csv GOLDEN.csv`, or -npu TARGET.csv -gpu GOLDEN.csv"
        raise ConfigError(f"found {len(named)} files of details, expected two: {expected}")
    return named[0], named[1]


def _is_wrong(against: Against, *, strict: bool) -> bool:
    counted = (Status.ERROR.value, *((Status.WARNING.value, UNMATCHED) if strict else ()))
    return any(against.of(status) for status in counted)
