"""Server-sent events: what happens now, to every open page, at the pace of the slowest without waiting for it."""

from __future__ import annotations

import asyncio
import collections
import json
from collections.abc import AsyncIterator
from typing import Any

from trainermon.core.values import as_plain

MAX_CLIENTS = 64
MAX_PENDING = 256
KEEP_ALIVE_S = 15.0


class FeedClient:
    """One browser page that listens to the agent's events, with its bounded queue of encoded events."""

    def __init__(self) -> None:
        self.pending: collections.deque[bytes] = collections.deque(maxlen=MAX_PENDING)
        self.wake = asyncio.Event()


class EventFeed:
    """Publishes events (server-sent events) to open pages, at most `MAX_CLIENTS`; a slow page loses its oldest events.

    The lost ones are counted.
    """

    def __init__(self) -> None:
        self._clients: set[FeedClient] = set()
        self._closed = False
        self.dropped = 0

    @property
    def num_clients(self) -> int:
        """Number of pages that listen now."""
        return len(self._clients)

    def publish(self, event: str, value: Any) -> None:
        """Send `value` as JSON, under the name `event`, to every open page.

        Encodes once, and not at all when nobody listens.
        """
        if not self._clients:
            return
        text = json.dumps(as_plain(value), allow_nan=False, separators=(",", ":"))
        encoded = f"event: {event}\ndata: {text}\n\n".encode()
        for client in self._clients:
            self.dropped += len(client.pending) == MAX_PENDING
            client.pending.append(encoded)
            client.wake.set()

    def subscribe(self) -> AsyncIterator[bytes] | None:
        """Return a stream of encoded events for a new page, from now on.

        None if there are too many or the feed is closed.
        """
        if self._closed or len(self._clients) >= MAX_CLIENTS:
            return None
        return self._stream()

    def close(self) -> None:
        """End every page's stream after the events that are queued for it."""
        self._closed = True
        for client in self._clients:
            client.wake.set()

    async def _stream(self) -> AsyncIterator[bytes]:
        client = FeedClient()  # registered by the first read: a stream that nobody reads leaves nothing behind
        self._clients.add(client)
        try:
            yield b"retry: 1000\n\n"
            while True:
                while client.pending:
                    yield client.pending.popleft()
                if self._closed:
                    return
                client.wake.clear()
                try:
                    await asyncio.wait_for(client.wake.wait(), KEEP_ALIVE_S)
                except asyncio.TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._clients.discard(client)
