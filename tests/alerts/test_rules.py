from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.alerts.series import PATIENT
from trainermon.alerts.conditions.criteria import (
    BreaksLaw,
    Dead,
    Differs,
    Direction,
    Drift,
    Exceeds,
    Flat,
    Frozen,
    NonFinite,
    Reported,
    Spike,
    Threshold,
)
from trainermon.alerts.conditions.watchers import history_of
from trainermon.alerts.rules import DEFAULT_RULES, RUNBOOK, RuleEscalation, SeriesSelection, inhibitors, load_rules
from trainermon.core.errors import RuleError
from trainermon.core.values import Action, DumpTask, Kind, SeriesKey, Severity

FULL: dict[str, Any] = {
    "name": "my-spike",
    "severity": "warning",
    "on": {"kind": ["grad_reduced", "update"], "names": ["h.*.weight"], "statistic": "rms"},
    "when": {"spike": {"score": 9, "window": 64, "warmup": 32, "direction": "up", "floor": 0.2, "adopt": 50}},
    "for": 3,
    "keep": {"steps": 4, "score": 2.5},
    "cooldown": 7,
    "escalate": {"action": "dump", "task": "tensor", "steps": 2},
    "inhibits": ["other"],
    "summary": "{k} of {n}",
    "runbook": "somewhere",
}
OTHER: dict[str, Any] = {
    "name": "other",
    "severity": "critical",
    "on": {"kind": "loss"},
    "when": {"nonfinite": True},
    "summary": "{worst}",
}


def load(folder: Path, *rules: Any) -> Any:
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump({"rules": list(rules)}))
    return load_rules(path)


