"""Which part of a job some ranks are: two pipeline stages of two tensor-parallel ranks each."""

import json

import pytest

from trainermon.analysis.diagnosis.domains import describe_domain, read_places

PLACES = {rank: {"pp": rank // 2, "tp": rank % 2} for rank in range(4)}


@pytest.mark.parametrize(
    ("ranks", "answer", "why"),
    [
        ([3, 2], "pp 1", "ranks 2, 3 and no others"),
        ([0, 2], "tp 0", "ranks 0, 2 and no others"),
        ([1], "pp 0, tp 1", "rank 1 and no other"),
        ([0, 3], "several", "ranks 0, 3, which share no place on any axis"),
        ([0, 1, 2, 3], "all ranks", "all 4 ranks alike"),
        ([7], "", ""),
        ([], "", ""),
    ],
)
def test_ranks_are_told_by_what_they_alone_share(ranks, answer, why):
    assert describe_domain(ranks, PLACES) == (answer, why)


def test_some_of_the_ranks_of_a_place_are_told_as_such():
    wide = {rank: {"pp": rank // 4, "dp": rank % 4} for rank in range(8)}

    assert describe_domain([4, 6], wide) == ("pp 1", "ranks 4, 6 of the 4 ranks there")


def test_a_rank_whose_file_is_damaged_costs_no_other(tmp_path):
    (tmp_path / "ranks").mkdir()
    told = {"rank": 1, "tp": 1, "tp_size": 2, "pp": 0, "pp_size": 1}
    for name, text in (("0", "{"), ("1", json.dumps({"coordinates": told})), ("2", "[]"), ("3", "{}")):
        (tmp_path / "ranks" / f"rank0000{name}.json").write_text(text)

    assert read_places(tmp_path) == {1: {"tp": 1}}
