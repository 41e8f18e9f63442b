"""Journals for tests: small headers, blocks and writers, and what a reader finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainermon.core.events import WarningEvent
from trainermon.core.journal import (
    BlockRecord,
    Header,
    JournalReader,
    JournalWriter,
    list_files,
)
from trainermon.core.values import Coordinates, Kind, SeriesKey, StatBlock


def make_header(**changes) -> Header:
    fields = {"run_id": "run", "attempt": 1, "coordinates": Coordinates(), "host": "node", "pid": 42, "started_s": 1.5}
    return Header(**{**fields, **changes})


def make_keys(count: int, prefix: str = "p") -> list[SeriesKey]:
    return [SeriesKey(Kind.GRAD_REDUCED, f"{prefix}{index}") for index in range(count)]


def make_block(step: int, num_series: int = 3) -> StatBlock:
    values = np.arange(8 * num_series, dtype=np.float64).reshape(8, num_series) + step
    return StatBlock(step=step, time_s=step / 2, series=np.arange(num_series, dtype=np.uint32), values=values)


def open_writer(directory: Path, num_series: int = 3, **limits) -> JournalWriter:
    writer = JournalWriter(directory, make_header(), **limits)
    writer.add_series(make_keys(num_series), [None] * num_series)
    return writer


def append_warning(writer: JournalWriter, message: str = "x") -> bool:
    return writer.append_event(WarningEvent(message=message))


def steps(records) -> list[int]:
    return [record.block.step for record in records if isinstance(record, BlockRecord)]


def read_all(directory: Path) -> list[int]:
    reader = JournalReader(directory, 0)
    found = steps(reader.poll())
    reader.close()
    return found


def file_of(directory: Path, index: int = -1) -> Path:
    return directory / f"rank00000.{list_files(directory, 0)[index]}.jnl"
