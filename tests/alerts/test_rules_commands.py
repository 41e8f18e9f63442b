"""The commands `trainermon rules check` and `trainermon rules list`: mistakes in a file, and what rules look at."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from trainermon.alerts import rules_check, rules_list
from trainermon.alerts.rules import load_rules

MINE = """
rules:
  - {name: lost, severity: fatal, on: {kind: [loss, step], names: [a, "b.*"]}, when: {nonfinite: true}, summary: x}
  - {name: far-away, severity: info, on: {kind: loss, statistic: max}, when: {relative_to_mean: {threshold: 1}},
     for: 3, summary: x}
  - {name: told, severity: warning, when: {reported: true}, summary: x}
"""


def write(folder: Path, text: str) -> argparse.Namespace:
    path = folder / "mine.yaml"
    path.write_text(text)
    return argparse.Namespace(rules=str(path))


def test_a_row_says_what_is_looked_at_and_by_which_condition(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rules_list.main(write(tmp_path, MINE)) == 0

    assert capsys.readouterr().out.splitlines() == [
        "rule      severity  condition         for  looks at",
        "lost      fatal     nonfinite         1    nonfinite of loss, step a b.*",
        "far-away  info      relative_to_mean  3    max of loss",
        "told      warning   reported               what the agent sees",
    ]


def test_every_built_in_rule_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert rules_list.main(argparse.Namespace(rules=None)) == 0

    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == [rule.name for rule in load_rules()]


def test_rules_that_can_be_meant_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write(tmp_path, MINE)
    assert rules_check.main(arguments) == 0
    assert rules_check.main(write(tmp_path, MINE.partition("  - {name: far")[0])) == 0
    assert rules_check.main(argparse.Namespace(rules=None)) == 0

    assert capsys.readouterr().out.splitlines() == [
        f"{arguments.rules}: 3 rules, no mistake found",
        f"{arguments.rules}: 1 rule, no mistake found",
        f"built-in rules: {len(load_rules())} rules, no mistake found",
    ]


def test_every_mistake_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rules_check.main(write(tmp_path, MINE.replace("severity: fatal", "severity: a").replace("max", "most"))) == 1

    *mistakes, end = capsys.readouterr().out.splitlines()
    assert [mistake.partition("found ")[2][:6] for mistake in mistakes] == ["'a'. K", "'most'"]
    assert end == "2 of 3 rules cannot be used"
