"""What the page of a run asks for: its files, data, reports and events, of an agent or of a run that is stored."""

from __future__ import annotations

import importlib.resources
import mimetypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import FastAPI, HTTPException
from fastapi.responses import Response, StreamingResponse

from trainermon.agent.feed import EventFeed
from trainermon.agent.orders.dumps import DumpKey
from trainermon.agent.web.answers import json_answer
from trainermon.agent.web.curves import CurveInterface, add_curves
from trainermon.agent.web.graphs import GraphInterface, add_graphs
from trainermon.agent.web.runbooks import add_runbooks
from trainermon.dashboards.headers import policy_of

if TYPE_CHECKING:
    from importlib.abc import Traversable  # moved in Python 3.11 and gone from here in 3.14

MAX_COLUMNS = 4000
PAGE = "index.html"


class PageInterface(CurveInterface, GraphInterface, Protocol):
    """What the page of a run asks for; every method returns at once unless it is a coroutine.

    `feed` sends events to open pages.
    """

    feed: EventFeed

    def run(self) -> dict[str, Any]:
        """Return the state of run and ranks as a mapping ready for JSON."""

    def lines(self, names: list[str]) -> dict[str, Any]:
        """Return curves over all ranks for the page: {"steps": [...], "series": {name: [...]}}.

        `names` are such as `loss`. Raises QueryError for an unknown one.
        """

    def heatmap(self, kind: str, statistic: str, columns: int) -> bytes:
        """Return a statistic of a kind of tensors as framed float32, rows × steps, at most `columns` of these.

        Raises QueryError for an unknown kind or statistic.
        """

    def ranks(self, quantity: str, columns: int) -> bytes:
        """Return a quantity of every rank as framed float32, ranks × steps, at most `columns` of these.

        Raises QueryError for an unknown quantity.
        """

    def alerts(self) -> list[dict[str, Any]]:
        """Return every alert of the run in its last state, as mappings ready for JSON."""

    def dumps(self) -> list[dict[str, Any]]:
        """Return every dump of the run, as mappings ready for JSON."""

    async def diagnosis(self, identity: str, attempt: int, step: int) -> bytes | None:
        """Return the diagnosis (JSON) of the dump with this id, attempt and step; None if there is none."""

    async def diagnosis_page(self, key: DumpKey) -> bytes | None:
        """Return the diagnosis of a dump as a page of one file; None if there is none. Raises OSError."""

    async def report(self, name: str) -> bytes | None:
        """Return the post-mortem `name` of a hang or crash as Markdown; None if there is none."""


def add_page(app: FastAPI, page_file: str, *packages: str) -> None:
    """Serve the files below the folder `web` of dashboards and of further `packages`, with `page_file` at `/`."""
    # Only names that were listed here can be asked for, so no path from a request ever reaches the file system.
    folders = [importlib.resources.files(package) / "web" for package in ("trainermon.dashboards", *packages)]
    files = {name: entry for folder in folders for name, entry in _files_below(folder)}

    @app.get("/")
    async def page() -> Response:
        return _file(files, page_file)

    @app.get("/static/{name:path}")
    async def static(name: str) -> Response:
        return _file(files, name)

    @app.get("/favicon.ico")
    async def favicon() -> Response:
        return Response(status_code=204)


def add_reading(app: FastAPI, node: PageInterface) -> None:
    """Answer what the page of a run asks for: data, curves, reports, graphs, runbooks and events."""
    _add_data(app, node)
    _add_findings(app, node)
    _add_diagnosis_page(app, node)
    _add_events(app, node)
    add_curves(app, node)
    add_graphs(app, node)
    add_runbooks(app)


def _add_data(app: FastAPI, node: PageInterface) -> None:
    @app.get("/api/run")
    async def run() -> Response:
        return json_answer(node.run())

    @app.get("/api/lines")
    async def lines(names: str) -> Response:
        return json_answer(node.lines([name for name in names.split(",") if name]))

    @app.get("/api/heatmap")
    async def heatmap(kind: str, statistic: str, columns: int = 1000) -> Response:
        return _binary(node.heatmap(kind, statistic, _clip(columns)))

    @app.get("/api/ranks")
    async def ranks(quantity: str, columns: int = 1000) -> Response:
        return _binary(node.ranks(quantity, _clip(columns)))


def _add_findings(app: FastAPI, node: PageInterface) -> None:
    @app.get("/api/alerts")
    async def alerts() -> Response:
        return json_answer(node.alerts())

    @app.get("/api/dumps")
    async def dumps() -> Response:
        return json_answer(node.dumps())

    @app.get("/api/diagnosis/{identity}/{attempt}/{step}")
    async def diagnosis(identity: str, attempt: int, step: int) -> Response:
        report = await node.diagnosis(identity, attempt, step)
        if report is None:
            raise HTTPException(404, "there is no diagnosis of this dump (yet)")
        return Response(report, media_type="application/json")

    @app.get("/api/reports/{name}")
    async def report(name: str) -> Response:
        text = await node.report(name)
        if text is None:
            raise HTTPException(404, "there is no such report (yet)")
        return Response(text, media_type="text/plain; charset=utf-8")


def _add_diagnosis_page(app: FastAPI, node: PageInterface) -> None:
    @app.get("/diagnosis/{identity}/{attempt}/{step}")
    async def diagnosis_page(identity: str, attempt: int, step: int) -> Response:
        try:
            page = await node.diagnosis_page(DumpKey(identity, attempt, step))
        except OSError as error:
            raise HTTPException(503, f"the page cannot be shown: {error.strerror or error}") from None
        if page is None:
            raise HTTPException(404, "there is no diagnosis of this dump (yet)")
        policy = {"content-security-policy": policy_of(page)}
        return Response(page, media_type="text/html; charset=utf-8", headers=policy)


def _add_events(app: FastAPI, node: PageInterface) -> None:
    @app.get("/events")
    async def events() -> Response:
        stream = node.feed.subscribe()
        if stream is None:
            raise HTTPException(503, "too many pages are open, or the agent is about to end")
        return StreamingResponse(stream, media_type="text/event-stream")


def _binary(content: bytes) -> Response:
    return Response(content, media_type="application/octet-stream")


def _files_below(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    """Yield the files of a folder and of those in it, each with its path from there (`heat/raster.js`)."""
    for entry in folder.iterdir():
        if entry.is_file():
            yield prefix + entry.name, entry
        elif entry.is_dir():
            yield from _files_below(entry, f"{prefix}{entry.name}/")


def _file(files: dict[str, Traversable], name: str) -> Response:
    entry = files.get(name)
    if entry is None:
        raise HTTPException(404, "there is no such file")
    media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(entry.read_bytes(), media_type=media_type)


def _clip(columns: int) -> int:
    return max(1, min(columns, MAX_COLUMNS))
