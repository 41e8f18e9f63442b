"""`trainermon gradients compare`: where the gradients of two runs part, by their signs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainermon.analysis.gradients.page import render_page
from trainermon.analysis.gradients.runs import open_gradients
from trainermon.analysis.gradients.similarity import SignSimilarity, Unmatched, compare_signs
from trainermon.analysis.gradients.tables import GradientsComparison, as_json, write_csv, write_similarities
from trainermon.analysis.gradients.verdict import faults_of
from trainermon.analysis.tensor.screen import table
from trainermon.core.errors import DumpError
from trainermon.core.private_files import make_private_folder, replace_file
from trainermon.core.terminal.escapes import printable
from trainermon.core.terminal.progress import ProgressBar
from trainermon.core.terminal.statuses import add_exit_code, exit_status
from trainermon.exporters.store.query import path_or_run
from trainermon.hooks.names import chosen

FORMATS = ("csv", "html", "json", "msprobe")
_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon gradients`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    compare = actions.add_parser("compare", help="find the step at which the gradients' signs of two runs part")
    compare.add_argument(
        "run", type=path_or_run, help="a run (directory or name), the dump_path of task grad_probe, or msprobe's"
    )
    compare.add_argument("other", type=path_or_run, help="the one to hold it against")
    compare.add_argument("-o", "--output", type=Path, metavar="DIR", help="write files into this folder")
    compare.add_argument(
        "-f", "--format", default="", help=f"which, with commas: {', '.join(FORMATS)} (default: csv,html,json)"
    )
    compare.add_argument(
        "--params", action="append", default=[], metavar="PATTERN", help="only these: a name, a prefix, or a * pattern"
    )
    compare.add_argument("--json", action="store_true", help="print JSON instead of the screen")
    add_exit_code(compare, "signs part", "they do not, and not all could be compared")


def main(args: argparse.Namespace) -> int:
    """Compare, print and write; return the exit status: 1 if nothing could be compared.

    Raises:
        DumpError: A folder has no signs, a file is damaged, or nothing can be written.
    """
    formats = _formats(args)
    with ProgressBar("reading gradients"):
        comparison = compare_gradients(args.run, args.other, args.params)
    sys.stdout.write(as_json(comparison) if args.json else _screen(comparison))
    if args.output is not None:
        _write(comparison, args.output, formats)
    if not comparison.similarities:
        sys.stderr.write("trainermon gradients: no step has a parameter that both runs have and --params chooses\n")
        return 1
    return exit_status(args, found=bool(comparison.faults), whole=not comparison.unmatched)


def compare_gradients(run: Path, other: Path, params: list[str] | None = None) -> GradientsComparison:
    """Return how similar the signs of two runs' gradients are, step by step, and where they part.

    Args:
        run: A run directory, the folder of a gradient probe, or of msprobe's.
        other: The one to hold it against.
        params: Names, name prefixes or `*` patterns; none: all parameters.

    Raises:
        DumpError: A folder has no signs, or a file is damaged.
    """
    found = list(compare_signs(open_gradients(run), open_gradients(other), lambda name: chosen(name, params or [])))
    similarities = tuple(one for one in found if isinstance(one, SignSimilarity))
    unmatched = tuple(one for one in found if isinstance(one, Unmatched))
    return GradientsComparison(run, other, similarities, unmatched, tuple(faults_of(similarities)))


def _formats(args: argparse.Namespace) -> list[str]:
    wanted = [name for name in args.format.split(",") if name] or ["csv", "html", "json"]
    unknown = [name for name in wanted if name not in FORMATS]
    if unknown:
        raise DumpError(f"--format: found {unknown[0]!r}, expected some of {', '.join(FORMATS)}")
    if args.format and args.output is None:
        raise DumpError("--format: files need a folder; add -o DIR")
    return wanted


def _write(comparison: GradientsComparison, folder: Path, formats: list[str]) -> None:
    try:
        make_private_folder(folder)
        if "csv" in formats:
            write_csv(comparison, folder / "gradients.csv")
        if "json" in formats:
            replace_file(folder / "gradients.json", as_json(comparison).encode())
        if "html" in formats:
            replace_file(folder / "gradients.html", render_page(comparison).encode())
        if "msprobe" in formats:
            write_similarities(comparison, folder)
    except OSError as error:
        raise DumpError(f"{folder}: cannot be written: {error.strerror}; choose another folder with -o") from error


def _screen(comparison: GradientsComparison) -> str:
    lines = [comparison.headline]
    if comparison.faults:
        rows = [
            (
                printable(one.name),
                f"{one.step}",
                "" if one.rank is None else f"{one.rank}",
                f"{one.num_elements:,}",
                f"{one.share:.2%}",
                "" if fault.before is None else f"{fault.before:.2%}",
                one.nonfinite,
            )
            for fault in comparison.faults[:_SHOWN]
            for one in (fault.similarity,)
        ]
        lines += ["", *table(("parameter", "step", "rank", "elements", "same sign", "before", ""), rows)]
        if len(comparison.faults) > _SHOWN:
            lines.append(f"  and {len(comparison.faults) - _SHOWN:,} more")
    if comparison.unmatched:
        first = comparison.unmatched[0]
        lines += [
            "",
            f"{len(comparison.unmatched):,} not compared; first, at step {first.step}: "
            f"{printable(first.name)}: {first.reason}",
        ]
    return "\n".join(lines) + "\n"
