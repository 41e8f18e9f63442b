"""Rules of Prometheus: one alert for each rule of the agents, and those on what only Prometheus sees.

An agent judges every tensor on every step; Prometheus sees a sample per scrape, of modules rolled up to a budget. So
the agents' rules are not written a second time in PromQL: the expression is the agent's own verdict,
`trainermon_alert_first_step`, with one series for each rule and rank that fires. `for`, `keep` and `inhibits` of the
rule are in it already; it stays for a minute after the end, so that a scrape finds it, and goes with the rank.

`prometheus_rules.yaml` holds the rest as a rule file of Prometheus: what joins several agents, and what is about the
agents themselves. The latter stand for the agents' own `monitor-` rules too, by counters, as the agent's rules may be
what is broken.

Source: Prometheus documentation, alerting rules and recording rules; Prometheus operator, API reference,
`PrometheusRule`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from trainermon.alerts.document import read_document
from trainermon.alerts.rules import RUNBOOK, AlertRule
from trainermon.core.errors import RuleError
from trainermon.core.values import Severity

BASE_RULES = Path(__file__).with_name("prometheus_rules.yaml")
BASE_RUNBOOK = RUNBOOK.with_name("prometheus_runbook.md")  # the two lie together, as their readers find them
CONTROLLER = "http://trainermon-controller:9462"
RUNBOOK_URL = f"{CONTROLLER}/runbook"
"""The controller serves the runbooks, as every agent does."""
JOB = ".*trainermon.*"
"""Regular expression for the label `job` of agents: the scrape configuration's name, or the operator's."""

PREFIX = "Trainermon"
ALERT_STATE = "trainermon_alert_first_step"
_ABOUT_THE_AGENT = "monitor-"
OTHER_ALERT = f"{PREFIX}OtherAlert"
KEEP_FIRING_FOR = "2m"
"""Bridges the scrapes that fail while an agent is restarted; an agent waits before it resolves an alert anyway."""

_WHERE = (
    'on rank {{ $labels.rank }} of run {{ $labels.run }} since step {{ printf "%.0f" $value }}'
    "{{ with $labels.series }}, worst in {{ . }}{{ end }}"
)
# Prometheus reads an alert of an agent from that agent: where it was scraped is where its page is.
_NEXT = {"page": "http://{{ $labels.instance }}/", "command": "trainermon diagnose {{ $labels.run }}"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteSettings:
    """The settings of a site for its Prometheus rules.

    Attributes:
        runbook_url: Where the runbooks can be read: the folder that `runbook.md` and `prometheus_runbook.md` lie in.
        job: Regular expression for the label `job` of agents.
    """

    runbook_url: str = RUNBOOK_URL
    job: str = JOB


def alert_name(rule: str) -> str:
    """Return the name of the Prometheus alert for an agent's rule.

    >>> alert_name("loss-spike")
    'TrainermonLossSpike'
    """
    return PREFIX + "".join(word.capitalize() for word in rule.split("-"))


def heading(alert: str) -> str:
    """Return the heading of a Prometheus alert in its runbook, the opposite of `alert_name`.

    >>> heading("TrainermonScrapeFailing")
    'scrape-failing'
    """
    return re.sub(r"(?<!^)(?=[A-Z])", "-", alert.removeprefix(PREFIX)).lower()


def rule_groups(rules: Sequence[AlertRule], site: SiteSettings | None = None) -> list[dict[str, Any]]:
    """Return the alert rules as groups of Prometheus rules, in mappings that become the YAML of a rule file.

    Args:
        rules: Those of the agents, the `reported` ones too.
        site: What differs from site to site.

    Raises:
        RuleError: A rule has the name of an alert that Prometheus has already.
    """
    site = site or SiteSettings()
    groups: list[dict[str, Any]] = read_document(BASE_RULES)["groups"]
    base = {entry["alert"]: entry for group in groups for entry in group["rules"] if "alert" in entry}
    stood_for = {alert_name(rule.name): rule for rule in rules if _is_in_base(rule, base)}
    for name, alert in base.items():
        alert["expr"] = alert["expr"].replace(JOB, site.job.replace("\\", r"\\"))
        if name in stood_for:
            alert["labels"]["severity"] = _severity(stood_for[name])
        page = RUNBOOK if heading(name).startswith(_ABOUT_THE_AGENT) else BASE_RUNBOOK
        alert["annotations"]["runbook_url"] = _literal(f"{site.runbook_url}/{page.name}#{heading(name)}")
    of_agents = [_agent_alert(rule, site) for rule in rules if alert_name(rule.name) not in stood_for]
    groups.insert(-1, {"name": "trainermon-rules", "rules": [*of_agents, _other_alert(rules, site)]})
    return groups


def rule_file(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return rule groups as the text (YAML) of a file for `rule_files` of prometheus.yml."""
    return _as_yaml({"groups": list(groups)})


