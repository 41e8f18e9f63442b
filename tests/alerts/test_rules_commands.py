"""The commands `trainermon rules check` and `trainermon rules list`: mistakes in a file, and what rules look at."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainermon.alerts import rules_check, rules_list
from trainermon.alerts.rules import load_rules, read_rules
from trainermon.cli import main

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
    return argparse.Namespace(rules=str(path), json=False)


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
    assert rules_list.main(argparse.Namespace(rules=None, json=False)) == 0

    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == [rule.name for rule in load_rules()]


def test_rules_that_can_be_meant_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write(tmp_path, MINE)
    assert rules_check.main(arguments) == 0
    assert rules_check.main(write(tmp_path, MINE.partition("  - {name: far")[0])) == 0
    assert rules_check.main(argparse.Namespace(rules=None, json=False)) == 0

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


FAULTS = {
    "severity": ("    severity: warning\n", "    severity: alarming\n", "severity: found 'alarming'"),
    "kind": ("kind: loss", "kind: lost", "on.kind: found 'lost'"),
    "condition": ("above: 12", "above: high", "when.threshold.above: found 'high'"),
    "key": ("\n  - {name: other,", "\n    four: 4\n  - {name: other,", "four: unknown key"),
    "for": ("    for: 3\n", "    for: -3\n", "for: found -3"),
    "cooldown": ("    cooldown: 5\n", "    cooldown: 5.5\n", "cooldown: found 5.5"),
    "summary": ("{value}", "{values}", "summary: found {values}"),
    "inhibits": ("inhibits: [other]", "inhibits: [others]", "inhibits: found 'others'"),
}
FAULTLESS = """
rules:
  - name: mine
    severity: warning
    on: {kind: loss, statistic: mean}
    when: {threshold: {above: 12}}
    for: 3
    cooldown: 5
    summary: "{value}"
  - {name: other, severity: info, on: {kind: loss}, when: {nonfinite: true}, summary: x}
  - {name: third, severity: info, on: {kind: loss}, when: {nonfinite: true}, summary: x, inhibits: [other]}
"""


@given(chosen=st.sets(st.sampled_from(sorted(FAULTS)), min_size=1))
def test_all_mistakes_of_a_file_are_told_and_no_other(tmp_path_factory, chosen) -> None:
    text = FAULTLESS
    for name in chosen:
        right, wrong, _ = FAULTS[name]
        assert right in text
        text = text.replace(right, wrong, 1)
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(text)

    _, mistakes = read_rules(path)

    # What a rule's condition is not known for is not judged beside it.
    expected = chosen - ({"for", "summary"} if "condition" in chosen else set())
    told = {name for name in FAULTS if any(FAULTS[name][2] in str(mistake) for mistake in mistakes)}
    assert expected <= told <= chosen
    assert len(mistakes) == len(told)


def test_lists_and_mistakes_are_given_to_programs_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(rule["name"], rule["severity"]) for rule in told] == [(rule.name, rule.severity) for rule in load_rules()]
    assert list(told[0]["when"]) == ["nonfinite"]

    path = tmp_path / "mine.yaml"
    path.write_text(MINE.replace("severity: fatal", "severity: a").replace("max", "most"))
    assert main(["rules", "check", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [mistake["path"] for mistake in found["mistakes"]] == ["severity", "on.statistic"]
    assert found["rules"] == 1


def test_every_mistake_of_a_rule_is_under_the_name_that_it_has_in_the_file(tmp_path, capsys):
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "rules:\n- {name: Bad Name, severity: wrong, on: {kind: loss, statistic: mean}, when: {x: 1}, summary: s}\n"
    )

    main(["rules", "check", str(rules)])

    said = "".join(capsys.readouterr())
    assert said.count("rule 'Bad Name': ") == 3
    assert "'any'" not in said
