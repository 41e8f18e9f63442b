"""`trainermon checkpoint show|verify|compare`: what is in a checkpoint, whether it is whole, how two differ."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from trainermon.analysis.checkpoint.comparison import (
    MOST_RTOL,
    PRECISIONS,
    RTOL,
    CheckpointOptions,
    compare_checkpoints,
)
from trainermon.analysis.checkpoint.inspection import CheckedTensor, check_tensors
from trainermon.analysis.checkpoint.names import SCHEMES
from trainermon.analysis.checkpoint.opening import is_recognized, open_checkpoint, open_in_part
from trainermon.analysis.checkpoint.output import FORMATS, as_document, write_files
from trainermon.analysis.checkpoint.pieces import Checkpoint
from trainermon.analysis.checkpoint.record_sums import verify_sums
from trainermon.analysis.checkpoint.screen import render_checkpoint, render_comparison, render_tensors
from trainermon.analysis.checkpoint.verdicts import SAME, CheckpointComparison, WeightVerdict
from trainermon.analysis.tensor.arguments import tolerance
from trainermon.analysis.tensor.screen import line
from trainermon.core.documents import read_document
from trainermon.core.errors import CheckpointError, ConfigError
from trainermon.core.terminal.escapes import printable
from trainermon.core.terminal.manners import has_colour
from trainermon.core.terminal.progress import ProgressBar
from trainermon.core.terminal.statuses import FOUND, UNKNOWN, add_exit_code, exit_status
from trainermon.core.values import as_plain

DEFAULT = ("json", "csv", "html")
_PATH = "a checkpoint: its file, its folder, or the folder of a run, of which the newest step is taken"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon checkpoint`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = _action(actions, "show", "what is in a checkpoint: format, split, tensors, norms, NaN and Inf")
    show.add_argument("path", help=_PATH)
    show.add_argument("name", nargs="?", default="", help="only tensors in whose name this is found")
    verify = _action(
        actions,
        "verify",
        f"whether a checkpoint is whole, as written, and its replicas equal; ends with status "
        f"{FOUND} if not, {UNKNOWN} if not all is read",
    )
    verify.add_argument("path", help=_PATH)
    compare = _action(actions, "compare", "how two checkpoints differ, whatever their formats and splits")
    compare.add_argument("first", help=f"{_PATH}; or BASE+ADAPTER, a base with a LoRA adapter merged into it")
    compare.add_argument("second", help="the one to hold it against")
    _add_compare(compare)


def _action(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
    )
    parser.add_argument("--json", action="store_true", help="print JSON, see docs/checkpoints.md")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="threads (default: one per core)")
    return parser


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="write files into this folder")
    parser.add_argument(
        "-f",
        "--format",
        metavar="FORMAT",
        help=f"what to write, one or several of {', '.join(FORMATS)} (default: {','.join(DEFAULT)})",
    )
    parser.add_argument(
        "--names",
        default="megatron",
        metavar="SCHEME",
        help="to which names those are translated that differ: megatron (default) or hf; or a file of JSON or YAML that"
        " gives names of the first for names of the second",
    )
    parser.add_argument("--match", metavar="RE", help="compare only tensors in whose name this is found")
    parser.add_argument("--weights-only", action="store_true", help="leave out all that is not the model's")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="model",
        help="which weights: as the model has them (default), or the optimizer's copy in float32",
    )
    parser.add_argument(
        "--rtol",
        type=tolerance,
        default=RTOL,
        metavar="X",
        help=f"up to which relative distance two tensors are close (default: {RTOL:g}, at most {MOST_RTOL:g} counts)",
    )
    add_exit_code(parser, "more than rounding differs", "not all could be compared")


def main(args: argparse.Namespace) -> int:
    """Run one of `trainermon checkpoint show`, `verify`, `compare`, print its result, and return the exit status.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ConfigError: an argument is wrong.
    """
    return _ACTIONS[args.action](args)


def _show(args: argparse.Namespace) -> int:
    with ProgressBar("opening the checkpoint"):
        checkpoint = open_checkpoint(args.path)
        found = check_tensors(checkpoint, args.name, jobs=args.jobs)
    if not found:
        raise CheckpointError(f"{args.path} has no tensor in whose name {args.name!r} is found")
    if args.json:
        document = {"path": str(checkpoint.path), "format": checkpoint.format, "step": checkpoint.step}
        split = {"layout": dict(checkpoint.layout), "notes": list(checkpoint.all_notes())}
        _print_json({**document, **split, "tensors": [as_plain(tensor) for tensor in found]})
    elif args.name:
        _print(render_tensors(found))
    else:
        _print(render_checkpoint(checkpoint, _by_kind(found)))
    return 0


def _by_kind(tensors: list[CheckedTensor]) -> dict[str, list[CheckedTensor]]:
    kinds: dict[str, list[CheckedTensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.kind, []).append(tensor)
    return kinds


def _verify(args: argparse.Namespace) -> int:
    damaged: list[str] = []
    try:
        with ProgressBar("opening the checkpoint"):
            checkpoint = open_in_part(args.path, damaged)
            found, faults = verify_sums(checkpoint, check_tensors(checkpoint, jobs=args.jobs), jobs=args.jobs)
    except CheckpointError as error:
        if not is_recognized(args.path):
            raise
        return _say_damaged(args, [*damaged, str(error)])
    wrong = [tensor for tensor in found if tensor.faults]
    bad = [tensor for tensor in found if tensor.nans or tensor.infs]
    faults = [*damaged, *faults]
    lacking = (*checkpoint.missing, *faults)
    is_whole = not (wrong or lacking)
    status = UNKNOWN if is_whole and checkpoint.unread else 0 if is_whole else FOUND
    if args.json:
        whole = None if is_whole and (checkpoint.unsaid or checkpoint.unread) else is_whole
        said = {"whole": whole, "num_tensors": len(found), "notes": [*checkpoint.all_notes(), *faults]}
        _print_json({**said, "wrong": [as_plain(tensor) for tensor in wrong]})
        return status
    pieces = sum(tensor.num_pieces for tensor in found)
    said_bad = f"; NaN or Inf in {len(bad):,}" if bad else ""
    _print([printable(f"{_wholeness(checkpoint, lacking, len(wrong), len(found))}; {pieces:,} pieces{said_bad}")])
    _print(line("note", printable(note)) for note in (*checkpoint.all_notes(), *faults))
    if wrong or bad:
        _print(render_tensors([*wrong, *(tensor for tensor in bad if not tensor.faults)]))
    return status


def _say_damaged(args: argparse.Namespace, faults: Sequence[str]) -> int:
    """Say that a checkpoint is not whole, as a file without which the others cannot be read is damaged."""
    if args.json:
        _print_json({"whole": False, "num_tensors": 0, "notes": list(faults), "wrong": []})
    else:
        _print([printable(f"not whole: {faults[0]}; no tensor was verified")])
        _print(line("note", printable(note)) for note in faults[1:])
    return FOUND


def _wholeness(checkpoint: Checkpoint, lacking: Sequence[str], num_wrong: int, num_tensors: int) -> str:
    damaged = f"{num_wrong:,} of {num_tensors:,} tensors are damaged"
    if lacking:
        held = damaged if num_wrong else f"{num_tensors:,} tensors are there"
        return f"not whole: {lacking[0]}; {held}"
    if num_wrong:
        return damaged
    limit = " as far as it is read" if checkpoint.unread else " as far as it says" if checkpoint.unsaid else ""
    return f"whole{limit}: {num_tensors:,} tensors"


def _compare(args: argparse.Namespace) -> int:
    formats = tuple((args.format or ",".join(DEFAULT)).split(","))
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise ConfigError(f"-f {unknown[0]!r} is no format: expected some of {', '.join(FORMATS)}")
    with ProgressBar("opening the checkpoints") as bar:
        found = compare_checkpoints(
            args.first,
            args.second,
            options=_options(args),
            report=lambda done, total: bar(done, total, "tensors"),
        )
    if args.json:
        _print_json(as_document(found))
    else:
        _print(render_comparison(found, colour=has_colour()))
    if args.output is not None:
        for path in write_files(found, args.output, formats):
            print(f"  wrote      {path}", file=sys.stderr if args.json else sys.stdout)
    return _status(args, found)


def _options(args: argparse.Namespace) -> CheckpointOptions:
    try:
        match = re.compile(args.match) if args.match else None
    except re.error as error:
        raise ConfigError(f"--match {args.match!r} is no regular expression: {error}") from error
    is_scheme = args.names in SCHEMES
    return CheckpointOptions(
        rtol=args.rtol,
        scheme=args.names if is_scheme else "megatron",
        renamed={} if is_scheme else _read_names(Path(args.names)),
        match=match,
        weights_only=args.weights_only,
        precision=args.precision,
        jobs=args.jobs,
    )


def _read_names(path: Path) -> dict[str, str]:
    """Return names of the first by names of the second; the file has it the way one reads it: first, then second."""
    if not path.is_file():
        raise ConfigError(f"--names {str(path)!r} is neither {' nor '.join(SCHEMES)} nor a file")
    found = read_document(path)
    if not isinstance(found, dict) or not all(isinstance(name, str) for pair in found.items() for name in pair):
        raise ConfigError(f"{path}: expected names of the second checkpoint by names of the first")
    return {theirs: ours for ours, theirs in found.items()}


def _status(args: argparse.Namespace, found: CheckpointComparison) -> int:
    counts = found.counts()
    unclear = counts.pop(WeightVerdict.DAMAGED, 0)
    compared = sum(counts.values()) - counts[WeightVerdict.UNMATCHED]
    has_other_arrays = any(value.is_array for value in found.changed_values())
    is_wrong = has_other_arrays or any(number for verdict, number in counts.items() if verdict not in SAME)
    unclear += sum(side.num_unread + sum(side.alone.values()) for side in (found.ours, found.theirs))
    return exit_status(args, found=bool(compared) and is_wrong, whole=bool(compared) and not unclear)


def _print(lines: Iterable[str]) -> None:
    for text in lines:
        sys.stdout.write(text + "\n")


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {"show": _show, "verify": _verify, "compare": _compare}
