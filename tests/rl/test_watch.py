"""The watch: what it writes, hands to a monitor, and survives."""

import dataclasses
import json
import os
import threading
import warnings

import numpy as np
import pytest
import torch

from tests.rl.policies import Step
from trainermon import rl
from trainermon.core.catalogue import ROLLOUT_SERIES
from trainermon.core.errors import DumpError
from trainermon.core.values import as_plain
from trainermon.rl.files import read_reports, read_sent
from trainermon.rl.snapshots import snapshot
from trainermon.rl.steps import series_of


@pytest.fixture
def watch(tmp_path):
    found = rl.Watch(tmp_path, rank=3)
    yield found
    found.close()


def test_a_version_as_which_nothing_was_sent_is_a_difference(watch, caplog):
    list(watch.sent({}, version=2))
    tell(watch, 1, Step(1))

    assert watch.report(1).causes[0].evidence == "as version 2 no tensor was sent"
    assert "no tensor was sent as version 2" in caplog.text


@pytest.mark.parametrize("form", [lambda held: held, lambda held: json.dumps(as_plain(held))])
def test_digests_are_taken_as_hold_gives_them_and_as_json(watch, form):
    list(watch.sent({"a": torch.ones(2, 3).bfloat16()}.items(), version=1))

    watch.take(form(rl.hold({"a": torch.zeros(2, 3).bfloat16()}.items(), version=1, engine="e")))

    tell(watch, 1, Step(1))
    assert str(watch.report(1).causes[0].cause) == "weights differ"


def tell(watch, number, made, *, parts=1):
    with watch.step(number):
        for some in np.array_split(np.arange(len(made.ids)), parts):
            watch.rollout(logprobs=made.rollout[some], ids=made.ids[some], mask=made.mask[some])
            watch.train(logprobs=torch.from_numpy(made.train[some]), mask=torch.from_numpy(made.mask[some]))


def test_reports_come_back_from_their_file(watch, tmp_path):
    for number, fault in ((1, None), (2, "top_p"), (5, "other context")):
        tell(watch, number, Step(number, fault))
    told = [watch.report(number) for number in (1, 2, 5)]
    watch.close()

    assert {rank: repr(found) for rank, found in read_reports(tmp_path).items()} == {3: repr(told)}  # NaN is not NaN


def test_parts_of_a_step_give_what_the_whole_gives(watch):
    made = Step(7, "stale cache")

    tell(watch, 1, made)
    tell(watch, 2, made, parts=5)

    one, other = watch.report(1), watch.report(2)
    assert (one.measures, one.causes, one.worst) == (other.measures, other.causes, other.worst)


def test_what_is_passed_in_may_be_changed_at_once(watch):
    made = Step(8)
    rollout, train = made.rollout.copy(), torch.from_numpy(made.train.copy())

    with watch.step(1):
        watch.rollout(logprobs=rollout, mask=made.mask)
        watch.train(logprobs=train, mask=made.mask)
        rollout[:] = 0
        train.zero_()

    assert watch.report(1).causes == ()


def test_the_noise_is_measured_by_a_second_computation(watch):
    made = Step(9, noise=0.002)
    with watch.step(1):
        watch.rollout(logprobs=made.rollout, mask=made.mask)
        watch.train(logprobs=made.train, mask=made.mask, again=made.train + 0.004)

    floor = watch.report(1).floor
    assert (floor.source, floor.mean_abs) == ("measured", pytest.approx(0.004))


def test_nothing_raises_into_training(watch, caplog):
    watch.rollout(logprobs=[[-1.0]])  # no step is open
    with watch.step(1):
        watch.rollout(logprobs="nonsense")
        watch.train(logprobs=[[-1.0]])
    with watch.step(2):
        watch.rollout(logprobs=[[-1.0]])
    list(watch.sent([("name", "no tensor")], version=1))
    watch.received([("name", object())], version=1)
    watch.save(stage=object())
    watch.close()

    assert watch.num_failures >= 4
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert watch.report(2).verdict == "not comparable"
    assert "nothing was passed to train()" in watch.report(2).sentence


