"""`trainermon tensor show|diff|top|hist|convert`: looks at dumped tensors, one or a folder of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from trainermon.analysis.tensor.arguments import tolerance
from trainermon.analysis.tensor.convert import FORMATS, convert, destination
from trainermon.analysis.tensor.difference import DIFF_HEAD, TensorDiff, diff_row, diff_tensors, render_diff
from trainermon.analysis.tensor.dtypes import DTYPES
from trainermon.analysis.tensor.extremes import largest, largest_differences
from trainermon.analysis.tensor.files import StoredTensor, UnreadTensor
from trainermon.analysis.tensor.histogram import histogram, render_histogram, render_svg
from trainermon.analysis.tensor.index import parse_index
from trainermon.analysis.tensor.profile import profile
from trainermon.analysis.tensor.screen import table
from trainermon.analysis.tensor.selection import TensorSelector, parse_target
from trainermon.analysis.tensor.show import (
    profile_row,
    record_row,
    render_extremes,
    render_profile,
    render_rows,
    unread_row,
)
from trainermon.core.errors import DumpError
from trainermon.core.terminal.escapes import printable
from trainermon.core.terminal.manners import has_colour
from trainermon.core.terminal.progress import ProgressBar, counted
from trainermon.core.terminal.results import write_text
from trainermon.core.terminal.statuses import add_exit_code, exit_status
from trainermon.core.values import as_plain
from trainermon.dump.files.records import TENSOR_FOLDER

_BATCH = 20  # lines of a long list that are aligned and shown together
_TENSOR = "a tensor file, or a folder of them; PATH::NAME of several those whose name contains NAME"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon tensor`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = _action(actions, "show", "what is in a tensor, or a line for each of many")
    show.add_argument("tensor", help=_TENSOR)
    show.add_argument("-i", "--index", help="look at this part only, as in numpy: '3, :, 10:20'")
    show.add_argument("--nonfinite", action="store_true", help="of many, list those with NaN or Inf only")
    diff = _action(actions, "diff", "how far two tensors are apart, and where; folders are paired by file names")
    _add_pair(diff)
    diff.add_argument("--rtol", type=tolerance, default=0.0, help="what may differ relative to the second (default: 0)")
    diff.add_argument("--atol", type=tolerance, default=0.0, help="what may differ besides (default: 0)")
    diff.add_argument("-n", "--number", type=_positive, default=5, help="how many positions to list (default: 5)")
    add_exit_code(diff, "a tensor differs", "none does, and not all could be compared")
    top = _action(actions, "top", "the largest elements, or with a second tensor the largest differences")
    _add_pair(top, optional=True)
    top.add_argument("-n", "--number", type=_positive, default=10, help="how many to list (default: 10)")
    hist = _action(actions, "hist", "how the elements are distributed")
    hist.add_argument("tensor", help=_TENSOR)
    hist.add_argument("-i", "--index", help="look at this part only, as in numpy: '3, :, 10:20'")
    hist.add_argument("--bins", type=_positive, default=20, help="number of bins (default: 20)")
    hist.add_argument("--log", action="store_true", help="a bin for each power of two: shows what a dtype cuts off")
    hist.add_argument("--svg", type=Path, metavar="FILE", help="draw it into this file, too")
    conversion = _action(
        actions, "convert", "write a tensor in another format, or a folder with --to", json_output=False
    )
    conversion.add_argument("tensor", help=_TENSOR)
    conversion.add_argument(
        "output", type=Path, help="a file that ends in .pt, .npy, .bin or .safetensors; with --to a folder"
    )
    conversion.add_argument("--to", choices=FORMATS, help="write every tensor in this format, into the folder OUTPUT")
    conversion.add_argument(
        "--dtype", choices=DTYPES, metavar="DTYPE", help="round to this dtype, and say what changed"
    )
    conversion.add_argument("--force", action="store_true", help="write over files that are there already")


def _action(actions: Any, name: str, summary: str, *, json_output: bool = True) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
    )
    if json_output:
        parser.add_argument("--json", action="store_true", help="print JSON, see analysis/tensor/README.md")
    return parser


def _add_pair(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    parser.add_argument("tensor", help=_TENSOR)
    parser.add_argument("other", nargs="?" if optional else None, help="the one to hold it against")
    parser.add_argument("-i", "--index", help="look at this part only, as in numpy: '3, :, 10:20'")
    parser.add_argument("--other-index", help="the part of the second one, if it is another")


def _positive(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 100000")
    return int(text)


def main(args: argparse.Namespace) -> int:
    """Run one of the subcommands of `trainermon tensor` (show, diff, convert …), print its result, return the status.

    Raises:
        DumpError: there is no such tensor, or a file is damaged.
    """
    args.tensor = parse_target(args.tensor)
    if getattr(args, "other", None) is not None:
        args.other = parse_target(args.other)
    return _ACTIONS[args.action](args) or 0


def _show(args: argparse.Namespace) -> None:
    if args.nonfinite or not any(args.tensor.files()) or args.tensor.is_several():
        _refuse_index(args)
        _print_list(_list_rows(args.tensor, only_bad=args.nonfinite), args)
        return
    tensor = args.tensor.one()
    part = parse_index(args.index, tensor.shape) if args.index else None
    found = profile(tensor, part)
    if args.json:
        _print_json(found)
    else:
        _print(render_profile(tensor, found, part, colour=has_colour()))


def _refuse_index(args: argparse.Namespace) -> None:
    if args.index or getattr(args, "other_index", None):
        raise DumpError(f"an index chooses a part of one tensor, {args.tensor.path} is a list: name one, as PATH::NAME")


def _list_rows(target: TensorSelector, *, only_bad: bool) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the line and the plain form of every tensor; of a dump without tensors, of its statistics."""
    records = [] if any(target.files()) else target.records()
    for name, record in records:
        if record.nonfinite or not only_bad:
            yield record_row(name, record), {**as_plain(record), "label": name, "data_path": None}
    for tensor in () if records else target.opened():
        if isinstance(tensor, UnreadTensor):
            yield unread_row(tensor), {"label": tensor.label, "unread": tensor.reason}
            continue
        found = profile(tensor)
        if found.nans + found.infs or not only_bad:
            yield profile_row(found), as_plain(found)


