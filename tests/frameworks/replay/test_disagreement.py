"""Where one rank cannot replay, or does not know that it should, none does, and none waits for ever."""

from typing import Any

import pytest

from tests.frameworks.replay.checks import FAULT_STEP, Results

pytestmark = pytest.mark.distributed

PLANTED = "RuntimeError: planted fault"
MISSING = "1 of 2 ranks did not ask for it within 3 s"
CLEAN, BAD = ("clean", ""), ("nonfinite", "")
SHORT = "another rank had not kept 1 of the micro steps that this one had"
# By case: status and reason on each rank; None where nothing was tried.
EXPECTED: dict[str, Any] = {
    "no-writer": [("refused", f"rank 1: {PLANTED}"), ("failed", PLANTED)],
    "no-capture": [("refused", f"rank 1: {PLANTED}"), ("failed", PLANTED)],
    "late-fault": [("refused", MISSING), None],
    "fewer-kept": [("clean", SHORT), ("nonfinite", "the first 1 micro steps did not fit the budget of 1024 MiB")],
    "chosen-ranks": [None, None],
    "not-joint": [None, None],
    "seen-by-one": [None, ("refused", MISSING)],
    "clipped-by-infinity": [CLEAN, CLEAN],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Results.of("disagreement_worker", tmp_path_factory.mktemp("disagreement"))


@pytest.mark.parametrize("name", EXPECTED)
def test_both_ranks_get_the_same_answer_and_no_bit_differs(results, name):
    for rank, expected in zip(results.of_rank, EXPECTED[name], strict=True):
        found = rank[name]
        assert found["same"]
        assert [(event["step"], event["status"], event["reason"]) for event in found["replays"]] == (
            [] if expected is None else [(FAULT_STEP, *expected)]
        )


@pytest.mark.parametrize(
    ("name", "text"), [("chosen-ranks", "module_ranks leaves some out"), ("not-joint", "replay.joint is false")]
)
def test_the_user_is_told_what_stands_in_the_way(results, name, text):
    for rank in results.of_rank:
        (warning,) = rank[name]["others"]
        assert text in warning["message"]
