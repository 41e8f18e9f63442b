"""The generated dashboards as they are shipped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "generated"


@dataclasses.dataclass(frozen=True, slots=True)
class DashboardFile:
    """One generated Grafana dashboard.

    Attributes:
        source: Type of its data source: `prometheus` or `influxdb`.
        name: Its file name.
        text: Its JSON.
    """

    source: str
    name: str
    text: str

    @property
    def body(self) -> dict[str, Any]:
        """The dashboard's JSON, parsed."""
        made: dict[str, Any] = json.loads(self.text)
        return made


def dashboards(source: str) -> list[DashboardFile]:
    """Return all Grafana dashboards for a type of data source, `prometheus` or `influxdb`."""
    paths = sorted((FOLDER / source).glob("*.json"))
    return [DashboardFile(source, path.name, path.read_text(encoding="utf-8")) for path in paths]