def changed(rule: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(rule)
    *parents, last = path.split(".")
    place = result
    for parent in parents:
        place = place[parent]
    place[last] = value
    return result


def test_every_key_is_read(tmp_path: Path) -> None:
    rule, other = load(tmp_path, FULL, OTHER)

    assert rule.severity is Severity.WARNING
    assert rule.on == SeriesSelection(kinds=(Kind.GRAD_REDUCED, Kind.UPDATE), names=("h.*.weight",), statistic="rms")
    assert rule.when == Spike(score=9, clear=2.5, window=64, warmup=32, direction=Direction.UP, floor=0.2, adopt=50)
    assert (rule.for_steps, rule.keep_steps, rule.cooldown_steps) == (3, 4, 7)
    assert rule.escalate == RuleEscalation(action=Action.DUMP, task=DumpTask.TENSOR, steps=2)
    assert (rule.inhibits, rule.runbook) == (("other",), "somewhere")
    assert other.when == NonFinite()
    assert inhibitors((rule, other)) == {"my-spike": (), "other": ("my-spike",)}


def test_conditions_are_read(tmp_path: Path) -> None:
    conditions = [
        ({"nonfinite": {"allow_initial_inf": True}}, None, NonFinite(allow_initial_inf=True), 1),
        ({"threshold": {"above": 5, "below": -1}}, "max", Threshold(above=5.0, below=-1.0), 1),
        ({"flat": {"relative_change": 1e-3, "steps": 9}}, "mean", Flat(relative_change=1e-3), 9),
        ({"dead": {"steps": 4}}, None, Dead(zero_ratio=1.0, lived=20), 4),
        ({"frozen": {"steps": 4, "lived": 3}}, None, Frozen(lived=3), 4),
        ({"drift": {"factor": 2, "direction": "down"}}, "rms", Drift(factor=2.0, direction=Direction.DOWN), 1),
        ({"exceeds": {"times": 5}}, "mean", Exceeds(times=5.0, warmup=16, adopt=128), 1),
        ({"differs": {"fewest": True}}, "max", Differs(fewest=True), 1),
    ]
    for when, statistic, expected, steps in conditions:
        on = {"kind": "loss"} | ({"statistic": statistic} if statistic else {})
        (rule,) = load(tmp_path, OTHER | {"when": when, "on": on})
        assert (rule.when, rule.for_steps) == (expected, steps)


@pytest.mark.parametrize(
    ("when", "steps"),
    [
        ({"nonfinite": True}, 0),
        ({"threshold": {"above": 1, "over": 20}}, 20),
        ({"drift": {"factor": 2, "steps": 4, "levels": 5, "warmup": 3}}, 4 * (5 + 3 + 2) - 2),
        ({"exceeds": {"times": 5, "warmup": 7, "adopt": 50}}, 7 + 50),
        ({"dead": {"lived": 30, "steps": 1}}, 30),
        ({"frozen": {"lived": 30, "steps": 1}}, 30),
        ({"not_decreasing": {"steps": 6}}, 6 * 3 - 2),
        ({"straggler": {"window": 10}}, 10 + 128),
    ],
    ids=lambda value: "" if isinstance(value, int) else next(iter(value)),
)
def test_after_a_restart_as_many_steps_are_read_as_a_condition_looks_back(
    tmp_path: Path, when: dict[str, Any], steps: int
) -> None:
    """Beside the step that is judged, and the one for which the rule is kept."""
    statistic = {} if next(iter(when)) in ("nonfinite", "straggler", "dead", "frozen") else {"statistic": "mean"}
    (rule,) = load(tmp_path, OTHER | {"when": when, "on": {"kind": "loss"} | statistic, "keep": {"steps": 1}})

    assert history_of(rule) == steps + 2


@pytest.mark.parametrize(
    ("when", "key"),
    [("threshold", "over"), ("straggler", "window")],
)
def test_window_that_no_memory_holds_is_refused(tmp_path: Path, when: str, key: str) -> None:
    rule = OTHER | {"when": {when: {key: 10**11} | ({"above": 1} if when == "threshold" else {})}}
    rule["on"] = {"kind": "loss"} | ({"statistic": "mean"} if when == "threshold" else {})

    with pytest.raises(RuleError, match=rf"when\.{when}\.{key}: found 100000000000, expected at most 100000"):
        load(tmp_path, rule)


def test_name_may_have_so_many_characters(tmp_path: Path) -> None:
    assert load(tmp_path, OTHER | {"name": "a" * 100})
    with pytest.raises(RuleError, match=r"rule 'a{100}': name: found 101 characters, expected at most 100"):
        load(tmp_path, OTHER | {"name": "a" * 101})


def test_default_rules_have_a_runbook_entry_each() -> None:
    headings = set(re.findall(r"^## (.+)$", RUNBOOK.read_text(), re.MULTILINE))

    assert {rule.runbook for rule in load_rules()} | {
        "anomaly-turbulence",
        "anomaly-nan",
    } == headings


def test_default_runbook_entries_say_for_how_many_values_in_a_row_as_the_rules_do() -> None:
    numbers = {"three": 3, "five": 5, "ten": 10, "twenty": 20}
    rules = {rule.name: rule for rule in load_rules()}
    for entry in re.split(r"^## ", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]:
        rule = rules.get(entry.splitlines()[0])
        said = re.search(r"\b(three|five|ten|twenty|\d+)(?: \w+)? in a\s+row", entry)
        if rule is not None and rule.for_steps > 1 and said is not None:
            assert int(numbers.get(said[1], said[1])) == rule.for_steps, rule.name


def test_what_a_rank_finds_by_itself_speaks_of_no_other_ranks_as_there_may_be_none() -> None:
    (rule,) = (rule for rule in load_rules() if rule.name == "gradient-nonfinite-local")

    assert "ranks" not in rule.summary


def test_default_runbook_entries_say_what_how_and_what_to_do() -> None:
    for entry in re.split(r"^## ", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]:
        for part in ("**Means**", "**Check**", "**Do**"):
            assert part in entry, entry.splitlines()[0]


def test_lost_gradients_inhibit_every_consequence() -> None:
    rules = {rule.name: rule for rule in load_rules()}

    assert rules["gradient-nonfinite"].severity is Severity.FATAL
    assert rules["gradient-nonfinite"].for_steps == 1
    news = {"gradient-nonfinite", "gradient-nonfinite-local", "loss-scale-collapse", "steps-skipped"}
    news |= {"steps-skipped-often", "straggler", "collective-slow", "collectives-mismatched"}
    news |= {"learning-rate-zero", "batch-repeated", "eval-mode", "accumulation-cut-short", "module-settings-differ"}
    news |= {"rollout-weights-differ", "rollout-bookkeeping", "rollout-stale", "rollout-not-comparable"}
    news |= {"accelerator-throttled", "accelerator-memory-full"}
    news |= {rule.name for rule in rules.values() if isinstance(rule.when, (Reported, BreaksLaw))}
    assert set(rules) - set(rules["gradient-nonfinite"].inhibits) == news


WRONG = [
    ("sevrity", "warning", r"sevrity: unknown key; did you mean 'severity'\? Known: name, severity"),
    ("when.spike.scor", 3, r"when\.spike\.scor: unknown key; did you mean 'score'\?"),
    ("on.knd", "loss", r"on\.knd: unknown key; did you mean 'kind'\?"),
    ("on.kind", "grad_reducd", r"on\.kind: found 'grad_reducd'; did you mean 'grad_reduced'\?"),
    ("on.kind", [], r"on\.kind: found an empty list"),
    ("on.statistic", "rmss", r"on\.statistic: found 'rmss'; did you mean 'rms'\?"),
    ("on.names", [1], r"on\.names: found a list, expected text or a list of texts"),
    ("severity", "warn", r"severity: found 'warn'; did you mean 'warning'\?"),
    ("severity", "fatal", r"severity: found 'fatal', which is kept for when\.nonfinite"),
    (
        "when",
        {},
        r"when: found none, expected exactly one of nonfinite, threshold, spike, relative_to_mean, flat, dead, ratio",
    ),
    ("when.dead", {"steps": 3}, r"when: found spike and dead, expected exactly one of"),
    ("when.spike.score", "high", r"when\.spike\.score: found 'high', expected a finite number, above 0"),
    ("when.spike.score", True, r"when\.spike\.score: found True, expected a finite number"),
    ("when.spike.window", 4, r"when\.spike\.window: found 4, expected a whole number, at least 8"),
    ("when.spike.warmup", 65, r"when\.spike\.warmup: found 65, expected at most window \(64\)"),
    ("when.spike.direction", "upp", r"when\.spike\.direction: found 'upp'; did you mean 'up'\?"),
    ("when.spike.floor", 0, r"when\.spike\.floor: found 0, expected a finite number, above 0"),
    ("when", {"threshold": {}}, r"keep\.score: stands beside when\.threshold: only spike and spread have a score"),
    ("when", {"spike": 3}, r"when\.spike: found 3, expected a mapping with the keys score"),
    ("for", 1, r"for: found 1, expected at least 2, or a share of at least 0.25, or a score of at least 12: single"),
    ("for", 51, r"for: found 51, expected at most when\.spike\.adopt \(50\)"),
    ("for", 2.5, r"for: found 2\.5, expected a whole number"),
    ("keep.score", 10, r"keep\.score: found 10, expected at most when\.spike\.score \(9\)"),
    ("keep.steps", 0, r"keep\.steps: found 0, expected a whole number, at least 1"),
    ("cooldown", -1, r"cooldown: found -1, expected a whole number, at least 0"),
    ("escalate.action", "stop", r"escalate\.action: found 'stop'. Known: dump"),
    ("escalate.task", "tensors", r"escalate\.task: found 'tensors'; did you mean 'tensor'\?"),
    ("inhibits", ["othr"], r"inhibits: found 'othr', which is no other rule's name; did you mean 'other'\?"),
    ("inhibits", ["my-spike"], r"inhibits: found 'my-spike', which is no other rule's name"),
    ("summary", "{wurst}", r"summary: found \{wurst\}; did you mean 'worst'\?"),
    ("summary", "{worst.__class__}", r"summary: found \{worst\.__class__\}"),
    ("summary", "{", r"summary: .*a brace that is meant as one is written twice"),
    ("summary", "{value:>999999999}", r"summary: found \{value:>999999999\}, expected a width of at most 99"),
    ("summary", "{value:{step}}", r"summary: found \{value:\{step\}\}, expected no field within a field"),
    ("summary", "{value!r:d}", r"summary: cannot be filled in: Unknown format code 'd'"),
    ("summary", "{step:c}", r"summary: cannot be filled in: "),
    ("summary", "x" * 1001, r"summary: found 1001 characters, expected at most 1000"),
    ("summary", "{k:99}" * 11, r"summary: comes to 1089 characters, expected at most 1000"),
    ("summary", "\ud800", r"summary: found '\\ud800', expected text without half characters"),
    ("when.spike.window", 10**11, r"when\.spike\.window: found 100000000000, expected at most 100000"),
    ("when.spike.adopt", 10**10, r"when\.spike\.adopt: found 10000000000, expected at most 1000000000"),
    ("when.spike.score", 10**400, r"when\.spike\.score: found a number of 1329 bits, expected a finite number"),
    ("for", 10**10, r"for: found 10000000000, expected at most 1000000000"),
    ("keep.steps", 10**400, r"keep\.steps: found a number of 1329 bits, expected at most 1000000000"),
    ("cooldown", 10**10, r"cooldown: found 10000000000, expected at most"),
    ("escalate.steps", 10**10, r"escalate\.steps: found 10000000000, expected at most"),
    ("summary", " ", r"summary: found ' ', expected text"),
    ("name", "My Spike", r"name: found 'My Spike', expected lower case words joined by hyphens"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG, ids=[f"{path}={value}" for path, value, _ in WRONG])
def test_mistake_is_reported_with_file_rule_key_and_remedy(tmp_path: Path, path: str, value: Any, message: str) -> None:
    with pytest.raises(RuleError, match=message) as caught:
        load(tmp_path, changed(FULL, path, value), OTHER)

    name = value if path == "name" else "my-spike"
    assert str(caught.value).startswith(f"{tmp_path / 'rules.yaml'}: rule {name!r}: ")


IMPOSSIBLE = [
    ({"when": {"dead": {"steps": 3}}, "for": 3}, r"for: stands beside when\.dead\.steps, which says the same"),
    ({"when": {"dead": {"steps": 3, "zero_ratio": 1.5}}}, r"when\.dead\.zero_ratio: found 1\.5, expected a share"),
    ({"when": {"threshold": {}}, "on": {"kind": "loss", "statistic": "mean"}}, "found neither above nor below"),
    (
        {"when": {"threshold": {"above": 1, "below": 2}}, "on": {"kind": "loss", "statistic": "mean"}},
        r"when\.threshold\.below: found 2, which is more than above \(1\)",
    ),
    ({"on": {"kind": "loss", "statistic": "rms"}}, r"on\.statistic: found 'rms', but this condition is on 'nonfinite'"),
    ({"when": {"nonfinite": False}}, r"when\.nonfinite: found False, expected a mapping"),
    ({"severity": "fatal", "escalate": {"action": "dump"}}, "escalate: stands beside severity: fatal"),
    ({"when": {"flat": {"relative_change": 0.1}}, "on": {"kind": "loss", "statistic": "mean"}}, "steps: is missing"),
    (
        {"when": {"relative_to_mean": {"threshold": 1, "beta": 1}}, "on": {"kind": "loss", "statistic": "mean"}},
        r"when\.relative_to_mean\.beta: found 1, expected less than 1: nothing would ever be learned",
    ),
    (
        {"when": {"ratio": {"over": "parm_origin", "above": 1}}, "on": {"kind": "update", "statistic": "rms"}},
        r"when\.ratio\.over: found 'parm_origin'; did you mean 'param_origin'",
    ),
    ({"when": {"reported": False}}, r"when\.reported: expected true"),
    (
        {"when": {"differs": {}}, "on": {"kind": "loss", "statistic": "max"}, "share": 0.5},
        "share: stands beside",
    ),
    ({"share": 1.5}, r"share: found 1\.5, expected at most 1"),
    ({"when": {"differs": {"fewest": 1}}}, r"when\.differs\.fewest: found 1, expected true or false"),
]


@pytest.mark.parametrize(("change", "message"), IMPOSSIBLE)
def test_impossible_pair_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RuleError, match=message):
        load(tmp_path, OTHER | change)


@pytest.mark.parametrize("missing", ["name", "severity", "on", "when", "summary"])
def test_missing_key_is_reported(tmp_path: Path, missing: str) -> None:
    rule = {key: value for key, value in OTHER.items() if key != missing}

    with pytest.raises(RuleError, match=f"{missing}: is missing"):
        load(tmp_path, rule)


def test_two_rules_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="rule 'other': appears twice"):
        load(tmp_path, OTHER, OTHER)


