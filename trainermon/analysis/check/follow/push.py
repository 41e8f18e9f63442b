"""`check follow --push`: has the calls of a step run on another host, for a verdict on both against float64."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from trainermon.accuracy.judge import Judgement, Status
from trainermon.analysis.check.checking import CallsCheck, CheckedCall, judge_result
from trainermon.analysis.check.follow.exchange import RESULT, call_frame, result_like
from trainermon.analysis.check.follow.frames import Frame, FrameError, read_frame, send_frame
from trainermon.analysis.check.follow.link import HostAddress
from trainermon.analysis.check.follow.listener import HELLO, WELCOME
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import load_raw, parse_dump
from trainermon.dump.files.records import EntryRecord
from trainermon.replay.dumped_calls import rebuild

HERE, BOTH, THERE = "here", "both", "there"
"""What the cause of a wrong result begins with: who gives it."""
_PEER = 3.0
_RETRY_S = 30.0
_ANSWER_LIMIT_S = 120.0
_CONNECT_LIMIT_S = 5.0


class PushedCalls:
    """A second opinion: the connection to a listener. While it is gone, calls are counted as lost, and nothing waits.

    Args:
        address: Where it listens.
        token: What it wants to be shown.
        context: How TLS is spoken; None: not at all.
        max_bytes: Larger calls are not sent.
        say: Receives a line for the user.
    """

    def __init__(
        self,
        address: HostAddress,
        token: str,
        context: ssl.SSLContext | None,
        *,
        max_bytes: int,
        say: Callable[[str], None],
    ) -> None:
        self._address, self._token, self._context = address, token, context
        self._max_bytes, self._say = max_bytes, say
        self._connection: socket.socket | None = None
        self._stream: IO[bytes] | None = None
        self._retry_s = -math.inf

    def __call__(self, directory: Path, check: CallsCheck) -> tuple[CallsCheck, int]:
        """Return the verdicts on what both hosts give for the forward calls of a dump, and how many were lost."""
        raw = load_raw(directory)
        entries = {entry.key: entry for entry in parse_dump(directory, raw, {}).entries}
        calls, num_lost = [], 0
        for call in check.calls:
            if call.is_backward or call.status is Status.SKIP or not call.judgements:
                calls.append(call)
                continue
            theirs = self._opinion(directory, raw.data, entries[call.key])
            num_lost += theirs is None
            calls.append(call if theirs is None else together(call, theirs, str(self._address)))
        return dataclasses.replace(check, calls=tuple(calls)), num_lost

    def close(self) -> None:
        """Close the connection."""
        for one in (self._stream, self._connection):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.close()
        self._stream = self._connection = None

    def _opinion(self, directory: Path, data: dict[str, object], entry: EntryRecord) -> Sequence[Judgement] | None:
        value = data[entry.key]
        if not isinstance(value, dict):
            return None
        try:
            rank = int(directory.name.removeprefix("rank"))
            frame = call_frame(directory, value, entry, rank)
            if sum(tensor.nbytes for tensor in frame.tensors) > self._max_bytes:
                return None
            dumped = rebuild(directory, data, entry)
            answer = self._asked(frame)
            if answer is None or answer.head["kind"] != RESULT:
                return None
            result = result_like(dumped.result, answer.tensors)
        except (DumpError, ValueError):  # it cannot be sent, or not be read
            return None
        return judge_result(dataclasses.replace(dumped, result=result), entry.autocast)

    def _asked(self, frame: Frame) -> Frame | None:
        """Return the answer of the other host; None if it gives none now."""
        if self._connection is None and time.monotonic() < self._retry_s:
            return None
        try:
            connection, stream = self._opened()
            send_frame(connection, frame)
            return _answer(stream, self._max_bytes)
        except (OSError, FrameError) as error:
            self.close()
            self._retry_s = time.monotonic() + _RETRY_S
            self._say(f"--push {self._address}: {error}; its opinion is missing until it is back")
            return None

    def _opened(self) -> tuple[socket.socket, IO[bytes]]:
        if self._connection is None or self._stream is None:
            self._connection = socket.create_connection(self._address, timeout=_CONNECT_LIMIT_S)
            if self._context is not None:
                self._connection = self._context.wrap_socket(self._connection, server_hostname=self._address.host)
            self._connection.settimeout(_ANSWER_LIMIT_S)
            self._stream = self._connection.makefile("rb")
            send_frame(self._connection, Frame({"kind": HELLO, "token": self._token}))
            _require_welcome(_answer(self._stream, 0))
        return self._connection, self._stream


def _answer(stream: IO[bytes], max_bytes: int) -> Frame:
    answer = read_frame(stream, max_bytes)
    if answer is None:
        raise FrameError("it has closed the connection")
    return answer


def _require_welcome(answer: Frame) -> None:
    if answer.head["kind"] != WELCOME:
        raise FrameError(f"it has refused: {str(answer.head.get('reason'))[:200]}")


def together(call: CheckedCall, theirs: Sequence[Judgement], peer: str) -> CheckedCall:
    """Return a call with the verdicts on what two hosts give.

    An error up to three times as large as that of the other host is a warning: then the numbers are hard, not the
    kernel wrong.
    """
    errors = [one.worst for one in theirs if one.status is not Status.SKIP and math.isfinite(one.worst)]
    limit = _PEER * max(errors, default=0.0)
    was_wrong, is_wrong = _is_wrong(call.judgements), _is_wrong(theirs)
    judged = tuple(
        dataclasses.replace(one, status=Status.WARNING, reason=f"about as far off as {peer}")
        if is_wrong and one.status is Status.ERROR and math.isfinite(one.worst) and one.worst <= limit
        else one
        for one in call.judgements
    )
    cause = ""
    if was_wrong:
        cause = f"{BOTH}: {peer} gives a wrong result, too" if is_wrong else f"{HERE}: {peer} gives the right result"
    elif is_wrong:
        cause = f"{THERE}: what was recorded is right, {peer} gives something else"
    return dataclasses.replace(call, judgements=judged, rerun=tuple(theirs), cause=cause or call.cause)


def _is_wrong(judgements: Sequence[Judgement]) -> bool:
    return any(one.status is Status.ERROR for one in judgements)
