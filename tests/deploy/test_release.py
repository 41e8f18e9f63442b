"""The release workflow calls targets that exist, and names what it runs on so that it cannot change."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/release.yml"
JOBS = yaml.safe_load(WORKFLOW.read_text())["jobs"]
STEPS = [step for job in JOBS.values() for step in job["steps"]]
MAKEFILE = (ROOT / "Makefile").read_text()
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def make(*words):
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_action_is_named_by_its_commit():
    used = [step["uses"] for step in STEPS if "uses" in step]

    assert used
    assert [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)] == []


def test_it_calls_make_alone_and_targets_that_exist():
    commands = [step["run"] for step in STEPS if "run" in step]

    assert all(re.fullmatch(r"make [\w -]+[\w./=\"$-]*( [\w./=\"$-]+)*", command) for command in commands)
    for command in commands:
        assert re.search(rf"^{command.split()[1]}:.*## ", MAKEFILE, re.MULTILINE), command


def test_wheel_source_chart_and_image_are_kept():
    assert {step["with"]["name"] for step in STEPS if "upload-artifact" in step.get("uses", "")} == set(JOBS)


def test_nothing_that_others_choose_becomes_part_of_a_command():
    assert not any("${{" in step.get("run", "") for step in STEPS)


def test_a_tag_that_is_another_version_is_refused():
    assert make("release-check", f"TAG=v{VERSION}").returncode == 0
    assert f"found 'v9.9.9', expected v{VERSION}" in make("release-check", "TAG=v9.9.9").stdout


@pytest.mark.parametrize(("target", "name"), [("build-release", "BUILD_IMAGE"), ("image", "BASE_IMAGE")])
def test_an_image_that_is_named_by_a_tag_is_refused(target, name):
    done = make(target, f"{name}=python:3.12")

    assert done.returncode == 2
    assert f"{name}: found 'python:3.12', expected an image by its digest" in done.stdout


def test_package_and_chart_name_the_same_place():
    placeholder = "https://example.com/trainermon"

    assert placeholder in (ROOT / "pyproject.toml").read_text()
    assert placeholder in (ROOT / "helm/trainermon/Chart.yaml").read_text()
