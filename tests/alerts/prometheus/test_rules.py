"""The rules and the example for Alertmanager: that they follow the agents' rules, and what Prometheus makes of them.

How each rule behaves is written down for promtool in promtool/*.yaml, by hand; for the alerts that show what an agent
says, which differ in a name only, it is written here.
"""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.server_programs import find_program
from trainermon.alerts.prometheus.alertmanager import LADDER
from trainermon.alerts.prometheus.rules import BASE_RUNBOOK, SiteSettings, alert_name, heading, rule_groups
from trainermon.alerts.rules import RUNBOOK, load_rules, with_reported
from trainermon.cli import main
from trainermon.core.errors import RuleError
from trainermon.core.metrics import METRICS

GENERATED = Path(__file__).parents[3] / "trainermon" / "alerts" / "generated"
RULE_FILE = GENERATED / "prometheus_rules.yaml"
PROMTOOL_TESTS = sorted((Path(__file__).parent / "promtool").glob("*.yaml"))
GROUPS = yaml.safe_load(RULE_FILE.read_text())["groups"]
ENTRIES = [entry for group in GROUPS for entry in group["rules"]]
ALERTS = {entry["alert"]: entry for entry in ENTRIES if "alert" in entry}
RECORDS = {entry["record"]: entry for entry in ENTRIES if "record" in entry}
RULES = with_reported(load_rules())
RUNBOOK_URL = "http://trainermon-controller:9462/runbook"
ALWAYS_ON = {"TrainermonWatchdog"}
COUNTED = {"monitor-records-lost", "monitor-lagging", "monitor-store-failing", "monitor-export-failing"}
"""Rules about the agent itself for which Prometheus asks its counters."""

OWN_RULE = """
rules:
  - name: loss-too-high
    severity: warning
    on: {kind: loss, statistic: mean}
    when: {threshold: {above: 12}}
    summary: "the loss is {value} at step {step} on rank {rank}"
"""


def call(*arguments: str | Path) -> str:
    program, *rest = arguments
    command = [find_program(str(program)), *map(str, rest)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.server
def test_prometheus_and_alertmanager_accept_what_is_generated() -> None:
    assert f"SUCCESS: {len(ENTRIES)} rules found" in call("promtool", "check", "rules", RULE_FILE)
    assert "SUCCESS" in call("amtool", "check-config", GENERATED / "alertmanager.yaml")


@pytest.mark.server
def test_rules_fire_stay_quiet_and_resolve() -> None:
    call("promtool", "test", "rules", *PROMTOOL_TESTS)


def agent_test(name: str, severity: str, summary: str, description: str, runbook: str) -> dict:
    """Return a promtool test: quiet for other rules, on with the agent's alert, over two minutes after it."""
    rule = summary.lower().replace(" ", "-").removesuffix("-in-run-a")
    series = '{run="a",rank="3",rule="%s",severity="fatal",instance="n1:1",series="h.0.q"}'
    labels = {"run": "a", "rank": "3", "rule": rule, "instance": "n1:1", "severity": severity, "series": "h.0.q"}
    texts = {"summary": summary, "description": description, "runbook_url": f"{RUNBOOK_URL}/{runbook}"}
    texts |= {"page": "http://n1:1/", "command": "trainermon diagnose a"}
    return {
        "name": name,
        "interval": "30s",
        "input_series": [
            {"series": f"trainermon_alert_first_step{series % 'unlike-any-other'}", "values": "7x40"},
            {"series": f"trainermon_alert_first_step{series % rule}", "values": "_x3 1234567x4 stale"},
        ],
        "alert_rule_test": [
            {"alertname": name, "eval_time": "1m", "exp_alerts": []},
            {"alertname": name, "eval_time": "2m", "exp_alerts": [{"exp_labels": labels, "exp_annotations": texts}]},
            {"alertname": name, "eval_time": "4m", "exp_alerts": [{"exp_labels": labels, "exp_annotations": texts}]},
            {"alertname": name, "eval_time": "7m", "exp_alerts": []},
        ],
    }


def in_one(tests: list[dict]) -> dict:
    """Return one promtool test of what several expect at the same times: each starts anew with all rules."""
    series = {entry["series"]: entry for test in tests for entry in test["input_series"]}
    expected = [entry for test in tests for entry in test["alert_rule_test"]]
    return {"interval": "30s", "input_series": [*series.values()], "alert_rule_test": expected}


def meaning(heading_of_rule: str) -> str:
    """Return the first sentence of an entry of the agents' runbook, without its first word."""
    entry = RUNBOOK.read_text().split(f"\n## {heading_of_rule}\n")[1]
    text = " ".join(entry.split("**Means**")[1].split())
    return text[: re.search(r"\.(?= [A-Z`]| \*\*|$)", text).end()]


@pytest.mark.server
def test_an_alert_of_an_agent_is_one_of_prometheus_and_ends_with_it(tmp_path: Path) -> None:
    tests = []
    for rule in (rule for rule in RULES if rule.name not in COUNTED):
        words = rule.name.replace("-", " ")
        where = "on rank 3 of run a since step 1234567, worst in h.0.q"
        tests.append(
            agent_test(
                "Trainermon" + words.title().replace(" ", ""),
                "critical" if rule.severity.value == "fatal" else rule.severity.value,
                f"{words.capitalize()} in run a",
                f"Rule {rule.name} fires {where}. It means {meaning(rule.runbook)}",
                f"runbook.md#{rule.runbook}",
            )
        )
    document = {"rule_files": [str(RULE_FILE)], "evaluation_interval": "30s", "tests": [in_one(tests)]}
    path = tmp_path / "agents.yaml"
    path.write_text(yaml.safe_dump(document, width=1000))

    call("promtool", "test", "rules", path)


def test_every_rule_has_a_test_in_which_it_fires_stays_quiet_and_resolves() -> None:
    tested, expressions = set(), set()
    for path in PROMTOOL_TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            expressions |= {entry["expr"] for entry in test.get("promql_expr_test", ())}
            states: dict[str, list[bool]] = {}
            for entry in test.get("alert_rule_test", ()):
                states.setdefault(entry["alertname"], []).append(bool(entry["exp_alerts"]))
            tested |= {name for name, seen in states.items() if not seen[0] and any(seen) and not seen[-1]}
    of_agents = {alert_name(rule.name) for rule in RULES if rule.name not in COUNTED}

    assert set(ALERTS) - tested - of_agents == ALWAYS_ON
    assert set(RECORDS) == expressions


def test_there_is_an_alert_for_every_rule_of_the_agents() -> None:
    for rule in RULES:
        asks_the_agent = ALERTS[alert_name(rule.name)]["expr"] == f'trainermon_alert_first_step{{rule="{rule.name}"}}'
        assert asks_the_agent is (rule.name not in COUNTED), rule.name


def test_what_has_an_alert_of_its_own_is_no_other_alert() -> None:
    (names,) = re.findall(r'rule!~"(.*)"', ALERTS["TrainermonOtherAlert"]["expr"])

    assert names.split("|") == [rule.name for rule in RULES]


def test_expressions_name_only_metrics_that_there_are() -> None:
    known = {re.sub(r"\W.*", "", name) for name in METRICS}
    for metric in METRICS.values():
        if metric.buckets:
            known |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}

    for entry in ENTRIES:
        expression = re.sub(r"[a-z_]+:trainermon_\w+:\w+", lambda found: _recorded(found[0]), entry["expr"])
        assert set(re.findall(r"trainermon_\w+", expression)) <= known, entry


