"""The addresses of what is stored of the steps: a row of a heat map and its histograms, for the page and as tables.

The numbers of the steps are a table, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from fastapi import FastAPI
from fastapi.responses import Response

from trainermon.core.errors import QueryError
from trainermon.exporters.store.curves import CurveQuery, encode_curve, read_curve, read_steps, read_table
from trainermon.exporters.store.histograms import encode_histograms, read_histogram_table, read_histograms

FRESH_S = 10.0
"""A curve of a running run is at most so old; storing what is newer for every question would make tiny segments."""

READ_TIMEOUT_S = 50.0

Answer = TypeVar("Answer")


class CurveInterface(Protocol):
    """What is asked for curves."""

    async def curve(self, query: CurveQuery) -> bytes:
        """Return the lines in the page's binary format. Raises QueryError, StoreError."""

    async def curve_table(self, query: CurveQuery) -> bytes:
        """Return the same steps as CSV. Raises QueryError, StoreError."""

    async def steps_table(self, first: int | None, last: int | None) -> bytes:
        """Return the numbers of these steps as they are stored, as CSV. Raises QueryError, StoreError."""

    async def histograms(self, query: CurveQuery) -> bytes:
        """Return the row's histograms in the page's binary format. Raises QueryError, StoreError."""

    async def histogram_table(self, query: CurveQuery) -> bytes:
        """Return them as CSV. Raises QueryError, StoreError."""


class StoredCurves:
    """Reads curves from the segments of a run, one at a time, in a thread of its own: see `CurveInterface`.

    Args:
        run_dir: The run directory.
        node: The node whose segments are read; `*`: those of all.
        flush: Stores what was read of the journals; None where nothing more comes.
    """

    def __init__(self, run_dir: Path, *, node: str = "*", flush: Callable[[], Awaitable[bool]] | None = None) -> None:
        self._run_dir = run_dir
        self._node = node
        self._flush = flush
        self._turn = asyncio.Lock()
        self._flushed_s = -FRESH_S

    async def curve(self, query: CurveQuery) -> bytes:
        """Return the lines in the page's binary format; of a running run up to `FRESH_S` ago at least."""
        return await self._read(lambda: encode_curve(read_curve(self._run_dir, query, node=self._node), query))

    async def curve_table(self, query: CurveQuery) -> bytes:
        """Return the same steps as CSV."""
        return await self._read(lambda: read_table(self._run_dir, query, node=self._node))

    async def steps_table(self, first: int | None, last: int | None) -> bytes:
        """Return the numbers of these steps as they are stored, as CSV; of a running run as old as a curve."""
        return await self._read(lambda: read_steps(self._run_dir, first=first, last=last, node=self._node))

    async def histograms(self, query: CurveQuery) -> bytes:
        """Return the row's histograms in the page's binary format."""
        return await self._read(
            lambda: encode_histograms(read_histograms(self._run_dir, query, node=self._node), query)
        )

    async def histogram_table(self, query: CurveQuery) -> bytes:
        """Return them as CSV."""
        return await self._read(lambda: read_histogram_table(self._run_dir, query, node=self._node))

    async def _read(self, read: Callable[[], Answer]) -> Answer:
        async with self._turn:
            if self._flush is not None and time.monotonic() >= self._flushed_s + FRESH_S:
                self._flushed_s = time.monotonic()
                await self._flush()
            try:
                return await asyncio.wait_for(asyncio.to_thread(read), READ_TIMEOUT_S)
            except asyncio.TimeoutError:
                raise QueryError(f"reading the segments took more than {READ_TIMEOUT_S:g} s") from None


def add_curves(app: FastAPI, curves: CurveInterface) -> None:
    """Answer for curves at `/api/row` and `/api/row.csv`, for histograms likewise, for numbers at `/api/steps.csv`."""

    @app.get("/api/row")
    async def row(  # noqa: PLR0913 - the parts of a question
        *,
        kind: str,
        row: str,
        statistic: str = "rms",
        ranks: str = "merged",
        first: int | None = None,
        last: int | None = None,
        points: int = 1000,
    ) -> Response:
        query = CurveQuery(
            heat_map=kind,
            row=row,
            statistic=statistic,
            by_rank=ranks == "each",
            first=first,
            last=last,
            points=points,
        )
        return Response(await curves.curve(query), media_type="application/octet-stream")

    @app.get("/api/row.csv")
    async def table(
        kind: str, row: str, ranks: str = "merged", first: int | None = None, last: int | None = None
    ) -> Response:
        query = CurveQuery(heat_map=kind, row=row, by_rank=ranks == "each", first=first, last=last)
        return _csv(await curves.curve_table(query), "row.csv")

    @app.get("/api/steps.csv")
    async def steps_table(first: int | None = None, last: int | None = None) -> Response:
        return _csv(await curves.steps_table(first, last), "steps.csv")

    @app.get("/api/histograms")
    async def histograms(
        kind: str, row: str, first: int | None = None, last: int | None = None, points: int = 1000
    ) -> Response:
        query = CurveQuery(heat_map=kind, row=row, first=first, last=last, points=points)
        return Response(await curves.histograms(query), media_type="application/octet-stream")

    @app.get("/api/histograms.csv")
    async def histogram_table(kind: str, row: str, first: int | None = None, last: int | None = None) -> Response:
        query = CurveQuery(heat_map=kind, row=row, first=first, last=last)
        return _csv(await curves.histogram_table(query), "histograms.csv")


def _csv(content: bytes, name: str) -> Response:
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type="text/csv; charset=utf-8", headers=headers)
