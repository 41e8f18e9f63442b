"""Real gloo ranks that stand still, are stopped, killed or fail: who is named, in which collective, and who is not."""

import signal

import pytest

from tests.agent.nodes import wait_for

pytestmark = pytest.mark.distributed


def place(verdict):
    return verdict["kind"], verdict["op"], verdict["sequence"], verdict["group"]


def blamed(verdict):
    return [(culprit["rank"], culprit["cause"]) for culprit in verdict["culprits"]]


def test_whoever_has_not_entered_the_collective_is_named_and_a_job_that_goes_on_is_left_alone(start_job):
    job = start_job(
        "3:spin:1", "6:still:0", "9:data:1", "12:chain:0", "14:checkpoint:1", "16:evaluation:0", "18:inference:1"
    )

    spinning = job.report("hang", 3)["verdict"]
    assert (place(spinning), blamed(spinning)) == (("not-entered", "all_reduce", 4, "world"), [(1, "running")])
    assert spinning["waiting"] == [0]
    assert "spin (" in spinning["culprits"][0]["text"]
    job.go(3)

    job.reached(6)
    job.signal(0, signal.SIGSTOP)
    stopped = job.report("hang", 6)["verdict"]
    assert (place(stopped), blamed(stopped)) == (("not-entered", "all_reduce", 7, "world"), [(0, "stopped")])
    assert stopped["waiting"] == [1]
    job.go(6)
    job.signal(0, signal.SIGCONT)

    starving = job.report("hang", 9)
    assert (place(starving["verdict"]), blamed(starving["verdict"])) == (
        ("not-entered", "all_reduce", 10, "world"),
        [(1, "data-loader")],
    )
    (worker,) = starving["ranks"][1]["children"]
    functions = [frame["function"] for frame in worker["stacks"][0]["frames"]]  # it looks for a file again and again
    assert functions[functions.index("stand_still") :][:2] == ["stand_still", "Items.__getitem__"]
    job.go(9)

    chain = job.report("hang", 12)["verdict"]
    assert (place(chain), blamed(chain)) == (("not-entered", "recv 1<-0", 1, "world"), [(0, "running")])
    assert chain["waiting"] == [1]
    job.go(12)

    assert job.end() == [0, 0], job.said()
    alerts = [(alert["step"], alert["state"], alert["rank"]) for alert in job.alerts("hang")]
    firing = [(step, rank) for step, state, rank in alerts if state == "firing"]
    assert firing == [(3, 1), (6, 0), (9, 1), (12, 0)]  # none on the steps with a checkpoint or an evaluation
    assert sum(state == "resolved" for _, state, _ in alerts) == 4
    assert job.alerts("rank-dead") == []


def test_killed_rank_is_named_and_not_the_one_that_failed_for_it(start_job):
    job = start_job("3:still:1")
    job.reached(3)
    job.signal(1, signal.SIGKILL)

    report = job.report("rank-dead", 3)

    assert blamed(report["verdict"]) == [(1, "dead")]
    assert report["verdict"]["text"].startswith("rank 1 was killed by SIGKILL at step 3 (phase step)")
    assert report["ranks"][1]["exit"] == {"signal": 9, "status": None}
    follower = report["ranks"][0]  # which may still be on its way to its end when this is told
    assert follower["life"] == "running" or "Connection" in follower["error"]
    assert [record["step"] for record in report["records"]["1"]] == [0, 1, 2]
    assert job.end() == [1, -9]
    assert [(alert["rank"], alert["state"]) for alert in job.alerts("rank-dead")] == [(1, "firing")]


def test_exception_of_one_of_four_ranks_is_told_apart_from_those_that_follow(start_job):
    job = start_job("3:exception:2", world_size=4)

    report = job.report("rank-dead", 3)

    assert blamed(report["verdict"]) == [(2, "dead")]
    assert report["verdict"]["culprits"][0]["text"] == "failed: RuntimeError: the batch is empty"
    assert "in fail\n" in report["ranks"][2]["error"]
    assert report["ranks"][2]["life"] == "dead"


