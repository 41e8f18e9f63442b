"""Losses, weights and optimizer states are bit-identical with everything collected."""

import pytest

from tests.journal_rows import RankJournal, only_spool
from tests.monitor.mindspore.trainings import MODES, OPTIMIZERS, SmallTraining
from trainermon import TrainerMon
from trainermon.core.values import Kind

pytestmark = pytest.mark.mindspore
STEPS = 5
# Compiled, MindSpore 2.10 adds no bfloat16 on a CPU, watched or not.
CASES = [
    (mode, dtype)
    for mode in MODES
    for dtype in ("float32", "bfloat16", "float16")
    if not (mode.startswith("jit") and dtype == "bfloat16")
]


@pytest.mark.parametrize(("mode", "dtype"), CASES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_the_same_with_everything_collected(spool, optimizer, mode, dtype):
    bare, watched = (SmallTraining(optimizer, mode=mode, dtype=dtype) for _ in range(2))
    is_compiled = mode == "jit step"
    config = {"param_distribution": True, "mv_distribution": True, "xy_distribution": not is_compiled}
    monitor = TrainerMon({**config, "agent": {"start": False}})
    monitor.set_monitor(watched.net, optimizer=watched.optimizer)
    if is_compiled:
        watched.used = monitor.watch(watched.optimizer)

    expected = [bare.step().asnumpy().tobytes() for _ in range(STEPS)]
    found = []
    for _ in range(STEPS):
        loss = watched.step()
        monitor.record(loss=loss)
        found.append(loss.asnumpy().tobytes())
    monitor.close()

    journal = RankJournal(only_spool(spool))
    assert found == expected
    assert watched.bits() == bare.bits()
    assert [event for event in journal.events if "detached" in str(event)] == []
    assert sorted(journal.rows) == list(range(STEPS))
    assert len(journal.of(STEPS - 1, Kind.GRAD_REDUCED)) == len(watched.optimizer.parameters)
