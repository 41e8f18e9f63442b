"""Two real ranks, of which one becomes slow: their journals through the built-in rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.alerts.slow_rank import FIRST_SLOW
from tests.journal_rows import spool_named
from tests.ranks import run_ranks
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.journal import BlockRecord, Header, HeaderRecord, JournalReader, SeriesRecord
from trainermon.core.values import SeriesKey, StatBlock


def blocks(spool: Path, rank: int) -> Iterator[tuple[Header, list[SeriesKey], StatBlock]]:
    reader, keys = JournalReader(spool, rank), []
    while records := reader.poll():
        for record in records:
            if isinstance(record, HeaderRecord):
                header, keys = record.header, list(record.header.series)
            elif isinstance(record, SeriesRecord):
                keys += record.keys
            elif isinstance(record, BlockRecord):
                yield header, keys, record.block


@pytest.mark.distributed
@pytest.mark.parametrize("way", ["own", "ddp"])
def test_rank_that_becomes_slow_is_named_within_20_steps_and_the_one_that_waits_is_not(
    tmp_path: Path, way: str
) -> None:
    run_ranks(Path(__file__).with_name("slow_rank.py"), str(tmp_path), way)
    engine = RuleEngine(load_rules())
    ranks = [blocks(spool_named(tmp_path / "spool" / "run"), rank) for rank in range(2)]

    found = [alert for both in zip(*ranks, strict=True) for each in both for alert in engine.evaluate(*each)]

    told = [(alert.rule, alert.rank) for alert in found if alert.rule in ("straggler", "step-time-slow")]
    assert told == [("straggler", 1)]
    (alert,) = (alert for alert in found if alert.rule == "straggler")
    assert FIRST_SLOW <= alert.first_step <= alert.step <= FIRST_SLOW + 20
    assert engine.slowness[1] > 1.2
