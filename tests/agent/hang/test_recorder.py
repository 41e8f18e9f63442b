"""What is made of a flight recorder's JSON, and how a rank's socket is asked."""

import asyncio
import json
import os
import socket
import threading

import pytest

from trainermon.agent.hang.evidence import GroupState, PendingCall
from trainermon.agent.hang.recorder import RankGroups, group_states, read_about, read_recorder
from trainermon.core.flight_recorder import parse

ABOUT = RankGroups(groups={"0": ("world", (0, 1)), "7": ("dp", (0, 1))})
NOTHING = RankGroups()


def entry(group, op, sequence, *, retired=False, state="scheduled", p2p=0, pg_id=0, description="undefined"):
    return {
        "collective_seq_id": sequence,
        "p2p_seq_id": p2p,
        "is_p2p": bool(p2p),
        "pg_id": pg_id,
        "process_group": [group, description],
        "profiling_name": op,
        "retired": retired,
        "state": state,
        "input_sizes": [[3, 2]],
        "input_dtypes": ["Float"],
        "output_sizes": [],
        "output_dtypes": [],
        "time_created_ns": 1,
    }


def recording(*entries, **others):
    return json.dumps({"entries": entries, "pg_status": {}, "pg_config": {}, **others})


def states(text, about=ABOUT):
    return {state.name: state for state in group_states(parse(text), about)}


def test_gloo_call_that_is_not_retired_is_in_flight():
    found = states(recording(entry("0", "gloo:all_reduce", 3, retired=True), entry("0", "gloo:all_reduce", 4)))

    assert found["world"] == GroupState(
        name="world", ranks=(0, 1), entered=4, in_flight=(PendingCall(op="all_reduce", sequence=4, shapes=((3, 2),)),)
    )
    assert found["dp"] == GroupState(name="dp", ranks=(0, 1))


def test_nccl_call_is_in_flight_until_its_device_has_completed_it():
    found = states(
        recording(
            entry("7", "nccl:all_reduce", 8, state="completed"),
            entry("7", "nccl:all_gather", 9, state="started"),
            entry("7", "nccl:send 0->1", 9, state="scheduled", p2p=5),
        )
    )

    assert found["dp"].entered == 9
    assert [(call.op, call.state, call.peer) for call in found["dp"].in_flight] == [
        ("all_gather", "started", None),
        ("send 0->1", "scheduled", 1),
    ]


def test_members_come_from_the_recorder_where_the_rank_has_not_told_them():
    text = recording(
        entry("9", "nccl:all_reduce", 1, description="mesh_tp"),
        pg_config={"2": {"name": "9", "desc": "mesh_tp", "ranks": "[4, 5]"}},
    )

    assert states(text, NOTHING)["mesh_tp"].ranks == (4, 5)


def test_group_whose_notes_were_overwritten_is_known_by_its_progress():
    status = {"last_enqueued_collective": "12", "last_completed_collective": "12", "last_started_collective": "-1"}
    text = recording(pg_status={"3": status}, pg_config={"3": {"name": "7", "ranks": "[0, 1]"}})

    assert states(text)["dp"].entered == 12


@pytest.fixture
def rank_socket(tmp_path):
    """Listen where a rank's recorder would, in a folder whose path is too long for a socket's name."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"/proc/self/fd/{descriptor}/rank00004.sock")
    os.close(descriptor)
    listener.listen()
    answers = []
    asked = []

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                asked.append(connection.recv(1000).split()[1].decode())
                if not answers:
                    connection.recv(1000)  # says nothing, until the other side gives up
                    continue
                status, body = answers.pop(0)
                connection.sendall(b"HTTP/1.1 %d X\r\nConnection: close\r\n\r\n" % status + body)

    thread = threading.Thread(target=serve)
    thread.start()
    yield folder, answers, asked
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def read(folder, *, limit_s=10.0, about=ABOUT):
    return asyncio.run(read_recorder(folder, 4, about, limit_s=limit_s))


def test_every_recorder_is_asked_as_torchs_cuda_build_answers_for_nccl_also_where_only_gloo_is_used(rank_socket):
    folder, answers, asked = rank_socket
    answers += [(200, recording().encode()), (200, recording(entry("0", "gloo:barrier", 2)).encode())]

    found = read(folder)

    assert asked == ["/handler/dump_nccl_trace_json", "/handler/fr_trace_json"]
    assert [(state.name, state.entered) for state in found] == [("world", 2), ("dp", 0)]


def test_recorder_that_this_torch_does_not_have_is_left_out(rank_socket):
    folder, answers, _ = rank_socket
    answers += [(404, b"no such handler"), (200, recording(entry("0", "gloo:barrier", 2)).encode())]

    assert [state.entered for state in read(folder)] == [2, 0]

    answers += [(404, b"no such handler"), (404, b"no such handler")]
    with pytest.raises(OSError, match="dump_nccl_trace_json: HTTP status 404; fr_trace_json: HTTP status 404"):
        read(folder)


def test_groups_of_two_backends_are_known_by_both_recorders(rank_socket):
    """As `cpu:gloo,cuda:nccl`, torch's default on a machine with devices: each backend counts for itself."""
    folder, answers, _ = rank_socket
    answers += [
        (200, recording(entry("0", "nccl:all_gather", 9), entry("7", "nccl:all_reduce", 3)).encode()),
        (200, recording(entry("0", "gloo:barrier", 2)).encode()),
    ]

    found = read(folder, about=RankGroups(groups=ABOUT.groups, mixed=frozenset({"0"})))

    assert [(state.name, state.entered) for state in found] == [("world", 9), ("dp", 3), ("world on CPU", 2)]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"entries": [3]}', b"\xff\xfe", b"[" * 100_000])
def test_answer_that_is_no_recorders_is_told(rank_socket, body):
    folder, answers, _ = rank_socket
    answers += [(200, body)] * 2

    with pytest.raises(OSError, match="not understood"):
        read(folder)


def test_rank_that_takes_the_question_and_does_not_answer_costs_the_limit(rank_socket):
    folder, _, _ = rank_socket

    with pytest.raises(asyncio.TimeoutError):
        read(folder, limit_s=0.2)


def test_no_socket_is_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path)


def test_about_that_is_damaged_is_nothing(tmp_path):
    path = tmp_path / "rank00004.about"
    for text in ("", "[]", '{"groups": [{}], "main_thread": 1, "signal": 2}', '{"groups": 3}'):
        path.write_text(text)
        assert read_about(tmp_path, 4) == NOTHING
    path.write_text(
        '{"pid": 1, "main_thread": 5, "signal": 39, "groups": ['
        '{"torch_name": "0", "name": "world", "ranks": [0, 1], "is_mixed": true},'
        '{"torch_name": "7", "name": "dp", "ranks": [0, 1]}]}'
    )
    assert read_about(tmp_path, 4) == RankGroups(main_thread=5, signal=39, groups=ABOUT.groups, mixed=frozenset({"0"}))
