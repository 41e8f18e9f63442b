"""The control page of one rank: heartbeat out, command epoch in; and the command set beside it.

The page is 4096 bytes of mapped file (layout: docs/reference/journal.md). The heartbeat alternates between two slots
that carry a generation and a CRC, so that a reader needs no order of stores (right on x86-64 and arm64): a torn slot
fails its CRC and the other one holds the beat before. The epoch is one aligned word with its own check bits. The
commands are a file that is replaced by rename before the epoch changes. Nobody waits for anybody.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import logging
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainermon.monitor.errors import SpoolError
from trainermon.monitor.spool import rank_path, unusable
from trainermon.monitor.values import Action, Command, as_plain

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096
PAGE_VERSION = 1
MAX_COMMAND_BYTES = 1 << 20

_MAGIC = struct.Struct("@8sQ")
_MAGIC_TEXT = b"TMONPAGE"
_EPOCH_WORD = 8  # in words of 8 bytes; heartbeats and epoch lie in cache lines of their own
_SLOTS = (128, 256)
# generation, step, time, phase, pid
_BEAT = struct.Struct("@QqdQQ")
_CRC = struct.Struct("@I")
_SLOT_BYTES = _BEAT.size + _CRC.size


class Phase(enum.IntEnum):
    """What a rank was doing when it last said so.

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
    """A rank's last sign of life. `generation` counts beats over all attempts; `time_s` is the rank's Unix time."""

    step: int
    phase: Phase
    time_s: float
    generation: int
    pid: int


class ControlPage:
    """The rank's side.

    Generation and epoch go on where an earlier attempt left them. A forked child beats into nothing.

    Attributes:
        command_problem: Why `read_commands` left something out when it was last called, '' if it did not.

    Raises:
        SpoolError: The page cannot be created.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.command_problem = ""
        self._command_path = rank_path(directory, rank, "cmd")
        path = rank_path(directory, rank, "page")
        try:
            self._map: mmap.mmap | bytearray = _create_page(path)
        except OSError as error:
            raise unusable(path, error) from error
        self._words = memoryview(self._map).cast("Q")
        beat = _newest_beat(self._map)
        self._generation = beat.generation if beat else 0
        self._pid = os.getpid()
        self._word = -1
        self._epoch = 0
        _pages.add(self)

    def beat(self, step: int, phase: Phase, time_s: float) -> None:
        """The agent sees step and phase. Cost: about 0.45 µs, no system call."""
        self._generation = generation = self._generation + 1
        slot = _BEAT.pack(generation, step, time_s, phase, self._pid)
        offset = _SLOTS[generation & 1]
        self._map[offset : offset + _SLOT_BYTES] = slot + _CRC.pack(zlib.crc32(slot))

    def epoch(self) -> int:
        """Return a number that changes when there is a new command set; 0 before the first. Cost: 0.05 µs."""
        word = self._words[_EPOCH_WORD]
        if word != self._word:
            epoch = _epoch_of(word)
            if epoch is None:
                return self._epoch
            self._word, self._epoch = word, epoch
        return self._epoch

    def read_commands(self) -> list[Command]:
        """Return every command of the set, also those whose steps are past: it is the reader's to say that it is late.

        What cannot be understood is left out and named in `command_problem`. Cost: reads a file, for when the epoch
        changed.
        """
        commands, problems = _read_commands(self._command_path)
        self.command_problem = "; ".join(problems)
        return commands

    def close(self) -> None:
        """The page is unmapped; beats go nowhere and the epoch stays. May be called again."""
        if isinstance(self._map, bytearray):
            return
        mapped = self._map
        self._words.release()
        self._map = bytearray(mapped)
        self._words = memoryview(self._map).cast("Q")
        mapped.close()


# A child shares the mapping, so it would beat in its parent's name. Asking for the pid at each beat costs 0.12 µs.
_pages: weakref.WeakSet[ControlPage] = weakref.WeakSet()


def _close_pages_in_child() -> None:
    for page in list(_pages):
        page.close()


os.register_at_fork(after_in_child=_close_pages_in_child)


class ControlReader:
    """The agent's side of one rank's page; the rank may start, end and start again at any time."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = rank_path(directory, rank, "page")
        self._command_path = rank_path(directory, rank, "cmd")
        self._map: mmap.mmap | None = None
        self._identity = (0, 0)
        self._last: Heartbeat | None = None

    def heartbeat(self) -> Heartbeat | None:
        """Return the newest heartbeat, None before the first; it never goes back. Cost: one stat, two CRCs."""
        page = self._page()
        if page is None:
            return None
        beat = _newest_beat(page)
        if beat is not None and (self._last is None or beat.generation > self._last.generation):
            self._last = beat
        return self._last

    def send(self, commands: Sequence[Command]) -> int:
        """These commands replace all earlier ones; return the new epoch.

        Raises:
            SpoolError: The rank has no page (it has not started, or the run is over), or the file cannot be written.
        """
        page = self._page()
        if page is None:
            raise SpoolError(f"there is no control page {self._path}: the rank has not started, or its run is over")
        epoch = ((_epoch_of(_WORD.unpack_from(page, 8 * _EPOCH_WORD)[0]) or 0) + 1) & 0xFFFFFFFF
        content = json.dumps({"epoch": epoch, "commands": [as_plain(command) for command in commands]}).encode()
        try:
            _replace_file(self._command_path, content)
        except OSError as error:
            raise unusable(self._command_path, error) from error
        with memoryview(page) as view, view.cast("Q") as words:
            words[_EPOCH_WORD] = _epoch_word(epoch)
        return epoch

    def close(self) -> None:
        """Unmap the page; the next call maps it again."""
        if self._map is not None:
            self._map.close()
        self._map = None
        self._last = None

    def _page(self) -> mmap.mmap | None:
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except OSError:
            self.close()
            return None
        if self._map is not None and self._identity == (status.st_dev, status.st_ino):
            return self._map
        self.close()
        with contextlib.suppress(OSError, ValueError):  # not yet full size, or just removed
            self._map = _open_page(self._path)
            self._identity = (status.st_dev, status.st_ino)
        return self._map


