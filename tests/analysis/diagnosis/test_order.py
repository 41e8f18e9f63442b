"""Which rank was first, by matched communication: on dumps of three real ranks, and on calls made by hand."""

import json
import math
from pathlib import Path

import pytest

from tests.analysis import communication_job
from tests.analysis.communication_job import FAULTS, SOUND
from tests.ranks import run_ranks
from trainermon import cli
from trainermon.analysis.diagnosis.against.against import diagnose_against
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import RankRole, Symptom
from trainermon.analysis.diagnosis.order import CallEvent, CommunicationCall, communications, earliest
from trainermon.dump.files.reader import RawDump

NONFINITE = [fault for fault in FAULTS if not math.isfinite(fault.factor)]
FINITE = [fault for fault in FAULTS if math.isfinite(fault.factor)]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    run_ranks(Path(communication_job.__file__), str(folder), world_size=3)
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("fault", NONFINITE, ids=lambda fault: fault.name)
def test_a_value_that_others_received_is_blamed_on_the_rank_that_made_it(dumps, fault):
    diagnosis = diagnose(dumps / fault.name)

    assert (diagnosis.rank, diagnosis.api) == (fault.rank, fault.api), diagnosis.headline
    roles = {finding.rank: finding.role for finding in diagnosis.ranks}
    assert [rank for rank, role in roles.items() if role is RankRole.ORIGIN] == [fault.rank]


@pytest.mark.distributed
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_first_difference_is_on_the_rank_that_made_it(dumps, fault):
    diagnosis = diagnose_against(dumps / fault.name, dumps / SOUND)

    # the factor is what differs first: the multiplication is given it
    assert (diagnosis.rank, diagnosis.api) == (fault.rank, fault.api), diagnosis.headline
    assert diagnosis.symptom is Symptom.DIFFERS
    assert "ranks ordered by matched communication" in diagnosis.evidence


@pytest.mark.distributed
def test_command_takes_dumps_alone(dumps, capsys):
    assert cli.main(["diagnose", str(dumps / NONFINITE[0].name), "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["api"] == NONFINITE[0].api


def bad(rank, order):
    return CallEvent(rank, order, f"Tensor.mul.{order}.forward")


def call(rank, order, operation, *, group=(), peer=None):
    return CommunicationCall(CallEvent(rank, order, f"Distributed.{operation}.{order}.forward"), operation, group, peer)


def test_what_comes_after_a_collective_may_be_a_consequence_and_what_comes_before_is_none():
    calls = {rank: [call(rank, 10, "all_reduce")] for rank in range(3)}

    assert earliest([bad(0, 20), bad(1, 5), bad(2, 30)], calls) == (bad(1, 5),)
    assert earliest([bad(0, 9), bad(1, 5)], calls) == (bad(0, 9), bad(1, 5))
    assert earliest([bad(0, 20), bad(1, 15)], calls) == (bad(0, 20), bad(1, 15))


def test_a_group_orders_its_members_only():
    calls = {rank: [call(rank, 10, "all_reduce", group=(0, 1))] if rank < 2 else [] for rank in range(3)}

    assert earliest([bad(0, 5), bad(1, 20), bad(2, 30)], calls) == (bad(0, 5), bad(2, 30))


def test_a_broadcast_carries_what_its_root_did_and_nothing_else():
    calls = {rank: [call(rank, 10, "broadcast", peer=1)] for rank in range(3)}

    assert earliest([bad(1, 5), bad(2, 20)], calls) == (bad(1, 5),)
    assert earliest([bad(0, 5), bad(2, 20)], calls) == (bad(0, 5), bad(2, 20))


def test_sends_and_receives_are_matched_by_their_number():
    calls = {
        0: [call(0, 10, "send", peer=1), call(0, 30, "send", peer=1)],
        1: [call(1, 10, "recv", peer=0), call(1, 30, "recv", peer=0)],
    }

    assert earliest([bad(0, 20), bad(1, 40)], calls) == (bad(0, 20),)
    assert earliest([bad(0, 20), bad(1, 20)], calls) == (bad(0, 20), bad(1, 20))
    assert earliest([bad(1, 5), bad(0, 40)], calls) == (bad(0, 40), bad(1, 5))


def test_collectives_in_different_orders_contradict_and_every_rank_keeps_its_first():
    first, second = ("all_reduce", (0, 1)), ("all_gather", (0, 1))
    calls = {
        rank: [call(rank, 10 * place, name, group=group) for place, (name, group) in enumerate(order, start=1)]
        for rank, order in ((0, (first, second)), (1, (second, first)))
    }

    assert earliest([bad(0, 15), bad(1, 15)], calls) == (bad(0, 15), bad(1, 15))


def test_roots_partners_and_groups_are_read_from_what_a_call_was_given():
    tensor = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2]}
    group = {"type": "torch.ProcessGroup", "group_ranks": [4, 6], "group_id": "x"}

    def number(value):
        return {"type": "int", "value": value}

    data = {
        "Distributed.broadcast.0.forward": {"input_args": [tensor, number(4), group], "input_kwargs": {}},
        "Distributed.send.0.forward": {"input_args": [tensor], "input_kwargs": {"dst": number(6)}},
        "Distributed.reduce.0.forward": {
            "input_args": [tensor],
            "input_kwargs": {"group": group, "group_dst": number(1)},
        },
        "Tensor.mul.0.forward": {"input_args": [tensor, number(3)], "input_kwargs": {}},
    }

    found = communications(RawDump(data=data), 4)

    assert [(one.operation, one.group, one.peer) for one in found] == [
        ("broadcast", (4, 6), 4),
        ("send", (), 6),
        ("reduce", (4, 6), 6),
    ]