def test_one_of_four_ranks_that_calls_another_collective_is_named(start_job):
    job = start_job("3:mismatch:1", world_size=4)

    verdict = job.report("hang", 3)["verdict"]

    assert place(verdict) == ("mismatch", "all_gather/all_reduce", 4, "world")
    assert blamed(verdict) == [(1, "mismatch")]
    calls = {call["rank"]: call["op"] for call in verdict["calls"]}
    assert calls == {0: "all_reduce", 1: "all_gather", 2: "all_reduce", 3: "all_reduce"}
    assert "gather_instead (" in next(call["where"] for call in verdict["calls"] if call["rank"] == 1)


def test_sizes_that_differ_in_one_collective_are_told_of_with_both_ranks(start_job):
    job = start_job("3:sizes:1", hang={"step_s": 60.0})
    job.reached(3)
    job.go(3)

    report = job.report("rank-dead", 3)

    told = "all_reduce #4 of world was not given the same number of elements on all ranks: "
    assert told + "all_reduce of 4 on rank 0, all_reduce of 40000 on rank 1" in report["verdict"]["text"]
    (alert,) = job.alerts("rank-dead")
    assert told in alert["message"]


@pytest.mark.slow
def test_two_ranks_that_enter_two_groups_in_different_order_are_both_told(start_job):
    job = start_job("3:order:1")

    verdict = job.report("hang", 3)["verdict"]

    assert (verdict["kind"], verdict["culprits"], verdict["waiting"]) == ("deadlock", [], [0, 1])
    assert {(call["rank"], call["group"], call["sequence"]) for call in verdict["calls"]} == {
        (0, "world", 4),
        (1, "pair", 1),
    }


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_rank_of_four_that_breaks_a_chain_of_receives_is_named(start_job, rank):
    job = start_job(f"3:chain:{rank}", world_size=4)

    verdict = job.report("hang", 3)["verdict"]

    assert blamed(verdict) == [(rank, "running")]
    assert verdict["waiting"] == [other for other in range(4) if other != rank]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"), [("segfault", "was killed by SIGSEGV"), ("os_exit", "ended with exit status 7")]
)
def test_crash_without_an_exception_is_named_by_how_the_process_ended(start_job, fault, text):
    job = start_job(f"3:{fault}:1")
    job.reached(3)
    job.go(3)

    report = job.report("rank-dead", 3)

    (culprit,) = report["verdict"]["culprits"]
    assert (culprit["rank"], culprit["text"]) == (1, text)
    functions = [frame["function"] for stack in report["ranks"][1]["stacks"] for frame in stack["frames"]]
    assert ("segfault" in functions) is (fault == "segfault")


@pytest.mark.slow
@pytest.mark.parametrize(
    "without",
    [{"py_spy": False}, {"recorder": False}, {"calls": False}, {"recorder": False, "calls": False, "py_spy": False}],
)
def test_each_rung_alone_names_the_rank(start_job, without):
    """Without py-spy the stacks come from a signal; without a recorder they tell who is in a collective."""
    job = start_job("3:spin:1", "6:still:0", "9:lock:1", hang=without)

    for step, rank in ((3, 1), (6, 0), (9, 1)):
        report = job.report("hang", step)
        assert blamed(report["verdict"]) == [(rank, "running")]
        assert report["verdict"]["waiting"] == [1 - rank]
        assert all(one["stacks"] for one in report["ranks"])
        job.go(step)

    assert job.end() == [0, 0]


@pytest.mark.slow
def test_hang_is_told_within_thirty_seconds_of_its_limit(start_job):
    job = start_job("3:spin:1")
    job.report("hang", 3)

    (alert,) = wait_for(lambda: job.alerts("hang"), "the alert")

    assert alert["baseline"] == 1.5
    assert alert["value"] < 1.5 + 30