def custom_resource(groups: Sequence[Mapping[str, Any]], *, name: str, labels: Mapping[str, str]) -> str:
    """Return rule groups as the text (YAML) of a `PrometheusRule`, a resource of Kubernetes' Prometheus operator.

    `name` is the resource's; the operator chooses by its `labels`.
    """
    return _as_yaml(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "trainermon", **labels}},
            "spec": {"groups": list(groups)},
        }
    )


def _is_in_base(rule: AlertRule, base: Collection[str]) -> bool:
    name = alert_name(rule.name)
    if name == OTHER_ALERT or (name in base and not rule.name.startswith(_ABOUT_THE_AGENT)):
        raise RuleError(f"rule {rule.name!r}: its alert {name} is one of Prometheus' own; rename it")
    return name in base


def _severity(rule: AlertRule) -> str:
    return "critical" if rule.severity is Severity.FATAL else str(rule.severity)


def _literal(text: str) -> str:
    """Return text as a template that gives it: what stands in double braces is otherwise carried out by Prometheus."""
    return text.replace("{{", '{{ "{{" }}')


def _agent_alert(rule: AlertRule, site: SiteSettings) -> dict[str, Any]:
    return {
        "alert": alert_name(rule.name),
        "expr": f'{ALERT_STATE}{{rule="{rule.name}"}}',
        "keep_firing_for": KEEP_FIRING_FOR,
        "labels": {"severity": _severity(rule)},
        "annotations": {
            "summary": f"{rule.name.replace('-', ' ').capitalize()} in run {{{{ $labels.run }}}}",
            "description": f"Rule {rule.name} fires {_WHERE}.{_literal(_meanings().get(rule.runbook, ''))}",
            "runbook_url": _literal(f"{site.runbook_url}/{RUNBOOK.name}#{rule.runbook}"),
            **_NEXT,
        },
    }


def _other_alert(rules: Sequence[AlertRule], site: SiteSettings) -> dict[str, Any]:
    """Return the alert for rules that Prometheus does not know: those of another file, or of a later version."""
    return {
        "alert": OTHER_ALERT,
        "expr": f'{ALERT_STATE}{{rule!~"{"|".join(rule.name for rule in rules)}"}}',
        "keep_firing_for": KEEP_FIRING_FOR,
        "labels": {"severity": "warning"},
        "annotations": {
            "summary": "An agent of run {{ $labels.run }} has an alert that Prometheus has no rule of its own for",
            "description": f"Rule {{{{ $labels.rule }}}} fires {_WHERE}.",
            "runbook_url": _literal(f"{site.runbook_url}/{BASE_RUNBOOK.name}#{heading(OTHER_ALERT)}"),
            **_NEXT,
        },
    }


@lru_cache(maxsize=1)
def _meanings() -> Mapping[str, str]:
    """Return, by heading of the agents' runbook, the first sentence of what the alert means."""
    text = RUNBOOK.read_text(encoding="utf-8")
    found = re.findall(r"^## (\S+)\n+\*\*Means\*\* (.+?\.)(?=\s)", text, re.MULTILINE | re.DOTALL)
    return {name: f" It means {' '.join(meaning.split())}" for name, meaning in found}


def _as_yaml(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1000)
