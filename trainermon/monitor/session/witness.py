"""What lets an agent look into this rank when it stands still; until then nothing of it does anything.

* `rank00000.about`: which process groups this rank is in (torch's names mean nothing elsewhere, and gloo's flight
  recorder does not tell the members), the id of its main thread, and the signal that asks for stacks.
* `rank00000.sock`: torch's own worker server on a private Unix socket, once there is a process group. Its native
  threads sleep until somebody asks for the flight recorder, and answer without the interpreter's lock: also while a
  rank holds it for ever.
* The rank's own notes of its collectives, in memory that `rank00000.about` names (`taps.noted_calls`).
* `rank00000.stacks`: where faulthandler writes the stacks of all threads, on that signal or on a fatal error. It is
  taken only where nobody else has it.

Nothing here may keep training from starting: what this process does not allow is left out, and the log says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from trainermon.core.config import HangConfig
from trainermon.core.private_files import open_private, replace_file
from trainermon.core.spool import rank_path
from trainermon.monitor.taps.noted_calls import NotedCalls
from trainermon.monitor.taps.process_groups import GroupPurposes, purposes_of

logger = logging.getLogger("trainermon")

STACKS_SIGNAL = signal.SIGRTMIN + 5
PING_LIMIT_S = 2.0
_PING = b"POST /handler/ping HTTP/1.1\r\nHost: rank\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
# What torch's server writes to standard error whenever it starts and ends.
_SERVER_NOTES = b"WorkerServer.cpp:"


class RankWitness:
    """Lets the agent read this rank's stacks, flight recorder and notes when it hangs, until `close`.

    Args:
        directory: The run's spool.
        rank: Global rank.
        settings: What is allowed.
        groups: Process groups by purpose, as far as they are known.
    """

    def __init__(self, directory: Path, rank: int, settings: HangConfig, groups: Mapping[str, Any]) -> None:
        self._directory = directory
        self._rank = rank
        self._groups = groups
        self._purposes: GroupPurposes | None = None
        self._num_groups = -1
        self._server: Any = None
        self._stacks: IO[bytes] | None = None
        self._signal = 0
        self._is_fault_handler = False
        self._noted: NotedCalls | None = None
        self._wants_socket = settings.enabled and settings.recorder
        if settings.enabled and settings.stacks:
            self._try(self._take_signal)
        if settings.enabled and settings.calls and dist.is_available():
            self._try(self._note_calls)
        self.notice_groups()

    @property
    def has_news(self) -> bool:
        """Whether a process group has come or gone; 0.3 µs."""
        return self._num_groups != _num_groups()

    def notice_groups(self) -> None:
        """Write down new process groups for the agent; 0.3 µs while none has come or gone."""
        num_groups = _num_groups()
        if num_groups == self._num_groups:
            return
        self._num_groups = num_groups
        if self._num_groups and self._wants_socket:  # a process without groups has no collectives to tell of
            self._wants_socket = False
            self._try(self._open_socket)
        self._try(self._write_about)

    def stop_in_child(self) -> None:
        """Leave the parent's files and server alone in a forked child.

        There torch's server has no threads, and must never be destroyed.
        """
        if self._noted is not None:
            self._noted.stop_in_child()
        if self._server is not None:
            _keep_for_ever(self._server)

    def close(self) -> None:
        """Stop serving the agent; the stacks that were written stay. May be called again."""
        for step in (self._return_signal, self._close_socket, self._end_notes):
            self._try(step)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # noqa: BLE001  # whatever it is, training starts and ends without it
            logger.info("a rank that hangs will tell less (%s): %s", step.__name__.strip("_"), error)

    def _write_about(self) -> None:
        about = {
            "pid": os.getpid(),
            "main_thread": threading.main_thread().ident,
            "signal": self._signal,
            "calls": -1 if self._noted is None else self._noted.descriptor,
            "groups": list(self._described_groups()),
        }
        path = rank_path(self._directory, self._rank, "about")
        replace_file(path, json.dumps(about).encode())

    def _described_groups(self) -> Iterator[dict[str, Any]]:
        if not self._num_groups:
            return
        if self._purposes is None:
            self._purposes = GroupPurposes(purposes_of(self._groups))
        for group in list(dist.distributed_c10d._world.pg_names):
            name, ranks = self._purposes.name(group), dist.get_process_group_ranks(group)
            yield {"torch_name": group.group_name, "name": name, "ranks": ranks, "is_mixed": _is_mixed(group)}

    def _note_calls(self) -> None:
        self._noted = NotedCalls()
        self._noted.attach()

    def _end_notes(self) -> None:
        if self._noted is not None:
            self._noted.detach()

    def _take_signal(self) -> None:
        caught = _caught_signals()
        path = rank_path(self._directory, self._rank, "stacks")
        descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        self._stacks = os.fdopen(descriptor, "wb", buffering=0)
        if STACKS_SIGNAL not in caught:
            faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True, chain=False)
            self._signal = int(STACKS_SIGNAL)
        if not faulthandler.is_enabled() and signal.SIGSEGV not in caught:
            faulthandler.enable(self._stacks, all_threads=True)
            self._is_fault_handler = True

    def _return_signal(self) -> None:
        if self._signal:
            faulthandler.unregister(self._signal)
            self._signal = 0
        if self._is_fault_handler:
            faulthandler.disable()
            self._is_fault_handler = False
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None

    def _open_socket(self) -> None:
        from torch._C._distributed_c10d import _WorkerServer  # not in every version that is supported

        path = rank_path(self._directory, self._rank, "sock")
        path.unlink(missing_ok=True)
        with _short(path) as address:
            with _without_notes():
                server = _WorkerServer(address)
            if not _answers(address):
                _keep_for_ever(server)  # its end would wait for ever for it to begin
                raise OSError(f"torch's worker server does not answer within {PING_LIMIT_S:g} s")
        self._server = server
        path.chmod(0o600)

    def _close_socket(self) -> None:
        if self._server is None:
            return
        with _without_notes():
            self._server.shutdown()
            self._server = None
        rank_path(self._directory, self._rank, "sock").unlink(missing_ok=True)


_world: Any = dist.distributed_c10d._world if dist.is_available() else None


def _keep_for_ever(server: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))


def _is_mixed(group: dist.ProcessGroup) -> bool:
    """Whether the backend depends on where a tensor is, as in `cpu:gloo,cuda:nccl`."""
    devices = dist.distributed_c10d._world.pg_backend_config.get(group, "").split(",")
    return len({device.rpartition(":")[2] for device in devices}) > 1


def _num_groups() -> int:
    return len(_world.pg_names) if _world is not None else 0


def _caught_signals() -> frozenset[int]:
    """Return the signals for which this process has a handler, whoever installed it."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    mask = int(status.partition("SigCgt:")[2].split()[0], 16)
    return frozenset(number for number in range(1, 65) if mask >> (number - 1) & 1)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Return a context that yields a short name of `path`: that of a socket has at most 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _answers(address: str) -> bool:
    """Whether the server at a socket answers; its connection waits for it while it is still beginning."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PING_LIMIT_S)
        connection.connect(address)
        connection.sendall(_PING)
        return connection.recv(64).startswith(b"HTTP/1.1 200")
    return False


@contextlib.contextmanager
def _without_notes() -> Iterator[None]:
    """Return a context in which what torch's server writes to standard error is left out.

    What anybody else writes meanwhile comes after it.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    said = os.memfd_create("stderr")
    try:
        os.dup2(said, 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            lines = os.pread(said, 1 << 20, 0).splitlines(keepends=True)
            os.write(2, b"".join(line for line in lines if _SERVER_NOTES not in line))
    finally:
        os.close(kept)
        os.close(said)
