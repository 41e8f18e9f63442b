"""Records single anomalies in the files of msprobe's monitor, `anomaly_detected/rank<r>/anomaly.json`."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainermon.core.config import AnomalyRuleConfig
from trainermon.core.journal import Header
from trainermon.core.private_files import replace_file
from trainermon.core.values import StatBlock
from trainermon.exporters.export import Exporter
from trainermon.msprobe.anomalies import AnomalyScanner

FOLDER = "anomaly_detected"
FILE = "anomaly.json"
MAX_RECORDS = 10_000

_log = logging.getLogger(__name__)


class AnomalyFiles(Exporter):
    """Writes the odd values of each local rank, by msprobe's anomaly rules, to its `anomaly.json`.

    A later attempt replaces the steps that it repeats. A file is replaced as a whole, so it holds the first
    `MAX_RECORDS` of a rank; the log says if there are more.
    """

    def __init__(self, rules: Sequence[AnomalyRuleConfig], ops: Sequence[str], run_dir: Path) -> None:
        self._rules = rules
        self._ops = ops
        self._root = run_dir / FOLDER
        self._scanners: dict[int, tuple[int, AnomalyScanner]] = {}
        self._records: dict[int, dict[str, dict[str, Any]]] = {}
        self._changed: set[int] = set()

    def write(self, header: Header, block: StatBlock) -> None:
        """Scan one step of one rank for anomalies, and keep those for the files."""
        rank = header.coordinates.rank
        attempt, scanner = self._scanners.get(rank, (None, None))
        if scanner is None or attempt != header.attempt:
            scanner = AnomalyScanner(self._rules, self._ops, header.coordinates)
            self._scanners[rank] = (header.attempt, scanner)
            known = self._records.get(rank) or self._read(rank)
            self._records[rank] = {key: record for key, record in known.items() if record["step"] < block.step}
            self._changed.add(rank)
        records = self._records[rank]
        for anomaly in scanner.scan(header, block):
            if len(records) < MAX_RECORDS or anomaly.key in records:
                records[anomaly.key] = dataclasses.asdict(anomaly)
                self._changed.add(rank)
                if len(records) == MAX_RECORDS:
                    _log.warning("rank %d has %d anomalies; further ones are not written", rank, MAX_RECORDS)

    def flush(self) -> None:
        """Write the anomaly.json of each rank that has new entries."""
        for rank in sorted(self._changed):
            path = self._path(rank)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, json.dumps(self._records[rank], indent=1).encode())
        self._changed.clear()

    def _read(self, rank: int) -> dict[str, dict[str, Any]]:
        try:
            known: dict[str, dict[str, Any]] = json.loads(self._path(rank).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return known

    def _path(self, rank: int) -> Path:
        return self._root / f"rank{rank}" / FILE
