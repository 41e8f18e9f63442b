"""What was found out about calls while training ran: rows of `free_benchmark.csv`, and a summary beside it."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import logging
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

from trainermon.accuracy.judge import Judgement, Status

logger = logging.getLogger("trainermon")

CSV_FILE, SUMMARY_FILE = "free_benchmark.csv", "free_benchmark.json"
# The first nine are msprobe's.
COLUMNS = (
    "rank", "pert_mode", "stage", "step", "api_name", "max_rel", "dtype", "shape", "output_index", "status", "reason",
    "worst", "index", "value", "expected", "condition", "place", "line",
)  # fmt: skip
CONDITION = "condition"
_FORMULA = ("=", "+", "-", "@")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallFinding:
    """The verdict on one tensor that a call gave, or on one gradient.

    Attributes:
        key: The call's key in a dump.
        mode: How it was tried (`pert_mode`), with the relation that was tested: `relations:contiguous`.
        stage: `forward` or `backward`.
        number: Which of its tensors it is.
        judgement: The verdict.
        max_rel: The largest relative difference that was seen; NaN if one side alone is not finite.
        flips: Whether an element changed its sign.
        condition: By how much the mathematics multiplies a relative change of the inputs; NaN: not measured.
        line: The line of the user's code.
    """

    key: str
    mode: str
    stage: str
    number: int
    judgement: Judgement
    max_rel: float = math.nan
    flips: bool = False
    condition: float = math.nan
    line: str = ""

    @property
    def status(self) -> str:
        """`pass`, `warning`, `error`, `SKIP`; `condition` of a pass whose mathematics is unstable."""
        if self.judgement.status is Status.PASS and self.condition > UNSTABLE:
            return CONDITION
        return self.judgement.status.value


UNSTABLE = 100.0
"""Beyond this factor between the relative changes of inputs and result, a call is called unstable."""


class FindingsFile:
    """Writes the findings of one rank in one step into a folder, as they come.

    Args:
        folder: `<dump_path>/step<N>/rank<R>`; it is made when the first row is written.
        rank: This rank.
        step: The step's number.
        takes_all: Whether calls that passed are written too.
        names: Of the csv file and of the summary.

    Files that are there are replaced. What cannot be written, on a full disk, is told once, and counted.

    Attributes:
        counts: How many tensors had which status.
        skipped: How many calls were not tried, by reason.
        fixed: How many calls were replaced, by name and type.
        num_lost: How many rows could not be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        step: int,
        takes_all: bool,
        names: tuple[str, str] = (CSV_FILE, SUMMARY_FILE),
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.fixed: Counter[str] = Counter()
        self.num_calls = 0
        self.num_lost = 0
        self.duration_s = 0.0
        self._folder, self._rank, self._step, self._takes_all = folder, rank, step, takes_all
        self._csv, self._summary = names
        self._is_begun = False

    def begin_step(self, step: int, *, takes_all: bool) -> None:
        """Go on with the step of this number: rows and counts are added to those of earlier ones."""
        self._step, self._takes_all = step, takes_all

    def add(self, finding: CallFinding) -> None:
        """Count `finding`, and write it unless it is a pass or was not judged (with `takes_all`: in any case)."""
        self.counts[finding.status] += 1
        if self._takes_all or finding.status not in (Status.PASS.value, Status.SKIP.value):
            self._append([_cells(finding, self._rank, self._step)])

    def close(self) -> None:
        """Write the summary, and the csv file's header if no row was written."""
        self._append([])
        summary = {
            "rank": self._rank,
            "step": self._step,
            "calls": self.num_calls,
            "results": dict(self.counts),
            "skipped": dict(self.skipped),
            "fixed": dict(self.fixed),
            "duration_s": round(self.duration_s, 6),
            **({"rows_lost": self.num_lost} if self.num_lost else {}),
        }
        self._write(self._summary, json.dumps(summary, indent=1) + "\n", os.O_TRUNC)

    def _append(self, rows: list[list[Any]]) -> None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not self._is_begun:
            writer.writerow(COLUMNS)
        writer.writerows([_safe(cell) for cell in row] for row in rows)
        if self._write(self._csv, text.getvalue(), os.O_APPEND if self._is_begun else os.O_TRUNC):
            self._is_begun = True
        else:
            self.num_lost += len(rows)

    def _write(self, name: str, text: str, how: int) -> bool:
        """Return whether `text` stands in the file: all of it, or nothing."""
        path = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                _write_whole(file, text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            _tell_once(self._folder.parent.parent, error.strerror or str(error), path)
            return False
        return True


_TOLD: set[tuple[Path, str]] = set()


def _tell_once(root: Path, why: str, path: Path) -> None:
    """Say that `path` cannot be written, unless that was said of another step below `root`."""
    if (root, why) not in _TOLD:
        _TOLD.add((root, why))
        logger.warning("cannot write %s: %s; rows are lost (rows_lost counts them), and training goes on", path, why)


def _write_whole(file: io.FileIO, data: bytes) -> None:
    """Append `data`, or leave the file as it was.

    Raises:
        OSError: There is no space for it.
    """
    begin = os.fstat(file.fileno()).st_size
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) or 0 :]
    except OSError:
        file.truncate(begin)
        raise


def _cells(finding: CallFinding, rank: int, step: int) -> list[Any]:
    found = finding.judgement
    reason = CONDITION if finding.status == CONDITION else found.reason
    return [
        rank,
        finding.mode,
        finding.stage,
        step,
        finding.key,
        "symbol_flipping" if finding.flips else finding.max_rel,
        found.dtype,
        list(found.shape),
        finding.number,
        finding.status,
        reason,
        found.worst,
        "" if found.index is None else list(found.index),
        found.device_value,
        found.golden_value,
        finding.condition,
        found.place.text() if found.place else "",
        finding.line,
    ]


def _safe(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell  # a spreadsheet would run it
