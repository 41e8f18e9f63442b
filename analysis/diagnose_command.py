"""`trainermon diagnose`: what went wrong in a run, for a terminal or as JSON."""

from __future__ import annotations

import argparse
import json
import sys

from trainermon.analysis.diagnose import diagnose
from trainermon.analysis.report import render_text
from trainermon.exporters.query import find_run
from trainermon.monitor.topology import OUTPUT_ROOT
from trainermon.monitor.values import as_plain

SUMMARY = "explain the step on which a run went wrong"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon diagnose`."""
    parser.add_argument(
        "run",
        nargs="?",
        help=f"run directory, or run id under $TRAINERMON_OUTPUT or ./{OUTPUT_ROOT} (default: the newest)",
    )
    parser.add_argument("--step", type=int, help="the step to explain (default: the first non-finite one)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, see analysis/README.md")


def main(args: argparse.Namespace) -> int:
    """Print the diagnosis and return 0, whatever it says.

    Raises:
        QueryError: there is no such run.
        DumpError: nothing is known of the step.
    """
    run_dir = find_run(args.run)
    diagnosis = diagnose(run_dir, step=args.step)
    if args.json:
        sys.stdout.write(json.dumps(as_plain(diagnosis), indent=1) + "\n")
    else:
        sys.stdout.write(render_text(diagnosis, colour=sys.stdout.isatty()))
        for path in sorted(run_dir.glob("reports/post-mortem-*.md")):
            sys.stdout.write(f"see also   {path}: ranks stood still or died\n")
    return 0