def _recorded(name: str) -> str:
    assert name in RECORDS
    return ""


def test_recording_rules_are_named_by_level_metric_and_operations() -> None:
    for name, entry in RECORDS.items():
        level, metric, operations = name.split(":")
        assert level in {"run", "run_rank", "run_kind"}, name
        assert re.fullmatch(r"trainermon_[a-z_]+", metric), name
        assert not metric.endswith(("_total", "_count", "_sum")), name
        assert re.fullmatch(r"[a-z]+[a-z0-9_]*", operations), name
        assert ("[5m]" in entry["expr"]) == operations.endswith("5m"), name


def test_every_alert_has_what_an_alert_needs() -> None:
    for name, alert in ALERTS.items():
        assert re.fullmatch(r"Trainermon([A-Z][a-z0-9]+)+", name)
        assert alert["labels"]["severity"] in {"critical", "warning", "info"} or name in ALWAYS_ON
        own = {"page", "command"} if "trainermon_alert_first_step" in alert["expr"] else set()
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"} | own
        # equal for all alerts of a group: one message may hold many of them
        assert set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])) <= {"run"}
        assert "$value" not in alert["annotations"]["summary"]


def test_every_alert_has_an_entry_in_a_runbook_and_no_entry_is_left_over() -> None:
    headings = {
        path.name: set(re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)) for path in (RUNBOOK, BASE_RUNBOOK)
    }
    linked: dict[str, set[str]] = {RUNBOOK.name: set(), BASE_RUNBOOK.name: set()}
    for alert in ALERTS.values():
        page, _, anchor = alert["annotations"]["runbook_url"].removeprefix(f"{RUNBOOK_URL}/").partition("#")
        linked[page].add(anchor)

    assert linked[RUNBOOK.name] <= headings[RUNBOOK.name]
    assert linked[BASE_RUNBOOK.name] == headings[BASE_RUNBOOK.name]
    for entry in BASE_RUNBOOK.read_text().split("\n## ")[1:]:
        for part in ("**Means**", "**Check**", "**Do**"):
            assert part in entry, entry.splitlines()[0]


