"""Writes every page and file that is generated from the code: `make sync`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs import chart
from docs.compatibility import PAGE, with_versions
from docs.python_reference import render_python_reference
from trainermon.alerts.laws.page import render_laws
from trainermon.alerts.prometheus.command import default_files
from trainermon.core.config import WITHOUT_EFFECT, MonitorConfig
from trainermon.exporters.prometheus.reference import render_reference

FOLDER = Path(__file__).parent / "reference"
LAWS_PAGE = Path(__file__).with_name("laws.md")
RULES = Path(__file__).parents[1] / "trainermon" / "alerts" / "generated"
HEAD = """\
# Configuration

<!-- Generated from trainermon/core/config/schema.py by `make sync`. Do not edit. -->

`TrainerMon(path)` reads a JSON or YAML file, `TrainerMon({...})` a mapping, `TrainerMon()` takes the defaults. An
unknown key, a wrong type or an impossible pair is an error that names the key and the nearest right name.
"""


def render_configuration() -> str:
    """Return the page of all configuration keys as Markdown."""
    parts = [HEAD, *_table(MonitorConfig, "")]
    for field in _fields(MonitorConfig):
        if dataclasses.is_dataclass(field.default):
            parts += [f"\n## `{field.name}`\n\n{_summary(type(field.default))}\n"]
            parts += _table(type(field.default), f"{field.name}.")
    parts += ["\n## Keys of msprobe's monitor without effect\n\nThey are accepted, and reported.\n"]
    parts += ["\n| key | why |\n|---|---|\n", *(f"| `{key}` | {why} |\n" for key, why in WITHOUT_EFFECT.items())]
    return "".join(parts)


def _table(cls: type[Any], prefix: str) -> Iterator[str]:
    documented = {name: meaning for each in cls.__mro__ for name, meaning in _attributes(each).items()}
    yield "\n| key | default | meaning |\n|---|---|---|\n"
    for field in _fields(cls):
        if not dataclasses.is_dataclass(field.default):
            yield f"| `{prefix}{field.name}` | `{_default(field.default)}` | {documented[field.name]} |\n"


def _fields(cls: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass, its own before those of its base."""
    return sorted(dataclasses.fields(cls), key=lambda field: field.name not in cls.__annotations__)


def _attributes(cls: type[Any]) -> dict[str, str]:
    text = inspect.getdoc(cls) or ""
    section = text.partition("Attributes:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.+?)(?=^ {4}\w+: |\Z)", section, re.MULTILINE | re.DOTALL)
    return {name: " ".join(meaning.split()) for name, meaning in found}


def _summary(cls: type[Any]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def _default(value: object) -> str:
    return json.dumps(value).strip('"')


def main() -> int:
    """Write all of them."""
    pages = {
        "configuration.md": render_configuration(),
        "metrics.md": render_reference(),
        "python.md": render_python_reference(),
    }
    for name, text in pages.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    LAWS_PAGE.write_text(render_laws(), encoding="utf-8")
    PAGE.write_text(with_versions(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for name, text in default_files().items():
        (RULES / name).write_text(text, encoding="utf-8")
    if sys.version_info >= (3, 11):  # what the library that dashboards are made with needs
        from trainermon.dashboards.grafana.generate import write_all

        write_all()
    chart.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
