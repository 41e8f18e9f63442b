"""Update and ratio of MindSpore's optimizers: what they really did to the parameters, and float64 on their moments."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.experimental import optim

from tests.journal_rows import RankJournal, only_spool
from tests.monitor.mindspore.trainings import SmallTraining, truth
from trainermon import TrainerMon
from trainermon.core.errors import ConfigError
from trainermon.core.values import Kind
from trainermon.monitor.mindspore import updates

pytestmark = pytest.mark.mindspore
RATE, STEPS = 0.1, 3
BETAS = {"betas": (0.8, 0.95)}  # with them RAdam rectifies from the sixth step on
OPTIMIZERS = {
    "Adam": lambda held: nn.Adam(held, RATE, beta1=0.8, beta2=0.95, eps=0.1),
    "amsgrad": lambda held: nn.Adam(held, RATE, beta2=0.1, eps=0.1, use_amsgrad=True),
    "AdamWeightDecay": lambda held: nn.AdamWeightDecay(held, RATE, eps=0.1),
    "experimental Adam": lambda held: optim.Adam(held, lr=RATE, eps=0.1, **BETAS),
    "experimental AdamW": lambda held: optim.AdamW(held, lr=RATE, eps=0.1, weight_decay=0.0, **BETAS),
    "its amsgrad": lambda held: optim.AdamW(held, RATE, (0.9, 0.1), eps=0.1, weight_decay=0.0, amsgrad=True),
    "groups": lambda held: optim.AdamW(
        [{"params": held[:2], "betas": (0.5, 0.6)}, {"params": held[2:]}], lr=RATE, eps=0.1, weight_decay=0.0
    ),
    "RAdam": lambda held: optim.RAdam(held, lr=RATE, eps=0.1, **BETAS),
}


def trained(optimizer, spool, *, mode="pynative", steps=STEPS):
    """Train; return for each step the journal's rows, and by how much each parameter was moved over the rate."""
    training = SmallTraining(mode=mode)
    training.optimizer = training.used = OPTIMIZERS[optimizer](training.net.trainable_params())
    monitor = TrainerMon({"agent": {"start": False}, "ur_distribution": True})
    monitor.set_monitor(training.net, optimizer=training.optimizer)
    if mode == "jit step":
        training.used = monitor.watch(training.optimizer)
    moved = []
    for _ in range(steps):
        before = [each.asnumpy().astype(np.float64) for each in training.optimizer.parameters]
        monitor.record(loss=training.step())
        moved.append(
            {
                each.name: (old - each.asnumpy()) / RATE
                for old, each in zip(before, training.optimizer.parameters, strict=True)
            }
        )
    monitor.close()
    return RankJournal(only_spool(spool)), moved, training.optimizer


def assert_row(row, values, tolerance):
    got = np.array([row.count, row.min, row.max, row.sum, row.sum_sq])
    np.testing.assert_allclose(got, truth(ms.Tensor(values.astype(np.float32)))[:5], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_is_what_the_optimizer_did_over_the_rate(spool, optimizer):
    steps = 9 if optimizer == "RAdam" else STEPS

    journal, moved, _ = trained(optimizer, spool, steps=steps)

    for step in range(steps):
        rows = journal.of(step, Kind.UPDATE)
        assert sorted(rows) == sorted(moved[step]) == sorted(journal.of(step, Kind.RATIO))
        for name, values in moved[step].items():
            assert_row(rows[name], values, 2e-4)


def test_a_compiled_step_has_them_too(spool):
    journal, moved, _ = trained("Adam", spool, mode="jit step")

    for step, of_step in enumerate(moved):
        for name, values in of_step.items():
            assert_row(journal.of(step, Kind.UPDATE)[name], values, 2e-4)


def test_a_ratio_is_that_of_float64(spool, monkeypatch):
    monkeypatch.setattr(updates, "PIECE", 7)  # several pieces

    journal, _, optimizer = trained("Adam", spool)

    for parameter, first, second in zip(optimizer.parameters, optimizer.moment1, optimizer.moment2, strict=True):
        mean = first.asnumpy().astype(np.float64) / (1 - 0.8**STEPS)
        root = np.sqrt(second.asnumpy().astype(np.float64) / (1 - 0.95**STEPS))
        assert_row(journal.of(STEPS - 1, Kind.RATIO)[parameter.name], mean / root, 2e-6)


def test_nothing_over_nothing_is_no_ratio():
    first, second = np.array([0, 1, 2], np.float16), np.array([0, 0, 4], np.float16)

    update, ratio = updates.adamw(0.9, 0.99, 1e-8, 10**6).apply(first, second)

    assert update.dtype == ratio.dtype == np.float32
    assert ratio.tolist() == [0, np.inf, 1]
    assert update.tolist() == [0, pytest.approx(1e8), 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda held: nn.SGD(held, RATE), r"no formula is known for mindspore.nn.optim.sgd.SGD, only for mindspore.nn"),
        (lambda held: nn.Adam(held, RATE, use_nesterov=True), "with use_nesterov Adam needs the gradient"),
    ],
)
def test_an_optimizer_of_another_kind_is_refused(spool, make, message):
    training = SmallTraining()
    with pytest.raises(ConfigError, match=message):
        TrainerMon({"agent": {"start": False}, "ur_distribution": True}).set_monitor(
            training.net, optimizer=make(training.net.trainable_params())
        )
