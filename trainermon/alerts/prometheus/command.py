"""`trainermon rules prometheus`: the same alerts as rules of Prometheus, and a configuration of Alertmanager."""

from __future__ import annotations

import argparse
import re
import sys

from trainermon.alerts.prometheus.alertmanager import TOKEN_FILE, alertmanager_configuration
from trainermon.alerts.prometheus.rules import CONTROLLER, JOB, SiteSettings, custom_resource, rule_file, rule_groups
from trainermon.alerts.rules import load_rules, with_reported
from trainermon.core.errors import RuleError

FORMATS = ("rules", "prometheusrule", "alertmanager")
_HEAD = "# Generated from alerts/ by `make sync`: `trainermon rules prometheus --format {}`. Do not edit.\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand that prints the rules for Prometheus or Alertmanager."""
    parser.add_argument("rules", nargs="?", help="YAML file of the agents' rules (default: the built-in rules)")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="rules",
        help="a rule file, the Kubernetes resource of it, or an example configuration of Alertmanager (default: rules)",
    )
    parser.add_argument(
        "--runbook-url",
        metavar="URL",
        help="where people can read runbook.md and prometheus_runbook.md (default: /runbook of the --controller)",
    )
    parser.add_argument(
        "--job", default=JOB, metavar="REGEX", help="label job of the agents in Prometheus (default: %(default)s)"
    )
    parser.add_argument(
        "--controller",
        default=CONTROLLER,
        metavar="URL",
        help="whom Alertmanager tells of alerts that ask for a dump: the controller, or the agent of a job on one node "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--token-file",
        default=TOKEN_FILE,
        metavar="FILE",
        help="where Alertmanager finds its token (default: %(default)s)",
    )
    parser.add_argument("--name", default="trainermon", help="name of the Kubernetes resource (default: %(default)s)")
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="label of the Kubernetes resource, by which the operator selects it; may be repeated",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the alert rules as files for Prometheus or Alertmanager, as asked for, and return 0.

    Raises:
        RuleError: The rules or an argument are wrong.
    """
    rules = with_reported(load_rules(arguments.rules))
    controller = arguments.controller.rstrip("/")
    if arguments.format == "alertmanager":
        text = alertmanager_configuration(rules, controller=controller, token_file=arguments.token_file)
    else:
        site = SiteSettings(
            runbook_url=(arguments.runbook_url or f"{controller}/runbook").rstrip("/"), job=_checked(arguments.job)
        )
        groups = rule_groups(rules, site)
        labels = dict(map(_label, arguments.label))
        is_file = arguments.format == "rules"
        text = rule_file(groups) if is_file else custom_resource(groups, name=arguments.name, labels=labels)
    sys.stdout.write(text)
    return 0


def default_files() -> dict[str, str]:
    """Return the text of every file in alerts/generated/: the built-in rules in each format."""
    rules = with_reported(load_rules())
    groups = rule_groups(rules)
    texts = {
        "prometheus_rules.yaml": ("rules", rule_file(groups)),
        "prometheusrule.yaml": ("prometheusrule", custom_resource(groups, name="trainermon", labels={})),
        "alertmanager.yaml": ("alertmanager", alertmanager_configuration(rules)),
    }
    return {name: _HEAD.format(given) + text for name, (given, text) in texts.items()}


def _checked(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise RuleError(f"--job: found {pattern!r}, which is no regular expression: {error}") from None
    if '"' in pattern:
        raise RuleError(f"--job: found {pattern!r}, expected a regular expression without quotation marks")
    return pattern


def _label(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise RuleError(f"--label: found {text!r}, expected NAME=VALUE")
    return name, value
