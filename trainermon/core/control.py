"""The control page of one rank: heartbeat out, command epoch in; and the command set beside it.

The page is a file of 4096 bytes (layout: docs/reference/journal.md). The heartbeat alternates between two slots that
carry a generation and a CRC, so that a reader needs no order of stores (right on x86-64 and arm64): a torn slot fails
its CRC and the other one holds the beat before. The epoch is one aligned word with its own check bits. The commands are
a file that is replaced by rename before the epoch changes. Nobody waits for anybody. Both sides read and write the page
by system calls: a store into a mapped file that somebody has shortened would kill the training by SIGBUS.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import json
import logging
import os
import struct
import sys
import weakref
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainermon.core.errors import SpoolError
from trainermon.core.journal.spool_thread import SpoolThread
from trainermon.core.private_files import open_private, replace_file
from trainermon.core.spool import rank_path, unusable
from trainermon.core.strict import shown
from trainermon.core.values import Action, Command, DumpTask, as_plain

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096
PAGE_VERSION = 1
MAX_COMMAND_BYTES = 1 << 20

_MAGIC = struct.Struct("@8sQ")
_MAGIC_TEXT = b"TMONPAGE"
_EPOCH_OFFSET = 64  # heartbeats and epoch lie in cache lines of their own
_SLOTS = (128, 256)
# generation, step, time, phase, pid
_BEAT = struct.Struct("@QqdQQ")
_CRC = struct.Struct("@I")
_SLOT_BYTES = _BEAT.size + _CRC.size
# How often the rank looks whether its page still is what the agent looks at: a call of 0.6 µs.
_CALLS_PER_CHECK = 64


class Phase(enum.IntEnum):
    """The part of its work that a rank is in, as it last said.

    `SETUP` lasts until the end of the first step, which compiles and connects; after `CLOSED` (in good order), `FAILED`
    (by an exception) and `DETACHED` (after a fault of the monitor's own) there are no beats any more.
    """

    SETUP = 0
    STEP = 1
    OPTIMIZER = 2
    REPLAY = 3
    DUMP = 4
    CLOSED = 5
    CHECKPOINT = 6
    EVALUATION = 7
    DETACHED = 8
    FAILED = 9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A rank's last sign of life on its control page.

    Attributes:
        step: The step it was on.
        phase: What it was doing.
        time_s: The rank's Unix time.
        generation: Number of heartbeats so far, over all attempts.
        pid: Its process id, as the rank itself sees it.
    """

    step: int
    phase: Phase
    time_s: float
    generation: int
    pid: int


class ControlPage:
    """A rank's side of its control page (4 KiB of memory shared with the agent): sends heartbeats, reads commands.

    Generation and epoch go on where an earlier attempt left them. A forked child beats into nothing. A `thread` sends
    the beats, the newest where several wait; commands are read from what lies in memory.

    Attributes:
        command_problem: Why `read_commands` left something out when it was last called, '' if it did not.

    Raises:
        SpoolError: The page cannot be created.
    """

    def __init__(self, directory: Path, rank: int, thread: SpoolThread | None = None) -> None:
        self.command_problem = ""
        self._thread = thread
        self._coming = (0, Phase.SETUP, 0.0)
        self._is_handed_over = False
        self._command_path = rank_path(directory, rank, "cmd")
        self._path = rank_path(directory, rank, "page")
        try:
            self._descriptor = _create_page(self._path)
            beat = _newest_beat(os.pread(self._descriptor, PAGE_BYTES, 0))
        except OSError as error:
            raise unusable(self._path, error) from error
        self._generation = beat.generation if beat else 0
        self._pid = os.getpid()
        self._word = b""
        self._epoch = 0
        self._num_calls = 0
        self._has_complained = False
        _pages.add(self)

    def beat(self, step: int, phase: Phase, time_s: float) -> None:
        """Send a heartbeat with step and phase. Cost: about 1 µs, one system call. A failure is only reported."""
        if self._descriptor < 0:
            return
        if self._thread is None:
            self._send(self._descriptor, step, phase, time_s)
            return
        self._coming = (step, phase, time_s)
        if not self._is_handed_over:  # else the thread has not looked yet
            self._is_handed_over = True
            self._thread.take(partial(self._send_coming, self._descriptor))

    def _send_coming(self, descriptor: int) -> None:
        self._is_handed_over = False  # before it looks: one that comes later is handed over again
        self._send(descriptor, *self._coming)

    def _send(self, descriptor: int, step: int, phase: Phase, time_s: float) -> None:
        self._generation = generation = self._generation + 1
        slot = _BEAT.pack(generation, step, time_s, phase, self._pid)
        try:
            os.pwrite(descriptor, slot + _CRC.pack(zlib.crc32(slot)), _SLOTS[generation & 1])
        except OSError as error:
            self._complain(f"takes no beats ({error}): the agent will take this rank for hung")

    def epoch(self) -> int:
        """Return a number that changes when there is a new command set; 0 before the first. Cost: 0.6 µs.

        A page that somebody has shortened, emptied, removed or replaced is made anew, and that is told once.
        """
        if self._descriptor < 0:
            return self._epoch
        try:
            word = os.pread(self._descriptor, _WORD.size, _EPOCH_OFFSET)
            self._num_calls += 1
            if word != self._word or self._num_calls % _CALLS_PER_CHECK == 0:
                self._take_word(word)
        except OSError as error:
            self._complain(f"cannot be read or made anew ({error}): no command reaches this rank")
        return self._epoch

    def _take_word(self, word: bytes) -> None:
        if not _is_intact(self._descriptor):
            self._make_anew()
        elif (epoch := _epoch_of(word)) is not None:
            self._word, self._epoch = word, epoch

    def _make_anew(self) -> None:
        self._complain("was changed by somebody else: it is made anew, and training goes on")
        descriptor = _create_page(self._path)
        os.dup2(descriptor, self._descriptor, inheritable=False)  # the number stays: a thread may be about to use it
        os.close(descriptor)
        # A command that came meanwhile is looked for: those that are known already are not carried out again.
        self._epoch = (self._epoch + 1) & 0xFFFFFFFF
        self._word = _epoch_word(self._epoch)
        os.pwrite(self._descriptor, self._word, _EPOCH_OFFSET)

    def _complain(self, trouble: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.warning("the control page %s %s", self._path, trouble)

    def read_commands(self) -> list[Command]:
        """Read all commands that the agent has sent this rank, past ones too: the reader reports those that are late.

        What cannot be understood is left out and named in `command_problem`. Cost: reads a file, for when the epoch
        changed.
        """
        commands, problems = _read_commands(self._command_path)
        self.command_problem = "; ".join(problems)
        return commands

    def close(self) -> None:
        """Close the page: beats are dropped, and the epoch stays what it was. May be called again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        if self._thread is None:
            os.close(descriptor)
        else:
            self._thread.take(partial(os.close, descriptor))

    def leave_to_parent(self) -> None:
        """Beat into nothing from now on, in a forked child."""
        self._thread = None
        self.close()


# A child shares the descriptor, so it would beat in its parent's name. Asking for the pid at each beat costs 0.12 µs.
_pages: weakref.WeakSet[ControlPage] = weakref.WeakSet()


def _close_pages_in_child() -> None:
    for page in list(_pages):
        page.leave_to_parent()


os.register_at_fork(after_in_child=_close_pages_in_child)


class ControlReader:
    """The agent's side of a rank's control page (shared memory): reads heartbeats and sends commands.

    It works across restarts of the rank.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = rank_path(directory, rank, "page")
        self._command_path = rank_path(directory, rank, "cmd")
        self._descriptor = -1
        self._identity = (0, 0)
        self._last: Heartbeat | None = None
        self._last_page = b""

    def heartbeat(self) -> Heartbeat | None:
        """Return the newest heartbeat, None before the first; it never goes back.

        Cost: a stat and a read, and two CRCs if it is a new one.
        """
        page = self._page()
        if page is None or page == self._last_page:
            return self._last
        self._last_page = page
        beat = _newest_beat(page)
        if beat is not None and (self._last is None or beat.generation > self._last.generation):
            self._last = beat
        return self._last

    def send(self, commands: Sequence[Command]) -> int:
        """Give the rank these commands in place of all earlier ones; return the number (epoch) of this set.

        Raises:
            SpoolError: The rank has no page (it has not started, or the run is over), or the file cannot be written.
        """
        page = self._page()
        if page is None:
            raise SpoolError(f"there is no control page {self._path}: the rank has not started, or its run is over")
        epoch = ((_epoch_of(page[_EPOCH_OFFSET : _EPOCH_OFFSET + _WORD.size]) or 0) + 1) & 0xFFFFFFFF
        content = json.dumps({"epoch": epoch, "commands": [as_plain(command) for command in commands]}).encode()
        try:
            replace_file(self._command_path, content)
            os.pwrite(self._descriptor, _epoch_word(epoch), _EPOCH_OFFSET)
        except OSError as error:
            raise unusable(self._command_path, error) from error
        return epoch

    def close(self) -> None:
        """Close the page, and forget the last heartbeat read; the next call opens the page again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._last, self._last_page = None, b""

    def _page(self) -> bytes | None:
        """Return the content of the page; None where there is none now, or what is there is none."""
        try:
            status = os.stat(self._path, follow_symlinks=False)
            if self._descriptor < 0 or self._identity != (status.st_dev, status.st_ino):
                self.close()
                self._descriptor = open_private(self._path, os.O_RDWR)
                self._identity = (status.st_dev, status.st_ino)
            content = os.pread(self._descriptor, PAGE_BYTES, 0)
        except OSError:
            self.close()
            return None
        is_page = len(content) == PAGE_BYTES and content.startswith(_START)
        return content if is_page else None  # not yet full size, or shortened: the rank will mend it


_WORD = struct.Struct("@Q")
_LAST_PHASE = max(Phase)


_START = _MAGIC.pack(_MAGIC_TEXT, PAGE_VERSION)


def _create_page(path: Path) -> int:
    """Return a descriptor of the page at `path`, which is made one if it is none."""
    descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        if not _is_intact(descriptor):
            content = _START.ljust(_EPOCH_OFFSET, b"\0") + _epoch_word(0)
            # Written, not truncated to size: an older agent maps the page, and a hole on a full disk would be a SIGBUS.
            _write_whole(descriptor, content.ljust(PAGE_BYTES, b"\0"))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _write_whole(descriptor: int, content: bytes) -> None:
    if os.pwrite(descriptor, content, 0) != len(content):
        raise OSError(errno.ENOSPC, f"no space for a page of {len(content)} bytes")


def _is_intact(descriptor: int) -> bool:
    """Whether this is a whole page, and one that a reader finds."""
    status = os.fstat(descriptor)
    return status.st_size >= PAGE_BYTES and status.st_nlink > 0 and os.pread(descriptor, len(_START), 0) == _START


def _newest_beat(page: bytes) -> Heartbeat | None:
    beats = [beat for offset in _SLOTS if (beat := _read_slot(page, offset))]
    return max(beats, key=lambda beat: beat.generation, default=None)


def _read_slot(page: bytes, offset: int) -> Heartbeat | None:
    slot = page[offset : offset + _SLOT_BYTES]
    if _CRC.unpack_from(slot, _BEAT.size)[0] != zlib.crc32(slot[: _BEAT.size]):
        return None
    generation, step, time_s, phase, pid = _BEAT.unpack_from(slot)
    if phase > _LAST_PHASE:
        return None
    return Heartbeat(step=step, phase=Phase(phase), time_s=time_s, generation=generation, pid=pid)


def _epoch_word(epoch: int) -> bytes:
    return _WORD.pack(zlib.crc32(_WORD.pack(epoch)) << 32 | epoch)


def _epoch_of(word: bytes) -> int | None:
    epoch = int.from_bytes(word, sys.byteorder) & 0xFFFFFFFF
    return epoch if _epoch_word(epoch) == word else None


def _read_commands(path: Path) -> tuple[list[Command], list[str]]:
    """Return the commands of a file, and what was wrong with it."""
    try:
        entries = _load_entries(path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return [], [f"the command file {path} cannot be read: {error!r}"]
    results = [_try_command(entry) for entry in entries]
    commands = [result for result in results if isinstance(result, Command)]
    return commands, [f"a command in {path} is left out: {result}" for result in results if isinstance(result, str)]


def _load_entries(path: Path) -> list[Any]:
    with os.fdopen(open_private(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe would be waited for
        content = file.read(MAX_COMMAND_BYTES + 1)
    if len(content) > MAX_COMMAND_BYTES:
        raise ValueError(f"more than {MAX_COMMAND_BYTES} bytes")
    entries = json.loads(content)["commands"]
    if not isinstance(entries, list):
        raise TypeError(f"'commands' is {type(entries).__name__}, expected a list")
    return entries


def _try_command(entry: Any) -> Command | str:
    try:
        return _command(entry)
    except (ValueError, TypeError) as error:
        return str(error)


def _command(entry: Any) -> Command:
    if not isinstance(entry, dict):
        raise TypeError(f"found {type(entry).__name__}, expected an object")
    fields = dict(entry)
    fields["action"] = Action(fields.get("action"))
    fields["task"] = DumpTask(fields.get("task", DumpTask.STATISTICS))
    scope = fields.get("scope", [])
    if not isinstance(scope, list):
        raise TypeError(f"'scope' is {type(scope).__name__}, expected a list")
    fields["scope"] = tuple(scope)
    command = Command(**fields)
    for name, kind in _FIELD_TYPES.items():
        value = getattr(command, name)
        if type(value) is not kind:
            raise TypeError(f"{name!r} is {shown(value)}, expected {kind.__name__}")
    if not all(type(name) is str for name in command.scope):
        raise TypeError(f"'scope' is {shown(scope)}, expected names")
    return command


_FIELD_TYPES = {
    "id": str,
    "first_step": int,
    "num_steps": int,
    "level": str,
    "max_bytes": int,
    "reason": str,
    "config": str,
}
