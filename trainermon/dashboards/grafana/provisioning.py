"""Files from which a Grafana sets itself up: dashboards, and the YAML that names them and the data source.

Source: Grafana 11.6, "Provision Grafana".
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trainermon.core.errors import ConfigError
from trainermon.dashboards.grafana.files import dashboards

FOLDER_UID = "trainermon"
FOLDER_TITLE = "trainermon"
SCRAPE_INTERVAL = "15s"
_HEAD = "# Written by `trainermon dashboards write`. Put it into Grafana's provisioning/{}.\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """A data source, as Grafana is told of it.

    Attributes:
        kind: Grafana's type: `prometheus` or `influxdb`.
        url: Where Grafana's server reaches it.
        database: Of an InfluxDB: the database, or the bucket that is mapped to one of that name.

    Raises:
        ConfigError: The address is none, or holds a password.
    """

    kind: str
    url: str
    database: str = "trainermon"

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"data source: found {self.url!r}, expected http://host:port or https://host")
        if parts.password is not None:
            raise ConfigError("data source: the address holds a password; give it to Grafana, in its own form")

    @property
    def name(self) -> str:
        """The data source's name in Grafana, which is its uid too."""
        return f"trainermon-{self.kind}"

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that Grafana's API is sent to create the data source; without secrets."""
        options: dict[str, Any] = {"httpMethod": "POST", "timeInterval": SCRAPE_INTERVAL}
        if self.kind == "influxdb":
            options = {"httpMode": "POST", "version": "InfluxQL", "dbName": self.database}
        return {
            "name": self.name,
            "uid": self.name,
            "type": self.kind,
            "access": "proxy",
            "url": self.url,
            "jsonData": options,
        }


def files(source: str, data_source: DataSource | None, *, path: str) -> Mapping[Path, str]:
    """Return the files by which Grafana loads the dashboards at its start (provisioning), as text by path.

    Args:
        source: Which set: `prometheus` or `influxdb`.
        data_source: Described too, if there is one.
        path: The folder of the dashboards, as Grafana will see it.
    """
    made = {Path("dashboards", file.name): file.text for file in dashboards(source)}
    made[Path("provisioning", "dashboards", "trainermon.yaml")] = _text("dashboards", _provider(path))
    if data_source is not None:
        place = Path("provisioning", "datasources", "trainermon.yaml")
        made[place] = _text("datasources", {"apiVersion": 1, "datasources": [_provisioned(data_source)]})
    return made


def _provider(path: str) -> dict[str, Any]:
    provider = {
        "name": "trainermon",
        "orgId": 1,
        "folder": FOLDER_TITLE,
        "folderUid": FOLDER_UID,
        "type": "file",
        "disableDeletion": False,
        "allowUiUpdates": False,
        "updateIntervalSeconds": 30,
        "options": {"path": path},
    }
    return {"apiVersion": 1, "providers": [provider]}


def _provisioned(data_source: DataSource) -> dict[str, Any]:
    """Return the data source with its secrets as variables, which Grafana takes from its environment."""
    body = {**data_source.body, "orgId": 1, "editable": False}
    if data_source.kind == "influxdb":
        body["jsonData"] = {**body["jsonData"], "httpHeaderName1": "Authorization"}
        body["secureJsonData"] = {"httpHeaderValue1": "Token $INFLUXDB_TOKEN"}
    return body


def _text(kind: str, body: Mapping[str, Any]) -> str:
    return _HEAD.format(kind) + yaml.safe_dump(dict(body), sort_keys=False)
