"""The agent's address: opened once, told to Prometheus while it is open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path

from trainermon.agent.place import AgentPlace
from trainermon.agent.settings import AgentSettings
from trainermon.agent.web.access import open_access
from trainermon.agent.web.http import EscalationInterface, NodeInterface, build_application
from trainermon.agent.web.server import WebServer, certificate_of
from trainermon.core.errors import ConfigError
from trainermon.exporters.discovery import clear_targets, write_targets

TARGETS_FILE = "prometheus_sd.json"
TARGETS_FOLDER = "prometheus_sd"
CLEAR_LIMIT_S = 2.0
FIRST_PORT, NUM_PORTS = 20_000, 10_000  # below those that systems give out by themselves

_log = logging.getLogger(__name__)


class AgentListener:
    """Runs the web server of one agent (page, metrics, orders), and tells Prometheus its address by a file.

    Args:
        place: The agent's folders.
        settings: Address and access.
        token: What orders must be signed with.
        host: Name of this node.
        executor: Writes the files that Prometheus reads.
    """

    def __init__(
        self, place: AgentPlace, settings: AgentSettings, *, token: str, host: str, executor: Executor
    ) -> None:
        self._settings = settings
        self._token = token
        self._host = host
        self._executor = executor
        self._server: WebServer | None = None
        name = f"{place.run_id}.{host}.json"  # the twin is in the folder that a Prometheus follows for all runs
        self._targets = (place.node_dir / TARGETS_FILE, place.run_dir.parent / TARGETS_FOLDER / name)

    @property
    def url(self) -> str | None:
        """The page's address; None if it could not be opened."""
        return self._server.url if self._server else None

    def open(self, node: NodeInterface, escalations: EscalationInterface) -> None:
        """Listen, and announce the address to Prometheus. A failure is logged: the agent works without."""
        settings = self._settings
        access = settings.access.completed()
        try:
            gate = open_access(access, own_token=self._token)
            hosts = (*settings.allowed_hosts, self._host)
            application = build_application(node, access=gate, hosts=hosts, escalations=escalations)
            self._server = WebServer(
                application,
                host=settings.agent.host,
                ports=(settings.agent.port or usual_port(settings.run_dir.parent), 0),
                certificate=certificate_of(access),
            )
        except (OSError, ConfigError) as error:
            _log.error("no page and no metrics: cannot listen on %s: %s", settings.agent.host, error)
            return
        if settings.agent.port not in (0, self._server.port):
            _log.warning("port %d of %s is taken; using a free one", settings.agent.port, settings.agent.host)
        _log.info("page %s", self._server.url)
        for path in self._targets:
            self._executor.submit(_write_targets, path, self._server.target, {"node": self._host})

    async def close(self) -> None:
        """Stop listening, and remove the address from Prometheus, if the file system answers."""
        if self._server is not None:
            await self._server.close()
        cleared = self._executor.submit(_clear_targets, *self._targets)
        await asyncio.wait([asyncio.wrap_future(cleared)], timeout=CLEAR_LIMIT_S)


def usual_port(output: Path) -> int:
    """Return the port for the pages of runs in the folder `output`: the same for each run, so that a tab stays right.

    >>> usual_port(Path("/data/runs")) == usual_port(Path("/data/runs")) != usual_port(Path("/data/other"))
    True
    """
    return FIRST_PORT + zlib.crc32(os.fsencode(output)) % NUM_PORTS


def _write_targets(path: Path, target: str, labels: Mapping[str, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_targets(path, target, labels)
    except OSError as error:
        _log.warning("Prometheus cannot find this agent: %s", error)


def _clear_targets(node_file: Path, shared_file: Path) -> None:
    with contextlib.suppress(OSError):
        clear_targets(node_file)
        shared_file.unlink(missing_ok=True)
