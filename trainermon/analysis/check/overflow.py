"""`trainermon check overflow`: why results of a dump are not finite, or stand at the end of their type's range."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainermon.accuracy.calls import RepeatableCall
from trainermon.accuracy.products import as_call
from trainermon.analysis.check.backward import GradientChecker
from trainermon.analysis.check.checking import dumps_below
from trainermon.analysis.check.details import safe_cell
from trainermon.core.errors import ConfigError, DumpError
from trainermon.core.terminal.formats import formats_of
from trainermon.core.terminal.manners import note
from trainermon.core.terminal.progress import ProgressBar, counted
from trainermon.core.terminal.results import write_text, writing_text
from trainermon.core.terminal.statuses import add_exit_code, exit_status
from trainermon.core.values import TextEnum, as_plain
from trainermon.dump.files.reader import DAMAGED_ENTRY, gap_notes, is_spoiled, load_raw, parse_dump
from trainermon.dump.files.records import BACKWARD, FORWARD, EntryRecord, TensorRecord
from trainermon.dump.files.verdicts import NonfiniteCause
from trainermon.replay.dumped_calls import DumpedCall, rebuild
from trainermon.replay.precise import floating, judge

FORMATS = ("csv", "json")
_COLUMNS = ("API name", "Class", "Reason", "Dump")


class OverflowClass(TextEnum):
    """Why a result is not finite, or stands at the end of its type's range.

    Attributes:
        KERNEL: Exactly it fits the type: the device or its kernel is to blame.
        PRECISION: The type cannot hold it, or what is computed on the way; float32 can.
        RANGE: Not even float32 can; float64 can.
        MATHEMATICS: In float64 it is not finite either.
        INHERITED: What it was given was not finite.
        UNKNOWN: The call cannot be run again.
    """

    KERNEL = "kernel"
    PRECISION = "precision"
    RANGE = "range"
    MATHEMATICS = "mathematics"
    INHERITED = "inherited"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallOverflow:
    """A call with a result, or a backward with a gradient, that is not finite, or at the end of its type's range.

    Attributes:
        key: The call's key in the dump.
        cause: Why.
        reason: The same in a sentence.
    """

    key: str
    cause: OverflowClass
    reason: str


def add_overflow(actions: Any) -> None:
    """Add the action to the parsers of `trainermon check`."""
    parser = actions.add_parser(
        "overflow", help="say why results of a dump are NaN or infinite, or at their type's end"
    )
    parser.add_argument("dump", type=Path, nargs="?", help="a dump with tensors, or a folder of steps and ranks")
    parser.add_argument(
        "-api_info", "--api_info_file", type=Path, dest="api_info", metavar="FILE", help="the same (msprobe)"
    )
    parser.add_argument("-j", "--jit_compile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-d", nargs="+", dest="device_ids", help=argparse.SUPPRESS)
    add_exit_code(parser, "a kernel is to blame", "none is, and a call could not be judged or is missing")
    parser.add_argument("-o", "--output", "--out_path", type=Path, metavar="DIR", help="write files into this folder")
    parser.add_argument(
        "-f",
        "--format",
        action="extend",
        type=formats_of(FORMATS),
        metavar="FORMAT",
        help=f"what to write, one or several of {', '.join(FORMATS)} (default: both)",
    )
    parser.add_argument("--json", action="store_true", help="print the classes as JSON")
    parser.set_defaults(run=_run)


def overflows_of(directory: Path) -> list[CallOverflow]:
    """Return the calls of the dump in `directory` whose results or gradients overflowed, in the order of the dump.

    Calls of modules consist of calls of functions, and are left out. Of a backward the gradients count that it gave
    back to what the call takes; where others are added to one, the class is UNKNOWN. So it is of a call whose entry
    cannot be read, last, whether it overflowed or not. Cost: up to four runs of each of those calls.

    Raises:
        DumpError: There is no dump, or it is damaged.
    """
    raw = load_raw(directory)
    damaged: dict[str, str] = {}
    entries = [
        entry
        for entry in parse_dump(directory, raw, damaged).entries
        if not entry.key.startswith("Module.") and not is_spoiled(entry.key, damaged)
    ]
    gradients = GradientChecker(directory, raw.data, [entry for entry in entries if entry.direction == FORWARD])

    def call_of(entry: EntryRecord) -> DumpedCall:
        if entry.direction == FORWARD:
            return rebuild(directory, raw.data, entry)
        return _backward_of(gradients, entry.key.removesuffix(f".{BACKWARD}"))

    chosen = (entry for entry in entries if entry.direction in (FORWARD, BACKWARD))
    found = [_classified(call_of, entry) for entry in chosen if any(map(_may_overflow, entry.outputs))]
    unread = [
        CallOverflow(key=key, cause=OverflowClass.UNKNOWN, reason=reason)
        for key, reason in damaged.items()
        if not key.startswith("Module.")
    ]
    return [*(one for one in found if one is not None), *unread]


def _may_overflow(record: TensorRecord) -> bool:
    dtype = getattr(torch, record.dtype.removeprefix("torch."), None)
    if record.nonfinite:
        return True
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return False
    return max(abs(record.max or 0.0), abs(record.min or 0.0)) >= torch.finfo(dtype).max


def _backward_of(gradients: GradientChecker, stem: str) -> DumpedCall:
    product = gradients.product(stem)
    recorded = gradients.gradients(stem)
    if not recorded:
        raise DumpError("the dump has its gradients only summed with what other calls give back")
    return DumpedCall(stem, as_call(product.backward), list(recorded))


def _classified(call_of: Callable[[EntryRecord], DumpedCall], entry: EntryRecord) -> CallOverflow | None:
    try:
        found = _cause(call_of(entry))
    except DumpError as error:
        found = OverflowClass.UNKNOWN, str(error)
    except Exception as error:  # noqa: BLE001  # a damaged entry, or what a foreign kernel raises
        found = OverflowClass.UNKNOWN, f"it cannot be run again: {(str(error).splitlines() or [''])[0][:160]}"
    return CallOverflow(key=entry.key, cause=found[0], reason=found[1]) if found is not None else None


def _cause(dumped: DumpedCall) -> tuple[OverflowClass, str] | None:
    """Return the class and the reason; None if the result stands at the end of the range because it belongs there."""
    recorded = list(floating(dumped.result))
    if all(bool(tensor.isfinite().all()) for tensor in recorded):
        exact = [tensor for tensor in RepeatableCall(dumped.call).run(torch.float64) if tensor.is_floating_point()]
        marked = [_with_infinities(*pair) for pair in zip(recorded, exact, strict=True)]
        if all(bool(tensor.isfinite().all()) for tensor in marked):
            return None
        found = judge(dumped.call, marked)
        return OverflowClass(found.cause.value), f"it stands at the type's end: {found.reason}"
    found = judge(dumped.call, dumped.result)
    if found.cause is NonfiniteCause.RANGE and not _fits_float64(dumped, recorded):
        return OverflowClass.MATHEMATICS, found.reason
    return OverflowClass(found.cause.value), found.reason


def _with_infinities(given: Tensor, exact: Tensor) -> Tensor:
    """Return a result with an infinity wherever it has the largest number of its type in place of a larger one."""
    largest = torch.finfo(given.dtype).max
    return given.masked_fill((given.abs() >= largest) & (exact.abs() > largest), float("inf"))


def _fits_float64(dumped: DumpedCall, recorded: Sequence[Tensor]) -> bool:
    exact = list(floating(RepeatableCall(dumped.call).run(torch.float64)))
    return any(
        bool((~given.isfinite() & wide.isfinite()).any())
        for given, wide in zip(recorded, exact, strict=False)
        if given.shape == wide.shape
    )


def _run(args: argparse.Namespace) -> int:
    dump = args.dump if args.dump is not None else args.api_info
    if dump is None:
        raise ConfigError("expected a dump: `trainermon check overflow DUMP`")
    if args.jit_compile or args.device_ids:
        sys.stderr.write("trainermon check: -j and -d have no effect: no device is needed\n")
    directories = dumps_below(dump)
    with ProgressBar("reading dumps"):
        found = {
            str(directory): overflows_of(directory) for directory in counted(directories, len(directories), "dumps")
        }
    if args.json:
        sys.stdout.write(_document(found))
    else:
        sys.stdout.writelines(f"{line}\n" for source, calls in found.items() for line in _lines(source, calls))
    if args.output is not None:
        paths = _write_files(found, args.output, args.format or FORMATS)
        note("\n".join(f"trainermon check: wrote {path}" for path in paths))
    causes = {call.cause for calls in found.values() for call in calls}
    is_whole = OverflowClass.UNKNOWN not in causes and not gap_notes(*directories)
    return exit_status(args, found=OverflowClass.KERNEL in causes, whole=is_whole)


def _document(found: Mapping[str, Sequence[CallOverflow]]) -> str:
    documents = [{"source": source, "calls": as_plain(calls)} for source, calls in found.items()]
    return json.dumps(documents, indent=1) + "\n"


def _write_files(found: Mapping[str, Sequence[CallOverflow]], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write the classes as `overflow_check_<time>.csv` and `.json` into `folder`, and return the paths.

    Raises:
        DumpError: The folder cannot be written.
    """
    stem = f"overflow_check_{time.strftime('%Y%m%d%H%M%S')}"
    paths = [folder / f"{stem}.{name}" for name in formats]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            if path.suffix == ".json":
                write_text(path, _document(found))
                continue
            with writing_text(path, encoding="utf-8-sig", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(_COLUMNS)
                for source, calls in found.items():
                    rows.writerows(map(safe_cell, (call.key, call.cause.value, call.reason, source)) for call in calls)
    except OSError as error:
        raise DumpError(f"cannot write into {folder}: {error}") from error
    return paths


def _lines(source: str, calls: Sequence[CallOverflow]) -> Iterator[str]:
    yield source
    known = [call for call in calls if not call.reason.startswith(DAMAGED_ENTRY)]
    limit = f"; {len(calls) - len(known)} could not be read" if len(known) < len(calls) else ""
    limit += "; the dump is not whole" if gap_notes(Path(source)) else ""
    if known:
        counts = Counter(call.cause for call in known)
        parts = ", ".join(f"{counts[cause]} {cause}" for cause in OverflowClass if counts[cause])
        verb = "call" if len(known) == 1 else "calls"
        yield f"  {len(known)} {verb} overflowed: {parts}; first: {known[0].key}{limit}"
    else:
        yield f"  no call overflowed{limit}"
    yield from (f"  {call.cause:<12}{call.key:<44} {call.reason}" for call in calls)
