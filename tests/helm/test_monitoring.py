"""How Prometheus and Grafana learn of the agents, who may reach them, and what each alert is changed to."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from docs import chart
from tests.helm.charts import CHART, CONTROLLER, DAEMONSET, SECRET, merged, render
from trainermon.exporters.prometheus.budget import SeriesBudget

CLOSED = merged(CONTROLLER, {"access": {"readTokenKey": "read"}})
BASIC = merged(CONTROLLER, {"access": {"userKey": "user", "passwordKey": "password"}})
MONITORING = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def endpoint(*values):
    return render(*values).one("PodMonitor")["spec"]["podMetricsEndpoints"][0]


def alerts(*values):
    groups = render(*values).one("PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def changed(**changes):
    return {"prometheusRule": {"alerts": {"TrainermonRunStalled": changes}}}


def policy(name, *values):
    return render(*values).one("NetworkPolicy", name)["spec"]


@pytest.mark.parametrize(
    ("operator", "enabled", "is_there"),
    [(True, "auto", True), (False, "auto", False), (False, True, True), (True, False, False)],
)
def test_resources_of_the_operator_are_gated(operator, enabled, is_there):
    wanted = {"enabled": enabled}
    values = {"podMonitor": wanted, "serviceMonitor": wanted, "prometheusRule": wanted}

    kinds = render(CONTROLLER, values, operator=operator).kinds()

    assert {"PodMonitor", "ServiceMonitor", "PrometheusRule"} & kinds == (
        {"PodMonitor", "ServiceMonitor", "PrometheusRule"} if is_there else set()
    )


def test_the_monitor_selects_the_pods_that_train():
    selector = {"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "gpu", "operator": "Exists"}]}

    spec = render({"podSelector": selector}).one("PodMonitor")["spec"]

    assert spec["selector"] == selector
    assert render().one("PodMonitor")["spec"]["selector"] == {"matchLabels": {"trainermon": "true"}}
    assert spec["namespaceSelector"] == {"matchNames": ["training"]}


def test_the_monitor_of_a_daemonset_selects_its_pods():
    objects = render(DAEMONSET)
    labels = objects.one("DaemonSet")["spec"]["template"]["metadata"]["labels"]

    assert objects.one("PodMonitor")["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_monitor_asks_at_the_port_of_the_agent():
    objects = render()
    container = yaml.safe_load(objects.one("ConfigMap", "-sidecar")["data"]["pod.yaml"])["spec"]["initContainers"][0]

    assert objects.one("PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"] == container["ports"][0]["name"]


def test_the_limit_of_samples_is_above_the_budget_of_the_agent():
    assert render().one("PodMonitor")["spec"]["sampleLimit"] > SeriesBudget().per_node


def test_labels_of_the_target_are_none_of_the_metrics_own():
    labels = {entry.get("targetLabel") for entry in endpoint()["relabelings"]}

    assert labels == {"job", "node"}


def test_relabelings_of_the_site_come_last():
    own = [{"action": "labeldrop", "regex": "pod"}]

    found = endpoint({"podMonitor": {"relabelings": own, "metricRelabelings": own}})

    assert found["relabelings"][-1:] == own
    assert found["metricRelabelings"] == own


def test_a_scrape_needs_no_credentials_where_reading_is_open():
    assert not {"authorization", "basicAuth", "tlsConfig", "scheme"} & endpoint(SECRET).keys()


def test_prometheus_gets_the_token_for_reading_but_never_that_for_orders():
    for values in (CLOSED, merged(CLOSED, DAEMONSET)):
        credentials = {"name": "secret", "key": "read"}
        assert endpoint(values)["authorization"] == {"type": "Bearer", "credentials": credentials}
        controller = render(values).one("ServiceMonitor")["spec"]["endpoints"][0]
        assert controller["authorization"]["credentials"] == credentials


def test_prometheus_gets_user_and_password():
    assert endpoint(BASIC)["basicAuth"] == {
        "username": {"name": "secret", "key": "user"},
        "password": {"name": "secret", "key": "password"},
    }


def test_prometheus_checks_the_certificate():
    found = endpoint({"access": {"tls": {"existingSecret": "tls", "serverName": "agents"}}})

    assert found["scheme"] == "https"
    assert found["tlsConfig"] == {"ca": {"secret": {"name": "tls", "key": "ca.crt"}}, "serverName": "agents"}


def test_the_operator_finds_them_by_labels():
    labels = {"labels": {"release": "stack"}}
    objects = render(CONTROLLER, {"podMonitor": labels, "serviceMonitor": labels, "prometheusRule": labels})

    for kind in ("PodMonitor", "ServiceMonitor", "PrometheusRule"):
        assert objects.one(kind)["metadata"]["labels"]["release"] == "stack"


def test_the_service_monitor_selects_the_controller_alone():
    objects = render(CONTROLLER)
    selector = objects.one("ServiceMonitor")["spec"]["selector"]["matchLabels"]

    matching = [o for o in objects if o["kind"] == "Service" and selector.items() <= o["metadata"]["labels"].items()]

    assert [entry["metadata"]["name"] for entry in matching] == ["demo-trainermon-controller"]
    port = objects.one("ServiceMonitor")["spec"]["endpoints"][0]["port"]
    assert port in {entry["name"] for entry in matching[0]["spec"]["ports"]}


def test_rules_are_those_of_the_generator():
    generated = {rule["alert"] for group in yaml.safe_load(chart.render_rules())["groups"] for rule in group["rules"]
                 if "alert" in rule}  # fmt: skip

    assert alerts().keys() == generated
    assert len(generated) >= 12


def test_no_placeholder_is_left():
    text = json.dumps(render().one("PrometheusRule"))

    assert not any(word in text for word in ("THRESHOLD", "RUNBOOK_URL", "JOB", '"threshold"'))


def test_alerts_ask_for_the_job_that_the_monitors_set():
    objects = render(CONTROLLER, {"podMonitor": {"job": "ml.agents"}})
    rules = json.dumps(objects.one("PrometheusRule"))
    jobs = [
        next(entry["replacement"] for entry in endpoint["relabelings"] if entry.get("targetLabel") == "job")
        for endpoint in (
            objects.one("PodMonitor")["spec"]["podMetricsEndpoints"][0],
            objects.one("ServiceMonitor")["spec"]["endpoints"][0],
        )
    ]

    assert jobs == ["ml.agents", "ml.agents-controller"]
    assert json.dumps(r'up{job=~"ml\\.agents(-controller)?"}')[1:-1] in rules, rules


def test_one_alert_can_be_switched_off():
    assert alerts(changed(enabled=False)).keys() == alerts().keys() - {"TrainermonRunStalled"}


def test_recording_rules_stay_when_all_alerts_are_off():
    off = {"prometheusRule": {"alerts": {name: {"enabled": False} for name in alerts()}}}

    groups = render(off).one("PrometheusRule")["spec"]["groups"]

    assert groups
    assert all("record" in rule for group in groups for rule in group["rules"])


def test_a_threshold_can_be_changed():
    assert alerts()["TrainermonRunStalled"]["expr"].endswith("> 1800")
    assert alerts(changed(threshold=90.5))["TrainermonRunStalled"]["expr"].endswith("> 90.5")


def test_every_thing_about_an_alert_can_be_changed():
    new = {"for": "7m", "keepFiringFor": "9m", "severity": "info", "labels": {"team": "b"}, "expr": "vector(1)"}

    alert = alerts(changed(**new), {"prometheusRule": {"alertLabels": {"team": "a", "site": "c"}}})[
        "TrainermonRunStalled"
    ]

    assert (alert["for"], alert["keep_firing_for"], alert["expr"]) == ("7m", "9m", "vector(1)")
    assert alert["labels"] == {"severity": "info", "team": "b", "site": "c"}


def test_labels_for_all_alerts_do_not_replace_what_an_alert_says_of_itself():
    found = alerts({"prometheusRule": {"alertLabels": {"team": "a", "severity": "info"}}})

    assert {alert["labels"]["team"] for alert in found.values()} == {"a"}
    assert {name: alert["labels"]["severity"] for name, alert in found.items()} == {
        name: alert["labels"]["severity"] for name, alert in alerts().items()
    }


def test_a_change_leaves_the_other_alerts_alone():
    before, after = alerts(), alerts(changed(severity="info"))

    assert {name for name in before if before[name] != after[name]} == {"TrainermonRunStalled"}


def test_runbooks_are_the_controllers_where_the_site_has_none():
    found = alerts({})

    assert found
    for alert in found.values():
        assert re.fullmatch(
            r"http://[a-z-]+-controller\.[a-z-]+\.svc:9462/runbook/(prometheus_)?runbook\.md#[a-z-]+",
            alert["annotations"]["runbook_url"],
        )


def test_runbooks_are_where_the_site_keeps_them():
    found = alerts({"prometheusRule": {"runbookUrl": "https://wiki.example.com/mon/"}})

    for alert in found.values():
        assert alert["annotations"]["runbook_url"].startswith("https://wiki.example.com/mon/")
        assert "//" not in alert["annotations"]["runbook_url"].removeprefix("https://")


@pytest.mark.parametrize("name", ["prometheus", "influxdb"])
def test_every_dashboard_is_an_object_of_its_own(name):
    files = {path.name: path.read_text() for path in CHART.glob(f"files/dashboards/{name}/*.json")}

    objects = [o for o in render({"dashboards": {"sets": [name]}}) if "-dashboard-" in o["metadata"]["name"]]

    assert len(objects) == len(files)
    for entry in objects:
        ((key, text),) = entry["data"].items()
        assert json.loads(text) == json.loads(files[key.removeprefix(f"{name}-")])
        assert entry["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert entry["metadata"]["annotations"]["grafana_folder"] == "trainermon"
        assert len(text.encode()) < 1 << 20


def test_dashboards_can_be_left_out():
    assert not any("-dashboard-" in str(name) for name in render({"dashboards": {"enabled": False}}).names())


def test_policies_are_for_what_the_chart_owns():
    names = {entry["metadata"]["name"] for entry in render(CONTROLLER) if entry["kind"] == "NetworkPolicy"}

    assert names == {"demo-trainermon-controller"}
    assert "NetworkPolicy" not in render(CONTROLLER, {"networkPolicy": {"enabled": False}}).kinds()


def test_the_controller_is_reached_by_those_who_are_named():
    values = {"networkPolicy": {"prometheusFrom": MONITORING, "alertmanagerFrom": MONITORING}}

    ingress = policy("-controller", CONTROLLER, values)["ingress"]

    port = [{"port": 9462, "protocol": "TCP"}]
    labels = render(CONTROLLER).one("Pod", "-test")["metadata"]["labels"]
    (peer,) = ingress[1]["from"]
    assert [ingress[0], ingress[2]] == [{"from": MONITORING, "ports": port}] * 2
    assert peer["podSelector"]["matchLabels"].items() <= labels.items()
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "test"
    assert policy("-controller", CONTROLLER)["ingress"][0] == {"ports": port}


def test_the_controller_reaches_agents_and_names_only():
    spec = policy("-controller", CONTROLLER)

    assert spec["policyTypes"] == ["Ingress", "Egress"]
    agents, names = spec["egress"]
    assert agents["to"] == [{"podSelector": {"matchLabels": {"trainermon": "true"}}}]
    assert agents["ports"] == [{"port": 9461, "protocol": "TCP"}]
    assert {entry["port"] for entry in names["ports"]} == {53}


def test_the_controller_reaches_the_api_where_it_must():
    kubernetes = {"controller": {"discovery": {"method": "kubernetes"}}}

    ports = {
        entry["port"] for rule in policy("-controller", CONTROLLER, kubernetes)["egress"] for entry in rule["ports"]
    }

    assert ports == {9461, 53, 443, 6443}


def test_the_daemonset_is_reached_by_prometheus_and_controller():
    ingress = policy("-agent", merged(CONTROLLER, DAEMONSET))["ingress"]

    assert [rule["ports"] for rule in ingress] == [[{"port": 9461, "protocol": "TCP"}]] * 2
    assert ingress[1]["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "controller"


def test_training_pods_are_isolated_only_on_demand_and_then_still_reach_each_other():
    asked = {"networkPolicy": {"trainingPods": {"enabled": True, "extraIngress": [{"ports": [{"port": 22}]}]}}}

    ingress = policy("-training", CONTROLLER, asked)["ingress"]

    assert ingress[0] == {"from": [{"podSelector": {"matchLabels": {"trainermon": "true"}}}]}  # on every port
    assert ingress[-1] == {"ports": [{"port": 22}]}
    assert "NetworkPolicy" not in render({"networkPolicy": {"enabled": True}}).kinds()
