"""`trainermon diagnose`: what went wrong in a run, for a terminal or as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from trainermon.analysis.compare.merging.places import find_places
from trainermon.analysis.diagnosis.against.against import diagnose_against
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import Diagnosis, DiagnosisVerdict
from trainermon.analysis.diagnosis.next_collection import write_configurations
from trainermon.analysis.diagnosis.page.page import render_page
from trainermon.analysis.diagnosis.report import render_text
from trainermon.core.errors import DumpError
from trainermon.core.terminal.manners import has_colour, note
from trainermon.core.terminal.progress import ProgressBar
from trainermon.core.terminal.results import write_text
from trainermon.core.terminal.statuses import add_exit_code, exit_status
from trainermon.core.topology import OUTPUT_ROOT
from trainermon.core.values import as_plain
from trainermon.exporters.store.query import find_run

SUMMARY = "explain the step on which a run went wrong"
_CALM = (DiagnosisVerdict.FINITE, DiagnosisVerdict.EQUAL, DiagnosisVerdict.NO_EVIDENCE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon diagnose`."""
    parser.add_argument(
        "run",
        nargs="?",
        help=f"run directory, or run id under $TRAINERMON_OUTPUT or ./{OUTPUT_ROOT} (default: the newest), or dumps",
    )
    parser.add_argument("--step", type=int, help="the step to explain (default: the first non-finite one)")
    parser.add_argument(
        "--against",
        metavar="REFERENCE",
        type=Path,
        help="find the first difference from this run or these dumps, ours or msprobe's; RUN may be dumps too",
    )
    parser.add_argument(
        "--collect",
        metavar="FOLDER",
        type=Path,
        help="write what to collect next into this folder: config.json for PrecisionDebugger, monitor_config.json",
    )
    add_exit_code(parser, "something was found", "nothing was, and not all could be read or compared")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with plots, values and code into FILE")
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON, see analysis/diagnosis/README.md"
    )


def main(args: argparse.Namespace) -> int:
    """Diagnose a run (`trainermon diagnose`), print the result, and return the exit status.

    It is 0, whatever the diagnosis says, unless an option asks for a status that tells.

    Raises:
        QueryError: there is no such run.
        DumpError: nothing is known of the step, or a file that says what to collect cannot be written.
    """
    with ProgressBar("reading the run"):
        run_dir, diagnosis = _diagnose(args)
    if args.json:
        sys.stdout.write(json.dumps(as_plain(diagnosis), indent=1) + "\n")
    else:
        sys.stdout.write(render_text(diagnosis, colour=has_colour()))
        for path in sorted(run_dir.glob("reports/post-mortem-*.md")):
            sys.stdout.write(f"see also   {path}: ranks stood still or died\n")
    sys.stdout.flush()  # the notes below go to the other stream, and belong behind the report
    if args.html:
        _write_page(args.html, run_dir, diagnosis)
    for path in write_configurations(diagnosis.collect, args.collect) if args.collect else ():
        note(f"wrote {path}")
    is_whole = diagnosis.verdict is not DiagnosisVerdict.NO_EVIDENCE and not diagnosis.unread
    return exit_status(args, found=diagnosis.verdict not in _CALM, whole=is_whole)


def _write_page(path: Path, run_dir: Path, diagnosis: Diagnosis) -> None:
    try:
        write_text(path, render_page(run_dir, diagnosis))
    except OSError as error:
        raise DumpError(f"cannot write {path}: {error}") from error
    note(f"wrote {path}")


def _diagnose(args: argparse.Namespace) -> tuple[Path, Diagnosis]:
    if args.against is None:
        run_dir = _find(args.run)
        return run_dir, diagnose(run_dir, step=args.step)
    run_dir = _find(args.run)
    return run_dir, diagnose_against(run_dir, _find(str(args.against)), step=args.step)


def _find(name: str | None) -> Path:
    """Return the directory of a run, or of dumps."""
    if name is not None and Path(name).is_dir():
        with contextlib.suppress(DumpError):
            find_places(Path(name))
            return Path(name)
    return find_run(name)
