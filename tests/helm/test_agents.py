"""What the chart gives to training pods, to nodes, and to those who look for agents."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import yaml

from tests.helm.charts import CHART, DAEMONSET, FULLNAME, NAMESPACE, SECRET, fragment, refusal, render
from trainermon.agent.lifecycle import service
from trainermon.alerts.rules import load_rules

RULES = (CHART.parents[1] / "trainermon" / "alerts" / "default_rules.yaml").read_text()
KINDS: dict[str, list[Any]] = {
    "job": ["spec", "template", "spec"],
    "jobset": ["spec", "replicatedJobs", 0, "template", "spec", "template", "spec"],
    "pytorchjob": ["spec", "pytorchReplicaSpecs", "Worker", "template", "spec"],
    "raycluster": ["spec", "workerGroupSpecs", 0, "template", "spec"],
}


def sidecar(*values):
    return fragment(*values)["spec"]["initContainers"][0]


def mounts(container):
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


def variables(container):
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container.get("env", [])}


def volumes(spec):
    return {volume["name"]: volume for volume in spec["volumes"]}


def test_the_sidecar_ends_with_the_job():
    assert sidecar()["restartPolicy"] == "Always"


def test_an_agent_that_cannot_start_does_not_keep_the_training_from_starting():
    assert "startupProbe" not in sidecar()


def test_the_training_may_wait_for_its_agent():
    probe = sidecar({"sidecar": {"holdsTraining": True}})["startupProbe"]

    assert probe["exec"]["command"][:3] == ["trainermon", "node", "--check=service"]


@pytest.mark.parametrize("values", [{}, {"agent": {"rules": "rules: []", "port": 1234}}])
def test_the_command_line_takes_the_arguments(values):
    parser = argparse.ArgumentParser()
    service.add_arguments(parser)
    command, *arguments = sidecar(values)["args"]

    taken = parser.parse_args(arguments)

    assert command == "node"
    assert taken.port == values.get("agent", {}).get("port", 9461)
    assert taken.host == "0.0.0.0"
    assert taken.drain_timeout == 25
    assert taken.rules == ("/etc/trainermon/agent/rules.yaml" if values else None)


def test_the_probe_asks_for_the_spool_that_the_agent_follows():
    container = sidecar({"sidecar": {"spool": {"mountPath": "/spool"}, "holdsTraining": True}})

    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["exec"]["command"][-1] == "--spool=/spool"
    assert "--spool=/spool" in container["args"]


def test_ranks_and_agent_share_spool_and_output():
    pod = fragment({"sidecar": {"spool": {"mountPath": "/spool"}, "output": {"mountPath": "/out"}}})["spec"]
    training, agent = pod["containers"][0], pod["initContainers"][0]

    assert variables(training) == {"TRAINERMON_SPOOL": "/spool", "TRAINERMON_OUTPUT": "/out"}
    assert mounts(training) == {"trainermon-spool": "/spool", "trainermon-output": "/out"}
    assert mounts(training).items() <= mounts(agent).items()


def test_the_spool_is_memory_with_a_limit():
    spool = volumes(fragment()["spec"])["trainermon-spool"]

    assert spool["emptyDir"] == {"medium": "Memory", "sizeLimit": "5Gi"}


def test_the_spool_may_be_on_disk():
    spool = volumes(fragment({"sidecar": {"spool": {"medium": "", "sizeLimit": "20Gi"}}})["spec"])["trainermon-spool"]

    assert spool["emptyDir"] == {"sizeLimit": "20Gi"}


def test_every_mount_has_its_volume_but_the_one_of_the_training():
    values = {**SECRET, "agent": {"rules": RULES}}
    pod = fragment(values)["spec"]

    assert set(mounts(pod["initContainers"][0])) - set(volumes(pod)) == {"trainermon-output"}
    given = fragment(values, {"sidecar": {"output": {"volume": {"nfs": {"server": "s", "path": "/"}}}}})["spec"]
    assert set(mounts(given["initContainers"][0])) == set(volumes(given))


def test_all_pods_of_a_job_belong_to_the_run_of_its_label():
    training = fragment({"sidecar": {"runIdLabel": "batch.kubernetes.io/job-name"}})["spec"]["containers"][0]

    source = variables(training)["TRAINERMON_RUN_ID"]["fieldRef"]["fieldPath"]
    assert source == "metadata.labels['batch.kubernetes.io/job-name']"


def test_the_pod_gets_the_labels_by_which_it_is_found():
    assert fragment()["metadata"]["labels"] == {"trainermon": "true"}


@pytest.mark.parametrize(("user", "is_root"), [(1000, False), (0, True)])
def test_the_agent_is_the_user_of_the_ranks(user, is_root):
    context = sidecar({"sidecar": {"runAsUser": user}})["securityContext"]

    assert (context["runAsUser"], context["runAsNonRoot"]) == (user, not is_root)


def test_without_a_user_the_pod_decides():
    assert "runAsUser" not in sidecar({"sidecar": {"runAsUser": None}})["securityContext"]


def test_the_limit_of_the_journal_fits_into_the_spool():
    """Eight ranks of 512 MiB, which is what `spool_mb` is by default."""
    from trainermon.core.config import MonitorConfig

    size = volumes(fragment()["spec"])["trainermon-spool"]["emptyDir"]["sizeLimit"]

    assert int(size.removesuffix("Gi")) * 1024 > 8 * MonitorConfig().spool_mb


def test_rules_are_mounted_and_can_be_read(tmp_path):
    objects = render({"agent": {"rules": RULES}})
    path = tmp_path / "rules.yaml"
    path.write_text(objects.one("ConfigMap", "-rules")["data"]["rules.yaml"])

    assert load_rules(path) == load_rules()
    assert "-rules" not in str(render().names())


def test_secrets_reach_the_agent_as_files():
    pod = fragment(SECRET, {"access": {"readTokenKey": "read"}})["spec"]
    agent = pod["initContainers"][0]
    secret = volumes(pod)["trainermon-secrets"]["secret"]

    assert variables(agent)["TRAINERMON_TOKEN_FILE"] == "/etc/trainermon/secrets/token"
    assert variables(agent)["TRAINERMON_READ_TOKEN_FILE"] == "/etc/trainermon/secrets/read-token"
    assert {item["key"]: item["path"] for item in secret["items"]} == {"token": "token", "read": "read-token"}
    assert "TRAINERMON_TOKEN_FILE" not in variables(pod["containers"][0])


def test_one_agent_per_node_is_only_there_when_asked_for():
    assert "DaemonSet" not in render().kinds()
    objects = render(DAEMONSET)
    assert "DaemonSet" in objects.kinds()
    assert "-sidecar" not in str(objects.names())


def test_the_agent_of_a_node_has_the_name_of_the_node():
    container = render(DAEMONSET).one("DaemonSet")["spec"]["template"]["spec"]["containers"][0]

    assert variables(container)["NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert "--node-name=$(NODE_NAME)" in container["args"]


def test_the_agent_of_a_node_reads_a_host_path():
    spec = render(DAEMONSET, {"daemonset": {"spoolPath": "/mnt/spool"}}).one("DaemonSet")["spec"]["template"]["spec"]

    assert volumes(spec)["trainermon-spool"]["hostPath"] == {"path": "/mnt/spool", "type": "DirectoryOrCreate"}
    assert mounts(spec["containers"][0])["trainermon-spool"] == "/mnt/spool"
    assert volumes(spec)["trainermon-output"]["hostPath"] == {"path": "/runs"}


def test_the_host_path_is_prepared_for_the_user_of_the_ranks():
    spec = render(DAEMONSET, {"daemonset": {"runAsUser": 1234}}).one("DaemonSet")["spec"]["template"]["spec"]
    prepare = spec["initContainers"][0]

    assert "1234, 1234" in prepare["args"][0]
    compile(prepare["args"][0], "args", "exec")
    assert prepare["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
    assert (
        "initContainers"
        not in render(DAEMONSET, {"daemonset": {"prepareSpool": False}}).one("DaemonSet")["spec"]["template"]["spec"]
    )


def test_there_is_time_for_the_last_flush():
    spec = render(DAEMONSET, {"agent": {"drainTimeoutSeconds": 100}}).one("DaemonSet")["spec"]["template"]["spec"]

    assert spec["terminationGracePeriodSeconds"] > 100
    assert "--drain-timeout=100" in spec["containers"][0]["args"]


def test_a_daemonset_without_a_place_for_runs_is_refused():
    assert "daemonset.output.volume" in refusal({"mode": "daemonset"})


def test_new_rules_restart_the_daemonset():
    def checksum(rules):
        template = render(DAEMONSET, {"agent": {"rules": rules}}).one("DaemonSet")["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/rules"]

    assert checksum("rules: []") != checksum(RULES)


def test_the_service_has_an_address_for_every_agent():
    service_spec = render().one("Service", "-agents")["spec"]

    assert service_spec["clusterIP"] == "None"
    assert service_spec["publishNotReadyAddresses"] is True
    assert service_spec["selector"] == {"trainermon": "true"}


def test_the_service_of_a_daemonset_selects_its_pods():
    objects = render(DAEMONSET)
    labels = objects.one("DaemonSet")["spec"]["template"]["metadata"]["labels"]

    assert objects.one("Service", "-agents")["spec"]["selector"].items() <= labels.items()


def test_a_selector_with_expressions_has_no_service():
    selector = {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}

    assert "Service" not in render({"podSelector": selector}).kinds()


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_has_what_the_chart_says(kind):
    values = yaml.safe_load((CHART / "examples" / f"{kind}-values.yaml").read_text())
    example = list(yaml.safe_load_all((CHART / "examples" / f"{kind}.yaml").read_text()))[-1]
    pod = example
    for step in KINDS[kind]:
        pod = pod[step]
    wanted = fragment(values)["spec"]
    selector = render(values).one("PodMonitor")["spec"]["selector"]
    training, wanted_training = pod["containers"][0], wanted["containers"][0]

    assert selector == values["podSelector"]
    assert pod["initContainers"] == wanted["initContainers"]
    assert pod["volumes"] == wanted["volumes"]
    assert pod["shareProcessNamespace"] == wanted["shareProcessNamespace"]
    assert training["env"] == wanted_training["env"]
    assert training["volumeMounts"] == wanted_training["volumeMounts"]
    assert pod["securityContext"]["runAsUser"] == wanted["initContainers"][0]["securityContext"]["runAsUser"]


def test_names_are_in_the_namespace_of_the_release():
    for entry in render(DAEMONSET):
        assert entry["metadata"]["name"].startswith(FULLNAME)
        assert entry["metadata"]["namespace"] == NAMESPACE
