"""The requests to an InfluxDB, by `influxdb-client`: writes of line protocol by the v2 API, or by `/write` of 1.x.

The client does connections, TLS and the API's surface. It does not do the work on the way: it would compress with
level 9 (three times as dear as everything else) and only log what the server refused, so lines and gzip are made by
the caller, and the answer is given back.

Source: InfluxDB 2.7 API, "Write data"; InfluxDB 1.8 API, "/write"; influxdb-client 1.50.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.core.config import InfluxDBConfig

TOKEN_VARIABLE = "INFLUXDB_TOKEN"  # noqa: S105  (its name)

_MAX_MESSAGE = 500
_UNAUTHORIZED = (401, 403)


class ServerAnswer(NamedTuple):
    """The answer of the InfluxDB server to a write.

    Attributes:
        status: HTTP status; 0: there was no answer.
        message: The reason.
        retry_after_s: The pause in seconds that it asks for; 0: none.
    """

    status: int
    message: str = ""
    retry_after_s: float = 0.0


class InfluxDBServer:
    """Writes points to the server that the configuration names. Not thread-safe.

    Args:
        config: Where it is.
        environ: Where the token is looked for if no file is given.

    Raises:
        ImportError: influxdb-client is not installed.
    """

    def __init__(self, config: InfluxDBConfig, environ: Mapping[str, str] = os.environ) -> None:
        import influxdb_client

        self._module: Any = influxdb_client  # most of it has no types
        self._config = config
        self._environ = environ
        self._client: Any = None

    def write(self, lines_gz: bytes) -> ServerAnswer:
        """Send lines of points, gzip-compressed, with times in microseconds; return how the server answered.

        Never raises for what a server can do. Cost: one request, at most `timeout_s`.
        """
        from urllib3.exceptions import HTTPError

        try:
            client = self._client = self._client or self._connect()
            client.api_client.call_api(
                "/write" if self._config.api == "v1" else "/api/v2/write",
                "POST",
                query_params=self._query(),
                header_params={"Content-Encoding": "gzip", "Content-Type": "text/plain; charset=utf-8"},
                body=lines_gz,
                _request_timeout=self._config.timeout_s * 1e3,
                urlopen_kw={"redirect": False},  # a POST that is redirected becomes a GET, and nothing is written
            )
        except self._module.rest.ApiException as error:
            if error.status in _UNAUTHORIZED:
                self.close()  # the token may have been replaced: it is read again
            return _answer(error.status or 0, error.body, error.headers)
        except (HTTPError, OSError) as error:
            return ServerAnswer(0, f"{type(error).__name__}: {error}"[:_MAX_MESSAGE])
        return ServerAnswer(204)

    def close(self) -> None:
        """Close the connections; the next write opens new ones."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connect(self) -> Any:
        config = self._config
        token = self._token()
        is_basic = config.api == "v1" and bool(config.username)
        return self._module.InfluxDBClient(
            url=config.url,
            token=f"{config.username}:{token}" if is_basic else token,
            auth_basic=is_basic,
            ssl_ca_cert=config.ca_file,
            connection_pool_maxsize=1,
        )

    def _token(self) -> str:
        if self._config.token_file is not None:
            return Path(self._config.token_file).read_text(encoding="utf-8").strip()
        return self._environ.get(TOKEN_VARIABLE, "")

    def _query(self) -> list[tuple[str, str]]:
        if self._config.api == "v1":
            database, _, policy = self._config.bucket.partition("/")
            return [("db", database), ("precision", "u"), *([("rp", policy)] if policy else [])]
        return [("org", self._config.org), ("bucket", self._config.bucket), ("precision", "us")]


def _answer(status: int, body: object, headers: Mapping[str, str] | None) -> ServerAnswer:
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body or "")
    retry_after = str((headers or {}).get("Retry-After", ""))
    return ServerAnswer(status, text.strip()[:_MAX_MESSAGE], float(retry_after) if retry_after.isdecimal() else 0.0)