def test_rules_that_inhibit_each_other_are_refused(tmp_path: Path) -> None:
    first = OTHER | {"name": "first", "inhibits": ["other"]}

    with pytest.raises(RuleError, match="first → other → first is a cycle"):
        load(tmp_path, first, OTHER | {"inhibits": "first"})


def test_pattern_inhibits_every_other_rule_that_it_matches(tmp_path: Path) -> None:
    spikes = [OTHER | {"name": name} for name in ("a-spike", "b-spike")]

    rules = load(tmp_path, OTHER | {"inhibits": "*-spike"}, *spikes)

    assert rules[0].inhibits == ("a-spike", "b-spike")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: [", r"is not valid YAML: .*line 1"),
        ("rules:\n- {name: a, name: b}", r"the key 'name' appears twice"),
        ("rules: []", r"rules: found an empty list, expected a list"),
        ("rules: 3", r"rules: found 3, expected a list"),
        ("- a", r"found a list, expected a mapping with the keys rules"),
        ("", r"found nothing, expected a mapping with the keys rules"),
        ("ruls: []", r"ruls: unknown key; did you mean 'rules'\?"),
        ("rules: [3]", r"rule number 1: found 3, expected a mapping"),
        ("rules:\n- for: " + "9" * 5000, r"found '9{59}.*line 2|rule number 1"),  # Python 3.10 reads it
        ("rules:\n- name: 0x" + "9" * 9000, r"name: found a number of 36000 bits, expected text"),
        ("rules:\n- name: 2024-13-45", r"found '2024-13-45', which is no timestamp that can be read.*line 2"),
        ("rules:\n- name: !!bool perhaps", r"found 'perhaps', which is no bool that can be read.*line 2"),
        ("rules: " + "[" * 3000 + "]" * 3000, r"is nested too deeply"),
        ("rules: !!python/object/apply:os.getcwd []", r"is not valid YAML"),
    ],
)
def test_broken_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text)

    with pytest.raises(RuleError, match=message):
        load_rules(path)


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"nowhere\.yaml: cannot be read"):
        load_rules(tmp_path / "nowhere.yaml")


