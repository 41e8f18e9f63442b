"""Which buffers came to hold NaN or Inf. One that held them when the run began may do so by design."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from trainermon.core.values import Kind

if TYPE_CHECKING:
    import duckdb

SPOILT_BUFFERS = f"""
    SELECT attempt, step, rank, kind, name, slot FROM (
        SELECT *, first_value(nans) OVER shown AS first_nans, first_value(infs) OVER shown AS first_infs
        FROM all_stats WHERE kind = '{Kind.BUFFER}'
        WINDOW shown AS (PARTITION BY rank, name, slot, stage ORDER BY attempt, step)
    ) WHERE (nans > 0 AND first_nans = 0) OR (infs > 0 AND first_infs = 0)
"""  # noqa: S608  # our own name
"""A query for the rows of buffers that hold NaN or Inf of which they held none in the first row of the run."""


def buffer_notes(connection: duckdb.DuckDBPyConnection, attempt: int, run_dir: Path) -> list[str]:
    """Return a sentence where no buffer was looked at in an attempt; none where some were, or no model has any."""
    if not _may_have_buffers(run_dir):
        return []
    query = f"SELECT count(*) FROM all_stats WHERE attempt = ? AND kind = '{Kind.BUFFER}'"  # noqa: S608  # our own name
    (number,) = connection.execute(query, [attempt]).fetchone() or (0,)
    return [] if number else ["no buffers (as running statistics of norms) are stored, so nothing is known of them"]


def _may_have_buffers(run_dir: Path) -> bool:
    """Return whether any rank's model holds buffers, as far as that is known."""
    held = []
    for path in sorted(run_dir.glob("ranks/rank*.json")):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            held.append(json.loads(path.read_bytes()).get("buffers"))
    return not held or any(number != 0 for number in held)
