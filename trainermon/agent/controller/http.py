"""The web application of a controller: pages, JSON, `/metrics`, probes, and the two ways in for escalations.

It runs behind the agent's `RequestGuard`, which has already checked host, origin, credentials and size of the body.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response

from trainermon.agent.controller.controller import Controller
from trainermon.agent.controller.metrics import render_metrics
from trainermon.agent.controller.node_pages import build_node_pages
from trainermon.agent.controller.overview import describe_escalations, render_job
from trainermon.agent.web.access import TokenAccess
from trainermon.agent.web.answers import json_answer, metrics_answer, packed_answer, refuse
from trainermon.agent.web.guard import Application, RequestGuard
from trainermon.agent.web.http import parse_json
from trainermon.agent.web.page import add_page
from trainermon.agent.web.runbooks import add_runbooks
from trainermon.core.errors import TrainermonError

PAGE = "job.html"


def build_application(controller: Controller, *, access: TokenAccess, hosts: tuple[str, ...] = ()) -> Application:
    """Return the ASGI web application of `controller`: page, metrics, webhook for Alertmanager, and orders.

    Args:
        controller: Answers the requests.
        access: Which credentials allow reading and ordering.
        hosts: Names under which it may be asked for (the `Host` header), besides `localhost` and IP addresses.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(TrainermonError, refuse)
    add_page(app, PAGE, "trainermon.agent.controller")
    add_runbooks(app)
    _add_reading(app, controller)
    _add_orders(app, controller)
    app.mount("/node/{run}/{host}", build_node_pages(controller.fleet, controller.client))
    return RequestGuard(app, access=access, hosts=hosts)


def _add_reading(app: FastAPI, controller: Controller) -> None:
    @app.get("/healthz")
    async def healthz() -> Response:
        return json_answer({"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Response:
        if not controller.fleet.is_known.is_set():
            raise HTTPException(503, "agents were not looked for and asked yet")
        return json_answer({"status": "ready"})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        return metrics_answer(request, functools.partial(render_metrics, controller))

    @app.get("/api/v1/job")
    async def job(request: Request) -> Response:
        headers = {"content-type": "application/json", "vary": "accept-encoding"}
        return packed_answer(request, render_job(controller), headers)

    @app.get("/api/v1/escalations")
    async def escalations() -> Response:
        return json_answer(describe_escalations(controller))


def _add_orders(app: FastAPI, controller: Controller) -> None:
    @app.post("/api/v1/alerts")
    async def alerts(request: Request) -> Response:
        return await _ordered(controller.take_alerts, await request.body())

    @app.post("/api/v1/escalations")
    async def escalate(request: Request) -> Response:
        return await _ordered(controller.order, await request.body())


async def _ordered(carry_out: Callable[[Any], Awaitable[dict[str, Any]]], body: bytes) -> Response:
    try:
        answer = await carry_out(parse_json(body))
    except RecursionError:
        raise HTTPException(400, "the body is nested too deeply") from None
    except OSError as error:
        raise HTTPException(503, f"this cannot be kept: {error.strerror or error}") from None
    return json_answer(answer, status=202 if answer["status"] == "accepted" else 200)
