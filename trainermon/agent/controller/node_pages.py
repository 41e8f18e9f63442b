"""Each node's page below `/node/<run>/<host>/` of the controller, for browsers that reach the controller and no node.

The files of the page are those of this package. Of an agent only data passes (JSON, numbers, text), never what a
browser would run in the controller's name; orders pass with the controller's token checked, and are signed anew.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import aiohttp
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from trainermon.agent.controller.client import FAULTS, AgentAddress, AgentClient, describe
from trainermon.agent.controller.fleet import AgentFleet
from trainermon.agent.web.answers import json_answer, refuse
from trainermon.agent.web.http import parse_json
from trainermon.agent.web.page import PAGE, add_page
from trainermon.agent.web.runbooks import add_runbooks
from trainermon.core.errors import TrainermonError

ORDERS = frozenset({"commands", "acknowledgements", "silences"})
DATA = frozenset({"application/json", "application/octet-stream", "text/csv", "text/plain"})
"""Media types that a browser does not run."""

TELLING = frozenset({*range(200, 300), *range(400, 600)} - {401})
"""Statuses of a node that are passed on: a redirect leads elsewhere, and a 401 blames the token of the browser."""


def build_node_pages(fleet: AgentFleet, client: AgentClient) -> FastAPI:
    """Return the ASGI application to be mounted below `/node/{run}/{host}`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(TrainermonError, refuse)
    add_page(app, PAGE)
    add_runbooks(app)
    _add_data(app, fleet, client)
    _add_orders(app, fleet, client)
    _add_pages_of_the_agent(app, fleet)
    return app


def _add_data(app: FastAPI, fleet: AgentFleet, client: AgentClient) -> None:
    @app.get("/api/{path:path}")
    async def data(request: Request, path: str) -> Response:
        if path.startswith("v1/"):
            raise HTTPException(404, "this is not of the page; ask the agent itself")
        try:
            answer = await client.open(_address(fleet, request), _with_query(request, f"api/{path}"))
        except FAULTS as fault:
            raise _no_answer(fault) from None
        try:
            _require_telling(answer.status)
            _require_data(answer.content_type)
        except HTTPException:
            answer.close()
            raise
        return StreamingResponse(_parts(answer), status_code=answer.status, media_type=answer.content_type)

    @app.get("/events")
    async def events(request: Request) -> Response:
        return StreamingResponse(_events(client, _address(fleet, request)), media_type="text/event-stream")


def _add_orders(app: FastAPI, fleet: AgentFleet, client: AgentClient) -> None:
    @app.post("/api/{path:path}")
    async def order(request: Request, path: str) -> Response:
        if path not in ORDERS:
            raise HTTPException(404, f"found the order {path[:50]!r}, expected one of {', '.join(sorted(ORDERS))}")
        body = parse_json(await request.body())
        try:
            status, answer = await client.post(_address(fleet, request), f"api/{path}", body)
        except FAULTS as fault:
            raise _no_answer(fault) from None
        _require_telling(status)
        return json_answer(answer, status=status)


def _add_pages_of_the_agent(app: FastAPI, fleet: AgentFleet) -> None:
    """Lead to the agent itself for pages that it has made: they run scripts of their own."""

    @app.get("/{path:path}")
    async def made_there(request: Request, path: str) -> Response:
        if not path.startswith(("diagnosis/", "graph/")):
            raise HTTPException(404, "there is no such page")
        return RedirectResponse(_address(fleet, request).url + _with_query(request, path))


def _no_answer(fault: Exception) -> HTTPException:
    return HTTPException(502, f"the node does not answer: {describe(fault)}")


def _address(fleet: AgentFleet, request: Request) -> AgentAddress:
    run, host = request.path_params["run"], request.path_params["host"]
    for agent in fleet.of_run(run):
        if agent.report is not None and agent.report.host == host:
            return agent.target
    raise HTTPException(404, f"no node {host[:100]!r} has told of a run {run[:100]!r} (yet)")


def _with_query(request: Request, path: str) -> str:
    """Return the decoded `path` as a node shall be asked for it; 404 for one that leads elsewhere than it says."""
    if not {"", ".", ".."}.isdisjoint(path.removesuffix("/").split("/")):
        raise HTTPException(404, "there is no such page")
    path = quote(path)
    return f"{path}?{request.url.query}" if request.url.query else path


def _require_telling(status: int) -> None:
    if status not in TELLING:
        raise HTTPException(502, f"the node answered with status {status}, expected data or an error")


def _require_data(media_type: str) -> None:
    if media_type not in DATA:
        raise HTTPException(502, f"the node answered with {media_type!r}, expected data")


async def _parts(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield an answer as it comes, so that none is held here; one that breaks off ends with an error, never early."""
    async with answer:
        async for part in answer.content.iter_any():
            yield part


async def _events(client: AgentClient, target: AgentAddress) -> AsyncIterator[Any]:
    try:
        async for part in client.stream(target, "events"):
            yield part
    except FAULTS:
        return  # the browser asks again
