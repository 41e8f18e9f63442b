"""values.schema.json and the templates refuse what cannot be meant, and say where it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.helm.charts import CHART, CONTROLLER, SECRET, refusal, render

# Values, and what the refusal must name.
BAD: dict[str, Any] = {
    "unknown key": ({"sidecars": {}}, "sidecars"),
    "unknown key below": ({"agent": {"prot": 1}}, "prot"),
    "unknown mode": ({"mode": "deployment"}, "mode"),
    "port as text": ({"agent": {"port": "9461"}}, "agent.port"),
    "port too high": ({"agent": {"port": 70000}}, "agent.port"),
    "port zero": ({"controller": {"port": 0}}, "controller.port"),
    "unknown pull policy": ({"image": {"pullPolicy": "Sometimes"}}, "image.pullPolicy"),
    "repository with a scheme": ({"image": {"repository": "https://registry/x"}}, "image.repository"),
    "short digest": ({"image": {"digest": "sha256:abc"}}, "image.digest"),
    "pull secret as text": ({"imagePullSecrets": ["registry"]}, "imagePullSecrets.0"),
    "selector by plain labels": ({"podSelector": {"app": "x"}}, "podSelector"),
    "unknown operator": ({"podSelector": {"matchExpressions": [{"key": "a", "operator": "Is"}]}}, "operator"),
    "label that is a number": ({"podSelector": {"matchLabels": {"a": 1}}}, "podSelector.matchLabels.a"),
    "label with a space": ({"commonLabels": {"team": "a b"}}, "commonLabels.team"),
    "annotation that is a boolean": ({"commonAnnotations": {"a": True}}, "commonAnnotations.a"),
    "relative path": ({"sidecar": {"spool": {"mountPath": "spool"}}}, "mountPath"),
    "unknown medium": ({"sidecar": {"spool": {"medium": "memory"}}}, "medium"),
    "size without a unit that exists": ({"sidecar": {"spool": {"sizeLimit": "5GB"}}}, "sizeLimit"),
    "user as text": ({"sidecar": {"runAsUser": "ray"}}, "runAsUser"),
    "controller as root": ({"controller": {"runAsUser": 0}}, "controller.runAsUser"),
    "volume with a name": ({"sidecar": {"output": {"volume": {"name": {}}}}}, "volume"),
    "volume of two kinds": ({"daemonset": {"output": {"volume": {"nfs": {}, "hostPath": {}}}}}, "volume"),
    "resources of no kind": ({"agent": {"resources": {"limit": {}}}}, "resources"),
    "memory in no unit": ({"agent": {"resources": {"limits": {"memory": "1 GB"}}}}, "memory"),
    "a token in the values": ({"access": {"token": "secret"}}, "token"),
    "agent without a port": ({"controller": {"discovery": {"agents": ["node1"]}}}, "agents.0"),
    "unknown discovery": ({"controller": {"discovery": {"method": "consul"}}}, "method"),
    "two replicas": ({"controller": {"replicas": 2}}, "replicas"),
    "budget above the one replica": ({"controller": {"podDisruptionBudget": {"maxUnavailable": 2}}}, "maxUnavailable"),
    "interval as a number": ({"podMonitor": {"interval": 15}}, "podMonitor.interval"),
    "interval of no unit": ({"podMonitor": {"interval": "15 s"}}, "podMonitor.interval"),
    "monitor perhaps": ({"podMonitor": {"enabled": "maybe"}}, "podMonitor.enabled"),
    "job that is a pattern": ({"podMonitor": {"job": ".*"}}, "podMonitor.job"),
    "misspelt relabeling": ({"podMonitor": {"relabelings": [{"target_label": "a"}]}}, "target_label"),
    "runbooks nowhere": ({"prometheusRule": {"runbookUrl": "runbooks"}}, "runbookUrl"),
    "unknown severity": ({"prometheusRule": {"alerts": {"TrainermonHang": {"severity": "page"}}}}, "severity"),
    "threshold as text": ({"prometheusRule": {"alerts": {"TrainermonRunStalled": {"threshold": "1h"}}}}, "threshold"),
    "unknown change of an alert": ({"prometheusRule": {"alerts": {"TrainermonHang": {"enable": False}}}}, "enable"),
    "unknown set of dashboards": ({"dashboards": {"sets": ["graphite"]}}, "dashboards.sets.0"),
    "peer of no kind": ({"networkPolicy": {"prometheusFrom": [{"pod": "x"}]}}, "prometheusFrom"),
    # What only the templates can see:
    "unknown alert": ({"prometheusRule": {"alerts": {"TrainermonHangs": {"enabled": False}}}}, "TrainermonHangs"),
    "threshold of an alert without one": (
        {"prometheusRule": {"alerts": {"TrainermonHang": {"threshold": 1}}}},
        "TrainermonHang.threshold",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused(name):
    values, named = BAD[name]

    # In Helm's messages a path is written as in the values.
    assert named.split(".")[-1] in refusal(values)


@pytest.mark.parametrize(
    "values",
    [
        {"agent": {"resources": {"limits": {"cpu": 2, "memory": "1.5Gi", "nvidia.com/gpu": 1}}}},
        {"sidecar": {"runAsUser": None}},
        {"podSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "gpt"}}},
        {"image": {"repository": "registry.example.com:5000/team/trainermon", "tag": "1.2.3-rc.1"}},
        {"prometheusRule": {"alerts": {"TrainermonRunStalled": {"threshold": 0.5, "for": "1h30m"}}}},
        {"controller": {"podDisruptionBudget": {"maxUnavailable": "50%"}}},
        {"global": {"anything": 1}},
        {**SECRET, "controller": {"discovery": {"agents": ["[fd00::1]:9461", "node-1.example.com:9461"]}}},
    ],
    ids=lambda values: json.dumps(values)[:60],
)
def test_a_good_value_is_not_refused(values):
    assert render(values)


def test_the_defaults_fit_the_schema_and_every_key_has_a_default():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    missing = schema["properties"].keys() - values.keys() - {"global"}

    assert not missing
    for name, below in values.items():
        properties = schema["properties"][name].get("properties")
        if properties is not None:
            assert below.keys() == properties.keys(), name


def test_every_default_is_explained():
    """Each top-level key, and each key below, has a comment above it, or above the key that it is in."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    unexplained = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if line and line[0] not in " #-" and not before.startswith("#") and line != "imagePullSecrets: []"
    ]

    assert unexplained in ([], ["serviceAccount:"])


