"""The chart as Kubernetes would get it: rendered by the real helm, parsed, and asked for its parts."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.package_programs import find_tarball_program, find_wheels

CHART = Path(__file__).parents[2] / "helm" / "trainermon"
OPERATOR = "monitoring.coreos.com/v1"
KUBERNETES = "1.32.0"
RELEASE = "demo"
NAMESPACE = "training"
FULLNAME = "demo-trainermon"
SECRET = {"access": {"existingSecret": "secret"}}
CONTROLLER = {**SECRET, "controller": {"enabled": True}}
DAEMONSET = {"mode": "daemonset", "daemonset": {"output": {"volume": {"hostPath": {"path": "/runs"}}}}}


class Objects(list[dict[str, Any]]):
    """Rendered objects."""

    def one(self, kind: str, name: str = "") -> dict[str, Any]:
        """Return the only object of a kind, or the one whose name ends in `name`."""
        found = [o for o in self if o["kind"] == kind and o["metadata"]["name"].endswith(name)]
        assert len(found) == 1, f"found {len(found)} {kind} {name!r} in {self.names()}"
        return found[0]

    def kinds(self) -> set[str]:
        return {entry["kind"] for entry in self}

    def names(self) -> list[tuple[str, str]]:
        return [(entry["kind"], entry["metadata"]["name"]) for entry in self]


def merged(*values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values over values, as several `-f` do."""
    result: dict[str, Any] = {}
    for layer in values:
        for key, value in layer.items():
            below = result.get(key)
            result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return result


def render(*values: Mapping[str, Any], operator: bool = True, kubernetes: str = KUBERNETES) -> Objects:
    """Return the objects for some values; the operator's resources are known unless `operator` is false."""
    done = helm_template(json.dumps(merged(*values)), operator=operator, kubernetes=kubernetes)
    assert done.returncode == 0, done.stderr
    # The loader in C: the dashboards are long.
    return Objects(entry for entry in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if entry)


def refusal(*values: Mapping[str, Any]) -> str:
    """Return what helm says to values that it must refuse."""
    done = helm_template(json.dumps(merged(*values)), operator=True, kubernetes=KUBERNETES)
    assert done.returncode != 0, f"helm has accepted {values}"
    return done.stderr


@functools.cache
def helm_template(values: str, *, operator: bool, kubernetes: str) -> subprocess.CompletedProcess[str]:
    """Return what `helm template` says to values in JSON."""
    options = ["--kube-version", kubernetes, "--values", "-", *(["--api-versions", OPERATOR] if operator else [])]
    return helm("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *options, text=values)


def helm(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the real helm; it leaves nothing behind."""
    with tempfile.TemporaryDirectory() as home:
        return subprocess.run(
            [find_tarball_program("helm"), *arguments],
            input=text,
            text=True,
            capture_output=True,
            check=False,
            env={**os.environ, "HOME": home, "HELM_NO_PLUGINS": "1"},
        )


def render_with_library(*values: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return, for each of several values, the text of every template as Helm 4 renders it, NOTES included."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("helm_library.py"), CHART],
        input=json.dumps([dict(one) for one in values]),
        text=True,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(find_wheels("helm-library"))},
    )
    assert done.returncode == 0, done.stderr
    rendered: list[dict[str, str]] = json.loads(done.stdout)
    return rendered


def pod_specs(objects: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the pod specification of every workload, and of the sidecar's fragment."""
    for entry in objects:
        if entry["kind"] in {"Deployment", "DaemonSet", "Job"}:
            yield entry["kind"], entry["spec"]["template"]["spec"]
        elif entry["kind"] == "ConfigMap" and "pod.yaml" in entry["data"]:
            yield "sidecar", yaml.safe_load(entry["data"]["pod.yaml"])["spec"]


def fragment(*values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a training pod that the chart renders."""
    document: dict[str, Any] = yaml.safe_load(render(*values).one("ConfigMap", "-sidecar")["data"]["pod.yaml"])
    return document


def ci_values() -> dict[str, dict[str, Any]]:
    """Return by name the values in `ci/`, each an installation of its own."""
    return {path.name: yaml.safe_load(path.read_text()) for path in sorted(CHART.glob("ci/*-values.yaml"))}
