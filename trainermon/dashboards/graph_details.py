"""The file beside a graph's page with the details of its nodes: written with the page, read by who serves it.

It begins with how many nodes there are and where the details of each end, as little-endian 64-bit numbers; behind them
stand the details one after the other, each packed by gzip. A node without details has none of its bytes.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

SUFFIX = ".details"
_NUMBER = struct.Struct("<Q")


def pack_detail(detail: bytes | None) -> bytes:
    """Return the details (JSON) of one node as the file has them; of None, a node that has none, no bytes."""
    return b"" if detail is None else gzip.compress(detail, 6, mtime=0)


def pack_details(details: Iterable[bytes]) -> bytes:
    """Return the file's bytes, from what `pack_detail` returns of each node in order."""
    bodies = list(details)
    ends = list(accumulate(map(len, bodies)))
    return struct.pack(f"<{len(ends) + 1}Q", len(ends), *ends) + b"".join(bodies)


def read_detail(path: Path, number: int) -> bytes | None:
    """Return the details of node `number` from the file `path`, packed by gzip; None if it has none.

    Raises:
        OSError: The file cannot be read, or is none of these.
    """
    with path.open("rb") as file:
        (count,) = _NUMBER.unpack(_exactly(file.read(8), 8, path))
        if not 0 <= number < count:
            return None
        file.seek(8 * number)
        begin, end = struct.unpack("<QQ", _exactly(file.read(16), 16, path))
        begin = begin if number else 0  # before the first end stands the count
        file.seek(8 * (count + 1) + begin)
        return _exactly(file.read(end - begin), end - begin, path) or None


def _exactly(found: bytes, size: int, path: Path) -> bytes:
    if len(found) != size:
        raise OSError(f"{path} is cut off: expected {size} bytes, found {len(found)}")
    return found
