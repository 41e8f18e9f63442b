"""The page of all laws, `docs/laws.md`, from the laws and the rules that watch them."""

from __future__ import annotations

from collections.abc import Iterator

from trainermon.alerts.conditions.criteria import BreaksLaw
from trainermon.alerts.laws.law import Law
from trainermon.alerts.laws.registry import LAWS
from trainermon.alerts.rules import AlertRule, load_rules

_HEAD = """\
# Silent errors: what must hold

<!-- Generated from trainermon/alerts/laws/registry.py by `make sync`. Do not edit. -->

Most errors that cost weeks crash nothing: the loss falls, and the result is wrong. What gives them away is that
something no longer holds that holds in every correct training. Such a *law* relates rows that are collected anyway, so
it needs no reference run, no further read of a tensor and no collective. Each is watched by an alert rule, which can be
acknowledged, silenced or replaced as any other ([alerts](alerts.md)). The second column says what must be collected for
it: without that it says nothing. `examples/monitor_config.json` collects what all of them need.

One more the agent watches: the gradient norm that the framework returns is that of the gradients
([monitor-integrity](../trainermon/alerts/runbook.md#monitor-integrity)). What was tried and is no law stands
[here](../trainermon/alerts/laws/README.md#what-was-tried-and-is-no-law).

| law | needs | alert |
|---|---|---|
"""


def render_laws() -> str:
    """Return the page as Markdown."""
    rule_of = {rule.when.law: rule for rule in load_rules() if isinstance(rule.when, BreaksLaw)}
    rows = (_row(law, rule_of[law.name]) for law in LAWS)
    return _HEAD + "".join(rows) + "".join(part for law in LAWS for part in _section(law, rule_of[law.name]))


def _row(law: Law, rule: AlertRule) -> str:
    return f"| {law.sentence} | {', '.join(f'`{key}`' for key in law.needs)} | [{rule.name}](#{rule.name}) |\n"


def _section(law: Law, rule: AlertRule) -> Iterator[str]:
    yield f"\n## {rule.name}\n\n**{law.sentence}** Law `{law.name}`, severity {rule.severity}, after {rule.for_steps} "
    yield "step.\n" if rule.for_steps == 1 else "steps in a row.\n"
    yield f"\n* **Rounding**: {law.tolerance}.\n* **Not judged, or broken by design**: {'; '.join(law.exceptions)}.\n"
    yield "* **Usual causes**, the most frequent first:\n"
    yield from (f"  {number}. {cause}\n" for number, cause in enumerate(law.causes, start=1))
    yield f"* **Look at** {law.look_at}. [What to do](../trainermon/alerts/runbook.md#{rule.runbook}).\n"
