"""What cannot be stored, whatever the disk, is found and set aside, so that everything else is stored.

A name, a number or a shape that the database refuses would otherwise be refused again with every attempt, and with it
the rows of all ranks of the node. Which part of a batch it is shows itself by trying halves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trainermon.core.errors import StoreError
from trainermon.core.private_files import make_private_directory, replacing
from trainermon.core.values import as_plain

FOLDER = "quarantine"
MAX_BYTES = 64 << 20
"""So much is kept of a node; what comes then is only counted."""

T = TypeVar("T")


def culprits(items: Sequence[T], works: Callable[[Sequence[T]], bool]) -> list[T]:
    """Find the items for which `works` fails, by halving; return them, or all if no single one is to blame.

    Costs one call of `works` for each half that is looked at: about 2 log2(n) for each item that is found.
    """
    found = set(_search(items, works))
    others = [item for item in items if item not in found]
    return [item for item in items if item in found] if works(others) else list(items)


def set_aside(segment: Path, reason: str, rows: Iterable[Any]) -> None:
    """Write what a segment had to leave out to `quarantine/<segment>.jsonl` beside its folder, as lines of ASCII JSON.

    Repeated, it replaces the file by itself. The folder is private, and keeps at most `MAX_BYTES`.

    Raises:
        StoreError: That cannot be written.
    """
    folder = segment.parent.with_name(FOLDER)
    path = folder / f"{segment.stem}.jsonl"
    try:
        make_private_directory(folder)
        kept_bytes = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name != path.name)
        with replacing(path) as file:
            file.write(_line({"segment": segment.name, "reason": reason}))
            for row in rows:
                if kept_bytes + file.tell() < MAX_BYTES:
                    file.write(_line(row))
    except OSError as error:
        raise StoreError(f"{path}: what cannot be stored could not be set aside: {error}") from error


def _line(entry: Any) -> bytes:
    return json.dumps(as_plain(entry)).encode("ascii") + b"\n"


def _search(items: Sequence[T], works: Callable[[Sequence[T]], bool]) -> list[T]:
    if not items or works(items):
        return []
    if len(items) == 1:
        return [items[0]]
    half = len(items) // 2
    return _search(items[:half], works) + _search(items[half:], works)
