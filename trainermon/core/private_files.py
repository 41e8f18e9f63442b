"""Files and directories that this user alone can write to: how they are made, checked, opened and replaced.

Everything that a run writes goes through here. Its places can be guessed, and in a shared folder somebody else may have
been there first: with a directory of his own, or with a link that leads to a file of ours.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_private_directory(path: Path, top: Path | None = None) -> None:
    """Make the directory `path`, or check it; it and all from `top` down are private (0700 whatever the umask).

    `top` is `path` or lies above it (None: `path` itself). What is missing above `top` is made as `mkdir -p` does.

    Raises:
        PermissionError: One of them is not private, see `check_private`.
        OSError: One of them cannot be made.
    """
    top = path if top is None else top
    top.parent.mkdir(parents=True, exist_ok=True)
    level = top
    for part in (Path(), *map(Path, path.relative_to(top).parts)):
        level /= part
        with contextlib.suppress(FileExistsError):
            level.mkdir(mode=0o700)
        check_private(level)


def make_private_folder(folder: Path, *, tries: int = 10) -> None:
    """Create `folder` and what is missing above it, all 0700.

    Raises:
        OSError: It cannot be made.
    """
    with contextlib.suppress(FileExistsError, FileNotFoundError):  # mostly the folder alone is missing
        folder.mkdir(mode=0o700)
        return
    try:
        for parent in (*reversed(folder.parents), folder):
            if not parent.is_dir():
                parent.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:  # whoever has emptied a folder above it may remove that at the same moment
        if tries == 1:
            raise
        make_private_folder(folder, tries=tries - 1)


def check_private(directory: Path) -> None:
    """Raise an error unless `directory` is this user's directory, no link, and writable by nobody else.

    Where owners and modes say nothing, since the file system gives the same to all (a share mounted with them, a server
    that maps users), it only has to be as private as one that is made in it now.

    Raises:
        PermissionError: It is not; the message says why, and what to do.
        OSError: It cannot be looked at.
    """
    try:
        descriptor = os.open(directory, _DIRECTORY_FLAGS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise PermissionError(
                f"{directory} is a link or a file, expected a directory: it may lead anywhere. Remove it, or choose "
                "another place"
            ) from error
        raise
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    is_foreign, is_open = status.st_uid != os.geteuid(), bool(status.st_mode & 0o022)
    if not (is_foreign or is_open) or _is_as_private_as_can_be(directory, status):
        return
    if is_foreign:
        raise PermissionError(
            f"{directory} belongs to user {status.st_uid}, expected user {os.geteuid()}: another user could read or "
            "replace what is written there. Remove it, or choose another place"
        )
    raise PermissionError(
        f"{directory} has mode {stat.S_IMODE(status.st_mode):04o}, so other users could replace what lies in it; "
        f"expected no write permission for group and others. Run 'chmod go-w {directory}', or choose another place"
    )


def open_private(path: str | Path, flags: int) -> int:
    """Return a descriptor of `path`, created 0600 if `flags` say so; a link is refused, no child inherits it.

    Raises:
        OSError: It cannot be opened; ELOOP: it is a link.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Return a context with a binary file (0600) that replaces `path` at the end; readers see the old or the new one.

    The unfinished file lies beside `path` under a random name; it is removed if the block raises. Nothing is
    synchronised to the disk.

    Raises:
        OSError: It cannot be written; `path` is as it was.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = open_private(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        unfinished.replace(path)
    except BaseException as error:  # an interrupt too leaves no half file; it goes on
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # of a write: it does not say where the disk is full
            error.filename = str(path)
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Replace `path` (0600) by a file with `content`; see `replacing`."""
    with replacing(path) as file:
        file.write(content)


def _is_as_private_as_can_be(directory: Path, status: os.stat_result) -> bool:
    try:
        probe = tempfile.mkdtemp(prefix=".probe.", dir=directory)
    except OSError:
        return False
    try:
        made = os.lstat(probe)
    finally:
        os.rmdir(probe)
    return made.st_uid == status.st_uid and not status.st_mode & ~made.st_mode & 0o022