def test_on_is_a_key_and_a_power_of_ten_a_number(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(
        "rules:\n- {name: a, severity: info, on: {kind: loss, statistic: mean}, summary: x,"
        " when: {flat: {relative_change: 1e-5, steps: 3}}}\n"
    )

    (rule,) = load_rules(path)

    assert rule.when == Flat(relative_change=1e-5)


def test_names_match_the_name_or_the_name_with_its_slot() -> None:
    selection = SeriesSelection(kinds=(Kind.ACTV,), names=("h.*.mlp", "*.output.*"))

    assert selection.matches(SeriesKey(Kind.ACTV, "h.3.mlp", "input.0"))
    assert selection.matches(SeriesKey(Kind.ACTV, "ln_f", "output.1"))
    assert selection.matches(SeriesKey(Kind.ACTV, "", "output.0"))
    assert not selection.matches(SeriesKey(Kind.ACTV, "ln_f", "input.0"))
    assert not selection.matches(SeriesKey(Kind.ACTV_GRAD, "h.3.mlp", "input.0"))


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, dict):
            found.append((*prefix, key))
        if isinstance(inner, dict | list):
            found += paths(inner, (*prefix, key))
    return found


# The loader's own parser gave `on` a meaning that the test's plain one must not change.
DEFAULTS = yaml.load(DEFAULT_RULES.read_text(), Loader=yaml.BaseLoader)
ALL_PATHS = [path for path in paths(DEFAULTS) if len(path) > 2]


@PATIENT
@given(path=st.sampled_from(ALL_PATHS), at=st.integers(0, 20))
def test_key_misspelled_anywhere_in_the_defaults_is_found(tmp_path: Path, path: tuple[Any, ...], at: int) -> None:
    document = load_plain(DEFAULT_RULES)
    place = document
    for key in path[:-1]:
        place = place[key]
    wrong = path[-1][: at % len(path[-1])] + "x" + path[-1][at % len(path[-1]) :]
    place[wrong] = place.pop(path[-1])
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(document))

    with pytest.raises(RuleError, match=re.escape(wrong)):
        load_rules(file)


def load_plain(path: Path) -> Any:
    from trainermon.alerts.document import read_document

    return read_document(path)
