"""`check follow --listen`: runs calls of followers elsewhere on a device of this host, and returns the numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from trainermon.analysis.check.follow.exchange import CALL, answer_to
from trainermon.analysis.check.follow.frames import Frame, FrameError, read_frame, send_frame
from trainermon.analysis.check.follow.link import HostAddress, is_token
from trainermon.core.errors import ConfigError

HELLO, WELCOME, BUSY, REFUSED = "hello", "welcome", "busy", "refused"
MAX_CONNECTIONS = 32
HELLO_LIMIT_S = 10.0
IDLE_LIMIT_S = 3600.0
_HELLO_BYTES = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """What a listener takes.

    Attributes:
        device: Where calls are run.
        token: What clients must show.
        context: How TLS is spoken; None: not at all.
        max_bytes: So many bytes of tensors a call may have.
        max_waiting: So many calls may wait for the device; beyond that a call is answered `busy`.
        ranks: Whose calls are taken; (): those of any rank.
        say: Receives a line for the user.
    """

    device: str
    token: str
    context: ssl.SSLContext | None
    max_bytes: int
    max_waiting: int
    ranks: tuple[int, ...]
    say: Callable[[str], None]


class CallListener:
    """A listening socket and a thread for each connection.

    Args:
        address: Where to listen; port 0 lets the system choose.
        options: What is taken.

    Attributes:
        address: Where it listens.
        counts: How many calls were `run`, answered `busy`, and connections `refused`.

    Raises:
        ConfigError: The address cannot be listened on.
    """

    def __init__(self, address: HostAddress, options: ListenOptions) -> None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            self._socket = socket.create_server((address.host, address.port), family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            raise ConfigError(f"--listen {address}: {error}") from error
        self.address = HostAddress(*self._socket.getsockname()[:2])
        self.counts: Counter[str] = Counter()
        self._options = options
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._waiting = threading.BoundedSemaphore(options.max_waiting)
        self._device = threading.Lock()

    def serve(self) -> None:
        """Answer until `close` is called, or an exception, Ctrl-C for example, ends it."""
        while True:
            try:
                connection, peer = self._socket.accept()
            except OSError:  # it was closed; or a client has gone before it was taken
                if self._socket.fileno() < 0:
                    return
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                self._refuse(str(peer[0]), f"{MAX_CONNECTIONS} connections are open")
                continue
            threading.Thread(target=self._serve, args=(connection, str(peer[0])), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            with self._secured(connection) as secured, secured.makefile("rb") as stream:
                with _ended_after(HELLO_LIMIT_S, secured):
                    if isinstance(secured, ssl.SSLSocket):
                        secured.do_handshake()
                    self._admit(read_frame(stream, 0, max_head_bytes=_HELLO_BYTES), secured)
                secured.settimeout(IDLE_LIMIT_S)
                while (frame := read_frame(stream, self._options.max_bytes)) is not None:
                    send_frame(secured, self._answer(frame))
        except (FrameError, OSError) as error:  # of TLS, too
            self._refuse(peer, " ".join(str(error).split())[:200])
        finally:
            connection.close()
            self._places.release()

    def _secured(self, connection: socket.socket) -> socket.socket:
        """Return the connection that speaks TLS, before its first byte."""
        context = self._options.context
        if context is None:
            return connection
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def _admit(self, frame: Frame | None, connection: socket.socket) -> None:
        if frame is None or frame.head["kind"] != HELLO:
            raise FrameError("it does not begin with a hello")
        if not is_token(frame.head.get("token"), self._options.token):
            send_frame(connection, Frame({"kind": REFUSED, "reason": "the token is wrong"}))
            raise FrameError("the token is wrong")
        send_frame(connection, Frame({"kind": WELCOME, "device": self._options.device}))

    def _answer(self, frame: Frame) -> Frame:
        if frame.head["kind"] != CALL:
            raise FrameError(f"found a frame of kind {frame.head['kind'][:40]!r}, expected a call")
        if self._options.ranks and frame.head.get("rank") not in self._options.ranks:
            return Frame({"kind": REFUSED, "reason": f"calls of rank {str(frame.head.get('rank'))[:20]} are not taken"})
        if not self._waiting.acquire(blocking=False):
            self.counts[BUSY] += 1
            return Frame({"kind": BUSY, "reason": "too many calls wait"})
        try:
            with self._device:
                self.counts["run"] += 1
                return answer_to(frame, self._options.device)
        finally:
            self._waiting.release()

    def _refuse(self, peer: str, why: str) -> None:
        self.counts[REFUSED] += 1
        self._options.say(f"{peer} refused: {why}")


@contextlib.contextmanager
def _ended_after(limit_s: float, connection: socket.socket) -> Iterator[None]:
    """Return a context that ends a connection which takes longer, however slowly something arrives on it."""

    def end() -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # not that of TLS, which another thread is using

    limit = threading.Timer(limit_s, end)
    limit.daemon = True
    limit.start()
    try:
        yield
    finally:
        limit.cancel()
