"""The node-local directory that ranks and agent share: where it is, whether it may be used, and who is alive.

Decides the place (`$TRAINERMON_SPOOL`, else in memory where there is room, else on the local disk), refuses what could
hold up or betray the training process (network mounts, directories of other users), names the files of a rank, and
answers whether a rank lives. It does not know what the files contain: see `journal` and `control`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import stat
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainermon.core.errors import SpoolError, lacks_room

SPOOL_VARIABLE = "TRAINERMON_SPOOL"
RUN_ID_LENGTH = 128
DIGEST_BYTES = 6
MEMORY = Path("/dev/shm")  # noqa: S108  # owner and mode are checked
DISK = Path("/var/tmp")  # noqa: S108
LOGIND = Path("/run/systemd/users")
MIN_MEMORY_BYTES = 8 << 30
MEMORY_SHARE = 16
MAX_SYSTEM_UID = 999
OUTBOX_FOLDER = "outbox"

_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:,=@+-]*", re.ASCII)
_RANK_FILE = re.compile(r"rank(\d{5,})\.(?:page|cmd|lock|\d+\.jnl|about|sock|stacks)", re.ASCII)
_AGENT_FILE = re.compile(r"agent\.[a-z.]+", re.ASCII)
# What a process that was killed may leave of a file that it was about to replace.
_UNFINISHED_FILE = re.compile(r"\.(?:rank|agent)[a-z0-9.]*\.[0-9a-f]{16}\.tmp", re.ASCII)

# write() on these waits for another machine, without a bound.
# fmt: off
_NETWORK_TYPES = frozenset((
    "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "dvs", "gfs", "gfs2", "glusterfs", "gpfs", "lustre",
    "lustre_lite", "mmfs", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
))
# fmt: on
# A FUSE file system waits for a user process, mostly one that talks to a network (sshfs, juicefs, gcsfuse, s3fs ...),
# so all are refused but these two: the root of a rootless container, and local NTFS/exFAT disks.
_LOCAL_FUSE_TYPES = frozenset({"fuse.fuse-overlayfs", "fuseblk"})

_MEMORY_TYPES = frozenset({"tmpfs", "ramfs"})

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ENTER_S = 10.0

# struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi4x")
_held_locks: dict[tuple[int, int], int] = {}


def spool_root() -> Path:
    """Return the directory that holds the spools of all runs on this node; it need not exist yet.

    `$TRAINERMON_SPOOL`, else `trainermon-<uid>` in /dev/shm, where no disk that hangs can hold up a step; else, where
    that is smaller than 8 GiB or would not be left alone, in /var/tmp. All processes of a user on a node agree.
    """
    configured = os.environ.get(SPOOL_VARIABLE)
    if configured:
        return Path(configured)
    return (MEMORY if _memory_is_fit() else DISK) / f"trainermon-{os.getuid()}"


def memory_share_bytes(directory: Path, num_ranks: int) -> int:
    """Return how much of /dev/shm the journal of one of `num_ranks` local ranks may take; without bound elsewhere.

    A sixteenth for all together: data loaders live there, too, and one that finds no room ends by SIGBUS.
    """
    if not directory.is_relative_to(MEMORY):
        return sys.maxsize
    return _size_bytes(MEMORY) // MEMORY_SHARE // num_ranks


def _memory_is_fit() -> bool:
    """Whether /dev/shm is memory, has room, and nobody clears it away while the run lasts.

    Where a user who is not of the system logs out for the last time, logind removes what is his (RemoveIPC).
    Source: logind.conf(5).
    """
    is_cleared = os.getuid() > MAX_SYSTEM_UID and LOGIND.is_dir()
    is_memory = filesystem_type(MEMORY, _read_mountinfo()) == "tmpfs"
    return is_memory and not is_cleared and os.access(MEMORY, os.W_OK) and _size_bytes(MEMORY) >= MIN_MEMORY_BYTES


def _size_bytes(path: Path) -> int:
    try:
        status = os.statvfs(path)
    except OSError:
        return 0
    return status.f_blocks * status.f_frsize


@functools.lru_cache(maxsize=4096)
def rank_path(directory: Path, rank: int, suffix: str) -> Path:
    """Return the path of a file of `rank`, for example `rank00003.page` for suffix 'page'."""
    return directory / f"rank{rank:05d}.{suffix}"


def list_ranks(directory: Path) -> list[int]:
    """Return the ranks that have left any file in the spool directory, ascending; empty if it does not exist."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted({int(match[1]) for match in map(_RANK_FILE.fullmatch, names) if match})


def spool_of(run_id: str, run_directory: Path, root: Path | None = None) -> Path:
    """Return where the spool of a run is on this node, `<root>/<run_id>-<digest>`; it need not exist yet.

    The digest is that of the run directory, so that runs of one name in different folders share nothing: rows of one
    would end in the other's store. Links are resolved, as two agents must not write to one store either.

    Args:
        run_id: 1 to 128 ASCII letters, digits and `._:,=@+-`, beginning with a letter, a digit or `_`.
        run_directory: Where the run is stored; it need not exist yet.
        root: Where the spools of all runs lie; None: `spool_root()`.

    Raises:
        SpoolError: The run id is not usable as a name.
    """
    _check_run_id(run_id)
    digest = hashlib.blake2b(os.fsencode(os.path.realpath(run_directory)), digest_size=DIGEST_BYTES).hexdigest()
    return (root or spool_root()).absolute() / f"{run_id}-{digest}"