def test_a_step_within_a_step_takes_nothing_from_it(watch):
    one, other = Step(1), Step(2)
    with watch.step(1):
        watch.rollout(logprobs=one.rollout, mask=one.mask)
        tell(watch, 2, other)
        watch.train(logprobs=one.train, mask=one.mask)

    assert [watch.report(number).measures.tokens for number in (1, 2)] == [one.mask.sum(), other.mask.sum()]


def test_the_error_of_a_script_inside_a_step_is_its_own(watch):
    with pytest.raises(KeyError), watch.step(1):
        raise KeyError("the script's")


def test_a_folder_that_cannot_be_written_costs_the_reports_only(tmp_path):
    (tmp_path / "file").write_text("in the way")
    watch = rl.Watch(tmp_path / "file", rank=0)

    tell(watch, 1, Step(1))
    watch.close()

    assert watch.num_failures == 1


def test_what_is_sent_passes_through_unchanged(watch):
    named = {"a": torch.randn(3, 4), "b": torch.randn(5)}

    passed = dict(watch.sent(named, version=1))

    assert all(passed[name] is tensor for name, tensor in named.items())


def test_a_loader_that_stops_early_leaves_no_digest(watch):
    sent = watch.sent({"a": torch.randn(3), "b": torch.randn(3)}, version=1)
    next(sent)
    sent.close()

    assert watch.check(1) is None


def test_numbers_reach_a_monitor_in_the_thread_of_the_training(tmp_path):
    calls = []

    class Monitor:
        def record(self, **values):
            calls.append((threading.current_thread(), values))

    watch = rl.Watch(tmp_path, monitor=Monitor(), rank=0)
    tell(watch, 1, Step(1))
    report = watch.report(1)
    watch.close()

    ((thread, values),) = calls
    assert thread is threading.current_thread()
    assert values == series_of(report, rl.Limits())
    assert values["rl_ratio"] == report.measures.ratio
    assert len(values) <= 40


def test_a_tensor_that_cannot_be_read_leaves_no_digest(watch):
    list(watch.sent([("a", torch.randn(3)), ("b", "no tensor")], version=1))

    assert watch.check(1) is None
    assert not list(watch.folder.glob("weights/*"))


def test_a_fork_compares_in_a_thread_of_its_own(tmp_path):
    watch = rl.Watch(tmp_path, rank=0)
    tell(watch, 1, Step(1))
    watch.report(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads, as data loaders make them
        child = os.fork()
    if not child:
        tell(watch, 2, Step(2))
        os._exit(0 if watch.report(2, timeout_s=60) is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
    watch.close()

    assert [report.step for report in read_reports(tmp_path)[0]] == [1, 2]


def test_prompts_are_the_same_in_whatever_they_are_held(watch):
    for number, prompts in enumerate([[[1, 2], [3]], [np.array([1, 2]), torch.tensor([3])], ["one", "two"]]):
        known = watch._are_known(prompts, number)
        assert known.tolist() == ([True, True] if number == 1 else [False, False])


def test_few_prompts_are_remembered(watch, monkeypatch):
    monkeypatch.setattr("trainermon.rl.watch.PROMPTS_KEPT", 2)
    watch._are_known([[1], [2], [3]], 1)

    assert watch._are_known([[1], [2], [3]], 2).tolist() == [False, True, True]


def test_weights_that_are_sent_after_a_step_do_not_make_its_engine_old(watch):
    made, goes_on = Step(1), threading.Event()
    list(watch.sent({"a": torch.ones(3)}, version=1))
    watch._thread.submit(goes_on.wait)

    with watch.step(1):
        watch.rollout(logprobs=made.rollout, ids=made.ids, mask=made.mask, version=1)
        watch.train(logprobs=made.train, ids=made.ids, mask=made.mask)
    list(watch.sent({"a": torch.ones(3)}, version=2))
    goes_on.set()

    assert watch.report(1).version_lag == 0


def test_an_engine_that_is_behind_is_not_said_to_have_the_weights_of_the_trainer(watch):
    made, held = Step(1, "old weights"), {"a": torch.ones(3, dtype=torch.bfloat16)}
    list(watch.sent(held, version=1))
    watch.received(held, version=1, engine="engine")
    list(watch.sent({"a": torch.zeros(3)}, version=2))

    with watch.step(1):
        watch.rollout(logprobs=made.rollout, ids=made.ids, mask=made.mask, version=1)
        watch.train(logprobs=made.train, ids=made.ids, mask=made.mask, again=made.train + 0.01)

    report = watch.report(1)
    assert (report.version_lag, report.weights.is_equal) == (1, True)
    assert [str(cause.cause) for cause in report.causes] == ["unexplained"]
    assert "1 version behind" in report.sentence


def test_a_step_that_is_left_out_is_said_once(watch, caplog):
    goes_on = threading.Event()
    watch._thread.submit(goes_on.wait)
    for number in range(5):
        tell(watch, number, Step(1))
    goes_on.set()

    assert (watch.num_skipped, watch.report(2)) == (3, None)
    (record,) = caplog.records
    assert "faster than they can be compared" in record.getMessage()


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("bf16", "bfloat16"), ("bfloat16", "bfloat16"), (torch.bfloat16, "bfloat16"), ("", "float32"), (None, "float32")],
)
def test_types_have_short_names_or_are_those_of_torch(tmp_path, dtype, name):
    watch = rl.Watch(tmp_path, rank=0, dtype=dtype)
    list(watch.sent({"a": torch.randn(3)}, version=1))
    watch.close()

    assert read_sent(tmp_path, 1)[0].tensors["a"].dtype == name


