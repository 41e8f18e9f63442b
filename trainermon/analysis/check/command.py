"""`trainermon check`: is what each operation gave right?"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from trainermon.accuracy.judge import Status
from trainermon.accuracy.rules import ChosenRules
from trainermon.analysis.check.against.command import add_against
from trainermon.analysis.check.baselines import add_baseline, add_calibrate, read_baseline
from trainermon.analysis.check.checking import CallsCheck, dumps_below, ranks_without_dump
from trainermon.analysis.check.details import DECIMALS
from trainermon.analysis.check.devices import chosen_devices
from trainermon.analysis.check.dumps import CallChoice, CheckOptions, check_dumps
from trainermon.analysis.check.follow.command import add_follow
from trainermon.analysis.check.inputs.options import add_input_options, chosen_inputs
from trainermon.analysis.check.inputs.references import add_reference_options, chosen_reference
from trainermon.analysis.check.ops import DEFAULT_DTYPES, check_device
from trainermon.analysis.check.overflow import add_overflow
from trainermon.analysis.check.run_options import (
    add_run_options,
    checker_config_of,
    chosen_rules,
    save_wrong,
)
from trainermon.analysis.check.screen import is_cut, render_text
from trainermon.analysis.check.tables import document, failure, write_files
from trainermon.analysis.check.worker_options import (
    add_worker_options,
    chosen_workers,
    opened_journal,
    stamp_to_resume,
)
from trainermon.core.errors import ConfigError, DumpError
from trainermon.core.terminal.formats import formats_of
from trainermon.core.terminal.manners import say_interrupted
from trainermon.core.terminal.progress import ProgressBar
from trainermon.core.terminal.statuses import add_exit_code, exit_status
from trainermon.dump.files.records import BACKWARD, FORWARD

FORMATS = ("csv", "json", "html", "md")
DEFAULT_FORMATS = ("csv", "json")
DTYPES = ("float32", "bfloat16", "float16", "float64", "complex64")
BOTH = "both"
STAGES = (FORWARD, BACKWARD, BOTH)
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon check`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run = actions.add_parser("run", help="judge every call of a dump against float64, forward and backward")
    run.add_argument(
        "dump", type=Path, nargs="?", help="a dump with tensors (level L1 or mix), or a folder of steps and ranks"
    )
    run.add_argument(
        "-api_info", "--api_info_file", type=Path, dest="api_info", metavar="FILE", help="the same (msprobe)"
    )
    run.add_argument(
        "--stage", choices=STAGES, default=BOTH, help="only forwards or only backwards (default: %(default)s)"
    )
    add_run_options(run)
    add_worker_options(run)
    add_input_options(run)
    add_reference_options(run)
    add_baseline(run)
    run.add_argument("-j", "-jit_compile", "--jit_compile", action="store_true", help=argparse.SUPPRESS)
    run.set_defaults(judge=_judge_dumps)
    ops = actions.add_parser("ops", help="judge what a device gives for the operations of torch; needs no dump")
    ops.add_argument("--device", default="cpu", help="the device, cuda:0 (default: %(default)s)")
    ops.add_argument(
        "--dtype",
        action="append",
        choices=DTYPES,
        help="type of the numbers, may be repeated (default: the first three)",
    )
    ops.add_argument(
        "--samples", type=int, default=1, metavar="N", help="calls of each operation and type (default: %(default)s)"
    )
    ops.add_argument(
        "--exhaustive",
        action="store_true",
        help="give operations of one argument all 65 536 numbers of a type of 16 bits, and run no others",
    )
    ops.set_defaults(judge=_judge_device)
    add_against(actions)
    add_calibrate(actions)
    add_overflow(actions)
    add_follow(actions)
    for action, example in ((run, "*.linear.*"), (ops, "linalg.*")):
        _add_common(action, example)


def _other_stage(stage: str) -> list[str]:
    """Return patterns of the keys that a stage leaves out."""
    return [f"*.{other}" for other in STAGES if stage not in (BOTH, other) and other != BOTH]


def _add_common(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument("-o", "--output", "--out_path", type=Path, metavar="DIR", help="write files into this folder")
    parser.add_argument(
        "-f",
        "--format",
        action="extend",
        nargs="?",
        const="",
        type=formats_of(FORMATS),
        metavar=",".join(FORMATS),
        help="what to write into -o DIR (default: csv,json)",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help=f"only calls whose keys match, as {example}"
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="PATTERN", help="leave out calls whose keys match"
    )
    add_exit_code(parser, "a call is wrong", "none is, and not all could be read")
    parser.add_argument("--strict", action="store_true", help="with --exit-code, count warnings as wrong")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON, see docs/check.md")


def main(args: argparse.Namespace) -> int:
    """Judge the calls of a dump or those that a device is given, print the result, and return the exit status.

    What of several dumps could not be read is named in the first line. The status is 130 after an interrupt.

    Raises:
        DumpError: There is no dump, none that can be read, nothing to resume, or a file cannot be written.
        ConfigError: There is no such device, or torch has no operator database here.
    """
    if args.action in ("against", "calibrate", "overflow", "follow"):
        return int(args.run(args))
    if args.format == [] and args.action == "run":  # msprobe's `-f` takes no value
        args.unique = True
    if args.format and args.output is None:
        raise ConfigError("-f says what to write: expected -o DIR with it")
    args.journal = None
    try:
        return _check(args)
    except KeyboardInterrupt:
        say_interrupted("check", "; --resume goes on" if args.journal is not None else "")
        return INTERRUPTED
    finally:
        if args.journal is not None:
            args.journal.close()


def _check(args: argparse.Namespace) -> int:
    with ProgressBar("reading dumps" if args.action == "run" else "reading the operator database") as progress:
        checks, unread = args.judge(args, progress)
    if args.json:
        documents = [*map(document, checks), *(failure(*one) for one in unread.items())]
        sys.stdout.write(json.dumps(documents, indent=1) + "\n")
    else:
        sys.stdout.write(render_text(checks, unread))
    _write(checks, args)
    is_wrong = _is_wrong(checks, strict=args.strict)
    if args.exit_code and not is_wrong and all(call.status is Status.SKIP for one in checks for call in one.calls):
        sys.stderr.write("trainermon check: --exit-code: no call was judged\n")
        return 1
    return exit_status(
        args, found=is_wrong, whole=not unread and not any(one.num_unread or is_cut(one) for one in checks)
    )


def _judge_dumps(args: argparse.Namespace, progress: ProgressBar) -> tuple[list[CallsCheck], dict[Path, str]]:
    """Return the verdicts on each dump, and why others could not be read, by their folders."""
    args.dump = args.api_info if args.dump is None else args.dump
    if args.dump is None:
        raise ConfigError("expected a dump: `trainermon check run DUMP`")
    devices = chosen_devices(args.device, args.device_ids)
    if args.jit_compile or (args.device_ids and not devices):
        sys.stderr.write(
            "trainermon check: -j and -d have no effect: no device is needed, its results are in the dump\n"
        )
    args.checker = checker_config_of(args)
    baseline = read_baseline(args.baseline) if args.baseline is not None else None
    stamp = stamp_to_resume(args)
    paths = dumps_below(args.dump)
    options = CheckOptions(
        choice=CallChoice(tuple(args.only), (*args.skip, *_other_stage(args.stage)), args.checker),
        unique=args.unique,
        rules=chosen_rules(args, args.checker),
        max_elements=args.max_elements,
        workers=chosen_workers(args, len(devices)),
        devices=devices,
        inputs=chosen_inputs(args, devices, paths),
        reference=chosen_reference(args, devices),
    )
    args.journal = opened_journal(args, options.about(args.dump, paths), stamp)

    unread = {lone.place.directory: lone.why for lone in ranks_without_dump(args.dump, paths)}

    def complain(directory: Path, error: DumpError) -> None:
        if len(paths) == 1:
            raise error
        unread[directory] = str(error)

    checks = list(check_dumps(paths, options, journal=args.journal, complain=complain, report=progress))
    if not checks:
        raise DumpError(f"none of {len(paths)} dumps could be read; the first: {unread[paths[0]]}")
    return [baseline.applied(check) for check in checks] if baseline else checks, unread


def _judge_device(args: argparse.Namespace, progress: ProgressBar) -> tuple[list[CallsCheck], dict[Path, str]]:
    if args.samples < 1:
        raise ConfigError(f"--samples: found {args.samples}, expected 1 or more")
    dtypes = [getattr(torch, name) for name in args.dtype] if args.dtype else DEFAULT_DTYPES
    check = check_device(
        args.device,
        dtypes=dtypes,
        samples=None if args.exhaustive else args.samples,
        wanted=CallChoice(tuple(args.only), tuple(args.skip)),
        rules=ChosenRules() if args.output is not None or args.json else None,
        report=progress,
    )
    return [check], {}


def _write(checks: Sequence[CallsCheck], args: argparse.Namespace) -> None:
    stamp = args.journal.stamp if args.journal is not None else time.strftime("%Y%m%d%H%M%S")
    is_run = args.action == "run"
    for check in checks:
        below = Path(check.source).relative_to(args.dump) if is_run and args.dump.is_dir() else Path()
        if is_run:
            save_wrong(check, args, args.checker, f"ut_error_data{stamp}" / below)
        if args.output is not None:
            decimals = args.checker.precision if is_run else DECIMALS
            for path in write_files(check, args.output / below, args.format or DEFAULT_FORMATS, stamp, decimals):
                if not args.json:
                    sys.stdout.write(f"wrote {path}\n")
    if args.journal is not None:
        args.journal.remove()


def _is_wrong(checks: Sequence[CallsCheck], *, strict: bool) -> bool:
    counted = (Status.ERROR, Status.WARNING) if strict else (Status.ERROR,)
    return any(check.of(status) for check in checks for status in counted)
