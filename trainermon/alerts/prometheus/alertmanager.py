"""A configuration of Alertmanager to start from: routes and receivers as in `alertmanager.yaml`, and the inhibitions.

Inhibition has two sources. From hang over straggler to slow steps the ladder stands here, because it joins alerts of
agents with those of Prometheus. The rest are the `inhibits` of the rules.

Source: Alertmanager documentation, configuration, `<inhibit_rule>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainermon.alerts.prometheus.rules import CONTROLLER, PREFIX, alert_name
from trainermon.alerts.rules import AlertRule

EXAMPLE = Path(__file__).with_name("alertmanager.yaml")
TOKEN_FILE = "/etc/alertmanager/trainermon-token"  # noqa: S105 - the name of a file

LADDER = (
    ("hang", "rank-dead"),
    ("TrainermonRunStalled",),
    ("TrainermonRankSilent",),
    ("straggler",),
    ("TrainermonThroughputDrop", "throughput-low"),
    ("step-time-slow", "collective-slow"),
)
"""Worst first: while one of a line fires, those of all lines below are not sent for the same run. Rules and alerts."""


def alertmanager_configuration(
    rules: Sequence[AlertRule], *, controller: str = CONTROLLER, token_file: str = TOKEN_FILE
) -> str:
    """Return the text of an alertmanager.yml to start from: how alerts are grouped, held back, and sent on.

    They go to the controller. Which people are told, and what the dead man's switch is, must be filled in.

    Args:
        rules: Those of the agents, the `reported` ones too.
        controller: Base URL of the controller, or in a job on one node of the agent.
        token_file: File from which Alertmanager reads the token that orders need.
    """
    text = EXAMPLE.read_text(encoding="utf-8").replace(CONTROLLER, controller).replace(TOKEN_FILE, token_file)
    inhibitions = {"inhibit_rules": [*_ladder(rules), *_consequences(rules)]}
    return text + yaml.safe_dump(inhibitions, sort_keys=False, width=1000)


def _ladder(rules: Sequence[AlertRule]) -> Iterator[dict[str, Any]]:
    known = {rule.name: alert_name(rule.name) for rule in rules}
    lines = [[known.get(name, name) for name in line if name in known or name.startswith(PREFIX)] for line in LADDER]
    lines = [line for line in lines if line]
    for number, sources in enumerate(lines[:-1], start=1):
        yield _inhibition(sources, [name for line in lines[number:] for name in line])


def _consequences(rules: Sequence[AlertRule]) -> Iterator[dict[str, Any]]:
    sources: dict[tuple[str, ...], list[str]] = {}
    for rule in rules:
        if rule.inhibits:
            sources.setdefault(rule.inhibits, []).append(alert_name(rule.name))
    for inhibited, names in sources.items():
        yield _inhibition(names, [alert_name(name) for name in inhibited])


def _inhibition(sources: Sequence[str], targets: Sequence[str]) -> dict[str, Any]:
    return {
        "source_matchers": [f'alertname =~ "{"|".join(sources)}"'],
        "target_matchers": [f'alertname =~ "{"|".join(targets)}"'],
        "equal": ["run"],
    }
