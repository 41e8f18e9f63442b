"""A disk that is full: files end at a size, as far as this process writes them."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes while the block runs, and no longer: pytest's own output may be a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
