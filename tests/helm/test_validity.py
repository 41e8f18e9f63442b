"""What the chart renders is valid for those who get it: Helm 3 and 4, Kubernetes, the operator, and Prometheus."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helm.charts import CHART, OPERATOR, ci_values, helm, render, render_with_library
from tests.package_programs import find_node_modules, find_wheels
from tests.server_programs import find_program

pytestmark = pytest.mark.server

# The first with sidecars that end with the job, and the newest that the schemas are there for.
KUBERNETES = ("1.29", "1.37")
OPERATOR_KINDS = {"PodMonitor", "PrometheusRule", "ServiceMonitor"}
EXAMPLES = sorted((CHART / "examples").glob("*[!s].yaml"))


@pytest.fixture(scope="module")
def installations():
    """Everything that the values in `ci/` make, by their name."""
    return {name: render(values) for name, values in ci_values().items()}


@pytest.fixture(scope="module")
def monitors(installations):
    return [entry for objects in installations.values() for entry in objects if entry["kind"] in OPERATOR_KINDS]


@pytest.fixture
def check_kubernetes(tmp_path):
    """Return a function that gives the complaints about objects; unknown kinds are passed over."""

    def check(objects, version):
        path = tmp_path / "objects.yaml"
        path.write_text(yaml.safe_dump_all(objects))
        return subprocess.run(
            [sys.executable, "-m", "kubernetes_validate", "-k", version, "--strict", "--no-warn", "--quiet", path],
            env={**os.environ, "PYTHONPATH": str(find_wheels("kubernetes-validate"))},
            capture_output=True,
            text=True,
            check=False,
        )

    return check


@pytest.fixture
def check_operator(tmp_path):
    """Return a function that gives the complaints about resources of the Prometheus operator, or nothing."""

    def check(objects):
        (tmp_path / "node_modules").symlink_to(find_node_modules("operator-models") / "node_modules")
        script = shutil.copy(Path(__file__).with_name("operator_models.mjs"), tmp_path)
        done = subprocess.run(
            ["node", script],
            cwd=tmp_path,
            input=json.dumps(objects),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return check


def test_lint_has_no_complaint():
    values = [option for path in CHART.glob("ci/*-values.yaml") for option in ("-f", str(path))]

    for options in ([], *(values[i : i + 2] for i in range(0, len(values), 2))):
        done = helm("lint", "--strict", str(CHART), *options)
        assert done.returncode == 0, done.stdout
        assert "[WARNING]" not in done.stdout


def test_the_package_has_what_is_needed_and_renders_the_same(tmp_path):
    assert helm("package", str(CHART), "-d", str(tmp_path)).returncode == 0
    (package,) = tmp_path.glob("trainermon-*.tgz")
    names = subprocess.run(["tar", "tzf", package], capture_output=True, text=True, check=True).stdout

    done = helm("template", "demo", str(package), "-n", "training", "--kube-version", "1.32.0", "-a", OPERATOR)

    assert list(filter(None, yaml.safe_load_all(done.stdout))) == render()
    assert "trainermon/values.schema.json" in names
    assert "trainermon/ci/" not in names


def test_helm_4_renders_the_same():
    for (name, values), texts in zip(ci_values().items(), render_with_library(*ci_values().values()), strict=True):
        objects = [
            entry
            for template, text in texts.items()
            if template.endswith(".yaml")
            for entry in yaml.safe_load_all(text)
            if entry
        ]

        def key(entry):
            return entry["kind"], entry["metadata"]["name"]

        assert sorted(objects, key=key) == sorted(render(values), key=key), name


def test_notes_say_what_to_do_next():
    for (name, values), texts in zip(ci_values().items(), render_with_library(*ci_values().values()), strict=True):
        notes = texts["trainermon/templates/NOTES.txt"]

        assert "<no value>" not in notes, name
        assert ("daemonset" if values.get("mode") else "restartPolicy Always") in notes
        if values.get("controller"):
            assert "-controller." in notes
            assert "/api/v1/alerts" in notes


@pytest.mark.parametrize("version", KUBERNETES)
def test_objects_fit_the_schemas_of_kubernetes(installations, check_kubernetes, version):
    objects = [entry for found in installations.values() for entry in found if entry["kind"] not in OPERATOR_KINDS]
    fragments = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "training"}, "spec": _completed(pod["spec"])}
        for entry in objects
        if "pod.yaml" in entry.get("data", {})
        for pod in [yaml.safe_load(entry["data"]["pod.yaml"])]
    ]

    done = check_kubernetes([*objects, *fragments], version)

    assert fragments
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", KUBERNETES)
def test_examples_fit_the_schemas_of_kubernetes(check_kubernetes, version):
    """The pods in resources of other projects are checked as pods; the rest of those resources is not."""
    objects = [entry for path in EXAMPLES for entry in yaml.safe_load_all(path.read_text())]
    native = [entry for entry in objects if entry["apiVersion"] in ("v1", "batch/v1")]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "training"}, "spec": spec}
        for entry in objects
        if entry not in native
        for spec in _pod_specs(entry)
    ]

    done = check_kubernetes([*native, *pods], version)

    assert (len(native), len(pods)) == (2, 5)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_schemas_of_kubernetes_see_a_mistake(installations, check_kubernetes):
    wrong = copy.deepcopy(installations["controller-values.yaml"].one("Deployment"))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessProb"] = {}

    assert check_kubernetes([wrong], KUBERNETES[0]).returncode != 0


def test_resources_of_the_operator_fit_its_types(monitors, check_operator):
    assert {entry["kind"] for entry in monitors} == OPERATOR_KINDS
    assert check_operator(monitors) == ""


def test_the_prometheus_of_a_large_job_fit_its_types(check_operator):
    objects = yaml.safe_load_all((CHART / "examples" / "prometheus-shards.yaml").read_text())

    assert check_operator([each for each in objects if each["apiVersion"] == "monitoring.coreos.com/v1"]) == ""


def test_each_prometheus_of_a_large_job_selects_what_the_chart_makes():
    values = yaml.safe_load((CHART / "examples" / "prometheus-shards-values.yaml").read_text())
    shards, everything, service = yaml.safe_load_all((CHART / "examples" / "prometheus-shards.yaml").read_text())
    made = render(values)

    def labels(kind):
        return made.one(kind)["metadata"]["labels"].items()

    assert shards["spec"]["podMonitorSelector"]["matchLabels"].items() <= labels("PodMonitor")
    assert everything["spec"]["serviceMonitorSelector"]["matchLabels"].items() <= labels("ServiceMonitor")
    assert everything["spec"]["ruleSelector"]["matchLabels"].items() <= labels("PrometheusRule")
    assert shards["spec"]["remoteWrite"][0]["url"] == f"http://{service['metadata']['name']}:9090/api/v1/write"


def test_the_types_of_the_operator_see_a_mistake(monitors, check_operator):
    wrong = copy.deepcopy(next(entry for entry in monitors if entry["kind"] == "PodMonitor"))
    wrong["spec"]["podMetricsEndpoints"][0]["scrape_timeout"] = "10s"
    wrong["spec"]["podMetricsEndpoints"][0]["interval"] = "often"

    complaints = check_operator([wrong])

    assert "scrape_timeout" in complaints
    assert "interval" in complaints


def test_prometheus_takes_the_rules(installations, tmp_path):
    for name, objects in installations.items():
        if "PrometheusRule" not in objects.kinds():
            continue
        path = tmp_path / f"{name}.rules.yaml"
        path.write_text(yaml.safe_dump(objects.one("PrometheusRule")["spec"]))
        done = subprocess.run(
            [find_program("promtool"), "check", "rules", path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "SUCCESS" in done.stdout


def _completed(spec):
    return {**spec, "containers": [{**spec["containers"][0], "name": "training", "image": "training"}]}


def _pod_specs(entry):
    """Yield everything in `entry` that is a pod's specification."""
    if isinstance(entry, dict):
        if "containers" in entry:
            yield entry
        for below in entry.values():
            yield from _pod_specs(below)
    elif isinstance(entry, list):
        for below in entry:
            yield from _pod_specs(below)
