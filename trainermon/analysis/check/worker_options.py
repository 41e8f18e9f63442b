"""Options of `trainermon check run` about worker processes, and about a check that was interrupted."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainermon.analysis.check.devices import RECORDED
from trainermon.analysis.check.journal import CheckJournal
from trainermon.analysis.check.runner import Workers
from trainermon.core.errors import ConfigError

_DAY_S = 86_400
_RESULT_FILE = re.compile(r"accuracy_checking_result_(\w+)\.csv")


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_judging_options(parser)
    parser.add_argument("--resume", action="store_true", help="go on with the check in -o DIR that was interrupted")
    parser.add_argument("-csv_path", "--result_csv_path", type=Path, dest="csv_path", help=argparse.SUPPRESS)


def add_judging_options(parser: argparse.ArgumentParser) -> None:
    """Add those that say where calls are judged, and run again."""
    parser.add_argument(
        "--jobs",
        "-n",
        "--num_splits",
        type=int,
        metavar="N",
        help="judge in N processes of one thread each (default: in this one)",
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="pass over a call that takes longer than S seconds, in a process"
    )
    parser.add_argument(
        "--max-elements", type=int, metavar="N", help="pass over calls whose tensors have more elements together"
    )
    parser.add_argument(
        "--device",
        default=RECORDED,
        metavar="NAMES",
        help="run each call again there and judge that, too: cpu, cuda:0,cuda:1 or npu:0 (default: %(default)s only)",
    )
    parser.add_argument("-d", nargs="+", dest="device_ids", help=argparse.SUPPRESS)


def chosen_workers(args: argparse.Namespace, num_devices: int = 0) -> Workers | None:
    """Return the worker processes that are asked for, or that so many devices need; None: none.

    Raises:
        ConfigError: A number is too small.
    """
    for name in ("jobs", "max_elements"):
        found = getattr(args, name)
        if found is not None and found < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: found {found}, expected 1 or more")
    if args.timeout is not None and not 0 < args.timeout <= _DAY_S:
        raise ConfigError(f"--timeout: found {args.timeout:g}, expected seconds, more than 0, at most a day")
    if args.jobs is None and args.timeout is None and num_devices < 2:
        return None
    return Workers(args.jobs or max(1, num_devices), args.timeout)


def stamp_to_resume(args: argparse.Namespace) -> str:
    """Return the time stamp of msprobe's `-csv_path`, which then stands for --resume in its folder; "" without it.

    Raises:
        ConfigError: The file is named otherwise than result files are.
    """
    if args.csv_path is None:
        return ""
    found = _RESULT_FILE.fullmatch(args.csv_path.name)
    if found is None:
        raise ConfigError(f"-csv_path: found {args.csv_path.name}, expected accuracy_checking_result_<time>.csv")
    args.output, args.resume = args.csv_path.parent, True
    return found[1]


def opened_journal(args: argparse.Namespace, about: Mapping[str, Any], stamp: str) -> CheckJournal | None:
    """Return the journal in the folder of the results, begun or resumed (that of `stamp`); None without a folder.

    Raises:
        ConfigError: There is no folder to resume in.
        DumpError: There is nothing to resume, or the folder cannot be written.
    """
    if args.output is None:
        if args.resume:
            raise ConfigError("--resume: expected -o DIR, the folder of the check that was interrupted")
        return None
    if args.resume:
        return CheckJournal.resume(args.output, about, stamp)
    return CheckJournal.begin(args.output, time.strftime("%Y%m%d%H%M%S"), about)
