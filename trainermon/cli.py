"""The command line. Each subcommand is a module of its own; only the one that is asked for is imported."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import trainermon
from trainermon.monitor.errors import TrainermonError

COMMANDS = {
    "run": ("trainermon.agent.launch", "run a training command, with its agent, to the last stored record"),
    "query": ("trainermon.exporters.query", "ask a run's statistics in SQL, while it is on or after it"),
    "diagnose": ("trainermon.analysis.diagnose_command", "name the first bad module of a step, and explain it"),
    "replay": ("trainermon.analysis.replay_command", "run a step that was kept on disk once more, in this process"),
    "compare": ("trainermon.analysis.compare.command", "hold a dump against another, and name what is to blame"),
    "restore": ("trainermon.dump.restore", "put the files of dumps in place whose process was killed"),
    "tensor": ("trainermon.analysis.tensor.command", "look at dumped tensors: show, diff, top, hist, convert"),
    "anomalies": ("trainermon.alerts.anomaly_order", "put the single anomalies of all ranks in the order of training"),
    "rules": ("trainermon.alerts.rules_command", "list, check or try out alert rules"),
    "dashboards": ("trainermon.dashboards.command", "bring the Grafana dashboards into a Grafana, or write them"),
    "export": ("trainermon.exporters.export_command", "write a run as csv, for TensorBoard or InfluxDB, or what is missing there"),
    "convert": ("trainermon.exporters.convert", "turn csv files into event files for TensorBoard, or into a database"),
    "node": ("trainermon.agent.service", "be the agent of every run on this node, for containers, systemd and Slurm"),
    "agent": ("trainermon.agent.daemon", "follow the journals of this node's ranks (usually started for you)"),
    "controller": ("trainermon.agent.controller.command", "show a whole job, and bring escalations to all its agents"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 1 refused or failed, 2 wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="trainermon", description="Watches distributed PyTorch training from the inside."
    )
    parser.add_argument("--version", action="version", version=f"trainermon {trainermon.__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for name, (module_name, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name in words:
            importlib.import_module(module_name).add_arguments(subparser)
    arguments = parser.parse_args(words)
    module = importlib.import_module(COMMANDS[arguments.subcommand][0])
    try:
        status: int = module.main(arguments)
        sys.stdout.flush()
    except TrainermonError as error:
        print(f"trainermon {arguments.subcommand}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head`: what is still buffered cannot be written either, and Python would say so
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status
