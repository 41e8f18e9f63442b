"""Ranks under torch's `Join` take different numbers of steps: nothing is compared by step, and that is said once."""

from pathlib import Path

from tests.alerts.across_ranks.joined_training import BATCHES, EPOCHS
from tests.alerts.laws.test_trainings import judged, steps_of
from tests.ranks import run_ranks
from trainermon.agent.across_nodes.folded_rows import FoldedRows
from trainermon.agent.across_nodes.replicas import ReplicaChecksums

TRAINING = Path(__file__).with_name("joined_training.py")


def rows_for_controller(folder: Path) -> list[dict]:
    checksums, folds = ReplicaChecksums(), FoldedRows()
    for header, block in steps_of(folder):
        checksums.on_block(header, header.series, block)
        folds.on_block(header, header.series, block)
    return [checksums.digests()["steps"], folds.rows()["steps"]]


def test_ranks_that_join_early_are_not_compared(tmp_path: Path) -> None:
    told, _ = run_ranks(TRAINING, str(tmp_path), "enabled")

    assert judged(tmp_path, EPOCHS * sum(BATCHES) // 2) == []
    assert rows_for_controller(tmp_path) == [{}, {}]
    assert told.count("torch's Join") == 1
    assert "from step 0 on they are not compared" in told


def test_a_join_that_is_switched_off_changes_nothing(tmp_path: Path) -> None:
    """With as many batches on both ranks, as torch itself has it then; one rank's weights are moved."""
    told, _ = run_ranks(TRAINING, str(tmp_path), "disabled, moved")

    assert "Join" not in told
    assert "replica-divergence" in {alert.rule for alert in judged(tmp_path, EPOCHS * BATCHES[0])}
    assert all(rows_for_controller(tmp_path))
