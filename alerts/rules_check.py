"""`trainermon rules check`: whether a file of alert rules can be meant as written."""

from __future__ import annotations

import argparse
import sys

from trainermon.alerts.rules import load_rules


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.add_argument("rules", nargs="?", help="YAML file (default: the built-in rules)")


def main(arguments: argparse.Namespace) -> int:
    """Print that the rules are right and return 0.

    Raises:
        RuleError: They are not.
    """
    rules = load_rules(arguments.rules)
    sys.stdout.write(f"{arguments.rules or 'built-in rules'}: {len(rules)} rules, no mistake found\n")
    return 0
