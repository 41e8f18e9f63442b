"""The command line. Each subcommand is a module of its own; only the one that is asked for is imported."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import trainermon
from trainermon.core.errors import TrainermonError

COMMANDS = {
    "run": (
        "trainermon.agent.lifecycle.launch",
        "run a training command with an agent, and wait until every record is stored",
    ),
    "query": ("trainermon.exporters.store.query", "query a run's statistics with SQL, during or after the run"),
    "diagnose": ("trainermon.analysis.diagnosis.command", "find the first bad module of a step, and explain it"),
    "replay": ("trainermon.analysis.diagnosis.replay_command", "re-run a step that was saved to disk, in this process"),
    "compare": ("trainermon.analysis.compare.command", "compare two dumps, and report the operation at fault"),
    "graph": ("trainermon.analysis.graph.command", "show the calls of a dump as a tree, and where it goes wrong"),
    "source": ("trainermon.analysis.source.command", "show which lines of code made the calls that go wrong"),
    "check": ("trainermon.analysis.check.command", "judge the operations of a dump, or of a device, against float64"),
    "script": ("trainermon.analysis.script.command", "write a script that reproduces one recorded call"),
    "env": ("trainermon.analysis.environment.command", "collect and compare what trainings run on and with"),
    "restore": ("trainermon.dump.files.restore", "finish dump files left behind by a killed process"),
    "gradients": ("trainermon.analysis.gradients.command", "compare the signs of two runs' gradients"),
    "tensor": ("trainermon.analysis.tensor.command", "inspect dumped tensors: show, diff, top, hist, convert"),
    "checkpoint": ("trainermon.analysis.checkpoint.command", "inspect, verify or compare checkpoints of any format"),
    "anomalies": ("trainermon.msprobe.anomaly_order", "list the anomalies of all ranks in training order"),
    "rules": ("trainermon.alerts.rules_command", "list, check or test alert rules"),
    "dashboards": ("trainermon.dashboards.command", "install the dashboards in Grafana, or write them to files"),
    "export": ("trainermon.exporters.export_command", "write a stored run to InfluxDB, csv or TensorBoard"),
    "convert": ("trainermon.msprobe.convert", "convert csv files to TensorBoard event files or a database"),
    "node": (
        "trainermon.agent.lifecycle.service",
        "serve as the agent of every run on this node (containers, systemd, Slurm)",
    ),
    "agent": ("trainermon.agent.daemon", "run the agent of one run on this node (usually started for you)"),
    "controller": ("trainermon.agent.controller.command", "show a job of several nodes, and send orders to its agents"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 1 refused or failed, 2 wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="trainermon", description="Watches distributed PyTorch training from the inside."
    )
    parser.add_argument("--version", action="version", version=f"trainermon {trainermon.__version__}")
    asked_for = next((word for word in words if not word.startswith("-")), None)  # not also the `compare` of others
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for name, (module_name, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == asked_for:
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
