"""Stands in for the API of a Grafana, which cannot be installed from a package.

Written after Grafana's own API description (swagger of 11.6): it knows the fields of each request and refuses others,
answers with Grafana's statuses, keeps what it is given, and numbers versions.
"""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any

DASHBOARD_FIELDS = {"dashboard", "folderId", "folderUid", "isFolder", "message", "overwrite", "userId"}
FOLDER_FIELDS = {"description", "parentUid", "title", "uid"}
DATA_SOURCE_FIELDS = {
    *("access", "basicAuth", "basicAuthUser", "database", "isDefault", "jsonData", "name", "secureJsonData"),
    *("type", "uid", "url", "user", "withCredentials", "version"),
}
# Fields of an answer that an update may carry back: Grafana's server ignores them.
ECHOED = {"id", "orgId", "readOnly", "secureJsonFields", "typeLogoUrl"}


class RefusalError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeGrafana:
    """What a Grafana keeps.

    Attributes:
        prefix: Path that it is served under.
        writes: Method and path of every request that changed something.
    """

    def __init__(self, token: str = "glsa_token", prefix: str = "") -> None:
        self.token, self.prefix = token, prefix
        self.folders: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.data_sources: dict[str, dict[str, Any]] = {}
        self.writes: list[str] = []
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                try:
                    status, answer = 200, fake.answer(self.command, self.path, self.headers, body)
                except RefusalError as refusal:
                    status, answer = refusal.status, {"message": str(refusal)}
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_POST = do_PUT = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}{prefix}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> dict[str, Any]:
        if headers.get("Authorization") != f"Bearer {self.token}":
            raise RefusalError(401, "Invalid API key")
        if not path.startswith(f"{self.prefix}/api/"):
            raise RefusalError(404, "Not found")
        words = path.removeprefix(f"{self.prefix}/api/").split("/")
        if method == "GET":
            return self.find(words)
        self.writes.append(f"{method} {path}")
        return self.change(method, words, json.loads(body))

    def find(self, words: list[str]) -> dict[str, Any]:
        match words:
            case ["folders", uid] if uid in self.folders:
                return self.folders[uid]
            case ["dashboards", "uid", uid] if uid in self.dashboards:
                return self.dashboards[uid]
            case ["datasources", "name", name] if name in self.data_sources:
                return self.data_sources[name]
        raise RefusalError(404, "not found")

    def change(self, method: str, words: list[str], body: dict[str, Any]) -> dict[str, Any]:
        match method, words:
            case "POST", ["folders"]:
                return self.create_folder(body)
            case "POST", ["dashboards", "db"]:
                return self.save_dashboard(body)
            case "POST", ["datasources"]:
                return self.create_data_source(body)
            case "PUT", ["datasources", number]:
                return self.update_data_source(int(number), body)
        raise RefusalError(404, "not found")

    def create_folder(self, body: dict[str, Any]) -> dict[str, Any]:
        only(body, FOLDER_FIELDS)
        if body["uid"] in self.folders:
            raise RefusalError(412, "the folder has been changed by someone else")
        self.folders[body["uid"]] = {"id": len(self.folders) + 1, "version": 1, **body}
        return self.folders[body["uid"]]

    def save_dashboard(self, body: dict[str, Any]) -> dict[str, Any]:
        only(body, DASHBOARD_FIELDS)
        made = body["dashboard"]
        if made["id"] is not None:
            raise RefusalError(404, "Dashboard not found")
        if body["folderUid"] not in self.folders:
            raise RefusalError(400, "folder not found")
        known = self.dashboards.get(made["uid"])
        if known and not body.get("overwrite"):
            raise RefusalError(412, "The dashboard has been changed by someone else")
        version = known["dashboard"]["version"] + 1 if known else 1
        stored = {**made, "id": len(self.dashboards) + 1, "version": version}
        meta = {"folderUid": body["folderUid"], "provisioned": False, "version": version}
        self.dashboards[made["uid"]] = {"dashboard": stored, "meta": meta}
        return {"uid": made["uid"], "status": "success", "version": version}

    def create_data_source(self, body: dict[str, Any]) -> dict[str, Any]:
        only(body, DATA_SOURCE_FIELDS)
        if body["name"] in self.data_sources:
            raise RefusalError(409, "data source with the same name already exists")
        made = {"id": len(self.data_sources) + 1, "orgId": 1, "readOnly": False, "version": 1, **body}
        self.data_sources[body["name"]] = made
        return {"datasource": made, "id": made["id"], "message": "Datasource added", "name": body["name"]}

    def update_data_source(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        only(body, DATA_SOURCE_FIELDS | ECHOED)
        known = next(found for found in self.data_sources.values() if found["id"] == number)
        if body.get("version", known["version"]) != known["version"]:
            raise RefusalError(409, "Datasource has already been updated by someone else")
        known.clear()
        known.update({**body, "id": number, "version": body["version"] + 1})
        return {"datasource": known, "message": "Datasource updated"}


def only(body: dict[str, Any], known: set[str]) -> None:
    if set(body) - known:
        raise RefusalError(400, f"unknown fields {sorted(set(body) - known)}")
