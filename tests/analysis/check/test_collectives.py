"""Collectives of a dump: two real ranks are right, and what one of them got wrong is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.analysis.check import collective_ranks
from tests.ranks import run_ranks
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import check_dump


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(Path(collective_ranks.__file__), str(folder))
    return folder / "dump" / "step0"


def collectives(directory):
    return {call.stem: call for call in check_dump(directory).calls if call.key.startswith("Distributed.")}


def test_sound_ranks_are_right_in_every_collective(ranks):
    for rank in ("rank0", "rank1"):
        found = collectives(ranks / rank)

        unjudged = {
            call.stem.split(".", 1)[1]: call.reason for call in found.values() if call.status is not Status.PASS
        }
        sends = {name: "it only sends" for name in unjudged if "send" in name}
        elsewhere = {"rank0": "reduce.0", "rank1": "gather.0"}[rank]
        assert unjudged == {**sends, elsewhere: "another rank has its result"}
        assert (len(found), len(sends)) == {"rank0": (22, 4), "rank1": (22, 3)}[rank]


def lose_a_rank(folder, result):
    return torch.load(folder / "Distributed.all_reduce.0.forward.input.0.pt", weights_only=True)


@pytest.mark.parametrize(
    ("name", "slot", "alter"),
    [
        ("all_reduce.0", "output.0", lose_a_rank),
        ("all_reduce.1", "output.0", lambda _, result: result * 1.05),
        ("all_reduce.3", "output.0", lambda _, result: result + 1),
        ("broadcast.0", "output.0", lambda _, result: result.roll(1)),
        ("all_gather.0", "output.0.1", lambda _, result: torch.zeros_like(result)),
        ("all_gather_into_tensor.0", "output.0", lambda _, result: result.roll(6)),
        ("reduce_scatter_tensor.0", "output.0", lambda _, result: result / 2),
        ("all_to_all_single.0", "output.0", lambda _, result: result.flip(0)),
        ("all_to_all_single.1", "output.0", lambda _, result: result.roll(1, 0)),
        ("gather.0", "output.1.1", lambda _, result: result.roll(1)),
        ("scatter.0", "output.0", lambda _, result: result.flip(0)),
        ("recv.0", "output.0", lambda _, result: result.roll(1)),
        ("recv.1", "output.0", lambda _, result: torch.zeros_like(result)),
        ("irecv.0", "output.0", lambda _, result: result + 1e-6),
        ("batch_isend_irecv.0", "output.0.0.tensor", lambda _, result: result.roll(1)),
    ],
)
def test_a_wrong_result_is_an_error_of_that_collective_alone(ranks, tmp_path, name, slot, alter):
    only_one_is_wrong(ranks, tmp_path, "rank0", (name, slot), alter)


@pytest.mark.parametrize(
    ("name", "alter"),
    [("reduce.0", lambda _, result: result * 1.05), ("irecv.1", lambda _, result: result.roll(1))],
)
def test_a_wrong_result_of_the_rank_that_receives_is_an_error(ranks, tmp_path, name, alter):
    only_one_is_wrong(ranks, tmp_path, "rank1", (name, "output.0"), alter)


def test_messages_that_the_sender_has_not_recorded_are_not_judged(ranks, tmp_path):
    shutil.copytree(ranks, tmp_path / "step0")
    path = tmp_path / "step0" / "rank0" / "dump.json"
    whole = json.loads(path.read_text())
    del whole["data"]["Distributed.isend.1.forward"]
    path.write_text(json.dumps(whole))

    found = collectives(tmp_path / "step0" / "rank1")

    assert found["Distributed.irecv.2"].reason == "the dump of rank 0 has not as many messages to this one"
    assert not [call for call in found.values() if call.status is Status.ERROR]


def only_one_is_wrong(ranks, tmp_path, rank, wrong, alter):
    name, slot = wrong
    shutil.copytree(ranks, tmp_path / "step0")
    folder = tmp_path / "step0" / rank / "dump_tensor_data"
    path = folder / f"Distributed.{name}.forward.{slot}.pt"
    torch.save(alter(folder, torch.load(path, weights_only=True)), path)

    found = collectives(tmp_path / "step0" / rank)

    assert [call.stem for call in found.values() if call.status is Status.ERROR] == [f"Distributed.{name}"]


def test_without_the_other_ranks_nothing_is_judged(ranks, tmp_path):
    shutil.copytree(ranks / "rank1", tmp_path / "rank1")

    found = collectives(tmp_path / "rank1")

    reasons = {call.reason for call in found.values()} - {"it only sends", "another rank has its result"}
    assert reasons == {"the dump of rank 0 is not beside it"}
    assert {call.status for call in found.values()} == {Status.SKIP}


def test_a_dump_that_does_not_say_how_many_ranks_there_are_is_not_judged(ranks, tmp_path):
    shutil.copytree(ranks, tmp_path / "step0")
    for path in (tmp_path / "step0").glob("rank*/dump.json"):
        whole = json.loads(path.read_text())
        for value in whole["data"].values():
            value.get("trainermon", {}).pop("world_size", None)
        path.write_text(json.dumps(whole))

    found = collectives(tmp_path / "step0" / "rank0")

    assert found["Distributed.all_reduce.0"].reason == "the dump does not say which ranks took part"
    assert found["Distributed.all_reduce.3"].status is Status.PASS  # its group is named