def test_no_thread_is_left(tmp_path):
    before = set(threading.enumerate())
    watch = rl.Watch(tmp_path, rank=0)
    tell(watch, 1, Step(1))
    watch.close()

    assert set(threading.enumerate()) == before


def test_a_folder_without_reports_is_refused(tmp_path):
    with pytest.raises(DumpError, match="found no report in rank"):
        read_reports(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"temperature": -1}, "temperature"), ({"top_p": 1.5}, "top_p"), ({"logprobs": "both"}, "logprobs")],
)
def test_sampling_is_checked(options, message):
    with pytest.raises(ValueError, match=message):
        rl.Sampling(**options)


def test_snapshots_copy_what_lists_hold():
    tensor, array = torch.zeros(2), np.zeros(2)

    copies = snapshot({"value": [tensor, array], "nothing": None}).values()
    tensor.fill_(1)
    array[:] = 1

    assert [float(each.sum()) for each in copies["value"]] == [0, 0]
    assert "nothing" not in copies


def test_every_number_that_is_recorded_is_in_the_catalogue():
    weights = rl.WeightCheck(version=1, engines=("a",), equal=1)
    report = dataclasses.replace(Step(1).report(), weights=weights, version_lag=0)

    assert set(series_of(report, rl.Limits())) == set(ROLLOUT_SERIES)


def sampled_by(watch, *names):
    """Judge a step whose rollouts name these engines, the weights of `e0` alone being known."""
    made, held = Step(1), {"a": torch.ones(3, dtype=torch.bfloat16)}
    list(watch.sent(held, version=1))
    watch.received(held, version=1, engine="e0")
    with watch.step(1):
        for name in names:
            named = {} if name is None else {"engine": name}
            watch.rollout(logprobs=made.rollout, ids=made.ids, mask=made.mask, version=1, **named)
            watch.train(logprobs=made.train, ids=made.ids, mask=made.mask)
    return watch.report(1)


def test_the_only_engine_need_not_be_named_in_rollout(watch):
    report = sampled_by(watch, None)

    assert [part.engine for part in report.engines] == ["e0"]
    assert "were not compared" not in report.sentence


@pytest.mark.parametrize("names", [["engine"], ["e0", "e1"]])
def test_an_engine_of_another_name_is_not_taken_for_the_only_one(watch, names):
    assert f"the weights of {names[-1]} were not compared" in sampled_by(watch, *names).sentence
