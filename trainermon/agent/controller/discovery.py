"""Ways to find agents: a list, the addresses of a name, a run directory, the pods of a Kubernetes namespace."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import socket
from pathlib import Path
from typing import Protocol

from trainermon.agent.controller.client import AgentAddress
from trainermon.agent.controller.settings import ControllerSettings
from trainermon.core.private_files import open_private

TARGETS_FILE = "prometheus_sd.json"
TOKEN_FILE = "token"  # noqa: S105 - the name of a file
LIMIT_S = 5.0

_log = logging.getLogger(__name__)


class AgentFinder(Protocol):
    """Interface of one way to find agents (a list, DNS, the run directory, Kubernetes).

    It is hashable, and its text says which way it is.
    """

    async def find(self) -> list[AgentAddress]:
        """Return the addresses of the agents. Raises OSError, ValueError, a time-out or aiohttp's errors if unknown."""


def make_finders(settings: ControllerSettings) -> list[AgentFinder]:
    """Return one finder for each way of finding agents that `settings` name."""
    wanted = settings.discovery
    scheme = "https" if settings.agents.https else "http"
    finders: list[AgentFinder] = []
    if wanted.agents:
        finders.append(StaticFinder(wanted.agents, scheme))
    finders += [DnsFinder(name, scheme) for name in wanted.dns]
    if wanted.run_directory:
        finders.append(RunDirectoryFinder(Path(wanted.run_directory), scheme))
    if wanted.kubernetes:
        from trainermon.agent.controller.kubernetes import KubernetesFinder

        finders.append(KubernetesFinder(wanted.kubernetes, scheme))
    return finders


@dataclasses.dataclass(frozen=True, slots=True)
class StaticFinder:
    """Finds the agents that the configuration lists.

    Attributes:
        addresses: `host:port` of each.
        scheme: `http` or `https`.
    """

    addresses: tuple[str, ...]
    scheme: str

    async def find(self) -> list[AgentAddress]:
        """Return the addresses of the listed agents."""
        return [AgentAddress(f"{self.scheme}://{address}/") for address in self.addresses]


@dataclasses.dataclass(frozen=True, slots=True)
class DnsFinder:
    """Finds an agent at every IP address of a DNS name, as a headless Kubernetes service has one for each pod.

    Attributes:
        name: `name:port`.
        scheme: `http` or `https`.
    """

    name: str
    scheme: str

    async def find(self) -> list[AgentAddress]:
        """Return an agent's address for each IP address of the name; empty if it has none now."""
        host, _, port = self.name.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            found = await asyncio.wait_for(loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM), LIMIT_S)
        except socket.gaierror as error:
            if error.errno == socket.EAI_NONAME:  # a headless service without a ready pod
                return []
            raise
        addresses = sorted({str(address[0]) for *_, address in found})
        return [AgentAddress(f"{self.scheme}://{f'[{a}]' if ':' in a else a}:{port}/") for a in addresses]


@dataclasses.dataclass(frozen=True, slots=True)
class RunDirectoryFinder:
    """Finds agents by the files in the run directory that hold their address and a token for orders.

    For an address without a token nobody vouches: the token of all agents is not used for it.

    Attributes:
        run_directory: On a file system that all nodes share.
        scheme: `http` or `https`.
    """

    run_directory: Path
    scheme: str
    _broken: set[Path] = dataclasses.field(default_factory=set, init=False, repr=False, compare=False)

    async def find(self) -> list[AgentAddress]:
        """Return the address of every node's agent that has written a file into the run directory.

        Reads it in a thread. A node whose file is broken is left out; the log says so once.
        """
        return await asyncio.wait_for(asyncio.to_thread(self._read), LIMIT_S)

    def _read(self) -> list[AgentAddress]:
        found = []
        for path in sorted(self.run_directory.glob(f"nodes/*/{TARGETS_FILE}")):
            found += self._of_node(path)
        return found

    def _of_node(self, path: Path) -> list[AgentAddress]:
        try:
            targets = self._targets(path)
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            if path not in self._broken:  # once, not every few seconds
                self._broken.add(path)
                _log.warning("the node of %s is left out; its file cannot be read: %r", path, error)
            return []
        self._broken.discard(path)
        return targets

    def _targets(self, path: Path) -> list[AgentAddress]:
        groups = json.loads(path.read_text(encoding="utf-8"))
        secret = _read_token(path.with_name(TOKEN_FILE))
        addresses = [address for group in groups for address in group["targets"]]
        wrong = [address for address in addresses if not isinstance(address, str)]
        if wrong:
            raise TypeError(f"found {wrong[0]!r} as an address")
        return [AgentAddress(f"{self.scheme}://{address}/", secret) for address in addresses]


def _read_token(path: Path) -> str:
    """Return the token of a node, empty without one. Raises OSError if it is a link."""
    try:
        descriptor = open_private(path, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    with os.fdopen(descriptor, encoding="utf-8") as file:
        return file.read().strip()
