"""The web application of the agent: the page, its JSON and binary answers, `/metrics`, events and control calls.

What is served comes from a `NodeInterface`; this module only speaks HTTP. It runs behind
`trainermon.agent.web.guard.RequestGuard`, which has already checked host, origin, token and size of the body when a
request arrives here.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response

from trainermon.agent.orders.answers import AgentReport, OrderAnswer, OrderStatus
from trainermon.agent.web.access import TokenAccess
from trainermon.agent.web.answers import json_answer, metrics_answer, refuse
from trainermon.agent.web.guard import Application, RequestGuard
from trainermon.agent.web.page import PAGE, PageInterface, add_page, add_reading
from trainermon.core.errors import TrainermonError


class NodeInterface(PageInterface, Protocol):
    """What the agent's web application asks of the agent; every method returns at once unless it is a coroutine."""

    def evidence(self) -> dict[str, Any]:
        """Return what is known of hung or dead ranks, for a controller that joins the nodes."""

    def checksums(self, after: int) -> dict[str, Any]:
        """Return {"attempt", "steps"}: by step after `after`, group and rank, a digest of the checksums of replicas."""

    def folds(self, after: int) -> dict[str, Any]:
        """Return {"attempt", "steps"}: by step after `after` and rank, its place and its gradients, folded."""

    def copies(self, step: int, group: str) -> dict[int, dict[str, str]]:
        """Return, by rank and name, the checksums (hexadecimal) of one group of copies on one step."""

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the text of `/metrics` and its content type, in the format that the `Accept` header asks for."""

    def order(self, body: Any) -> OrderAnswer:
        """Carry out the command that a client's JSON describes; return how it was taken.

        Raises ConfigError, or ConflictError for a 409.
        """

    def take_finding(self, body: Any) -> OrderAnswer:
        """Evaluate what another program has found about a rank, as a client's JSON says; return that it was taken.

        Raises ConfigError, or ConflictError for a 409.
        """

    async def acknowledge(self, body: Any) -> OrderAnswer:
        """Record who knows of some alerts, as a client's JSON says; return that it was taken.

        Raises ConfigError, ConflictError for a 409, OSError where it cannot be kept.
        """

    async def silence(self, body: Any) -> OrderAnswer:
        """Mute a rule for a while, as a client's JSON says; return that it was taken.

        Raises ConfigError, ConflictError for a 409, OSError where it cannot be kept.
        """

    async def flush(self) -> bool:
        """Store everything read so far; return whether that succeeded."""

    def stop(self) -> None:
        """Ask the agent to store everything, and to end soon."""


class EscalationInterface(Protocol):
    """What controllers and Alertmanager may ask of the agent's ranks (dumps, mostly); every method returns at once."""

    def rank_states(self) -> AgentReport:
        """Return what a controller needs of the local ranks: place, step, life, pace, alerts, what became of dumps."""

    def escalate(self, body: Any) -> OrderAnswer:
        """Have local ranks dump as a controller's JSON asks for; return how it was taken.

        Raises ConfigError, or ConflictError for a 409.
        """

    def take_alerts(self, body: Any) -> OrderAnswer:
        """Have local ranks dump as Alertmanager's notification asks for; return how it was taken.

        Raises ConfigError, OSError where it cannot be kept.
        """