def test_alerts_that_ask_for_a_dump_say_so_as_the_controller_expects() -> None:
    asking = {name: alert["labels"] for name, alert in ALERTS.items() if "escalate" in alert["labels"]}

    assert asking == {"TrainermonRankLossApart": {"severity": "warning", "escalate": "statistics"}}


def test_the_ladder_of_inhibitions_names_alerts_that_there_are() -> None:
    known = {rule.name for rule in RULES} | set(ALERTS)

    assert {name for line in LADDER for name in line} <= known


def test_what_a_rule_inhibits_is_inhibited_for_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["rules", "prometheus", "--format", "alertmanager"])
    rules = yaml.safe_load(capsys.readouterr().out)["inhibit_rules"]
    pairs = {
        (source, target)
        for rule in rules
        for source in re.findall(r"Trainermon\w+", rule["source_matchers"][0])
        for target in re.findall(r"Trainermon\w+", rule["target_matchers"][0])
    }

    assert {tuple(rule["equal"]) for rule in rules} == {("run",)}
    expected = {(alert_name(rule.name), alert_name(other)) for rule in RULES for other in rule.inhibits}
    assert expected <= pairs
    assert not {(target, source) for source, target in pairs} & pairs
    assert ("TrainermonThroughputDrop", "TrainermonStepTimeSlow") in pairs


def test_a_file_of_rules_of_ones_own_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(OWN_RULE)

    status = main(["rules", "prometheus", str(path), "--runbook-url", "https://wiki/tm/", "--job", r"train\.er"])

    groups = yaml.safe_load(capsys.readouterr().out)["groups"]
    alerts = {entry["alert"]: entry for group in groups for entry in group["rules"] if "alert" in entry}
    assert status == 0
    assert alerts["TrainermonLossTooHigh"]["expr"] == 'trainermon_alert_first_step{rule="loss-too-high"}'
    assert alerts["TrainermonLossTooHigh"]["annotations"]["runbook_url"] == "https://wiki/tm/runbook.md#loss-too-high"
    assert 'rule!~"loss-too-high|hang|' in alerts["TrainermonOtherAlert"]["expr"]
    assert alerts["TrainermonHang"]["labels"]["severity"] == "critical", "agents say so whatever rules they have"
    assert alerts["TrainermonScrapeFailing"]["expr"] == r'up{job=~"train\\.er"} == 0'
    assert "TrainermonLossSpike" not in alerts


@pytest.mark.server
def test_braces_in_a_text_are_text_to_prometheus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, generated, tests = (tmp_path / name for name in ("rules.yaml", "generated.yaml", "tests.yaml"))
    path.write_text(OWN_RULE + '    runbook: "x{{ end {{{ .Value }} }}"\n')
    main(["rules", "prometheus", str(path), "--runbook-url", "https://wiki/{{team"])
    generated.write_text(capsys.readouterr().out)
    expected = agent_test(
        "TrainermonLossTooHigh",
        "warning",
        "Loss too high in run a",
        "Rule loss-too-high fires on rank 3 of run a since step 1234567, worst in h.0.q.",
        "x",
    )
    for entry in expected["alert_rule_test"]:
        for alert in entry["exp_alerts"]:
            alert["exp_annotations"]["runbook_url"] = "https://wiki/{{team/runbook.md#x{{ end {{{ .Value }} }}"
    document = {"rule_files": [str(generated)], "evaluation_interval": "30s", "tests": [expected]}
    tests.write_text(yaml.safe_dump(document, width=1000))

    assert "SUCCESS" in call("promtool", "check", "rules", generated)
    call("promtool", "test", "rules", tests)


def test_the_kubernetes_resource_holds_the_same_groups(capsys: pytest.CaptureFixture[str]) -> None:
    main(["rules", "prometheus", "--format", "prometheusrule", "--name", "tm", "--label", "release=kps"])

    resource = yaml.safe_load(capsys.readouterr().out)
    assert (resource["apiVersion"], resource["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert resource["metadata"] == {"name": "tm", "labels": {"app.kubernetes.io/name": "trainermon", "release": "kps"}}
    assert resource["spec"] == {"groups": GROUPS}


def test_a_rule_may_not_take_the_name_of_one_of_prometheus_own(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(OWN_RULE.replace("loss-too-high", "run-stalled"))

    with pytest.raises(RuleError, match="'run-stalled': its alert TrainermonRunStalled is one of Prometheus' own"):
        rule_groups(load_rules(path), SiteSettings())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--job", "("], r"--job: found '\(', which is no regular expression"),
        (["--job", '"'], "expected a regular expression without quotation marks"),
        (["--format", "prometheusrule", "--label", "x"], "--label: found 'x', expected NAME=VALUE"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "prometheus", *arguments]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_names_of_alerts_and_headings_are_each_others_opposite() -> None:
    for rule in RULES:
        assert heading(alert_name(rule.name)) == rule.name
