"""Event files and lines of text with the tags of MindFormers' monitor.

    <run>/mindformers/rank_0/events.out.tfevents…      local_norm/model.layers.0.attention.wq.weight
    <run>/mindformers/rank_0/samples/events…           loss-vs-samples
    <run>/mindformers/rank_0.log                       step 12  device_local_norm: 0.0312

Event files need the package tensorboard. Steps are those of trainermon, which count from 0.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainermon.core.journal import Header
from trainermon.core.private_files import replace_file
from trainermon.core.values import StatBlock
from trainermon.exporters.event_files import EventFile
from trainermon.exporters.export import Exporter, ExportSettings
from trainermon.exporters.trackers.run_notes import settings_of
from trainermon.mindformers.numbers import EVENTS, LOG, MindFormersNumber, global_batch, numbers_of, series_of

FOLDER = "mindformers"
SAMPLES_FOLDER = "samples"
BY_SAMPLES = "-vs-samples"


class MindFormersExporter(Exporter):
    """Writes the numbers of each step to an event file and a log for each rank.

    A later attempt replaces the steps that it repeats.
    """

    def __init__(self, settings: ExportSettings) -> None:
        self._settings = settings
        self._root = settings.run_dir / FOLDER
        self._attempts: dict[int, int] = {}
        self._events: dict[tuple[int, str], EventFile] = {}

    def write(self, header: Header, block: StatBlock) -> None:
        """Add one step of one rank to its files."""
        rank = header.coordinates.rank
        if self._attempts.get(rank) != header.attempt:
            self._begin(rank, header.attempt, block.step)
        numbers = numbers_of(header, block, self._settings.mindformers)
        events = [number for number in numbers if EVENTS in number.forms]
        self._file(rank, "", block.step).add([(one.tag, one.value) for one in events], block.step, block.time_s)
        consumed = int(global_batch(series_of(header, block), header)) * (block.step + 1)
        if consumed:
            of_samples = [(one.tag + BY_SAMPLES, one.value) for one in events if one.by_samples]
            self._file(rank, SAMPLES_FOLDER, consumed).add(of_samples, consumed, block.time_s)
        self._log(rank, block.step, [number for number in numbers if LOG in number.forms])

    def flush(self) -> None:
        """Write everything added to the event files, where TensorBoard can read it."""
        for file in self._events.values():
            file.flush()

    def close(self) -> None:
        """Close all event files."""
        for place in list(self._events):
            self._events.pop(place).close()

    def _begin(self, rank: int, attempt: int, step: int) -> None:
        for place in [place for place in self._events if place[0] == rank]:
            self._events.pop(place).close()
        self._attempts[rank] = attempt
        folder = self._root / f"rank_{rank}"
        if not folder.exists():
            for name, value in settings_of(self._settings.run_dir).items():
                self._file(rank, "", step).add_text(name, str(value))
        _forget_from(_log_path(self._root, rank), step)

    def _file(self, rank: int, axis: str, position: int) -> EventFile:
        """Return the rank's file of numbers by step, or by samples; a new one replaces what is at `position` or behind.

        By samples they need a folder of their own: TensorBoard replaces by one axis in each folder.
        """
        if (rank, axis) not in self._events:
            folder = self._root / f"rank_{rank}" / axis
            has_files = any(folder.glob("events.out.tfevents.*"))
            self._events[rank, axis] = EventFile(folder, position if has_files else None)
        return self._events[rank, axis]

    def _log(self, rank: int, step: int, numbers: Sequence[MindFormersNumber]) -> None:
        text = "".join(f"step {step}  {number.tag}: {number.value:.6g}\n" for number in numbers)
        descriptor = os.open(_log_path(self._root, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)


def _log_path(root: Path, rank: int) -> Path:
    return root / f"rank_{rank}.log"


def _forget_from(path: Path, step: int) -> None:
    """Remove the lines of `step` and later ones, and what a killed writer has left incomplete."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and int(line.split()[1]) < step]
    replace_file(path, "".join(kept).encode())
