"""`trainermon rules list`: what rules look at and how urgent they are."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from trainermon.alerts.rules import Rule, load_rules


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.add_argument("rules", nargs="?", help="YAML file (default: the built-in rules)")


def main(arguments: argparse.Namespace) -> int:
    """Print a table and return 0.

    Raises:
        RuleError: The rules are wrong.
    """
    sys.stdout.write("\n".join(_table(load_rules(arguments.rules))) + "\n")
    return 0


def _table(rules: Sequence[Rule]) -> Iterator[str]:
    rows = [("rule", "severity", "on"), *((rule.name, str(rule.severity), _looked_at(rule)) for rule in rules)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, severity, looked_at in rows:
        yield f"{name:<{widths[0]}}  {severity:<{widths[1]}}  {looked_at}"


def _looked_at(rule: Rule) -> str:
    names = "" if rule.on.names == ("*",) else f" {', '.join(rule.on.names)}"
    return f"{rule.on.statistic} of {', '.join(rule.on.kinds)}{names}"
