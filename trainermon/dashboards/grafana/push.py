"""Brings dashboards into a running Grafana through its API, by the library `grafana-api`.

Pushing twice changes nothing the second time. What is there under the same uids is replaced; nothing is removed.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import trainermon
from trainermon.core.errors import ConfigError, DashboardError
from trainermon.dashboards.grafana.files import DashboardFile, dashboards
from trainermon.dashboards.grafana.provisioning import FOLDER_TITLE, FOLDER_UID, DataSource

TOKEN_VARIABLE = "GRAFANA_TOKEN"  # noqa: S105  (its name)
TIMEOUT_S = 30.0

_OF_GRAFANA = frozenset({"id", "version"})


class Grafana:
    """A client of a running Grafana, which brings dashboards there.

    Args:
        url: Its address, with the path that it is served under, if any.
        token: Of a service account with the role Editor, or Admin for data sources.
        ca_file: Certificates that the server's one is checked against, instead of the usual ones.

    Raises:
        ConfigError: The address is none, the token cannot be one, or grafana-api is not installed.
    """

    def __init__(self, url: str, token: str, *, ca_file: Path | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ConfigError(f"Grafana: found the address {parts.hostname!r}, expected http(s)://host[:port][/path]")
        if not token or not token.isprintable() or not token.isascii():
            raise ConfigError(f"Grafana: no usable token; set {TOKEN_VARIABLE} or name a file by --token-file")
        try:
            from grafana_api import grafana_api, grafana_face
        except ImportError as error:
            raise ConfigError("grafana-api is not installed: pip install grafana-api") from error
        self._error: type[Exception] = grafana_api.GrafanaException
        path = parts.path.strip("/")
        self._api = grafana_face.GrafanaFace(
            auth=token,
            host=f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname,
            port=parts.port,
            protocol=parts.scheme,
            url_path_prefix=f"{path}/" if path else "",
            verify=str(ca_file) if ca_file else True,
            timeout=TIMEOUT_S,
        )

    def push(self, source: str, data_source: DataSource | None) -> Iterator[tuple[str, str]]:
        """Create or update all dashboards in Grafana; yield the title of each, and `created`, `updated` or `unchanged`.

        Args:
            source: Which set of dashboards: `prometheus` or `influxdb`.
            data_source: Made or brought up to date first, if there is one; its secrets are left as they are.

        Raises:
            DashboardError: Grafana cannot be reached or refuses; what was yielded is there.
        """
        if data_source is not None:
            yield f"data source {data_source.name}", self._push_data_source(data_source)
        yield f"folder {FOLDER_TITLE}", self._push_folder()
        for file in dashboards(source):
            yield f"dashboard {file.body['title']}", self._push_dashboard(file)

    def _push_data_source(self, wanted: DataSource) -> str:
        body = wanted.body
        found = self._find(self._api.datasource.get_datasource_by_name, wanted.name)
        if found is None:
            self._call(self._api.datasource.create_datasource, body)
            return "created"
        if found.get("readOnly"):
            raise DashboardError(f"data source {wanted.name} was provisioned from a file: change it there")
        options = {**(found.get("jsonData") or {}), **body["jsonData"]}
        if _contains(found, {**body, "jsonData": options}):
            return "unchanged"
        # An update replaces everything but secrets: what others have set beside stays.
        self._call(self._api.datasource.update_datasource, found["id"], {**found, **body, "jsonData": options})
        return "updated"

    def _push_folder(self) -> str:
        if self._find(self._api.folder.get_folder, FOLDER_UID) is not None:
            return "unchanged"
        self._call(self._api.folder.create_folder, FOLDER_TITLE, FOLDER_UID)
        return "created"

    def _push_dashboard(self, file: DashboardFile) -> str:
        body = file.body
        found = self._find(self._api.dashboard.get_dashboard, body["uid"])
        if found is not None and _is_same(found, body):
            return "unchanged"
        order = {
            "dashboard": {**body, "id": None},
            "folderUid": FOLDER_UID,
            "message": f"trainermon {trainermon.__version__}",
            "overwrite": True,
        }
        self._call(self._api.dashboard.update_dashboard, order)
        return "created" if found is None else "updated"

    def _find(self, ask: Any, name: str) -> dict[str, Any] | None:
        """Return what Grafana has under a name; None if nothing."""
        try:
            found: dict[str, Any] = ask(name)
        except self._error as error:
            if getattr(error, "status_code", 0) == 404:
                return None
            raise _refused(error) from error
        except (
            OSError,
            ValueError,
        ) as error:  # requests' own errors are of the first kind, those of JSON of the second
            raise _unreachable(error) from error
        return found

    def _call(self, method: Any, *arguments: Any) -> None:
        try:
            method(*arguments)
        except self._error as error:
            raise _refused(error) from error
        except (OSError, ValueError) as error:
            raise _unreachable(error) from error


def _is_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    stored = {key: value for key, value in found["dashboard"].items() if key not in _OF_GRAFANA}
    ours = {key: value for key, value in wanted.items() if key not in _OF_GRAFANA}
    return stored == ours and found.get("meta", {}).get("folderUid", "") == FOLDER_UID


def _contains(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(found.get(key) == value for key, value in wanted.items())


def _refused(error: Exception) -> DashboardError:
    hint = {401: "; is the token right, and not expired?", 403: "; has the service account the role Editor or Admin?"}
    status = getattr(error, "status_code", 0)
    return DashboardError(f"Grafana refused with status {status}: {error}{hint.get(status, '')}")


def _unreachable(error: Exception) -> DashboardError:
    return DashboardError(f"Grafana did not answer as one: {error}")