def build_application(
    node: NodeInterface,
    *,
    access: TokenAccess,
    hosts: tuple[str, ...] = (),
    escalations: EscalationInterface | None = None,
) -> Application:
    """Return the agent's ASGI web application: page, data, `/metrics` and orders.

    Args:
        node: Answers the requests.
        access: Which credentials allow reading and ordering.
        hosts: Names under which it may be asked for (the `Host` header), besides `localhost` and IP addresses.
        escalations: Takes orders of controllers and Alertmanager; None: they are not offered.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(TrainermonError, refuse)
    add_page(app, PAGE)
    add_reading(app, node)
    _add_probe(app)
    _add_evidence(app, node)
    _add_metrics(app, node)
    _add_control(app, node)
    if escalations is not None:
        _add_escalation(app, escalations)
    return RequestGuard(app, access=access, hosts=hosts)


def _add_probe(app: FastAPI) -> None:
    @app.get("/healthz")
    async def healthz() -> Response:
        return json_answer({"status": "ok"})


def _add_evidence(app: FastAPI, node: NodeInterface) -> None:
    @app.get("/api/v1/evidence")
    async def evidence() -> Response:
        return json_answer(node.evidence())

    @app.get("/api/v1/checksums")
    async def checksums(after: int = -1) -> Response:
        return json_answer(node.checksums(after))

    @app.get("/api/v1/folds")
    async def folds(after: int = -1) -> Response:
        return json_answer(node.folds(after))

    @app.get("/api/v1/copies")
    async def copies(step: int, group: str) -> Response:
        return json_answer({"ranks": node.copies(step, group)})


def _add_metrics(app: FastAPI, node: NodeInterface) -> None:
    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        return metrics_answer(request, node.metrics)


def _add_escalation(app: FastAPI, escalations: EscalationInterface) -> None:
    @app.get("/api/v1/ranks")
    async def rank_states() -> Response:
        return json_answer(escalations.rank_states())

    @app.post("/api/v1/escalations")
    async def escalate(request: Request) -> Response:
        return answer_order(escalations.escalate, await request.body())

    @app.post("/api/v1/alerts")
    async def alerts(request: Request) -> Response:
        return answer_order(escalations.take_alerts, await request.body())


def _add_control(app: FastAPI, node: NodeInterface) -> None:
    @app.post("/api/commands")
    async def commands(request: Request) -> Response:
        return answer_order(node.order, await request.body())

    @app.post("/api/findings")
    async def findings(request: Request) -> Response:
        return answer_order(node.take_finding, await request.body())

    @app.post("/api/acknowledgements")
    async def acknowledge(request: Request) -> Response:
        return await _answer_word(node.acknowledge, await request.body())

    @app.post("/api/silences")
    async def silence(request: Request) -> Response:
        return await _answer_word(node.silence, await request.body())

    @app.post("/api/flush")
    async def flush() -> Response:
        if not await node.flush():
            raise HTTPException(503, "the commit did not succeed; agent.status.json says why")
        return json_answer({"status": "flushed"})

    @app.post("/api/stop")
    async def stop() -> Response:
        node.stop()
        return json_answer({"status": "stopping"}, status=202)


async def _answer_word(take: Callable[[Any], Awaitable[OrderAnswer]], body: bytes) -> Response:
    """Take what somebody says about alerts, the parsed JSON `body`; errors are answered as those of orders."""
    try:
        answer = await take(parse_json(body))
    except RecursionError:
        raise HTTPException(400, "the body is nested too deeply") from None
    except OSError as error:
        raise HTTPException(503, f"this cannot be kept: {error.strerror or error}") from None
    return json_answer(answer.plain(), status=202)


def answer_order(carry_out: Callable[[Any], OrderAnswer], body: bytes) -> Response:
    """Carry out an order with the parsed JSON `body`.

    Return 202 if it was accepted, 200 if it changes nothing, 400 if it is wrong. 503 where it cannot be kept: a client
    repeats it then.
    """
    try:
        answer = carry_out(parse_json(body))
    except RecursionError:
        raise HTTPException(400, "the body is nested too deeply") from None
    except OSError as error:
        raise HTTPException(503, f"this cannot be kept: {error.strerror or error}") from None
    return json_answer(answer.plain(), status=202 if answer.status is OrderStatus.ACCEPTED else 200)


def parse_json(body: bytes) -> Any:
    """Return what the JSON text `body` says; anything else is answered 400, halves of characters too."""
    try:
        value = json.loads(body)
        if b"\\u" in body:  # an escape may be half a character, which cannot be written to any file
            json.dumps(value, ensure_ascii=False).encode()
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise HTTPException(400, "the body is nested too deeply") from None
    return value
