"""docs/alerts.md: its rules can be read, its condition works, and Prometheus takes its rule."""

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.server_programs import find_program
from trainermon.alerts import extensions
from trainermon.alerts.prometheus.rules import alert_name, rule_groups
from trainermon.alerts.rules import load_rules
from trainermon.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "alerts.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The condition of the page as an installed package."""
    folder = tmp_path / "my_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "conditions.py").write_text(blocks("python")[0])
    ((name, value),) = re.findall(r'(\w+) = "(.*)"', blocks("toml")[0])
    point = importlib.metadata.EntryPoint(name, value, extensions.GROUP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [point])
    extensions._entry_points.cache_clear()
    yield
    extensions._entry_points.cache_clear()
    for module in ("my_package.conditions", "my_package"):
        sys.modules.pop(module, None)


def test_the_rules_of_the_page_are_rules(package: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [text for text in blocks("yaml") if text.startswith("rules:")]
    for number, text in enumerate(found):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        assert main(["rules", "check", str(path)]) == 0
        groups = rule_groups(load_rules(path))
        assert alert_name(yaml.safe_load(text)["rules"][0]["name"]) in str(groups)
    assert len(found) == 2


def test_the_condition_of_the_page_holds_where_it_says(package: None) -> None:
    watcher = extensions.factory_of("skewed")({"times": 1000}, "max")
    moments = np.zeros((8, 2))
    moments[0] = 4
    moments[1] = [-1.0, -1.0]  # smallest elements
    moments[2] = [2000.0, 5.0]  # largest

    verdict = watcher.judge(slice(0, 2), moments)

    assert verdict.bad.tolist() == [True, False]
    assert verdict.value.tolist() == [2000.0, 5.0]


@pytest.mark.server
def test_prometheus_takes_the_rule_of_the_page(tmp_path: Path) -> None:
    (text,) = [text for text in blocks("yaml") if text.startswith("groups:")]
    path = tmp_path / "own.yaml"
    path.write_text(text)

    done = subprocess.run([find_program("promtool"), "check", "rules", str(path)], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_names_every_group_of_rules() -> None:
    for group in rule_groups(load_rules()):
        assert f"| `{group['name']}` |" in PAGE
