"""The release workflow calls targets that exist, and names what it runs on so that it cannot change."""

import importlib
import re
import shutil
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


def test_package_and_chart_name_the_same_place(tmp_path):
    """Before a release they name none; `make release-name` writes it into both, and into the README's links."""
    recipe = (ROOT / "Makefile").read_text().split("\nrelease-name:")[1].partition("\n\n")[0]
    for name in ("pyproject.toml", "helm/trainermon/Chart.yaml", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
        assert "example.com" not in (ROOT / name).read_text()
    (tmp_path / "Makefile").write_text(f"release-name:{recipe}\n")
    url = "https://git.test/team/trainermon"
    subprocess.run(["make", "release-name", f"URL={url}"], cwd=tmp_path, check=True)

    tomllib = importlib.import_module("tomllib")  # of Python 3.11, which the tests run with
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    before = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert before["urls"] == {}
    assert set(project["urls"]) == {"Homepage", "Documentation", "Changelog", "Issues", "Source"}
    assert all(address.startswith(url) for address in project["urls"].values())
    chart = yaml.safe_load((tmp_path / "helm/trainermon/Chart.yaml").read_text())
    assert (chart["home"], chart["sources"], chart["maintainers"][0]["url"]) == (url, [url], url)
    links = re.findall(r"\]\(([^)]+)\)", (tmp_path / "README.md").read_text())
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