def _print_list(rows: Iterable[tuple[tuple[str, ...], Any]], args: argparse.Namespace) -> None:
    if args.json:
        sys.stdout.write(json.dumps([plain for _, plain in rows], indent=1) + "\n")
        return
    rows = iter(rows)
    found = False
    while batch := list(islice(rows, _BATCH if sys.stdout.isatty() else None)):
        lines = list(render_rows([row for row, _ in batch], colour=has_colour()))
        _print(lines[1:] if found else lines)
        found = True
    if not found:
        _print(["every tensor is finite"])


def _diff(args: argparse.Namespace) -> int:
    if args.tensor.path.is_dir() != args.other.path.is_dir():
        raise DumpError(f"{args.tensor.path} and {args.other.path}: expected two files or two folders")
    if args.tensor.is_several() or args.other.is_several():
        _refuse_index(args)
        return _diff_all(args)
    diff = _diff_pair(args, *_pair(args))
    if args.json:
        _print_json(diff)
    else:
        _print(render_diff(diff))
    return exit_status(args, found=diff.is_apart, whole=True)


def _pair(args: argparse.Namespace) -> tuple[StoredTensor, StoredTensor]:
    ours, theirs = args.tensor.one(), args.other.one()
    other_index = args.other_index or args.index
    if args.index:
        ours = ours.part(parse_index(args.index, ours.shape).index)
    return ours, theirs.part(parse_index(other_index, theirs.shape).index) if other_index else theirs


def _diff_pair(args: argparse.Namespace, ours: StoredTensor, theirs: StoredTensor) -> TensorDiff:
    return diff_tensors(ours, theirs, rtol=args.rtol, atol=args.atol, number=args.number)


def _diff_all(args: argparse.Namespace) -> int:
    theirs = {_place(tensor, args.other): tensor for tensor in args.other.opened()}
    found: list[tuple[str, TensorDiff]] = []
    rest: dict[str, list[str]] = {"unmatched": [], "shapes": [], "unread": []}
    with ProgressBar("reading tensors"):
        for tensor in counted(args.tensor.opened(), len(theirs), "tensors"):
            place = _place(tensor, args.tensor)
            other = theirs.pop(place, None)
            if other is None:
                rest["unmatched"].append(f"only in {args.tensor.path}: {place}")
            elif isinstance(tensor, UnreadTensor) or isinstance(other, UnreadTensor):
                reasons = {side.reason: None for side in (tensor, other) if isinstance(side, UnreadTensor)}
                rest["unread"].append(f"{place}: {'; '.join(reasons)}")
            elif other.shape != tensor.shape:
                rest["shapes"].append(f"{place}: {list(tensor.shape)} and {list(other.shape)}")
            else:
                found.append((place, _diff_pair(args, tensor, other)))
    rest["unmatched"] += [f"only in {args.other.path}: {place}" for place in theirs]
    differing = [(place, diff) for place, diff in found if diff.is_apart]
    if args.json:
        pairs = [as_plain(diff) for _, diff in found]
        sys.stdout.write(json.dumps({"pairs": pairs, **rest}, indent=1, default=_complex) + "\n")
    else:
        _print_diffs(differing, len(found), rest)
    is_whole = bool(found) and not (rest["unread"] or rest["unmatched"])
    return exit_status(args, found=bool(differing or rest["shapes"]), whole=is_whole)


