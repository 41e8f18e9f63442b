"""What comes with the chart beside its objects: its page, its test, and the policy that adds the sidecar."""

import base64
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml

from docs.chart import README, render_values
from tests.helm.charts import CHART, CONTROLLER, DAEMONSET, FULLNAME, fragment, render

EXAMPLES = CHART / "examples"
INJECTED = {"sidecar": {"injection": {"enabled": True, "container": "train*"}}}
PAGE = Path(__file__).parents[2] / "docs/deploy/kubernetes.md"


def merged(pod, patch):
    """Return a pod's specification after a strategic merge: lists of named things are merged by name or mount path."""
    result = dict(pod)
    for key, value in patch.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            result[key] = merged_list(pod.get(key, []), value)
        else:
            result[key] = value
    return result


def merged_list(present, wanted):
    if "(name)" in wanted[0]:  # Kyverno's anchor: merged into those whose name it matches
        (change,) = wanted
        pattern = re.escape(change["(name)"]).replace(r"\*", ".*").replace(r"\?", ".")
        more = {key: value for key, value in change.items() if key != "(name)"}
        return [merged(one, more) if re.fullmatch(pattern, one["name"]) else one for one in present]
    known = {one.get("mountPath", one["name"]) for one in wanted}
    return [one for one in present if one.get("mountPath", one["name"]) not in known] + wanted


def test_nothing_is_injected_unless_it_is_asked_for():
    assert "Policy" not in render().kinds()
    assert "Policy" not in render(INJECTED, DAEMONSET).kinds()


def test_the_policy_makes_of_a_plain_pod_what_the_config_map_says():
    values = yaml.safe_load((EXAMPLES / "job-values.yaml").read_text())
    policy = render(values, INJECTED).one("Policy")
    (rule,) = policy["spec"]["rules"]
    example = list(yaml.safe_load_all((EXAMPLES / "job.yaml").read_text()))[-1]["spec"]["template"]["spec"]
    wanted = fragment(values)["spec"]
    ours = {volume["name"] for volume in wanted["volumes"]}
    trainer = {key: value for key, value in example["containers"][0].items() if key not in ("env", "volumeMounts")}
    plain = {key: value for key, value in example.items() if key not in ("initContainers", "shareProcessNamespace")}
    plain["containers"] = [trainer, {"name": "logger", "image": "logger:1"}]
    plain["volumes"] = [volume for volume in example["volumes"] if volume["name"] not in ours]

    pod = merged(plain, rule["mutate"]["patchStrategicMerge"]["spec"])

    assert pod == {**example, "containers": [example["containers"][0], plain["containers"][1]]}


def test_the_policy_is_for_new_pods_that_train_in_its_namespace():
    values = {"podSelector": {"matchLabels": {"team": "llm"}}}
    policy = render(values, INJECTED).one("Policy")
    (rule,) = policy["spec"]["rules"]
    (match,) = [one["resources"] for one in rule["match"]["any"]]

    assert policy["metadata"]["namespace"] == "training"
    assert (match["kinds"], match["operations"], match["selector"]) == (["Pod"], ["CREATE"], values["podSelector"])
    assert policy["metadata"]["annotations"]["pod-policies.kyverno.io/autogen-controllers"] == "none"


def test_the_test_is_a_hook_that_runs_the_image_and_asks_the_controller():
    alone = render().one("Pod", "-test")
    both = render(CONTROLLER).one("Pod", "-test")

    assert alone["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert [one["name"] for one in alone["spec"]["containers"]] == ["image"]
    image, controller = both["spec"]["containers"]
    assert image["args"] == ["rules", "list"]
    assert controller["args"][1] == f"http://{FULLNAME}-controller.training.svc:9462/healthz"
    compile(controller["args"][0], "test", "exec")
    for container in both["spec"]["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert both["spec"]["securityContext"]["runAsNonRoot"]
    assert not both["spec"]["automountServiceAccountToken"]


def test_with_tls_the_test_trusts_the_authority_alone():
    pod = render(CONTROLLER, {"access": {"tls": {"existingSecret": "tls"}}}).one("Pod", "-test")
    controller = pod["spec"]["containers"][1]

    assert controller["args"][1].startswith("https://")
    assert controller["args"][2] == "/etc/trainermon/tls/ca.crt"
    assert [one["key"] for one in pod["spec"]["volumes"][0]["secret"]["items"]] == ["ca.crt"]


def test_the_table_of_values_is_up_to_date_and_complete():
    text = README.read_text()
    described = set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))

    assert text == render_values()
    assert described >= set(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))


def leaves(values, prefix=""):
    for key, value in values.items():
        inline = key in ("startupProbe", "livenessProbe", "readinessProbe")  # on one line
        if isinstance(value, dict) and value and not inline:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_the_chart_says_what_a_catalogue_shows():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    kind, _, data = chart["icon"].partition(";base64,")

    assert kind == "data:image/svg+xml"
    assert ET.fromstring(base64.b64decode(data)).tag.endswith("svg")
    assert "example.com" not in str(chart)  # addresses come with a release, see tests/deploy/test_release.py
    assert chart["maintainers"][0]["name"]


def test_the_page_makes_the_namespace_before_it_is_used():
    text = PAGE.read_text()
    commands = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines()
    first = next(number for number, line in enumerate(commands) if line.startswith("kubectl create namespace training"))

    used = [number for number, line in enumerate(commands) if "--namespace training" in line]
    assert min(used) > first


@pytest.mark.parametrize("step", range(1, 7))
def test_the_steps_of_the_page_are_in_order(step):
    numbers = [int(number) for number in re.findall(r"^## (\d)\.", PAGE.read_text(), re.MULTILINE)]

    assert numbers[step - 1] == step