_WORD = struct.Struct("@Q")


def _create_page(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        start = _MAGIC.pack(_MAGIC_TEXT, PAGE_VERSION)
        if os.pread(descriptor, len(start), 0) != start or os.fstat(descriptor).st_size < PAGE_BYTES:
            # Written, not truncated to size: a hole in a mapped file on a full disk is a SIGBUS, not an error.
            content = start + _WORD.pack(0) * (_EPOCH_WORD - 2) + _WORD.pack(_epoch_word(0))
            if os.pwrite(descriptor, content.ljust(PAGE_BYTES, b"\0"), 0) != PAGE_BYTES:
                raise OSError("no space for a page of 4096 bytes")
        return mmap.mmap(descriptor, PAGE_BYTES)
    finally:
        os.close(descriptor)


def _open_page(path: Path) -> mmap.mmap | None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        page = mmap.mmap(descriptor, PAGE_BYTES)
    finally:
        os.close(descriptor)
    if _MAGIC.unpack_from(page) == (_MAGIC_TEXT, PAGE_VERSION):
        return page
    page.close()
    return None


def _newest_beat(page: mmap.mmap | bytearray) -> Heartbeat | None:
    beats = [beat for offset in _SLOTS if (beat := _read_slot(page, offset))]
    return max(beats, key=lambda beat: beat.generation, default=None)


def _read_slot(page: mmap.mmap | bytearray, offset: int) -> Heartbeat | None:
    slot = page[offset : offset + _SLOT_BYTES]
    if _CRC.unpack_from(slot, _BEAT.size)[0] != zlib.crc32(slot[: _BEAT.size]):
        return None
    generation, step, time_s, phase, pid = _BEAT.unpack_from(slot)
    if phase > max(Phase):
        return None
    return Heartbeat(step=step, phase=Phase(phase), time_s=time_s, generation=generation, pid=pid)


def _epoch_word(epoch: int) -> int:
    return zlib.crc32(_WORD.pack(epoch)) << 32 | epoch


def _epoch_of(word: int) -> int | None:
    epoch = word & 0xFFFFFFFF
    return epoch if _epoch_word(epoch) == word else None


def _replace_file(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


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
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
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
    scope = fields.get("scope", [])
    if not isinstance(scope, list):
        raise TypeError(f"'scope' is {type(scope).__name__}, expected a list")
    fields["scope"] = tuple(scope)
    command = Command(**fields)
    for name, kind in _FIELD_TYPES.items():
        value = getattr(command, name)
        if type(value) is not kind:
            raise TypeError(f"{name!r} is {value!r}, expected {kind.__name__}")
    if not all(type(name) is str for name in command.scope):
        raise TypeError(f"'scope' is {scope!r}, expected names")
    return command


_FIELD_TYPES = {
    "id": str,
    "first_step": int,
    "num_steps": int,
    "level": str,
    "task": str,
    "max_bytes": int,
    "reason": str,
    "config": str,
}
