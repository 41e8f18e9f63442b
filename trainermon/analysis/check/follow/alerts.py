"""Tells the agents of a run which ranks got wrong results: they raise the alert `kernel-inaccurate`, and end it."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.analysis.check.follow.book import RankResult, StepBook, StepResult, StepVerdict
from trainermon.core.errors import ConfigError
from trainermon.core.signing import sign

RULE = "kernel-inaccurate"
_PATH = "/api/findings"
_TIMEOUT_S = 5.0
_MAX_DETAIL = 500
_NO_ANSWER, _ACCEPTED, _OTHERS_RANK = 0, 202, 409


class _Agent(NamedTuple):
    address: str
    token: str


class AgentAlerts:
    """Tells the agents of one run, in order, what was found; what cannot be told now is told later.

    The agent of each node stands in the run directory, with the token for it. Requests are signed and carry no secret.

    Args:
        run: The run directory.
        authority: Certificate that agents with HTTPS are verified by; None: they speak HTTP.

    Raises:
        ConfigError: There is no such directory, or the certificate cannot be read.
    """

    def __init__(self, run: Path, *, authority: Path | None = None) -> None:
        if not run.is_dir():
            raise ConfigError(f"--run {run}: there is no such folder, expected that of a run (<output>/<run id>)")
        self._run = run
        try:
            self._context = ssl.create_default_context(cafile=str(authority)) if authority is not None else None
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--agent-ca {authority}: {error}") from error

    def tell(self, book: StepBook) -> str:
        """Tell what is in the book and not told yet; return why not all of it could be, or ""."""
        wrong: set[int] = set()
        for result in book.results:
            news = list(_news(result, wrong))
            wrong = {rank.rank for rank in result.ranks if rank.errors} | wrong - {rank.rank for rank in result.ranks}
            if not news or result.identity in book.told:
                continue
            for rank in news:
                trouble = self._told(_finding(result, rank))
                if trouble:
                    return f"the agent does not know yet of {result.step}, rank {rank.rank}: {trouble}"
            book.note_told(result.identity)
        return ""

    def _told(self, finding: dict[str, Any]) -> str:
        """Tell the agent whose rank it is; return why none has taken it, or ""."""
        trouble = f"no agent is up in {self._run}"
        for agent in self._agents():
            status, answer = self._answer(agent, json.dumps(finding).encode())
            if status == _ACCEPTED:
                return ""
            trouble = f"{agent.address}: {answer[:200]}"
            if status not in (_OTHERS_RANK, _NO_ANSWER):
                return trouble
        return trouble

    def _answer(self, agent: _Agent, body: bytes) -> tuple[int, str]:
        try:
            return self._post(agent, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return _NO_ANSWER, str(error)

    def _agents(self) -> Iterator[_Agent]:
        for targets in sorted(self._run.glob("nodes/*/prometheus_sd.json")):
            yield from _listed(targets)

    def _post(self, agent: _Agent, body: bytes) -> tuple[int, str]:
        connection = (
            http.client.HTTPConnection(agent.address, timeout=_TIMEOUT_S)
            if self._context is None
            else http.client.HTTPSConnection(agent.address, timeout=_TIMEOUT_S, context=self._context)
        )
        try:
            signature = sign(agent.token, "POST", _PATH, body, now_s=time.time())
            connection.request("POST", _PATH, body, {"Authorization": signature, "Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read(1 << 16).decode(errors="replace")
        finally:
            connection.close()


def _listed(targets: Path) -> list[_Agent]:
    """Return the agent that a file for Prometheus names; none if it has just ended, or begun."""
    try:
        token = (targets.parent / "token").read_text(encoding="utf-8").strip()
        return [
            _Agent(str(address), token) for group in json.loads(targets.read_bytes()) for address in group["targets"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _news(result: StepResult, wrong: set[int]) -> Sequence[RankResult]:
    """Return the ranks of a step of which an agent should hear: those that are wrong, and that were until then."""
    if result.verdict is StepVerdict.UNJUDGED:
        return ()
    return [rank for rank in result.ranks if rank.errors or rank.rank in wrong]


def _finding(result: StepResult, rank: RankResult) -> dict[str, Any]:
    where = f"; {result.kept}" if result.kept else ""
    detail = f"first {rank.first}: {rank.reason}{where}" if rank.errors else "a later step is right"
    return {
        "rule": RULE,
        "rank": rank.rank,
        "step": result.number,
        "holds": rank.errors > 0,
        "value": float(rank.errors),
        "detail": detail[:_MAX_DETAIL],
    }
