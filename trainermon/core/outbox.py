"""Folders on their way from a rank to the run directory: no step ever writes to a file system that may hang.

The output may lie on a cluster file system, which may keep a process waiting for ever. So a rank writes a dump into the
outbox in the spool, which is local, and it is delivered to its place by a process of its own: at the agent's order
while the run lasts, and when the rank closes where no agent has done so. A delivery ends with a rename: a folder in the
run directory is whole. Run as a program it delivers what is there:

    python -m trainermon.core.outbox SPOOL RUN_DIRECTORY

    <spool>/<run>/outbox/rank00000.<random>.<place below the run directory, / as ~>.open|ready/
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trainermon.core.private_files import make_private_directory
from trainermon.core.spool import OUTBOX_FOLDER, rank_alive, rank_path

_OPEN, _READY = ".open", ".ready"
_PARCEL = re.compile(r"rank(\d{5,})\.[0-9a-f]{16}\.([A-Za-z0-9_.~-]+)(\.open|\.ready)", re.ASCII)
_PLACE = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*/)*[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)
# A parcel takes at most this share of what is free: the journals of all ranks are there, too.
_SHARE_OF_FREE = 4


class Parcel:
    """A folder, as a dump's, that a rank writes on the node and that is later moved to the run directory.

    The writer creates it.

    Attributes:
        place: Path that it will have below the run directory.
        final: The same as a whole path.
        content: Where it is written until then.
    """

    def __init__(self, outbox: Path, run_directory: Path, rank: int, place: str) -> None:
        self.place = place
        self.final = run_directory / place
        name = f"{rank_path(outbox, rank, secrets.token_hex(8)).name}.{place.replace('/', '~')}"
        self._ready = outbox / f"{name}{_READY}"
        self.content = outbox / f"{name}{_OPEN}"

    def send(self) -> None:
        """Mark the folder as complete, so that it is delivered. Never raises: a failure leaves it to later recovery."""
        with contextlib.suppress(OSError):
            self.content.rename(self._ready)

    def delete(self) -> None:
        """Remove the folder from the node; it is never delivered."""
        shutil.rmtree(self.content, ignore_errors=True)


class Outbox:
    """Sends the folders that one rank writes to its run directory, by way of the node."""

    def __init__(self, spool: Path, run_directory: Path, rank: int) -> None:
        self._folder = spool / OUTBOX_FOLDER
        self._run_directory = run_directory
        self._rank = rank

    def parcel(self, place: str) -> Parcel:
        """Return a new parcel for `place`, a path below the run directory.

        The caller makes its folder `content`, and sends it.
        """
        return Parcel(self._folder, self._run_directory, self._rank, place)

    def room(self, wanted_bytes: int) -> int:
        """Return how many of `wanted_bytes` the next parcel may hold: at most a quarter of the free space."""
        try:
            status = os.statvfs(self._folder.parent)
        except OSError:
            return 0
        free = min(status.f_bavail * status.f_frsize, available_memory_bytes())
        return max(0, min(wanted_bytes, free // _SHARE_OF_FREE))

    def is_empty(self) -> bool:
        """Return whether everything that this rank has sent is delivered."""
        return not any(parcel.rank == self._rank for parcel in _waiting(self._folder.parent))


def available_memory_bytes() -> int:
    """Return how much memory the kernel can give without swapping; the spool may lie in memory."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return sys.maxsize


def num_deliverable(spool: Path) -> int:
    """Return how many parcels can be delivered now: complete ones, and those left by a rank that is gone."""
    return sum(parcel.is_deliverable(spool) for parcel in _waiting(spool))


def deliver(spool: Path, run_directory: Path) -> list[str]:
    """Deliver every parcel that is ready; return what went wrong with those that stay.

    Blocks as long as the file systems do. Killed at any point it leaves the parcel or the whole folder, and whoever
    comes next goes on. Two processes do not take the same parcel.
    """
    troubles = []
    for parcel in list(_waiting(spool)):
        if parcel.is_deliverable(spool):
            try:
                _deliver(parcel, run_directory)
            except (OSError, ValueError) as error:
                troubles.append(f"{parcel.folder}: {error}")
    with contextlib.suppress(OSError):
        (spool / OUTBOX_FOLDER).rmdir()
    return troubles


class _WaitingParcel(NamedTuple):
    folder: Path
    rank: int
    place: str
    is_whole: bool

    def is_deliverable(self, spool: Path) -> bool:
        return self.is_whole or not rank_alive(spool, self.rank)


def _waiting(spool: Path) -> Iterator[_WaitingParcel]:
    try:
        names = sorted(os.listdir(spool / OUTBOX_FOLDER))
    except OSError:
        return
    for name in names:
        if match := _PARCEL.fullmatch(name):
            place = match[2].replace("~", "/")
            yield _WaitingParcel(spool / OUTBOX_FOLDER / name, int(match[1]), place, match[3] == _READY)


def _deliver(parcel: _WaitingParcel, run_directory: Path) -> None:
    if not _PLACE.fullmatch(parcel.place):
        raise ValueError("its name tells no place below the run directory")
    try:
        held = os.open(parcel.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # somebody else has delivered it
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _put(parcel.folder, run_directory / parcel.place, run_directory)
        shutil.rmtree(parcel.folder)
    except BlockingIOError:  # somebody else is at it
        return
    finally:
        os.close(held)


def _put(content: Path, final: Path, run_directory: Path) -> None:
    make_private_directory(final.parent, run_directory)
    for left in final.parent.glob(f".{final.name}.*.part"):  # of a delivery that was killed
        shutil.rmtree(left)
    unfinished = final.with_name(f".{final.name}.{secrets.token_hex(8)}.part")
    known: dict[int, Path] = {}

    def copy(source: str, target: str) -> None:
        """Copy a file; a tensor that has several names keeps them."""
        number = os.stat(source).st_ino
        if number in known:
            with contextlib.suppress(OSError):
                os.link(known[number], target)
                return
        shutil.copy2(source, target, follow_symlinks=False)
        known[number] = Path(target)

    try:
        shutil.copytree(content, unfinished, symlinks=True, copy_function=copy)
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
    except BaseException:  # an interrupt too leaves no half delivery; it goes on
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def main() -> int:
    """Move all waiting parcels of the spool that the command line names to the run directory; a process of its own."""
    troubles = deliver(Path(sys.argv[1]), Path(sys.argv[2]))
    for trouble in troubles:
        sys.stderr.write(f"not delivered: {trouble}\n")
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
