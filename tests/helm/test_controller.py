"""The controller as the chart runs it: settings that it takes, one writer, and no more rights than it needs."""

from __future__ import annotations

import pytest
import yaml

from tests.helm.charts import CONTROLLER, DAEMONSET, FULLNAME, NAMESPACE, SECRET, merged, refusal, render
from trainermon.agent.controller.settings import ControllerSettings, load_settings

KUBERNETES = merged(CONTROLLER, {"controller": {"discovery": {"method": "kubernetes"}}})


def deployment(*values):
    return render(CONTROLLER, *values).one("Deployment")


def pod(*values):
    return deployment(*values)["spec"]["template"]["spec"]


def settings(tmp_path, *values) -> ControllerSettings:
    path = tmp_path / "controller.yaml"
    path.write_text(render(CONTROLLER, *values).one("ConfigMap", "-controller")["data"]["controller.yaml"])
    return load_settings(path, {})


def test_without_it_nothing_of_it_is_there():
    assert not render().kinds() & {"Deployment", "ServiceAccount", "ServiceMonitor", "NetworkPolicy"}


def test_it_needs_a_token():
    said = refusal({"controller": {"enabled": True}})

    assert "controller.enabled needs access.existingSecret" in said
    assert "kubectl create secret generic" in said


def test_it_takes_its_settings(tmp_path):
    taken = settings(tmp_path, {"controller": {"limits": {"maxPerHour": 7}, "allowedHosts": ["job.example.com"]}})

    assert taken.discovery.dns == (f"{FULLNAME}-agents.{NAMESPACE}.svc:9461",)
    assert taken.limits.max_per_hour == 7
    assert "job.example.com" in taken.allowed_hosts
    assert f"{FULLNAME}-controller.{NAMESPACE}.svc" in taken.allowed_hosts
    assert not taken.agents.https


def test_the_name_of_the_agents_is_that_of_their_service(tmp_path):
    objects = render(CONTROLLER)
    agents = objects.one("Service", "-agents")["metadata"]

    name = settings(tmp_path).discovery.dns[0].partition(":")[0]

    assert name == f"{agents['name']}.{agents['namespace']}.svc"


def test_listed_agents_are_all_there_is_with_static_discovery(tmp_path):
    static = {"controller": {"discovery": {"method": "static", "agents": ["10.0.0.1:9461"]}}}

    taken = settings(tmp_path, static).discovery

    assert (taken.agents, taken.dns, taken.kubernetes) == (("10.0.0.1:9461",), (), None)
    assert "discovery.agents" in refusal(CONTROLLER, {"controller": {"discovery": {"method": "static"}}})


