"""`trainermon rules …`: what can be done with a file of alert rules. Each subcommand is a module of its own.

They are named here and not imported: the replay of a stored run stands a layer above the rules.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping

COMMANDS: Mapping[str, tuple[str, str]] = {
    "list": ("trainermon.alerts.rules_list", "show rules in words, a line each"),
    "check": ("trainermon.alerts.rules_check", "say what is wrong with a file of rules"),
    "test": (
        "trainermon.analysis.diagnosis.rows.rule_replay",
        "say what rules would have said about a run that is stored",
    ),
    "prometheus": ("trainermon.alerts.prometheus.command", "print rules as alerts of Prometheus and Alertmanager"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `trainermon rules` and their arguments."""
    subparsers = parser.add_subparsers(dest="rules_command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        importlib.import_module(module).add_arguments(subparser)


def main(arguments: argparse.Namespace) -> int:
    """Run the subcommand of `trainermon rules` that was given, and return its exit status."""
    status: int = importlib.import_module(COMMANDS[arguments.rules_command][0]).main(arguments)
    return status
