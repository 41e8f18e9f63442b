"""The web application of `trainermon serve`: the list of runs, each run's page below `/run/<key>/`, and comparisons.

It runs behind the agent's `RequestGuard`, and each run's page is the agent's own (`agent/web/page.py`). Nothing can be
ordered, and only what lies in the opened folders can be named: by the key of a run that was found there.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Annotated, Any, NamedTuple

from fastapi import FastAPI, HTTPException, Query
from fastapi.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import trainermon
from trainermon.agent.runs.comparison import compare, matching_series
from trainermon.agent.runs.curves import RunCurves
from trainermon.agent.runs.first_difference import first_difference
from trainermon.agent.runs.run_list import RunList
from trainermon.agent.runs.stored_run import StoredRun
from trainermon.agent.web.access import TokenAccess
from trainermon.agent.web.answers import json_answer, refuse
from trainermon.agent.web.guard import Application, RequestGuard
from trainermon.agent.web.page import PAGE, add_page, add_reading
from trainermon.agent.web.runbooks import add_runbooks
from trainermon.core.errors import QueryError, TrainermonError

LIST_PAGE = "runs/index.html"
FRESH_S = 2.0
MAX_OPEN = 8
"""So many runs' pages are kept in memory, up to about 70 MB each; the one that was not asked for longest is let go."""

MAX_COMPARED = 32
MAX_NAMES = 12
MAX_COLUMNS = 4000


class _OpenRun(NamedTuple):
    run: StoredRun
    app: ASGIApp


class RunDesk:
    """Looks at the folders when somebody asks, and keeps the runs whose pages are open.

    Args:
        runs: The list.
        executor: Reads files; several threads, as one large run must not hold up the others.
    """

    def __init__(self, runs: RunList, executor: Executor) -> None:
        self.runs = runs
        self._executor = executor
        self._looking = asyncio.Lock()
        self._looked_s = float("-inf")
        self._open: OrderedDict[str, _OpenRun] = OrderedDict()
        self._curves: dict[str, RunCurves] = {}

    async def look(self) -> None:
        """Bring the list up to date, if it is older than two seconds."""
        async with self._looking:
            if time.monotonic() - self._looked_s >= FRESH_S:
                await self.work(self.runs.scan)
                self._looked_s = time.monotonic()

    async def work(self, task: Callable[..., Any], *arguments: Any) -> Any:
        """Return what `task` returns in a thread of the executor."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, task, *arguments)

    async def page_of(self, key: str) -> ASGIApp | None:
        """Return the web application of a run's page, with what its files say now; None if there is no such run."""
        await self.look()
        place = self.runs.places.get(key)
        if place is None:
            return None
        if key not in self._open:
            run = StoredRun(place.path, executor=self._executor, facts=lambda: self.runs.facts[key])
            self._open[key] = _OpenRun(run, _page_app(run))
            if len(self._open) > MAX_OPEN:
                _, oldest = self._open.popitem(last=False)
                await oldest.run.close()
        self._open.move_to_end(key)
        found = self._open[key]
        await found.run.refresh(max_age_s=FRESH_S)
        return found.app

    async def curves_of(self, keys: Sequence[str]) -> list[RunCurves]:
        """Return the curves of runs.

        Raises:
            QueryError: There is no such run, or they are too many.
        """
        if not 1 <= len(keys) <= MAX_COMPARED:
            raise QueryError(f"found {len(keys)} runs, expected 1 to {MAX_COMPARED}")
        await self.look()
        for key in keys:
            place = self.runs.places.get(key)
            if place is None:
                raise QueryError(f"there is no run {key!r} (any more)")
            if self._curves.get(key) is None or self._curves[key].place != place:
                self._curves[key] = RunCurves(place)
        return [self._curves[key] for key in keys]

    async def close(self) -> None:
        """End the streams of open pages."""
        for entry in self._open.values():
            await entry.run.close()


def build_application(desk: RunDesk, *, access: TokenAccess, hosts: tuple[str, ...] = ()) -> Application:
    """Return the ASGI web application over the runs of `desk`.

    Args:
        desk: Finds and opens runs.
        access: Which credentials allow reading.
        hosts: Names under which it may be asked for, besides `localhost` and IP addresses.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(TrainermonError, refuse)
    add_page(app, LIST_PAGE)
    add_runbooks(app)
    _add_list(app, desk)
    _add_comparison(app, desk)
    app.mount("/run/{key}", _RunPages(desk))
    return RequestGuard(app, access=access, hosts=hosts)


class _RunPages:
    """Passes a request below `/run/<key>` to the page of that run."""

    def __init__(self, desk: RunDesk) -> None:
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = await self._desk.page_of(scope["path_params"]["key"])
        if page is None:
            page = json_answer({"detail": "there is no such run (any more)"}, status=404)
        await page(scope, receive, send)


def _page_app(run: StoredRun) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(TrainermonError, refuse)
    add_page(app, PAGE)
    add_reading(app, run)
    return app


def _add_list(app: FastAPI, desk: RunDesk) -> None:
    @app.get("/healthz")
    async def healthz() -> Response:
        return json_answer({"status": "ok"})

    @app.get("/api/runs")
    async def runs() -> Response:
        await desk.look()
        listed = [facts.as_plain() for facts in desk.runs.facts.values()]
        folders = [str(path) for path in desk.runs.opened]
        return json_answer({"runs": listed, "folders": folders, "version": trainermon.__version__})


def _add_comparison(app: FastAPI, desk: RunDesk) -> None:
    @app.get("/api/curves")
    async def curves(  # noqa: PLR0913, PLR0917 - what an address may say
        runs: str,
        names: Annotated[list[str], Query()],
        columns: int = 1000,
        axis: str = "step",
        first: float | None = None,
        last: float | None = None,
    ) -> Response:
        chosen = await desk.curves_of(_listed(runs))
        span = None if first is None or last is None else (first, last)
        width = max(16, min(columns, MAX_COLUMNS))
        return json_answer(await desk.work(compare, chosen, names[:MAX_NAMES], width, axis, span))

    @app.get("/api/series")
    async def series(runs: str, text: str = "") -> Response:
        chosen = await desk.curves_of(_listed(runs))
        return json_answer(await desk.work(matching_series, chosen, text))

    @app.get("/api/difference")
    async def difference(runs: str, name: str = "loss") -> Response:
        keys = _listed(runs)
        if len(keys) != 2:
            raise HTTPException(400, f"found {len(keys)} runs, expected two")
        one, other = await desk.curves_of(keys)
        return json_answer(await desk.work(first_difference, one, other, name))


def _listed(runs: str) -> list[str]:
    return list(dict.fromkeys(key for key in runs.split(",") if key))
