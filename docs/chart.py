"""Writes the files of the chart that are made elsewhere: alert rules by the generator, dashboards as they are.

The rules stand with placeholders, which the chart's templates replace: `RUNBOOK_URL`, `JOB` (a regular expression), and
in the alerts that compare one number, `THRESHOLD`, with the number beside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainermon.alerts.prometheus.rules import SiteSettings, rule_groups
from trainermon.alerts.rules import load_rules

ROOT = Path(__file__).parents[1]
FILES = ROOT / "helm" / "trainermon" / "files"
DASHBOARDS = ROOT / "trainermon" / "dashboards" / "grafana"
HEAD = "# Generated from trainermon/alerts/ by `make sync`. Do not edit.\n"

_COMPARISON = re.compile(r"[<>]=?|[=!]=(?!~)")
_LIMIT = re.compile(r"([<>]=?) (\d+(?:\.\d+)?)$")


def render_rules() -> str:
    """Return the rule groups with placeholders, as YAML."""
    groups = rule_groups(load_rules(), SiteSettings(runbook_url="RUNBOOK_URL", job="JOB"))
    for group in groups:
        group["rules"] = [_with_threshold(rule) if "alert" in rule else rule for rule in group["rules"]]
    return HEAD + yaml.safe_dump({"groups": groups}, sort_keys=False, allow_unicode=True, width=1000)


def dashboards() -> Iterator[tuple[Path, str]]:
    """Yield the place in the chart, relative to its files, and the text of every generated dashboard."""
    for path in sorted(DASHBOARDS.rglob("*.json")):
        source = "influxdb" if "influx" in str(path.relative_to(DASHBOARDS)) else "prometheus"
        yield Path("dashboards") / source / path.name, path.read_text(encoding="utf-8")


def write() -> None:
    """Replace the generated files of the chart; a dashboard that is no more goes."""
    FILES.mkdir(exist_ok=True)
    (FILES / "prometheus_rules.yaml").write_text(render_rules(), encoding="utf-8")
    wanted = {FILES / place: text for place, text in dashboards()}
    for path in set(FILES.glob("dashboards/*/*.json")) - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _with_threshold(rule: dict[str, Any]) -> dict[str, Any]:
    """Return the alert with a placeholder for the number, if that is all that it compares with."""
    expression = str(rule["expr"]).strip()
    # A selector's own comparisons, {rule="…"}, are none of the expression.
    if len(_COMPARISON.findall(re.sub(r"\{[^}]*\}", "", expression))) != 1:
        return rule
    limit = _LIMIT.search(expression)
    if limit is None:
        return rule
    changed = {**rule, "expr": f"{expression[: limit.start()]}{limit[1]} THRESHOLD", "threshold": _number(limit[2])}
    return {name: changed[name] for name in ("alert", "expr", "threshold", *changed) if name in changed}


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)
