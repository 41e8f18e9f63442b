"""What a rank wrote, read back: rows by step and series."""

import re
from pathlib import Path

from trainermon.core.events import encode
from trainermon.core.journal import BlockRecord, EventRecord, HeaderRecord, JournalReader, SeriesRecord
from trainermon.core.values import Moments, SeriesKey


class RankJournal:
    """All rows (`rows[step][key]`), histograms likewise, events (as JSON has them) and series of one rank's journal."""

    def __init__(self, spool: Path, rank: int = 0) -> None:
        self.keys: list[SeriesKey] = []
        self.rows: dict[int, dict[SeriesKey, Moments]] = {}
        self.histograms: dict[int, dict[SeriesKey, list[int]]] = {}
        self.events: list[dict] = []
        reader = JournalReader(spool_named(spool), rank)
        while records := reader.poll():
            for record in records:
                self._add(record)

    def _add(self, record) -> None:
        match record:
            case HeaderRecord():
                self.keys = list(record.header.series)
            case SeriesRecord():
                self.keys += record.keys
            case BlockRecord():
                step = self.rows.setdefault(record.block.step, {})
                for column, number in enumerate(record.block.series):
                    step[self.keys[number]] = Moments(*record.block.values[:, column].tolist())
                if (taken := record.block.histograms) is not None:
                    keys = [self.keys[record.block.series[place]] for place in taken.places]
                    counted = dict(zip(keys, taken.counts.tolist(), strict=True))
                    self.histograms.setdefault(record.block.step, {}).update(counted)
            case EventRecord():
                self.events.append(encode(record.event))

    def of(self, step: int, kind) -> dict[str, Moments]:
        """Return the rows of one kind on one step by label."""
        return {key.label: row for key, row in self.rows.get(step, {}).items() if key.kind == kind}


def spool_named(path: Path) -> Path:
    """Return the spool of the only run of the name `path.name` in the folder of spools `path.parent`; else `path`."""
    named = re.compile(re.escape(path.name) + "-[0-9a-f]{12}")
    return next((spool for spool in path.parent.glob(f"{path.name}-*") if named.fullmatch(spool.name)), path)


def only_spool(root: Path) -> Path:
    """Return the spool directory of the only run below `root`, where its output may lie as well."""
    found = [path for path in root.iterdir() if path.is_dir()]
    (spool,) = [path for path in found if re.fullmatch(r".*-[0-9a-f]{12}", path.name)] or found
    return spool
