"""`trainermon rules list`: what rules look at, which condition they have, and how urgent they are."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from trainermon.alerts.conditions.criteria import Reported
from trainermon.alerts.extensions import CustomCondition
from trainermon.alerts.rules import AlertRule, load_rules
from trainermon.core.values import as_plain

_HEADINGS = ("rule", "severity", "condition", "for", "looks at")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand of `trainermon rules` that lists the rules."""
    parser.add_argument("rules", nargs="?", help="YAML file (default: the built-in rules)")
    parser.add_argument("--json", action="store_true", help="print the rules as JSON, for another program")


def main(arguments: argparse.Namespace) -> int:
    """Print the alert rules as a table, and return 0.

    Raises:
        RuleError: The rules are wrong.
    """
    rules = load_rules(arguments.rules)
    text = json.dumps([_plain(rule) for rule in rules], indent=1) if arguments.json else "\n".join(_table(rules))
    sys.stdout.write(f"{text}\n")
    return 0


def condition_name(rule: AlertRule) -> str:
    """Return the name of a rule's condition, as it stands in the file.

    >>> from trainermon.alerts.rules import load_rules
    >>> condition_name(load_rules()[0])
    'nonfinite'
    """
    if isinstance(rule.when, CustomCondition):
        return rule.when.name
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(rule.when).__name__).lower()
    return "nonfinite" if name == "non_finite" else name


def _plain(rule: AlertRule) -> dict[str, Any]:
    """Return all that a rule says, its condition under the name that it has in the file."""
    plain: dict[str, Any] = as_plain(rule)
    return {**plain, "when": {condition_name(rule): plain["when"]}}


def _table(rules: Sequence[AlertRule]) -> Iterator[str]:
    rows = [_HEADINGS, *(_row(rule) for rule in rules)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS) - 1)]
    for *cells, last in rows:
        yield "  ".join((*(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)), last))


def _row(rule: AlertRule) -> tuple[str, ...]:
    if isinstance(rule.when, Reported):
        return rule.name, str(rule.severity), "reported", "", "what the agent sees"
    names = "" if rule.on.names == ("*",) else f" {' '.join(rule.on.names)}"
    looks_at = f"{rule.on.statistic} of {', '.join(rule.on.kinds)}{names}"
    return rule.name, str(rule.severity), condition_name(rule), str(rule.for_steps), looks_at
