"""The web application of the agent: the page, its JSON and binary answers, `/metrics`, events and control calls.

What is served comes from a `NodeInterface`; this module only speaks HTTP. It runs behind
`trainermon.agent.web.guard.RequestGuard`, which has already checked host, origin, token and size of the body when a
request arrives here.
"""

from __future__ import annotations

import gzip
import importlib.resources
import json
import mimetypes
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response, StreamingResponse

from trainermon.agent.feed import EventFeed
from trainermon.agent.orders.answers import AgentReport, OrderAnswer, OrderStatus
from trainermon.agent.orders.commands import ConflictError
from trainermon.agent.web.access import TokenAccess
from trainermon.agent.web.graphs import GraphInterface, add_graphs
from trainermon.agent.web.guard import Application, RequestGuard
from trainermon.agent.web.runbooks import add_runbooks
from trainermon.core.errors import TrainermonError
from trainermon.core.values import as_plain

if TYPE_CHECKING:
    from importlib.abc import Traversable  # moved in Python 3.11 and gone from here in 3.14

MAX_COLUMNS = 4000
PAGE = "index.html"
GZIP_LEVEL = 1  # a seventh of the bytes, in a third of the time of the usual level


class NodeInterface(GraphInterface, Protocol):
    """What the agent's web application asks of the agent; every method returns at once unless it is a coroutine.

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

    def evidence(self) -> dict[str, Any]:
        """Return what is known of hung or dead ranks, for a controller that joins the nodes."""

    def checksums(self, after: int) -> dict[str, Any]:
        """Return {"attempt", "steps"}: by step after `after`, group and rank, a digest of the checksums of replicas."""

    def copies(self, step: int, group: str) -> dict[int, dict[str, str]]:
        """Return, by rank and name, the checksums (hexadecimal) of one group of copies on one step."""

    async def report(self, name: str) -> bytes | None:
        """Return the post-mortem `name` of a hang or crash as Markdown; None if there is none."""

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
    _add_reading(app, node)
    _add_evidence(app, node)
    add_graphs(app, node)
    add_runbooks(app)
    _add_stream(app, node)
    _add_control(app, node)
    if escalations is not None:
        _add_escalation(app, escalations)
    return RequestGuard(app, access=access, hosts=hosts)


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


def _add_reading(app: FastAPI, node: NodeInterface) -> None:
    @app.get("/healthz")
    async def healthz() -> Response:
        return json_answer({"status": "ok"})

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


def _add_evidence(app: FastAPI, node: NodeInterface) -> None:
    @app.get("/api/v1/evidence")
    async def evidence() -> Response:
        return json_answer(node.evidence())

    @app.get("/api/v1/checksums")
    async def checksums(after: int = -1) -> Response:
        return json_answer(node.checksums(after))

    @app.get("/api/v1/copies")
    async def copies(step: int, group: str) -> Response:
        return json_answer({"ranks": node.copies(step, group)})

    @app.get("/api/reports/{name}")
    async def report(name: str) -> Response:
        text = await node.report(name)
        if text is None:
            raise HTTPException(404, "there is no such report (yet)")
        return Response(text, media_type="text/plain; charset=utf-8")


def _add_stream(app: FastAPI, node: NodeInterface) -> None:
    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        return metrics_answer(request, node.metrics)

    @app.get("/events")
    async def events() -> Response:
        stream = node.feed.subscribe()
        if stream is None:
            raise HTTPException(503, "too many pages are open, or the agent is about to end")
        return StreamingResponse(stream, media_type="text/event-stream")


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

    @app.post("/api/flush")
    async def flush() -> Response:
        if not await node.flush():
            raise HTTPException(503, "the commit did not succeed; agent.status.json says why")
        return json_answer({"status": "flushed"})

    @app.post("/api/stop")
    async def stop() -> Response:
        node.stop()
        return json_answer({"status": "stopping"}, status=202)


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
    return value


async def refuse(request: Request, error: Exception) -> Response:
    """Return the error answer for an exception of ours: 409 for what is impossible now, 400 for the rest."""
    del request
    status = 409 if isinstance(error, ConflictError) else 400
    return json_answer({"detail": str(error)}, status=status)


def json_answer(value: Any, *, status: int = 200) -> Response:
    """Return an HTTP response with `value` as JSON."""
    content = json.dumps(as_plain(value), allow_nan=False, separators=(",", ":"))
    return Response(content, status_code=status, media_type="application/json")


def metrics_answer(request: Request, render: Callable[[str], tuple[bytes, str]]) -> Response:
    """Return the answer to a scrape: what `render` gives for its `Accept` header, in gzip for those who read that."""
    content, content_type = render(request.headers.get("accept", ""))
    headers = {"content-type": content_type, "vary": "accept, accept-encoding"}
    if reads_gzip(request.headers.get("accept-encoding", "")):
        content = gzip.compress(content, compresslevel=GZIP_LEVEL, mtime=0)
        headers["content-encoding"] = "gzip"
    return Response(content, headers=headers)


def reads_gzip(accept_encoding: str) -> bool:
    """Return whether a client that sent this `Accept-Encoding` header takes gzip.

    >>> reads_gzip("gzip"), reads_gzip("br, GZIP;q=0.5"), reads_gzip("gzip;q=0, *"), reads_gzip("")
    (True, True, False, False)
    """
    for coding in accept_encoding.lower().split(","):
        name, _, weight = (part.strip() for part in coding.partition(";"))
        if name == "gzip":
            return re.fullmatch(r"q=0(\.0*)?", weight) is None
    return False


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
