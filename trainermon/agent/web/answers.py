"""What every web application here answers with: JSON, the text of a scrape, errors of ours."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from trainermon.agent.orders.commands import ConflictError
from trainermon.core.values import as_plain

GZIP_LEVEL = 1  # a seventh of the bytes, in a third of the time of the usual level


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
    return packed_answer(request, content, {"content-type": content_type, "vary": "accept, accept-encoding"})


def packed_answer(request: Request, content: bytes, headers: dict[str, str]) -> Response:
    """Return an HTTP response with `content` and `headers`, in gzip for those who read that."""
    if reads_gzip(request.headers.get("accept-encoding", "")):
        content = gzip.compress(content, compresslevel=GZIP_LEVEL, mtime=0)
        headers = {**headers, "content-encoding": "gzip"}
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
