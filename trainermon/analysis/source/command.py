"""`trainermon source`: the lines of code whose calls go wrong, and every line of a file with what its calls did."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from trainermon.analysis.compare.command import add_options, read_options
from trainermon.analysis.source.lines import LineCalls, by_gravity
from trainermon.analysis.source.page import render_page
from trainermon.analysis.source.report import SourceReport, read_report
from trainermon.analysis.source.screen import render
from trainermon.core.errors import DumpError
from trainermon.core.private_files import replace_file
from trainermon.core.terminal.manners import note
from trainermon.core.terminal.progress import ProgressBar
from trainermon.core.terminal.statuses import add_exit_code, exit_status

SCHEMA = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon source`."""
    parser.add_argument("path", type=Path, help="a dump, or a folder of steps, ranks or a run; ours or msprobe's")
    parser.add_argument("golden", type=Path, nargs="?", help="the dump to hold it against, taken to be right")
    parser.add_argument(
        "-l", "--lines", metavar="FILE[:LINE]", help="show every line of this file that was kept, or those around LINE"
    )
    parser.add_argument("--step", type=int, help="only this step")
    parser.add_argument("--rank", type=int, help="only this rank")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.html", help="write one page that needs nothing else")
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the screen, see docs/source.md")
    add_exit_code(parser, "a line is at fault", "not all could be judged")


def main(args: argparse.Namespace) -> int:
    """Print the lines at fault, or all lines of a file; return the exit status.

    Raises:
        DumpError: There is no dump, it is damaged, or no call was made in the file that was asked for.
    """
    if args.output is not None and args.output.suffix.lower() not in (".html", ".htm"):
        raise DumpError(f"{args.output} cannot be written: expected a name that ends in .html; choose another with -o")
    with ProgressBar("reading dumps"):
        options = read_options(args, args.path)
        report = read_report(args.path, args.golden, step=args.step, rank=args.rank, options=options)
    if args.json:
        sys.stdout.write(json.dumps(as_document(report), indent=1) + "\n")
    else:
        sys.stdout.write(render(report, args.lines))
    if args.output is not None:
        try:
            replace_file(args.output, render_page(report).encode())
        except OSError as error:
            raise DumpError(f"cannot write {args.output}: {error.strerror}; choose another file with -o") from error
        note(f"wrote {args.output}")
    return exit_status(args, found=bool(by_gravity(report.lines)), whole=report.whole)


def as_document(report: SourceReport) -> dict[str, Any]:
    """Return what `trainermon source --json` prints, see docs/source.md."""
    return {
        "schema": SCHEMA,
        "sentence": report.sentence,
        "lines": [_line(line) for line in report.lines],
        "different_code": [{"file": one.file, "diff": list(one.lines)} for one in report.differences],
    }


def _line(line: LineCalls) -> dict[str, Any]:
    return {
        "file": line.file,
        "line": line.line,
        "function": line.function,
        "code": line.code,
        "forwards": line.forwards,
        "backwards": line.backwards,
        "verdict": line.verdict.name.lower(),
        "error": line.error if math.isfinite(line.error) else None,
        "nonfinite": line.nonfinite,
        "messages": [{"key": one.key, "module": one.module, "message": one.text} for one in line.messages],
    }