def open_spool(directory: Path) -> Path:
    """Make or check the private directory of a run's spool (0700, this user's, on a local disk), and return its path.

    The folder of the spools, its parent, is created where it is missing.

    Raises:
        SpoolError: The place is on a network file system, belongs to somebody else, lets others write, is a symbolic
            link, or cannot be created or written.
    """
    directory = directory.absolute()
    root = directory.parent
    _refuse_network(root)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_root(root)
        descriptor = _enter(directory)
        try:
            _check_private(directory, os.fstat(descriptor))
        finally:
            os.close(descriptor)
    except SpoolError:
        raise
    except OSError as error:
        raise unusable(directory, error) from error
    return directory


def unusable(path: Path, error: OSError) -> SpoolError:
    """Return the error that says that `path` in the spool cannot be created or written, why, and what to do."""
    advice = f"{'Make room there, or set' if lacks_room(error) else 'Set'} {SPOOL_VARIABLE} to a directory on a"
    return SpoolError(
        f"cannot write to the spool at {path}: {error.strerror or error}. {advice} "
        "local disk of this node that this user can write to"
    )


def filesystem_type(path: Path, mountinfo: str) -> str:
    """Return the type of the file system that `path` lies on, '' if unknown.

    Symbolic links are resolved; of several mounts on one point the last one counts. `mountinfo` is the text of
    /proc/self/mountinfo. Source: proc(5).
    """
    target = os.path.realpath(path)
    best, found = "", ""
    for line in mountinfo.split("\n"):
        mount, _, filesystem = line.partition(" - ")
        fields, types = mount.split(" "), filesystem.split(" ")
        if len(fields) < 5:
            continue
        point = _unescape(fields[4])
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, found = point, types[0]
    return found


def disk_type(directory: Path) -> str:
    """Return the type of the file system below `directory` if that may be a disk; "" for memory, and if not known.

    What is written there may wait: a disk that hangs holds up the writer.
    """
    found = filesystem_type(directory, _read_mountinfo())
    return "" if found in _MEMORY_TYPES else found


def is_network_type(filesystem: str) -> bool:
    """Whether writes to a file system of this type may wait for a network or for a user process (FUSE)."""
    if filesystem.startswith("fuse"):
        return filesystem not in _LOCAL_FUSE_TYPES
    return filesystem in _NETWORK_TYPES


def remove_spool(path: Path, is_stored: Callable[[], bool]) -> bool:
    """Remove the files of trainermon from the spool directory of one run, and the directory if it is then empty.

    Nothing happens while a rank lives in it or is about to take its lock, or if `is_stored` denies that all records are
    stored elsewhere: a short attempt may have come and gone unseen. It is asked when no rank can write any more; a rank
    that comes meanwhile waits, and finds a new directory. Returns whether the directory is gone.
    """
    try:
        descriptor = os.open(path, _DIRECTORY_FLAGS)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if any(rank_alive(path, rank) for rank in list_ranks(path)) or not is_stored():
            return False
        for name in os.listdir(path):
            if any(pattern.fullmatch(name) for pattern in (_RANK_FILE, _AGENT_FILE, _UNFINISHED_FILE)):
                (path / name).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (path / OUTBOX_FOLDER).rmdir()
        path.rmdir()
    except OSError:  # a rank is starting, or somebody else's file is left
        return False
    finally:
        os.close(descriptor)
    return True


def try_enter(directory: Path) -> int | None:
    """Open the spool directory so that it is not removed; return the descriptor, or None if it is missing or going.

    Until the descriptor is closed `remove_spool` does nothing; keep it for milliseconds.
    """
    try:
        descriptor = os.open(directory, _DIRECTORY_FLAGS)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.lstat(directory)):
            return descriptor
    except (FileNotFoundError, BlockingIOError):
        pass
    os.close(descriptor)
    return None


