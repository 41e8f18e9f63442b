"""Every pod of the chart fits the restricted Pod Security Standard, but the one that needs a host path, which says so.

Source: Kubernetes documentation, "Pod Security Standards", profile Restricted.
"""

from __future__ import annotations

import pytest

from tests.helm.charts import CONTROLLER, DAEMONSET, ci_values, pod_specs, render

ALLOWED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
PREPARES_HOST_PATH = "prepare-spool"


@pytest.fixture(params=sorted(ci_values()))
def containers(request):
    """The containers of one installation, each with the specification of its pod."""
    return [
        (container, spec)
        for _, spec in pod_specs(render(ci_values()[request.param]))
        for container in (*spec.get("initContainers", ()), *spec["containers"])
        if container["name"] not in (PREPARES_HOST_PATH, "YOUR-TRAINING-CONTAINER")
    ]


def test_there_are_workloads_of_every_kind():
    found = {kind for values in ci_values().values() for kind, _ in pod_specs(render(values))}

    assert found == {"sidecar", "DaemonSet", "Deployment"}


def test_containers_are_restricted(containers):
    for container, spec in containers:
        own, pod = container["securityContext"], spec.get("securityContext", {})
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert own["privileged"] is False
        assert {**pod, **own}.get("runAsNonRoot", True) is True
        assert {**pod, **own}["seccompProfile"] == {"type": "RuntimeDefault"}


def test_nothing_can_be_written_but_volumes(containers):
    for container, _ in containers:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert any(mount["mountPath"] == "/tmp" for mount in container["volumeMounts"])


def test_nothing_of_the_host_is_shared(containers):
    for container, spec in containers:
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert all("hostPort" not in port for port in container.get("ports", []))


def test_containers_have_resources_and_probes(containers):
    for container, _ in containers:
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        assert "livenessProbe" in container


def test_secrets_are_only_referred_to(containers):
    for container, _ in containers:
        for entry in container.get("env", []):
            is_secret = any(word in entry["name"] for word in ("TOKEN", "PASSWORD", "KEY"))
            assert not is_secret or entry["value"].startswith("/etc/trainermon/")


def test_only_the_daemonset_needs_a_host_path():
    for values in ci_values().values():
        for kind, spec in pod_specs(render(values)):
            types = {key for volume in spec["volumes"] for key in volume if key != "name"}
            assert types <= ALLOWED_VOLUMES | ({"hostPath"} if kind == "DaemonSet" else set())


@pytest.mark.parametrize("kind", ["Deployment", "DaemonSet"])
def test_pods_have_no_account_of_the_api(kind):
    assert render(CONTROLLER, DAEMONSET).one(kind)["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_there_is_no_secret_in_the_chart():
    assert all("Secret" not in render(values).kinds() for values in ci_values().values())