def test_with_tls_it_speaks_it_on_both_sides(tmp_path):
    tls = {"access": {"tls": {"existingSecret": "tls", "serverName": "agents"}}}

    taken = settings(tmp_path, tls).agents

    assert (taken.https, taken.ca_file, taken.server_name) == (True, "/etc/trainermon/tls/ca.crt", "agents")
    container = pod(tls)["containers"][0]
    assert container["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert {entry["name"] for entry in container["env"]} >= {"TRAINERMON_TLS_CERT_FILE", "TRAINERMON_TLS_KEY_FILE"}


def test_it_asks_the_api_with_the_selector_of_the_pods(tmp_path):
    selector = {
        "podSelector": {
            "matchLabels": {"trainermon": "true"},
            "matchExpressions": [
                {"key": "tier", "operator": "In", "values": ["a", "b"]},
                {"key": "debug", "operator": "DoesNotExist"},
            ],
        }
    }

    taken = settings(tmp_path, KUBERNETES, selector).discovery.kubernetes

    assert taken is not None
    assert taken.label_selector == "trainermon=true,tier in (a,b),!debug"
    assert (taken.port, taken.namespace) == ("trainermon", NAMESPACE)


def test_a_service_cannot_select_by_expressions():
    selector = {"podSelector": {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}}

    assert "Use method kubernetes" in refusal(CONTROLLER, selector)


def test_it_has_no_rights_where_it_needs_none():
    objects = render(CONTROLLER)

    assert not objects.kinds() & {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
    assert pod()["automountServiceAccountToken"] is False
    assert objects.one("ServiceAccount")["automountServiceAccountToken"] is False


def test_it_may_list_pods_of_its_namespace_and_nothing_else():
    objects = render(KUBERNETES)
    binding = objects.one("RoleBinding")

    assert objects.one("Role")["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    assert not objects.kinds() & {"ClusterRole", "ClusterRoleBinding"}
    assert binding["subjects"][0]["name"] == objects.one("ServiceAccount")["metadata"]["name"]
    assert pod(KUBERNETES)["automountServiceAccountToken"] is True


def test_there_is_never_more_than_one_writer_of_its_journal():
    spec = deployment()["spec"]

    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


@pytest.mark.parametrize(
    ("persistence", "volume", "claims"),
    [
        ({}, {"emptyDir": {}}, 0),
        ({"enabled": True}, {"persistentVolumeClaim": {"claimName": f"{FULLNAME}-controller"}}, 1),
        ({"enabled": True, "existingClaim": "mine"}, {"persistentVolumeClaim": {"claimName": "mine"}}, 0),
    ],
)
def test_its_journal_may_outlive_the_pod(persistence, volume, claims):
    objects = render(CONTROLLER, {"controller": {"persistence": persistence}})
    spec = objects.one("Deployment")["spec"]["template"]["spec"]

    state = next(entry for entry in spec["volumes"] if entry["name"] == "state")

    assert state == {"name": "state", **volume}
    assert [entry["kind"] for entry in objects].count("PersistentVolumeClaim") == claims


def test_state_is_where_the_settings_say(tmp_path):
    paths = {mount["name"]: mount["mountPath"] for mount in pod()["containers"][0]["volumeMounts"]}

    assert settings(tmp_path).state_dir == paths["state"]


def test_alive_and_ready_are_different_questions():
    container = pod()["containers"][0]

    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["startupProbe"]["httpGet"]["path"] == "/healthz"


def test_new_settings_restart_it():
    def checksum(*values):
        return deployment(*values)["spec"]["template"]["metadata"]["annotations"]["checksum/config"]

    assert checksum() != checksum({"controller": {"limits": {"maxPerHour": 9}}})
    assert checksum() == checksum({"controller": {"resources": {"limits": {"memory": "1Gi"}}}})


def test_its_service_reaches_it():
    objects = render(CONTROLLER, {"controller": {"port": 1234}})
    template = objects.one("Deployment")["spec"]["template"]
    spec = objects.one("Service", "-controller")["spec"]

    assert spec["selector"].items() <= template["metadata"]["labels"].items()
    assert spec["ports"][0]["port"] == 1234
    assert template["spec"]["containers"][0]["ports"][0]["containerPort"] == 1234


def test_a_node_can_be_drained():
    budget = render(CONTROLLER, {"controller": {"podDisruptionBudget": {"enabled": True}}}).one("PodDisruptionBudget")

    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] == "controller"
    assert "PodDisruptionBudget" not in render(CONTROLLER).kinds()


def test_it_is_placed_as_asked():
    spread = [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    placed = pod(
        {
            "controller": {
                "topologySpreadConstraints": spread,
                "nodeSelector": {"pool": "system"},
                "tolerations": [{"operator": "Exists"}],
                "priorityClassName": "high",
                "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}},
            }
        }
    )

    constraint = placed["topologySpreadConstraints"][0]
    assert constraint["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "controller"
    assert placed["nodeSelector"] == {"pool": "system"}
    assert placed["tolerations"] == [{"operator": "Exists"}]
    assert placed["priorityClassName"] == "high"
    assert "podAntiAffinity" in placed["affinity"]


@pytest.mark.parametrize("mode", [{}, DAEMONSET], ids=["sidecar", "daemonset"])
def test_it_has_the_token_that_its_agents_want(mode):
    objects = render(CONTROLLER, mode)
    env = pod(mode)["containers"][0]["env"]
    agent = (
        objects.one("DaemonSet")["spec"]["template"]["spec"]["containers"][0]
        if mode
        else yaml.safe_load(objects.one("ConfigMap", "-sidecar")["data"]["pod.yaml"])["spec"]["initContainers"][0]
    )

    token = {"name": "TRAINERMON_TOKEN_FILE", "value": "/etc/trainermon/secrets/token"}
    assert token in env
    assert token in agent["env"]


def test_a_password_without_a_user_key_is_refused():
    assert "access.passwordKey" in refusal(SECRET, {"access": {"userKey": "user"}})
    assert "access.existingSecret" in refusal({"access": {"readTokenKey": "read"}})