def _print_diffs(differing: Sequence[tuple[str, TensorDiff]], num_compared: int, rest: dict[str, list[str]]) -> None:
    told = {"unmatched": "on one side only", "shapes": "of other shapes", "unread": "not read"}
    others = ", ".join(f"{len(rest[name]):,} {words}" for name, words in told.items() if rest[name])
    said = f"{len(differing):,} of {num_compared:,} {'compared ' if others else ''}tensors differ"
    if not num_compared:
        said = "nothing is compared: no tensor is in both" + (", and read in both" if rest["unread"] else "")
    _print([said + (f"; {others}" if others else "")])
    if differing:
        _print(table(DIFF_HEAD, [diff_row(diff, place) for place, diff in differing]))
    _print(printable(f"not compared  {text}") for text in rest["unread"])
    _print(map(printable, [*(f"other shape  {text}" for text in rest["shapes"]), *rest["unmatched"]]))


def _place(tensor: StoredTensor | UnreadTensor, target: TensorSelector) -> str:
    if tensor.path == target.path:
        return tensor.name
    place = tensor.path.relative_to(target.path).as_posix().replace(f"{TENSOR_FOLDER}/", "")
    return f"{place}::{tensor.name}" if tensor.name else place


def _top(args: argparse.Namespace) -> None:
    if args.other is None:
        tensor = args.tensor.one()
        part = parse_index(args.index or "", tensor.shape)
        found = largest(tensor.part(part.index), args.number)
    else:
        ours, theirs = _pair(args)
        part = parse_index(args.index or "", args.tensor.one().shape)
        found = largest_differences(ours, theirs, args.number)
    whole = [replace(extreme, position=part.whole(extreme.position)) for extreme in found]
    if args.json:
        _print_json(whole)
    elif found:
        _print(render_extremes(whole, against=args.other is not None))
    else:
        _print(["no element differs" if args.other else "the tensor is empty"])


def _hist(args: argparse.Namespace) -> None:
    tensor = args.tensor.one()
    if args.index:
        tensor = tensor.part(parse_index(args.index, tensor.shape).index)
    found = histogram(tensor, bins=args.bins, by_power=args.log)
    if args.svg:
        write_text(args.svg, render_svg(found))
    if args.json:
        _print_json(found)
    else:
        _print(render_histogram(found))


def _convert(args: argparse.Namespace) -> None:
    if args.to is None:
        _print([_converted(args.tensor.one(), args.output, args)])
        return
    for tensor in args.tensor.opened():
        if isinstance(tensor, UnreadTensor):
            _print([printable(f"left out {tensor.label}: {tensor.reason}")])
            continue
        path = destination(tensor, args.tensor.path, args.output, args.to)
        path.parent.mkdir(parents=True, exist_ok=True)
        _print([_converted(tensor, path, args)])


def _converted(tensor: StoredTensor, path: Path, args: argparse.Namespace) -> str:
    written = convert(tensor, path, dtype=args.dtype, overwrite=args.force)
    words = [f"wrote {written.path}", f"{written.dtype}{list(written.shape)}"]
    if written.dtype != tensor.kind:
        words.append(f"from {tensor.kind}, {f'{written.changed:,} elements changed' if written.changed else 'exactly'}")
    return printable(", ".join(words))


def _print(lines: Iterable[str]) -> None:
    for text in lines:
        sys.stdout.write(text + "\n")


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(as_plain(value), indent=1, default=_complex) + "\n")


def _complex(value: complex) -> list[Any]:
    return [as_plain(value.real), as_plain(value.imag)]


_ACTIONS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "show": _show,
    "diff": _diff,
    "top": _top,
    "hist": _hist,
    "convert": _convert,
}
