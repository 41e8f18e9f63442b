"""What a flight recorder writes, and what is made of it."""

import json

import pytest

from trainermon.core.flight_recorder import FlightRecorder, GroupProgress, parse

# As torch 2.13 writes it for two collectives of gloo, and one of NCCL with its timing on; shortened.
ENTRY = {
    "collective_seq_id": 17,
    "input_dtypes": ["Float", "BFloat16"],
    "input_sizes": [[10], [3, 2]],
    "is_p2p": False,
    "output_dtypes": ["Float"],
    "output_sizes": [[2, 10]],
    "p2p_seq_id": 0,
    "pg_id": 1,
    "process_group": ["7", "tp group"],
    "profiling_name": "gloo:all_gather",
    "state": "scheduled",
    "time_created_ns": 1795230375517573111,
}
STATUS = {"last_completed_collective": "-1", "last_enqueued_collective": "2", "last_started_collective": "-1"}


def written(*entries, **others):
    return json.dumps({"version": "2.10", "pg_status": {"1": STATUS}, "entries": list(entries), **others})


def test_entry_is_read():
    (entry,) = parse(written(ENTRY)).entries

    assert (entry.group, entry.description, entry.op, entry.sequence) == ("7", "tp group", "all_gather", 17)
    assert (entry.input_shapes, entry.output_shapes) == (((10,), (3, 2)), ((2, 10),))
    assert entry.size_bytes == 80  # the output; the inputs are 40 and 12
    assert entry.created_s == pytest.approx(1795230375.517573)
    assert entry.duration_s is None


def test_point_to_point_entry_has_a_number_of_its_own():
    (entry,) = parse(written(ENTRY | {"is_p2p": True, "p2p_seq_id": 4, "profiling_name": "nccl:send 0->1"})).entries

    assert (entry.sequence, entry.op) == (4, "send 0->1")


def test_duration_is_in_seconds():
    (entry,) = parse(written(ENTRY | {"duration_ms": 2.5})).entries

    assert entry.duration_s == 0.0025


def test_size_in_an_unknown_type_is_not_guessed():
    (entry,) = parse(written(ENTRY | {"input_dtypes": ["Float", "Float8_e4m3fn"]})).entries

    assert entry.size_bytes is None


def test_entry_without_tensors_has_no_bytes():
    nothing = {"input_dtypes": [], "input_sizes": [], "output_dtypes": [], "output_sizes": []}
    (entry,) = parse(written(ENTRY | nothing)).entries

    assert entry.size_bytes == 0


def test_progress_of_a_group_whose_first_collective_is_not_complete():
    recording = parse(written())

    assert recording.progress == {"1": GroupProgress(2, -1)}
    assert recording.progress["1"].in_flight == 2


def test_names_come_from_entries_and_from_the_configuration():
    recording = parse(written(ENTRY, pg_config={"": {"name": ""}, "3": {"name": "9"}}))

    assert recording.names == {"1": "7", "3": "9"}


@pytest.mark.parametrize("text", ["[]", "{", ""])
def test_what_is_no_recording_is_refused(text):
    with pytest.raises(ValueError, match=r"expected|Expecting"):
        parse(text)


def test_progress_is_by_name_and_the_name_is_asked_for_once():
    recorder = FlightRecorder()
    full = []

    def read(with_entries, only_active):
        full.append(with_entries)
        return written(*[ENTRY] * with_entries).encode()

    recorder._readers, recorder._names = [read], [{}]

    assert recorder.progress() == recorder.progress() == {"7": GroupProgress(2, -1)}
    assert full == [False, True, False]


def test_several_backends_of_a_group_add_up():
    recorder = FlightRecorder()
    recorder._readers, recorder._names = [lambda *_: written(ENTRY).encode()] * 2, [{}, {}]

    assert recorder.progress() == {"7": GroupProgress(4, -2)}
    assert len(recorder.entries()) == 2


def test_torch_without_a_recorder_says_so(monkeypatch):
    monkeypatch.setattr("trainermon.core.flight_recorder._READERS", ("_not_there",))
    recorder = FlightRecorder()

    assert "no flight recorder" in recorder.reason
    assert (recorder.progress(), recorder.entries()) == ({}, ())
