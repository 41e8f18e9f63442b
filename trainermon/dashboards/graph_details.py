"""The files beside a graph's page, from which whoever serves it answers: numbered parts, each packed by gzip.

One has the details of nodes, one the pieces of the page's data. A file begins with how many parts there are and where
each ends, as little-endian 64-bit numbers; behind them stand the parts one after the other. A part that there is not,
as the details of a node without any, has none of its bytes.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

DETAILS_SUFFIX = ".details"
PIECES_SUFFIX = ".pieces"
_NUMBER = struct.Struct("<Q")


def pack_detail(detail: bytes | None) -> bytes:
    """Return the details (JSON) of one node as the file has them; of None, a node that has none, no bytes."""
    return b"" if detail is None else gzip.compress(detail, 6, mtime=0)


def join_parts(parts: Iterable[bytes]) -> bytes:
    """Return a file's bytes, from its parts in order, each packed by gzip or without any bytes."""
    bodies = list(parts)
    ends = list(accumulate(map(len, bodies)))
    return struct.pack(f"<{len(ends) + 1}Q", len(ends), *ends) + b"".join(bodies)


def read_part(path: Path, number: int) -> bytes | None:
    """Return part `number` of the file `path`, packed by gzip; None if there is none.

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
