"""Files that a person asked for: written beside their place and renamed, so that they are whole or not there.

Unlike what a run writes (`trainermon.core.private_files`) they get the rights that the user's umask gives, and replace
what a link leads to, not the link.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

_UNFINISHED_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """Return a context with a binary file that takes the place of `path` at the end.

    If the block raises, an interrupt included, `path` is as it was, and nothing is left beside it. A file that exists
    keeps its rights. What is no regular file, as /dev/stdout, is written to as it is.

    Raises:
        OSError: It cannot be written; it names `path`.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        with path.open("wb") as file:
            yield file
        return
    unfinished = place.with_name(f".{place.name[:200]}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(unfinished, _UNFINISHED_FLAGS, 0o666)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        if place.exists():
            unfinished.chmod(place.stat().st_mode & 0o7777)
        unfinished.replace(place)
    except BaseException:  # an interrupt too leaves no half file; it goes on
        unfinished.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def writing_text(path: Path, *, encoding: str = "utf-8", newline: str | None = None) -> Iterator[TextIO]:
    """Return a context with a text file that takes the place of `path` at the end; see `writing`."""
    with writing(path) as file:
        text = io.TextIOWrapper(file, encoding=encoding, newline=newline)
        try:
            yield text
        finally:
            text.detach()


def write_text(path: Path, content: str) -> None:
    """Let `path` hold `content`, in UTF-8; see `writing`."""
    with writing_text(path) as file:
        file.write(content)
