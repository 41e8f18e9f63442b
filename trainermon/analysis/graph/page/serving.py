"""Serves the page of a graph to whoever has its address, and the details of nodes as they are asked for."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import hmac
import json
import re
import secrets
import socket
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from pathlib import Path
from threading import Lock

from trainermon.analysis.graph.page.details import NodeDetails
from trainermon.core.errors import DumpError
from trainermon.dashboards.graph_notes import MAX_BYTES, keep_change, notes_file, parse_change, read_notes
from trainermon.dashboards.headers import CONTENT_SECURITY_POLICY, SECURITY_HEADERS, policy_of

LOOPBACK = "127.0.0.1"
DETAILS = "details/"
PIECES = "pieces/"
NOTES = "notes"
DetailsOf = Callable[[int], NodeDetails]
"""Returns the details of a rank, by its place on the page."""
_READ_LIMIT_S = 10.0
_DROPPED_AT_ONCE = 1 << 16
_MOST_DROPPED = 1 << 26
_ASKED = re.compile(rf"({DETAILS}|{PIECES})([0-9]{{1,12}})")


class GraphServer(ThreadingHTTPServer):
    """Answers three kinds of addresses: the page, `pieces/NUMBER` and `details/NUMBER` beside it. None names a file.

    All begin with a secret, so other users of the machine and foreign pages in the reader's browser find nothing.

    Args:
        page: The page.
        pieces: The pieces of its data, each packed by gzip.
        counts: How many nodes each rank has, in the order of the page.
        details: Returns those of one of them; it may have to read a dump.
        notes: Where the dumps are on which notes may be written; None: nowhere.
        host: Address to listen on.
        port: Port to listen on; 0 lets the system choose.

    Raises:
        OSError: It cannot be listened on.
    """

    daemon_threads = True

    def __init__(  # noqa: PLR0913  # what it serves, and where
        self,
        page: str,
        pieces: Sequence[bytes],
        counts: Sequence[int],
        details: DetailsOf,
        notes: Path | None = None,
        *,
        host: str = LOOPBACK,
        port: int = 0,
    ) -> None:
        super().__init__((host, port), _Handler)
        self.page = page.encode()
        self.pieces = pieces
        self.policy = policy_of(self.page)
        self.secret = secrets.token_urlsafe(24)
        self._details = details
        self._reading = Lock()
        self.notes = notes
        self.place = ""
        self._ends = list(accumulate(counts))

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/{self.secret}/{self.place}"

    def detail(self, number: int) -> bytes | None:
        """Return the details of a node, counted through all ranks, as JSON; None if it has none.

        Raises:
            DumpError: The dump has changed since it was read.
        """
        rank = bisect_right(self._ends, number)
        if rank == len(self._ends):
            return None
        with self._reading:  # one dump at a time: several would need the memory of all
            return self._details(rank).json_of(number - (self._ends[rank - 1] if rank else 0))


class _Handler(BaseHTTPRequestHandler):
    server: GraphServer
    protocol_version = "HTTP/1.1"
    timeout = _READ_LIMIT_S

    def do_GET(self) -> None:
        rest = self._asked_for()
        if rest is None:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page: copy the whole address")
        elif not rest:
            self._answer(self.server.page, "text/html; charset=utf-8", self.server.policy)
        elif rest == NOTES and self.server.notes is not None:
            self._answer_notes(self.server.notes)
        elif asked := _ASKED.fullmatch(rest):
            (self._answer_detail if asked[1] == DETAILS else self._answer_piece)(int(asked[2]))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")

    def do_POST(self) -> None:
        """Keep what the reader has changed at nodes, and answer what there is now."""
        origin, host = self.headers.get("Origin", ""), self.headers.get("Host", "")
        size = self.headers.get("Content-Length", "")
        self.close_connection = True
        if self._asked_for() != NOTES or self.server.notes is None:
            self._refuse_unread(HTTPStatus.NOT_FOUND, "nothing can be written here")
        elif origin.partition("://")[2].lower() != host.lower():
            self._refuse_unread(HTTPStatus.FORBIDDEN, "requests from other origins are refused")
        elif not size.isdecimal() or int(size) > MAX_BYTES:
            reason = f"expected up to {MAX_BYTES:,} bytes, and their number"
            self._refuse_unread(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
        else:
            self._keep_notes(self.server.notes, self.rfile.read(int(size)))

    def _answer_notes(self, path: Path) -> None:
        try:
            self._answer(json.dumps(read_notes(path).as_json()).encode(), "application/json")
        except DumpError as error:
            self._refuse(HTTPStatus.CONFLICT, str(error))

    def _keep_notes(self, path: Path, content: bytes) -> None:
        try:
            notes = keep_change(path, parse_change(content))
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except DumpError as error:
            self._refuse(HTTPStatus.CONFLICT, str(error))
        except OSError as error:
            self._refuse(HTTPStatus.CONFLICT, f"{notes_file(path)} cannot be written: {error.strerror}")
        else:
            self._answer(json.dumps(notes.as_json()).encode(), "application/json")

    def _asked_for(self) -> str | None:
        """Return the part of the address behind the secret; None if that is not the secret."""
        secret, _, rest = self.path.removeprefix("/").partition("/")
        return rest if hmac.compare_digest(secret.encode(), self.server.secret.encode()) else None

    def _answer_detail(self, number: int) -> None:
        try:
            found = self.server.detail(number)
        except (DumpError, OSError) as error:
            self._refuse(HTTPStatus.GONE, str(error))
            return
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND, "this node has no tensors of its own")
        else:
            self._answer(found, "application/json")

    def _answer_piece(self, number: int) -> None:
        """Answer a piece as it is: it is packed already, and every browser unpacks it."""
        if number >= len(self.server.pieces):
            self._refuse(HTTPStatus.NOT_FOUND, "the page has no such piece")
        else:
            headers = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
            self._send(HTTPStatus.OK, self.server.pieces[number], headers)

    def _answer(self, body: bytes, kind: str, policy: str = CONTENT_SECURITY_POLICY) -> None:
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, b"", {"ETag": tag}, policy)
            return
        headers = {"Content-Type": kind, "ETag": tag, "Vary": "Accept-Encoding"}
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 6, mtime=0)
            headers["Content-Encoding"] = "gzip"
        self._send(HTTPStatus.OK, body, headers, policy)

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self._send(status, json.dumps({"detail": reason}).encode(), {"Content-Type": "application/json"})

    def _refuse_unread(self, status: HTTPStatus, reason: str) -> None:
        """Refuse what comes with a body, and drop that: a connection closed before it came would lose the answer."""
        self._refuse(status, reason)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            for _ in range(_MOST_DROPPED // _DROPPED_AT_ONCE):
                if not self.connection.recv(_DROPPED_AT_ONCE):
                    break

    def _send(
        self, status: HTTPStatus, body: bytes, headers: dict[str, str], policy: str = CONTENT_SECURITY_POLICY
    ) -> None:
        self.send_response(status)
        for name, value in (*headers.items(), *SECURITY_HEADERS, ("content-security-policy", policy)):
            self.send_header(name, value)
        self.send_header("cache-control", "private, no-cache")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "trainermon"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the address has a secret, and the terminal the sentence."""
        del format, args


def serve(server: GraphServer) -> None:
    """Answer until Ctrl-C."""
    with server:
        sys.stderr.write(f"{server.url}\nCtrl-C ends it\n")
        sys.stderr.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            sys.stderr.write("\n")