def message(op, peer):
    tensor = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2]}
    return {
        "class_type": "torch.distributed.P2POp",
        "tensor": tensor,
        "op": op,
        "peer": peer,
        "tag": 0,
        "group_id": "x",
    }


def batch(rank, *messages, by_name=False):
    operations = [message(op, peer) for op, peer in messages]
    given = {"input_args": [], "input_kwargs": {"p2p_op_list": operations}} if by_name else {"input_args": [operations]}
    return communications(RawDump(data={"Distributed.batch_isend_irecv.0.forward": given}), rank)


@pytest.mark.parametrize("by_name", [False, True])
def test_messages_of_a_batch_go_both_ways(by_name):
    calls = {rank: batch(rank, ("isend", 1 - rank), ("irecv", 1 - rank), by_name=by_name) for rank in range(2)}

    assert [(one.operation, one.peer) for one in calls[0]] == [("isend", 1), ("irecv", 1)]
    assert earliest([bad(0, -1), bad(1, 5)], calls) == (bad(0, -1),)
    assert earliest([bad(0, 5), bad(1, -1)], calls) == (bad(1, -1),)
    assert earliest([bad(0, 5), bad(1, 5)], calls) == (bad(0, 5), bad(1, 5))


def test_a_batch_that_only_sends_brings_nothing_back():
    calls = {0: batch(0, ("isend", 1)), 1: batch(1, ("irecv", 0))}

    assert earliest([bad(0, 5), bad(1, -1)], calls) == (bad(0, 5), bad(1, -1))


@pytest.mark.parametrize("given", [{}, {"input_args": [7]}, {"input_args": [[7, {"peer": 1}]]}])
def test_a_batch_that_is_laid_out_otherwise_ties_nobody(given):
    assert communications(RawDump(data={"Distributed.batch_isend_irecv.0.forward": given}), 0) == []


def test_messages_without_a_known_partner_tie_nobody():
    calls = {0: [call(0, 10, "send")], 1: [call(1, 10, "recv")]}

    assert earliest([bad(0, 5), bad(1, 20)], calls) == (bad(0, 5), bad(1, 20))
