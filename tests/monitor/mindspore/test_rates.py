"""The learning rates of a training of MindSpore that follow a schedule, beside the schedule's own formula."""

import mindspore as ms
import pytest
from mindspore import nn
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from tests.journal_rows import RankJournal, only_spool
from tests.monitor.mindspore.trainings import SmallTraining
from trainermon import TrainerMon
from trainermon.core.values import Kind

pytestmark = pytest.mark.mindspore

LISTED = [0.1, 0.05, 0.025, 0.0125]


class Halving(LearningRateSchedule):
    """A schedule that a user wrote, which counts how often it is asked."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def construct(self, step):
        self.asked += 1
        return 0.1 / 2 ** step.astype(ms.float32)


def decaying(step):
    return 0.1 * 0.5 ** (step / 2)


MAKERS = {
    "list": (lambda net: nn.SGD(net.trainable_params(), LISTED), [LISTED]),
    "schedule": (
        lambda net: nn.Adam(net.trainable_params(), nn.ExponentialDecayLR(0.1, 0.5, 2)),
        [[decaying(step) for step in range(4)]],
    ),
    "groups": (
        lambda net: nn.Momentum(
            [
                {"params": net.first.trainable_params(), "lr": nn.ExponentialDecayLR(0.1, 0.5, 2)},
                {"params": net.norm.trainable_params(), "lr": 0.03},
                {"params": net.head.trainable_params()},
            ],
            LISTED,
            0.9,
        ),
        [[decaying(step) for step in range(4)], [0.03] * 4, LISTED],
    ),
}


def rates_of(spool, training, mode):
    monitor = TrainerMon({"agent": {"start": False}})
    monitor.set_monitor(training.net, optimizer=training.optimizer)
    if mode == "jit step":
        training.used = monitor.watch(training.optimizer)
    for _ in range(4):
        monitor.record(loss=training.step())
    monitor.close()
    journal = RankJournal(only_spool(spool))
    steps = [journal.of(step, Kind.STEP) for step in range(4)]
    names = sorted(name for name in steps[0] if name.startswith("learning_rate."))
    return [[step[name].max for step in steps] for name in names]


@pytest.mark.parametrize("mode", ["pynative", "jit step"])
@pytest.mark.parametrize("kind", MAKERS)
def test_the_rate_of_each_group_is_the_schedules_of_that_step(spool, mode, kind):
    training = SmallTraining(mode=mode)
    make, expected = MAKERS[kind]
    training.optimizer = training.used = make(training.net)
    assert rates_of(spool, training, mode) == [pytest.approx(rates, rel=1e-6) for rates in expected]


def test_a_schedule_of_the_users_is_left_alone(spool):
    training, schedule = SmallTraining(), Halving()
    training.optimizer = training.used = nn.SGD(training.net.trainable_params(), schedule)
    assert rates_of(spool, training, "pynative") == []
    assert schedule.asked == 4
