"""Writes the files of the chart that are made elsewhere: alert rules by the generator, dashboards as they are.

The rules stand with placeholders, which the chart's templates replace: `RUNBOOK_URL`, `JOB` (a regular expression), and
in the alerts that compare one number, `THRESHOLD`, with the number beside.
"""

from __future__ import annotations

import json
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
README, VALUES = FILES.with_name("README.md"), FILES.with_name("values.yaml")
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
HEAD = "# Generated from trainermon/alerts/ by `make sync`. Do not edit.\n"

_COMPARISON = re.compile(r"[<>]=?|[=!]=(?!~)")
_LIMIT = re.compile(r"([<>]=?) (\d+(?:\.\d+)?)$")


def render_rules() -> str:
    """Return the rule groups with placeholders, as YAML."""
    groups = rule_groups(load_rules(), SiteSettings(runbook_url="RUNBOOK_URL", job="JOB"))
    for group in groups:
        group["rules"] = [_with_threshold(rule) if "alert" in rule else rule for rule in group["rules"]]
    return HEAD + yaml.safe_dump({"groups": groups}, sort_keys=False, allow_unicode=True, width=1000)


def render_values() -> str:
    """Return the chart's README with the table of its values, by the comments in values.yaml."""
    text = README.read_text(encoding="utf-8")
    rows = "".join(f"| `{path}` | `{default}` | {meaning} |\n" for path, default, meaning in _documented_values())
    table = f"{BEGIN}\n| value | default | meaning |\n|---|---|---|\n{rows}{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: table, text, flags=re.DOTALL)


def _documented_values() -> Iterator[tuple[str, str, str]]:
    """Yield path, default and meaning of each value that is no mapping of values of its own, in the file's order."""
    source = VALUES.read_text(encoding="utf-8")
    defaults = yaml.safe_load(source)
    path: list[str] = []
    said: list[str] = []
    for line in source.splitlines():
        comment, key = re.match(r" *# ?(.*)", line), re.match(r"( *)([\w.-]+):", line)
        if comment:
            said = [comment[1].removeprefix("-- ")] if comment[1].startswith("-- ") else [*said, comment[1]]
        elif key:
            path[len(key[1]) // 2 :] = [key[2]]
            value: Any = defaults
            for name in path:
                value = value[name]
            is_group = isinstance(value, dict) and value and line.rstrip().endswith(":")
            if not is_group:
                yield ".".join(path), json.dumps(value, separators=(", ", ": ")), _cell(" ".join(said))
            said = []
        else:
            said = []


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def dashboards() -> Iterator[tuple[Path, str]]:
    """Yield the place in the chart, relative to its files, and the text of every generated dashboard."""
    for path in sorted(DASHBOARDS.rglob("*.json")):
        source = "influxdb" if "influx" in str(path.relative_to(DASHBOARDS)) else "prometheus"
        yield Path("dashboards") / source / path.name, path.read_text(encoding="utf-8")


def write() -> None:
    """Replace the generated files of the chart; a dashboard that is no more goes."""
    FILES.mkdir(exist_ok=True)
    README.write_text(render_values(), encoding="utf-8")
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
