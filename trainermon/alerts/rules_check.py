"""`trainermon rules check`: whether a file of alert rules can be meant as written."""

from __future__ import annotations

import argparse
import json
import sys

from trainermon.alerts.rules import read_rules


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand of `trainermon rules` that checks a file."""
    parser.add_argument("rules", nargs="?", help="YAML file (default: the built-in rules)")
    parser.add_argument("--json", action="store_true", help="print the mistakes as JSON, for another program")


def main(arguments: argparse.Namespace) -> int:
    """Check a file of alert rules, print every mistake; return 0 if there is none, else 1.

    Raises:
        RuleError: The file cannot be read, or is no list of rules.
    """
    rules, mistakes = read_rules(arguments.rules)
    if arguments.json:
        told = [{"where": mistake.where, "path": mistake.path, "message": str(mistake)} for mistake in mistakes]
        sys.stdout.write(json.dumps({"rules": len(rules), "mistakes": told}, indent=1) + "\n")
        return 1 if mistakes else 0
    for mistake in mistakes:
        sys.stdout.write(f"{mistake}\n")
    if mistakes:
        mistaken = len({mistake.where or str(mistake) for mistake in mistakes})
        sys.stdout.write(f"{mistaken} of {len(rules) + mistaken} rules cannot be used\n")
        return 1
    number = "1 rule" if len(rules) == 1 else f"{len(rules)} rules"
    sys.stdout.write(f"{arguments.rules or 'built-in rules'}: {number}, no mistake found\n")
    return 0