class RankLock:
    """Marks this process as the living `rank` of the run, for all that ask `rank_alive`, until `close` or its end.

    The directory is made again if the agent of an earlier attempt has just removed it; from here on it stays.

    A POSIX record lock: children do not inherit it, so a data loader that outlives its rank does not keep it alive, and
    it is seen across pid namespaces. The kernel drops it when the process closes *any* descriptor of the file; that is
    why nothing else in the process may open it (`rank_alive` does not).

    Raises:
        SpoolError: Another process (its pid is named) or this one already is that rank, or the file cannot be written.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = rank_path(directory, rank, "lock")
        self._descriptor = -1
        if _held_here(self._path):
            raise SpoolError(f"{self._path} is already locked by this process: the monitor is attached twice")
        try:
            directory_descriptor = _enter(directory)
            try:
                self._acquire(rank)
            finally:
                os.close(directory_descriptor)
        except SpoolError:
            raise
        except OSError as error:
            raise unusable(self._path, error) from error
        status = os.fstat(self._descriptor)
        self._identity = (status.st_dev, status.st_ino)
        _held_locks[self._identity] = os.getpid()

    def _acquire(self, rank: int) -> None:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _lock_holder(self._descriptor)
            os.close(self._descriptor)
            if holder is None:
                raise
            raise SpoolError(
                f"rank {rank} of this run is already running on this node as pid {holder} (lock {self._path}). Give "
                "this run another run id, or end that process"
            ) from error

    def close(self) -> None:
        """Release the lock; without effect in a forked child, and when called again."""
        if self._descriptor < 0 or _held_locks.get(self._identity) != os.getpid():
            return
        del _held_locks[self._identity]
        os.close(self._descriptor)
        self._descriptor = -1


def rank_alive(directory: Path, rank: int) -> bool:
    """Return whether a process holds the lock of `rank`, this one included: then the rank lives.

    Takes no lock, so it never disturbs a start.
    """
    return _find_holder(rank_path(directory, rank, "lock")) is not None


def rank_pid(directory: Path, rank: int) -> int:
    """Return the process that holds the lock of `rank`; 0 if nobody does, or somebody in another pid namespace."""
    return _find_holder(rank_path(directory, rank, "lock")) or 0


def _find_holder(lock: Path) -> int | None:
    """Return the process that holds `lock`, 0 for one in another pid namespace, None if nobody does."""
    if _held_here(lock):
        return os.getpid()
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _lock_holder(descriptor)
    finally:
        os.close(descriptor)


def _enter(directory: Path) -> int:
    """Return a descriptor of the directory, made if it is missing; until it is closed `remove_spool` does nothing.

    It holds a shared lock on the directory itself against the exclusive one of `remove_spool`, held for milliseconds.
    """
    deadline_s = time.monotonic() + _ENTER_S
    while True:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        descriptor = try_enter(directory)
        if descriptor is not None:
            return descriptor
        if time.monotonic() > deadline_s:
            raise SpoolError(
                f"{directory} is being removed by a process that does not come to an end (for {_ENTER_S:.0f} s). "
                "End the agent of the run before this one"
            )
        time.sleep(0.005)


def _held_here(path: Path) -> bool:
    if not _held_locks:
        return False
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return _held_locks.get((status.st_dev, status.st_ino)) == os.getpid()


def _lock_holder(descriptor: int) -> int | None:
    """Return the pid that holds the lock (0: in another pid namespace), None if nobody does."""
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else pid


def _check_run_id(run_id: str) -> None:
    if len(run_id) > RUN_ID_LENGTH or not _RUN_ID.fullmatch(run_id):
        raise SpoolError(
            f"run id {run_id[: RUN_ID_LENGTH + 1]!r} cannot be used: expected 1 to {RUN_ID_LENGTH} ASCII letters, "
            "digits and ._:,=@+- that begin with a letter, a digit or _. It names directories"
        )


def _refuse_network(root: Path) -> None:
    found = filesystem_type(root, _read_mountinfo())
    if is_network_type(found):
        raise SpoolError(
            f"the spool {root} lies on a {found} file system, where a write may hold up the training step; expected a "
            f"local disk or memory of this node. Set {SPOOL_VARIABLE} to a directory on one"
        )


def _read_mountinfo() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _check_root(root: Path) -> None:
    """The root is ours or the system's, and others cannot replace what lies in it.

    A mount point is exempt from the mode: the volume that a container gets for this purpose (emptyDir) is 0777, and who
    can reach it was decided by whoever mounted it.
    """
    link = os.lstat(root)
    if link.st_uid not in (os.getuid(), 0):  # a link that somebody else laid in /var/tmp may lead anywhere
        raise _foreign(root, link.st_uid)
    status = os.stat(root)
    if status.st_uid not in (os.getuid(), 0):
        raise _foreign(root, status.st_uid)
    replaceable = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    if replaceable and not os.path.ismount(root):
        raise _writable(root, status.st_mode)


def _check_private(directory: Path, status: os.stat_result) -> None:
    if status.st_uid != os.getuid():
        raise _foreign(directory, status.st_uid)
    if status.st_mode & 0o022:
        raise _writable(directory, status.st_mode)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _foreign(path: Path, owner: int) -> SpoolError:
    return SpoolError(
        f"{path} belongs to user {owner}, expected user {os.getuid()}: another user could read or replace this run's "
        f"records. Remove it, or set {SPOOL_VARIABLE} to a directory of your own"
    )


def _writable(path: Path, mode: int) -> SpoolError:
    return SpoolError(
        f"{path} has mode {stat.S_IMODE(mode):04o}, so other users could replace what lies in it; expected no write "
        f"permission for group and others. Run 'chmod go-w {path}', or set {SPOOL_VARIABLE} to another directory"
    )


def _unescape(text: str) -> str:
    """Undo the octal escapes of mountinfo (space, tab, newline, backslash)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
