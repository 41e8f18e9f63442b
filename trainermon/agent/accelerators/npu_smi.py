"""Reads Ascend's NPUs from what `npu-smi info` prints; for a process of its own.

The table has two lines per chip: the first about the card and its power, the second about the chip and its memory.
Which memories there are (HBM, or beside the chip) depends on the product; the last of them is where models are.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Iterator

from trainermon.agent.accelerators.readings import AcceleratorReading, ReaderError

PROGRAM = "npu-smi"
LIMIT_S = 20.0
MIB = 1 << 20

_SHARE = re.compile(r"(\d+)\s*/\s*(\d+)")


class NpuSmiReader:
    """Runs `npu-smi info` for each reading; it takes about a second.

    Raises:
        ReaderError: There is no such program on the path.
    """

    def __init__(self) -> None:
        path = shutil.which(PROGRAM)
        if path is None:
            raise ReaderError(f"Ascend's NPUs cannot be read: there is no {PROGRAM} on the path of the agent")
        self._path = path

    def read(self) -> list[AcceleratorReading]:
        """Return a reading of every chip.

        Raises:
            ReaderError: The program failed, took too long, or printed no table that is known.
        """
        try:
            done = subprocess.run(  # noqa: S603  (a vendor's tool, with fixed arguments)
                [self._path, "info"], stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ReaderError(f"{PROGRAM} info: {error}") from None
        text = done.stdout.decode(errors="replace")
        readings = parse_table(text)
        if not readings:
            said = " ".join((done.stderr.decode(errors="replace") or text).split())[:200]
            raise ReaderError(f"{PROGRAM} info ended with status {done.returncode} and no chip in its table: {said}")
        return readings


def parse_table(text: str) -> list[AcceleratorReading]:
    """Return a reading of every chip in the output of `npu-smi info`, in its order; [] if there is none.

    What is not printed, or printed as NA, is NaN.
    """
    rows = [_cells(line) for line in text.splitlines() if line.startswith("|")]
    pids = _pids(rows)
    readings: list[AcceleratorReading] = []
    card: list[list[str]] | None = None
    for row in rows:
        if len(row) == 3 and row[0] and row[0][0].isdecimal():
            if card is None and len(row[0]) >= 2 and ":" not in row[1][0]:
                card = row
            elif card is not None:
                readings.append(_reading(card, row, index=len(readings), pids=pids))
                card = None
    return readings


def _cells(line: str) -> list[list[str]]:
    """Return the words of each cell of a line of the table."""
    return [cell.split() or [""] for cell in line.strip().strip("|").split("|")]


def _reading(
    card: list[list[str]], chip: list[list[str]], *, index: int, pids: dict[tuple[str, str], tuple[int, ...]]
) -> AcceleratorReading:
    power, temperature = (*card[2], "", "")[:2]
    memories = [(int(used), int(size)) for used, size in _SHARE.findall(" ".join(chip[2]))]
    used, size = memories[-1] if memories else (math.nan, math.nan)
    bus = chip[1][0]
    return AcceleratorReading(
        uuid=bus if ":" in bus else f"NPU {card[0][0]} chip {chip[0][0]}",
        index=index,
        model=f"Ascend {card[0][1].removeprefix('Ascend')}".strip(),
        pids=pids.get((card[0][0], chip[0][0]), ()),
        utilization=_number(chip[2][0]) / 100,
        memory_used_bytes=used * MIB,
        memory_size_bytes=size * MIB,
        power_watts=_number(power),
        temperature_celsius=_number(temperature),
    )


def _pids(rows: list[list[list[str]]]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the processes by card and chip, from the second table."""
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for place, pid in _processes(rows):
        found[place] = (*found.get(place, ()), pid)
    return found


def _processes(rows: list[list[list[str]]]) -> Iterator[tuple[tuple[str, str], int]]:
    for row in rows:
        if len(row) == 4 and len(row[0]) == 2 and row[1][0].isdecimal():
            yield (row[0][0], row[0][1]), int(row[1][0])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
