"""Rules over a stored run say what they said while it ran: broken trainings, judged live and from their store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.alerts.laws.test_trainings import STEPS, TRAINING, judged, steps_of
from tests.ranks import run_ranks
from trainermon.alerts.rules import load_rules
from trainermon.analysis.diagnosis.rows.rule_replay import is_blind, rehearse
from trainermon.core.journal import Cursor
from trainermon.core.values import Alert
from trainermon.exporters.store.segments import JournalPosition
from trainermon.exporters.store.store import SegmentWriter

FAULTS = ("cut", "lost", "own", "still")


def stored(folder: Path, *, num_segments: int) -> Path:
    """Store what the ranks wrote, with what they told of themselves, and return the directory of the run."""
    run_dir, told = folder.parent / "stored", list(folder.rglob("ranks/rank*.json"))
    (run_dir / "ranks").mkdir(parents=True)
    for path in told:
        shutil.copy(path, run_dir / "ranks")
    writer = SegmentWriter(run_dir / "nodes/node/segments")
    steps = steps_of(folder)
    for number, (header, block) in enumerate(steps):
        writer.add(header, header.series, block)
        if number % (len(steps) // num_segments) == 0:
            writer.commit({0: JournalPosition(1, Cursor(0, number))})
    writer.commit({0: JournalPosition(1, Cursor(0, STEPS))})
    return run_dir


def told_by(alerts: list[Alert] | tuple[Alert, ...]) -> set[tuple[str, int, int, str]]:
    seen = {rule.name for rule in load_rules() if not is_blind(rule)}
    return {(alert.rule, alert.rank, alert.first_step, alert.law) for alert in alerts if alert.rule in seen}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_stored_run_is_judged_as_the_live_one_was(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "live"
    run_ranks(TRAINING, fault, str(folder))
    live = told_by(judged(folder, STEPS))

    assert live
    assert told_by(rehearse(load_rules(), stored(folder, num_segments=3)).alerts) == live
