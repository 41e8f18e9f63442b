"""What of its dumps a diagnosis could not read: so much it says nothing of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from trainermon.analysis.compare.merging.places import hollow_places
from trainermon.analysis.diagnosis.wording import counted
from trainermon.core.errors import DumpError
from trainermon.core.events import Unreplayed, read_outcome_line
from trainermon.dump.files.reader import gap_notes, load_raw, parse_dump
from trainermon.dump.files.records import Dump, TensorRecord


@dataclass(slots=True)
class DumpReading:
    """Reads dumps, and remembers what is missing in them.

    Attributes:
        gaps: By the folder of each dump that could not be read, or not whole, a sentence on each reason.
    """

    gaps: dict[Path, tuple[str, ...]] = field(default_factory=dict)

    def read(self, folder: Path) -> Dump | None:
        """Return the dump in `folder`; None: it cannot be read."""
        damaged: dict[str, str] = {}
        try:
            dump = parse_dump(folder, load_raw(folder), damaged)
        except DumpError as error:
            self.gaps[folder] = (str(error),)
            return None
        number = _num_unknown(dump)
        unknown = (f"{folder}: {counted(number, 'tensor')} without statistics",) if number else ()
        odd = tuple(f"{folder}: {key}: {why}" for key, why in damaged.items())
        if gaps := (*gap_notes(folder), *unknown, *odd):
            self.gaps[folder] = gaps
        return dump

    def miss(self, path: Path, known: Collection[tuple[int | None, int | None]], step: int | None) -> None:
        """Remember the folders of ranks below `path` without a dump, of a step and rank that is not `known`.

        With `step`, those of that step.
        """
        for lone in hollow_places(path, known):
            if step in (None, lone.place.step):
                self.gaps[lone.place.directory] = (lone.why,)

    def sentences(self) -> tuple[str, ...]:
        """Return all that is said of what could not be read."""
        return tuple(chain.from_iterable(self.gaps.values()))


def _num_unknown(dump: Dump) -> int:
    """Return how many tensors with elements tell neither whether these are finite nor any of their size."""
    found = (record for entry in dump.entries for record in chain(entry.inputs, entry.outputs, entry.parameters))
    return sum(map(_is_unknown, found))


def _is_unknown(record: TensorRecord) -> bool:
    return record.count > 0 and all(value is None for value in (record.nans, record.infs, record.max, record.mean))


def unreplayed_ranks(run_dir: Path, step: int) -> dict[int, Unreplayed]:
    """Return by rank which replays of the step left no dump, and why, as the agents' logs tell; the newest counts."""
    logs = (log.read_text(errors="replace") for log in sorted(run_dir.glob("nodes/*/agent.log")))
    found = (read_outcome_line(line) for text in logs for line in text.splitlines())
    return {one.rank: one for one in found if one is not None and one.step == step}
