"""`trainermon compare`: two dumps, or all those of two runs, on one screen and as files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from trainermon.analysis.compare.answer.summary import render_text
from trainermon.analysis.compare.comparison import CompareOptions, Mode
from trainermon.analysis.compare.distributed import documents, outcomes
from trainermon.analysis.compare.inputs import read_compare_input
from trainermon.analysis.compare.mappings import matched_by_hand, read_mappings
from trainermon.analysis.compare.merging.splits import parse_sizes
from trainermon.analysis.compare.output.files import FORMATS, OutputDestination
from trainermon.analysis.compare.run_settings import setting_differences
from trainermon.analysis.compare.verdicts import differs
from trainermon.analysis.environment.apart import lines_of
from trainermon.core.errors import ConfigError
from trainermon.core.terminal.escapes import printable
from trainermon.core.terminal.formats import formats_of
from trainermon.core.terminal.manners import has_colour
from trainermon.core.terminal.progress import ProgressBar
from trainermon.core.terminal.statuses import add_exit_code, exit_status
from trainermon.dashboards.graph_notes import read_notes

DEFAULT = ("csv", "json")
DEFAULT_FOLDER = Path("output")
"""Where msprobe's compare writes if it is not told."""

_WITHOUT_FILE = "; without FILE, as built in"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon compare`."""
    parser.add_argument(
        "target", type=Path, nargs="?", help="the dump in question: a dump, or a folder of steps, ranks or a run"
    )
    parser.add_argument("golden", type=Path, nargs="?", help="the dump to hold it against")
    parser.add_argument(
        "-i", "--input", "--input_path", type=Path, help="take both from msprobe's compare.json instead"
    )
    _add_output(parser)
    add_options(parser)
    _add_switches_of_msprobe(parser)
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="compare on the Ray cluster there (default: one process per core of this machine)",
    )
    parser.add_argument("--no-stack", action="store_true", help="leave call stacks out")
    add_exit_code(parser, "more than rounding differs", "not all could be compared")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, see docs/compare.md")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say how two dumps are held against each other."""
    parser.add_argument(
        "--mode",
        choices=[mode.value for mode in Mode],
        help="what to compare (default: tensors, else checksums, else statistics, whichever both have)",
    )
    _add_mappings(parser)
    for side in ("target", "golden"):
        parser.add_argument(
            f"--{side}-split",
            metavar="SIZES",
            help=f"how the {side}'s ranks share the model, as in tp=2,pp=4, where its dumps do not tell",
        )
    parser.add_argument(
        "--fuzzy",
        "-fm",
        "--fuzzy_match",
        action="store_true",
        help="pair also calls whose numbers or prefixes differ",
    )
    parser.add_argument(
        "--baseline", nargs=2, type=Path, metavar="DUMP", help="two dumps of one side: what these differ by is noise"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        "--output_path",
        type=Path,
        nargs="?",
        const=DEFAULT_FOLDER,
        help=f"write files into this folder (default: with -i {DEFAULT_FOLDER}, else print a summary only)",
    )
    parser.add_argument(
        "-f",
        "--format",
        action="extend",
        type=formats_of(FORMATS),
        metavar="FORMAT",
        help=f"what to write, one or several of {', '.join(FORMATS)} (default: {','.join(DEFAULT)})",
    )


def _add_switches_of_msprobe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-hl", "--highlight", "--xlsx", action="store_true", help="write a coloured spreadsheet too")
    parser.add_argument("-c", "--compare_only", action="store_true", help="write no advisor_*.txt")
    for words, why in (
        (("-s", "--stack_mode"), "call stacks are in the files without it"),
        (("-da", "--diff_analyze"), "what is to blame is in every result"),
    ):
        parser.add_argument(*words, action="store_true", help=f"msprobe's, without effect: {why}")


def main(args: argparse.Namespace) -> int:
    """Compare two dumps or folders of dumps (`trainermon compare`), print the summary, and return the exit status.

    It is 0, whatever the comparison says, unless an option asks for a status that tells.

    Raises:
        DumpError: there is nothing to compare.
        ConfigError: it is not said what to compare, a file that is given is wrong, or no Ray cluster answers.
    """
    target, golden = _sides(args)
    options = dataclasses.replace(read_options(args, target), stack=not args.no_stack, ray=args.ray)
    if args.json:
        with ProgressBar("comparing"):
            as_json = list(documents(target, golden, options=options))
        settings = setting_differences(target, golden)
        as_json = [{**document, "settings": settings} for document in as_json]
        sys.stdout.write(json.dumps(as_json, indent=1) + "\n")
        is_different = any(differs(document["rows"]) for document in as_json)
        return exit_status(args, found=is_different, whole=all(document["whole"] for document in as_json))
    destination = _destination(args)
    with ProgressBar("comparing") as progress:
        found = list(outcomes(target, golden, destination, options=options, report=progress))
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines_of(setting_differences(target, golden))))
    sys.stdout.write(render_text(found, colour=has_colour()))
    _list_files([path for outcome in found for path in outcome.files])
    return exit_status(args, found=any(one.differs for one in found), whole=all(one.whole for one in found))


def read_options(args: argparse.Namespace, target: Path) -> CompareOptions:
    """Return what the arguments of `add_options` say, with what was matched by hand beside the dumps at `target`.

    Raises:
        ConfigError: a mapping file, or the sizes of a split, are wrong.
        DumpError: the file with what was matched by hand is damaged.
    """
    mappings = read_mappings(
        api=args.api_mapping,
        cell=args.cell_mapping,
        data=args.data_mapping,
        layer=args.layer_mapping,
        match=args.match,
    )
    return CompareOptions(
        mode=Mode(args.mode) if args.mode else None,
        fuzzy=args.fuzzy,
        baseline=tuple(args.baseline) if args.baseline else None,
        target_sizes=parse_sizes(args.target_split),
        golden_sizes=parse_sizes(args.golden_split),
        mappings=matched_by_hand(mappings, read_notes(target).matches),
    )


def _destination(args: argparse.Namespace) -> OutputDestination | None:
    folder = args.output or (DEFAULT_FOLDER if args.input else None)
    if folder is None:
        return None
    formats = dict.fromkeys((*(args.format or DEFAULT), *(("xlsx",) if args.highlight else ())))
    return OutputDestination(folder=folder, formats=tuple(formats), advisor=not args.compare_only)


def _add_mappings(parser: argparse.ArgumentParser) -> None:
    for short, word, what in (
        ("-am", "api", "functions and the places of their arguments"),
        ("-cm", "cell", "modules with their classes, or parts of such names"),
        ("-dm", "data", "single rows"),
        ("-lm", "layer", "paths below classes of modules"),
    ):
        parser.add_argument(
            short,
            f"--{word}-mapping",
            type=Path,
            nargs="?" if word != "data" else None,  # msprobe's scripts give some without a file
            metavar="FILE",
            help=f"which of the target's names stand for which: {what}{'' if word == 'data' else _WITHOUT_FILE}",
        )
    parser.add_argument(
        "--match",
        type=Path,
        metavar="FILE",
        help="which modules of the target do what which of the golden dump do, one or several together, as q, k and v "
        "a fused one; or what was matched by hand elsewhere, graph_notes.json (that of the target counts as it is)",
    )


def _sides(args: argparse.Namespace) -> tuple[Path, Path]:
    if args.input is not None and args.target is None:
        return read_compare_input(args.input)
    if args.input is not None or args.golden is None:
        raise ConfigError("name a target and a golden dump, or a compare.json with -i")
    return args.target, args.golden


def _list_files(files: list[Path]) -> None:
    for path in files[:4]:
        sys.stdout.write(f"wrote     {path}\n")
    if len(files) > 4:
        sys.stdout.write(f"          and {len(files) - 4} more files in {files[0].parent}\n")