def test_a_chart_may_be_part_of_another(tmp_path):
    """A training chart of the user's own includes the sidecar by its named templates."""
    parent = tmp_path / "training"
    (parent / "templates").mkdir(parents=True)
    (parent / "charts").mkdir()
    (parent / "charts" / "trainermon").symlink_to(CHART)
    (parent / "Chart.yaml").write_text("apiVersion: v2\nname: training\nversion: 0.1.0\n")
    (parent / "templates" / "pod.yaml").write_text(
        "apiVersion: v1\n"
        "kind: Pod\n"
        "metadata: {name: training}\n"
        "spec:\n"
        "  initContainers:\n"
        '    - {{ include "trainermon.sidecar.container" .Subcharts.trainermon | nindent 6 | trim }}\n'
        "  containers:\n"
        "    - name: trainer\n"
        "      image: training\n"
        "      env:\n"
        '        {{- include "trainermon.sidecar.env" .Subcharts.trainermon | nindent 8 }}\n'
        "      volumeMounts:\n"
        '        {{- include "trainermon.sidecar.volumeMounts" .Subcharts.trainermon | nindent 8 }}\n'
        "  volumes:\n"
        '    {{- include "trainermon.sidecar.volumes" .Subcharts.trainermon | nindent 4 }}\n'
    )
    from tests.helm.charts import fragment, helm

    done = helm("template", "demo", str(parent), "--set", "trainermon.agent.port=1234", "--kube-version", "1.32.0")

    assert done.returncode == 0, done.stderr
    pod = next(entry for entry in yaml.safe_load_all(done.stdout) if entry and entry["kind"] == "Pod")
    wanted = fragment({"agent": {"port": 1234}})["spec"]
    assert pod["spec"]["initContainers"] == wanted["initContainers"]
    assert pod["spec"]["volumes"] == wanted["volumes"]
    assert pod["spec"]["containers"][0]["env"] == wanted["containers"][0]["env"]


def test_names_can_be_chosen():
    def names(values, kind=None):
        return {entry["metadata"]["name"] for entry in render(CONTROLLER, values) if kind in (None, entry["kind"])}

    assert all(name.startswith("demo-mon") for name in names({"nameOverride": "mon"}))
    assert all(name.startswith("mine") for name in names({"fullnameOverride": "mine"}))
    assert max(map(len, names({"fullnameOverride": "a" * 63}, "Service"))) <= 63  # a label of the DNS


def test_another_namespace_can_be_chosen():
    assert {entry["metadata"]["namespace"] for entry in render(CONTROLLER, {"namespaceOverride": "other"})} == {"other"}


def test_every_object_has_the_recommended_labels_and_those_of_the_site():
    objects = render(CONTROLLER, {"commonLabels": {"team": "a"}, "commonAnnotations": {"owner": "b"}})

    for entry in objects:
        labels = entry["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "trainermon"
        assert labels["app.kubernetes.io/instance"] == "demo"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["helm.sh/chart"].startswith("trainermon-")
        assert labels["team"] == "a"
        assert entry["metadata"]["annotations"]["owner"] == "b"


def test_labels_of_the_site_never_reach_a_selector():
    selector = render(CONTROLLER, {"commonLabels": {"team": "a"}}).one("Deployment")["spec"]["selector"]["matchLabels"]

    assert selector == {
        "app.kubernetes.io/name": "trainermon",
        "app.kubernetes.io/instance": "demo",
        "app.kubernetes.io/component": "controller",
    }


@pytest.mark.parametrize(
    ("image", "wanted"),
    [
        ({}, "trainermon:0.1.0"),
        ({"repository": "r.example.com/t", "tag": "2"}, "r.example.com/t:2"),
        ({"tag": "2", "digest": "sha256:" + "0" * 64}, "trainermon@sha256:" + "0" * 64),
    ],
)
def test_a_digest_counts_before_a_tag(image, wanted):
    container = render(CONTROLLER, {"image": image}).one("Deployment")["spec"]["template"]["spec"]["containers"][0]

    assert container["image"] == wanted


def test_further_objects_are_templates():
    extra = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "{{ .Release.Name }}-x"}}

    objects = render({"extraObjects": [extra, "apiVersion: v1\nkind: Pod\nmetadata: {name: y}\n"]})

    assert objects.one("Secret")["metadata"]["name"] == "demo-x"
    assert objects.one("Pod", "y")["metadata"]["name"] == "y"
