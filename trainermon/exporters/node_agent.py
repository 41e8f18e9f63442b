"""The agent of a run on this node: where it listens, and a request to it, from any process of the same user."""

from __future__ import annotations

import dataclasses
import glob
import http.client
import json
import os
import socket
import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from trainermon.core.spool import spool_root

STATUS_FILE = "agent.status.json"
AGENT_FAULTS = (OSError, http.client.HTTPException, ValueError)
"""What a request to an agent may raise."""


@dataclasses.dataclass(frozen=True, slots=True)
class LocalAgent:
    """An agent of this node.

    Attributes:
        url: Where it listens, `http://…` or `https://…`.
        run_dir: The run directory that it writes.
        has_finished: Whether every rank has ended and all is stored; it waits for a restarted job then.
    """

    url: str
    run_dir: Path
    has_finished: bool = False

    def ask(
        self, path: str, *, timeout_s: float, headers: Mapping[str, str] | None = None, data: bytes | None = None
    ) -> bytes:
        """Return the agent's answer to `GET path`, or to `POST` with `data`.

        Raises:
            OSError: It does not answer within `timeout_s` between two pieces, or refuses.
            http.client.HTTPException: What answers is no web server.
        """
        request = urllib.request.Request(  # noqa: S310  (`find_agent` has checked it)
            self.url + path, data=data, headers={"Authorization": f"Bearer {self._token()}", **(headers or {})}
        )
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_own())
        )
        with opener.open(request, timeout=timeout_s) as answer:
            content: bytes = answer.read()
        return content

    def _token(self) -> str:
        for directory in (self.run_dir / "nodes" / socket.gethostname(), self.run_dir):
            if (directory / "token").is_file():
                return (directory / "token").read_text(encoding="utf-8").strip()
        raise FileNotFoundError(f"no token for this node in {self.run_dir}")


def find_agent(run: str | os.PathLike[str], root: Path | None = None) -> LocalAgent | None:
    """Return the agent that follows `run` (run directory or run id) on this node; None: there is none that listens.

    Where nothing is at `run` it is an id; None too if several runs of that name are followed. `root` is the folder of
    the spools, where it is not the usual one or TRAINERMON_SPOOL.
    """
    path = Path(os.path.abspath(run))  # not resolved: the name of a link may be the run's
    files = sorted((root or spool_root()).glob(f"{glob.escape(path.name)}*/{STATUS_FILE}"))
    found = [agent for agent in map(_agent_of, files) if agent is not None and _follows(agent, path)]
    return found[0] if len(found) == 1 else None


def _follows(agent: LocalAgent, run: Path) -> bool:
    try:
        return os.path.samefile(agent.run_dir, run) if run.exists() else agent.run_dir.name == run.name
    except OSError:
        return False


def _agent_of(status_file: Path) -> LocalAgent | None:
    """Return the agent that has written this file; None if it does not listen."""
    try:
        status = json.loads(status_file.read_text(encoding="utf-8"))
        url, output = status["url"], Path(status["output"])
        is_web = url.startswith(("http://", "https://"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return LocalAgent(url.rstrip("/"), output, status.get("state") == "finished") if is_web else None


def _own() -> ssl.SSLContext:
    """Return a context for an agent of this node: its certificate is for the name that others know it by.

    Whose address it is stands in a file that only this user can write, as without TLS.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
