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

        assert len(found) == 10
        assert {call.key: call.reason for call in found.values() if call.status is not Status.PASS} == {}


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
    ],
)
def test_a_wrong_result_is_an_error_of_that_collective_alone(ranks, tmp_path, name, slot, alter):
    shutil.copytree(ranks, tmp_path / "step0")
    folder = tmp_path / "step0" / "rank0" / "dump_tensor_data"
    path = folder / f"Distributed.{name}.forward.{slot}.pt"
    torch.save(alter(folder, torch.load(path, weights_only=True)), path)

    found = collectives(tmp_path / "step0" / "rank0")

    assert [call.stem for call in found.values() if call.status is Status.ERROR] == [f"Distributed.{name}"]


def test_without_the_other_ranks_nothing_is_judged(ranks, tmp_path):
    shutil.copytree(ranks / "rank1", tmp_path / "rank1")

    found = collectives(tmp_path / "rank1")

    assert {(call.status, call.reason) for call in found.values()} == {
        (Status.SKIP, "the dump of rank 0 is not beside it")
    }


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
