"""The addresses of the graphs of dumps: the page, what is shown until it is there, and the details of nodes."""

from __future__ import annotations

import html
from typing import Any, Protocol

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response

from trainermon.agent.orders.dumps import DumpKey
from trainermon.agent.orders.graphs import GraphAnswer, GraphState
from trainermon.agent.web.answers import json_answer
from trainermon.core.errors import DumpError
from trainermon.dashboards.headers import policy_of

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">{head}
<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">
<title>{title}</title><link rel="stylesheet" href="../../../../static/style.css"></head>
<body><main><section class="panel"><h1 class="headline">{title}</h1><p class="empty" role="status">{text}</p>
<p class="empty"><a href="../../../../">← Back to the run</a></p></section></main></body></html>
"""
_REFRESH = '<meta http-equiv="refresh" content="1">'


_NO_DUMP = "the run has no dump of that name, attempt and step"


class GraphInterface(Protocol):
    """What is asked of the agent for graphs."""

    async def graph(self, key: DumpKey) -> GraphAnswer:
        """Return the graph's page with this dump, or what became of it."""

    async def graph_detail(self, key: DumpKey, number: int) -> bytes | None:
        """Return the details of a node, packed by gzip; None if there are none."""

    async def graph_piece(self, key: DumpKey, number: int) -> bytes | None:
        """Return a piece of the page's data, packed by gzip; None if there is none."""

    async def graph_notes(self, key: DumpKey) -> dict[str, Any] | None:
        """Return what was written at its nodes, ready for JSON; None: no such dump. Raises DumpError."""

    async def keep_graph_notes(self, key: DumpKey, content: bytes) -> dict[str, Any] | None:
        """Keep what was changed at its nodes; return what there is now. Raises DumpError, ValueError, OSError."""


def add_graphs(app: FastAPI, node: GraphInterface) -> None:
    """Answer for the graph of each dump, below `/graph/`."""

    @app.get("/graph/{identity}/{attempt}/{step}/")
    async def graph(identity: str, attempt: int, step: int) -> Response:
        answer = await node.graph(DumpKey(identity, attempt, step))
        if answer.state is GraphState.UNKNOWN:
            return _said(404, "No such dump", "The run has no dump of that name, attempt and step.")
        if answer.state is GraphState.FAILED:
            return _said(500, "The graph cannot be shown", f"{answer.reason}. Load this page again to try once more.")
        if answer.state is GraphState.BUILDING:
            return _said(202, "The graph is being drawn", "This takes a few seconds.", _REFRESH)
        policy = {"content-security-policy": policy_of(answer.page)}
        return Response(answer.page, media_type="text/html; charset=utf-8", headers=policy)

    @app.get("/graph/{identity}/{attempt}/{step}/details/{number}")
    async def detail(identity: str, attempt: int, step: int, number: int) -> Response:
        return _packed(await node.graph_detail(DumpKey(identity, attempt, step), number), "application/json")

    @app.get("/graph/{identity}/{attempt}/{step}/pieces/{number}")
    async def piece(identity: str, attempt: int, step: int, number: int) -> Response:
        return _packed(await node.graph_piece(DumpKey(identity, attempt, step), number), "application/octet-stream")

    _add_notes(app, node)


def _add_notes(app: FastAPI, node: GraphInterface) -> None:
    @app.get("/graph/{identity}/{attempt}/{step}/notes")
    async def notes(identity: str, attempt: int, step: int) -> Response:
        try:
            found = await node.graph_notes(DumpKey(identity, attempt, step))
        except DumpError as error:
            raise HTTPException(409, str(error)) from None
        if found is None:
            raise HTTPException(404, _NO_DUMP)
        return json_answer(found)

    @app.post("/graph/{identity}/{attempt}/{step}/notes")
    async def keep_notes(identity: str, attempt: int, step: int, request: Request) -> Response:
        try:
            found = await node.keep_graph_notes(DumpKey(identity, attempt, step), await request.body())
        except ValueError as error:
            raise HTTPException(400, f"these are no notes: {error}") from None
        except DumpError as error:
            raise HTTPException(409, str(error)) from None
        except OSError as error:
            raise HTTPException(409, f"notes cannot be written beside the dumps: {error.strerror or error}") from None
        if found is None:
            raise HTTPException(404, _NO_DUMP)
        return json_answer(found)


def _packed(found: bytes | None, kind: str) -> Response:
    if found is None:
        raise HTTPException(404, "the page does not have this (any more): load it again")
    return Response(found, media_type=kind, headers={"content-encoding": "gzip"})


def _said(status: int, title: str, text: str, head: str = "") -> Response:
    page = _PAGE.format(title=html.escape(title), text=html.escape(text), head=head)
    return Response(page, status_code=status, media_type="text/html; charset=utf-8")
