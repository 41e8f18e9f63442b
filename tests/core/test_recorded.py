"""The journal that the version before has written is still read, event by event and row by row."""

import json
import shutil
from pathlib import Path

from tests.core.test_journal_frames import parse_as_documented
from tests.journal_rows import RankJournal
from trainermon.core.events import (
    ConfigurationEvent,
    ConfigurationStatus,
    DumpEvent,
    DumpStatus,
    FailedEvent,
    ReplayEvent,
    decode,
    encode,
)
from trainermon.core.values import Kind

RECORDED = Path(__file__).parents[1] / "recorded"
(JOURNAL,) = RECORDED.glob("*.jnl")
EVENT = 4


def plain_events():
    return [json.loads(payload) for kind, _, payload in parse_as_documented(JOURNAL.read_bytes()) if kind == EVENT]


def test_every_event_is_understood_and_written_as_it_was():
    found = [decode(plain) for plain in plain_events()]

    assert [encode(event) for event in found] == plain_events()
    assert [type(event) for event in found] == [
        DumpEvent,
        DumpEvent,
        ConfigurationEvent,
        DumpEvent,
        DumpEvent,
        ConfigurationEvent,
        ConfigurationEvent,
        ReplayEvent,
        FailedEvent,
    ]
    late, failed, late_edit, written, _, applied, refused, replay, end = found
    assert [one.status for one in (late, failed, written)] == [DumpStatus.LATE, DumpStatus.FAILED, DumpStatus.WRITTEN]
    assert [one.status for one in (late_edit, applied, refused)] == [
        ConfigurationStatus.LATE,
        ConfigurationStatus.APPLIED,
        ConfigurationStatus.REFUSED,
    ]
    assert (written.command, written.step, written.bytes) == ("written", 5, 7658)
    assert (replay.step, replay.status, replay.micro_steps) == (17, DumpStatus.NONFINITE, 1)
    assert (end.step, end.message.splitlines()[-1]) == (20, "RuntimeError: the script ends here")


def test_its_rows_are_read(tmp_path):
    shutil.copy(JOURNAL, tmp_path)

    journal = RankJournal(tmp_path)

    assert list(journal.rows) == list(range(20))
    zeros = {step: journal.of(step, Kind.GRAD_REDUCED)["2.weight"].zeros for step in journal.rows}
    assert [step for step, count in zeros.items() if count == 3] == list(range(9, 14))
    assert journal.of(17, Kind.GRAD_REDUCED)["2.weight"].nonfinite > 0
    assert len(journal.events) == len(plain_events())
