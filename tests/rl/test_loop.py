"""GRPO with an engine in another process: every cause that is put in is named, and a sound loop raises nothing."""

import pytest

from tests.rl.loop import CASES, Fault, Trainer, engine_process
from trainermon.rl.values import Verdict


@pytest.fixture(scope="module")
def call():
    with engine_process() as found:
        yield found


@pytest.mark.parametrize(("faults", "cause"), CASES.values(), ids=CASES)
def test_the_cause_is_named(faults, cause, call, tmp_path):
    trainer = Trainer(tmp_path, call, faults)

    reports = [trainer.step(number) for number in range(3)]
    trainer.watch.close()

    assert trainer.watch.num_failures == 0
    assert [str(report.causes[0].cause) for report in reports[1:]] == [cause, cause]


def test_routers_that_choose_other_experts_are_named(call, tmp_path):
    trainer = Trainer(tmp_path, call, [Fault("routing")], family="mixture")

    reports = [trainer.step(number) for number in range(3)]
    trainer.watch.close()

    assert trainer.watch.num_failures == 0
    assert [str(report.causes[0].cause) for report in reports] == ["routing"] * 3
    assert all(report.weights.is_equal for report in reports)


def test_a_sound_loop_raises_nothing(call, tmp_path):
    trainer = Trainer(tmp_path, call, [Fault(), Fault()])

    reports = [trainer.step(number) for number in range(4)]
    trainer.watch.close()

    assert [report.causes for report in reports] == [()] * 4
    assert {report.verdict for report in reports} == {Verdict.NOISE}  # rounding was not measured
    assert all(report.weights.is_equal and len(report.weights.engines) == 2 for report in reports)


def test_only_the_tensors_that_were_not_sent_are_named(call, tmp_path):
    trainer = Trainer(tmp_path, call, [Fault("layer")])

    report = [trainer.step(number) for number in range(2)][-1]
    trainer.watch.close()

    assert {each.version for each in report.weights.differing} == {0}
    assert all(".layers.1." in each.name for each in report.weights.differing)
