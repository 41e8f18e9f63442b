from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.full_disk import room_for
from trainermon.core.control import ControlPage, ControlReader, Heartbeat, Phase
from trainermon.core.errors import SpoolError
from trainermon.core.values import Action, Command, DumpTask

DUMP = Command(
    id="manual-1", action=Action.DUMP, first_step=812, num_steps=2, scope=("h.0", "h.1"), task=DumpTask.TENSOR
)


@pytest.fixture
def page(tmp_path):
    page = ControlPage(tmp_path, 3)
    yield page
    page.close()


@pytest.fixture
def reader(tmp_path):
    reader = ControlReader(tmp_path, 3)
    yield reader
    reader.close()


def test_a_beat_is_seen_with_all_its_fields(page, reader):
    assert reader.heartbeat() is None

    page.beat(812, Phase.OPTIMIZER, 1.5e9)

    assert reader.heartbeat() == Heartbeat(step=812, phase=Phase.OPTIMIZER, time_s=1.5e9, generation=1, pid=os.getpid())


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1), st.sampled_from(Phase), st.floats(allow_nan=False, allow_infinity=False)
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_last_beat_counts(tmp_path_factory, beats):
    directory = tmp_path_factory.mktemp("page")
    page, reader = ControlPage(directory, 0), ControlReader(directory, 0)

    for step, phase, time_s in beats:
        page.beat(step, phase, time_s)
        beat = reader.heartbeat()
        assert beat is not None
        assert (beat.step, beat.phase, beat.time_s) == (step, phase, time_s)

    page.close()
    reader.close()


def test_there_is_no_heartbeat_before_the_rank_starts(reader):
    assert reader.heartbeat() is None


def test_the_page_is_laid_out_as_documented(page, tmp_path):
    page.beat(7, Phase.DUMP, 2.0)
    page.beat(8, Phase.STEP, 3.0)

    content = (tmp_path / "rank00003.page").read_bytes()

    assert len(content) == 4096
    assert content[:8] == b"TMONPAGE"
    assert struct.unpack_from("=Q", content, 8) == (1,)
    epoch, check = struct.unpack_from("=II", content, 64)
    assert (epoch, check) == (0, zlib.crc32(struct.pack("=Q", 0)))
    for offset, beat in ((256, (1, 7, 2.0, 4, os.getpid())), (128, (2, 8, 3.0, 1, os.getpid()))):
        assert struct.unpack_from("=QqdQQ", content, offset) == beat
        assert struct.unpack_from("=I", content, offset + 40) == (zlib.crc32(content[offset : offset + 40]),)
    assert (tmp_path / "rank00003.page").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", range(44))
def test_a_torn_slot_shows_the_beat_before(page, reader, tmp_path, damage):
    page.beat(1, Phase.STEP, 1.0)
    page.beat(2, Phase.STEP, 2.0)  # the even generation lies in the slot at 128

    with open(tmp_path / "rank00003.page", "r+b") as file:
        file.seek(128 + damage)
        byte = file.read(1)[0]
        file.seek(128 + damage)
        file.write(bytes([byte ^ 0x40]))

    beat = reader.heartbeat()
    assert beat is not None
    assert beat.step == 1


def test_a_reader_never_goes_back(page, reader, tmp_path):
    page.beat(1, Phase.STEP, 1.0)
    page.beat(2, Phase.STEP, 2.0)
    newest = reader.heartbeat()
    assert newest is not None
    assert newest.step == 2

    with open(tmp_path / "rank00003.page", "r+b") as file:  # as if the newer slot were just being written
        file.seek(128)
        file.write(b"\xff" * 44)

    assert reader.heartbeat() == newest


def test_generation_and_epoch_go_on_in_the_next_attempt(page, reader, tmp_path):
    page.beat(800, Phase.STEP, 1.0)
    reader.send([DUMP])
    assert reader.heartbeat() is not None
    page.close()

    second = ControlPage(tmp_path, 3)
    second.beat(5, Phase.SETUP, 2.0)

    beat = reader.heartbeat()
    assert beat is not None
    assert (beat.step, beat.generation) == (5, 2)
    assert second.epoch() == 1
    second.close()


@pytest.mark.parametrize("is_missed", [False, True])
def test_a_page_that_was_removed_and_made_again_is_followed(page, reader, tmp_path, is_missed):
    for step in range(5):
        page.beat(step, Phase.STEP, 1.0)
    assert reader.heartbeat() is not None
    (tmp_path / "rank00003.page").unlink()
    assert is_missed or reader.heartbeat() is None

    second = ControlPage(tmp_path, 3)
    second.beat(1, Phase.STEP, 1.0)

    beat = reader.heartbeat()
    assert beat is not None
    assert (beat.step, beat.generation) == (1, 1)
    second.close()


@pytest.mark.parametrize("content", [b"", b"TMONPAGE", b"\0" * 4096, b"\xff" * 4096])
def test_what_is_not_a_page_is_no_heartbeat_and_made_one_by_the_rank(reader, tmp_path, content):
    (tmp_path / "rank00003.page").write_bytes(content)
    assert reader.heartbeat() is None

    page = ControlPage(tmp_path, 3)
    page.beat(1, Phase.STEP, 1.0)

    assert reader.heartbeat() is not None
    assert page.epoch() == 0
    page.close()


def test_a_phase_of_a_newer_release_is_not_taken_for_another(page, reader, monkeypatch):
    page.beat(1, Phase.STEP, 1.0)
    page.beat(2, 77, 1.0)  # what a newer rank would write

    beat = reader.heartbeat()
    assert beat is not None
    assert beat.step == 1


def test_a_page_has_its_blocks_for_those_who_map_it(tmp_path):
    page = ControlPage(tmp_path, 3)
    assert os.stat(tmp_path / "rank00003.page").st_blocks * 512 >= 4096, "a hole is SIGBUS on a full disk"
    page.close()


def shorten(path, size):
    os.truncate(path, size)


def replace(path, content):
    path.unlink()
    path.write_bytes(content)


def overwrite(path, content):
    path.write_bytes(content)


ATTACKS = {
    "truncated to nothing": lambda path: shorten(path, 0),
    "truncated": lambda path: shorten(path, 100),
    "removed": lambda path: path.unlink(),
    "replaced by an empty file": lambda path: replace(path, b""),
    "replaced by rubbish": lambda path: replace(path, b"rubbish" * 1000),
    "overwritten by zeros": lambda path: overwrite(path, bytes(4096)),
    "overwritten by rubbish": lambda path: overwrite(path, b"rubbish" * 10),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_page_that_somebody_spoils_is_made_anew_and_that_is_told_once(page, reader, tmp_path, caplog, attack):
    page.beat(1, Phase.STEP, 1.0)
    reader.send([DUMP])
    assert page.epoch() == 1
    assert reader.heartbeat() is not None
    path = tmp_path / "rank00003.page"

    for step in range(2, 402):
        if step % 100 == 2:
            ATTACKS[attack](path)
            reader.heartbeat()
        page.beat(step, Phase.STEP, 2.0)
        page.epoch()

    assert path.stat().st_size >= 4096
    assert reader.heartbeat() == Heartbeat(step=401, phase=Phase.STEP, time_s=2.0, generation=401, pid=os.getpid())
    before = page.epoch()
    reader.send([])
    assert page.epoch() != before
    assert len(caplog.records) == 1
    assert "rank00003.page was changed by somebody else: it is made anew" in caplog.text


def test_a_page_that_cannot_be_made_anew_ends_nothing_and_is_told_once(page, tmp_path, caplog):
    (tmp_path / "rank00003.page").unlink()
    (tmp_path / "rank00003.page").mkdir()

    for step in range(200):
        page.beat(step, Phase.STEP, 1.0)
        page.epoch()

    assert len(caplog.records) == 1


def test_a_beat_for_which_there_is_no_space_ends_nothing_and_is_told_once(page, tmp_path, caplog):
    """The page is a hole after somebody has shortened it, and the disk is full."""
    os.truncate(tmp_path / "rank00003.page", 0)
    with room_for(0):
        for step in range(200):
            page.beat(step, Phase.STEP, 1.0)
            page.epoch()

    assert len(caplog.records) == 1


def test_a_page_that_cannot_be_written_is_refused(tmp_path):
    code = (  # the child prints whatever it is that is raised: which it must be is asked below
        "import resource, sys; from pathlib import Path; from trainermon.core.control import ControlPage\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: ControlPage(Path(sys.argv[1]), 0)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)

    assert result.stdout.startswith("SpoolError cannot write to the spool at ")
    with pytest.raises(SpoolError, match=r"rank00000\.page"):
        ControlPage(tmp_path / "missing", 0)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


def test_commands_arrive_with_a_new_epoch(page, reader):
    assert page.epoch() == 0
    page.beat(800, Phase.STEP, 1.0)

    assert reader.send([DUMP]) == 1
    assert page.epoch() == 1
    assert page.read_commands() == [DUMP]
    assert page.command_problem == ""

    other = Command(id="2", action=Action.COLLECT, first_step=900)
    assert reader.send([other, DUMP]) == 2
    assert page.epoch() == 2
    assert page.read_commands() == [other, DUMP]

    assert reader.send([]) == 3
    assert page.read_commands() == []


@pytest.mark.parametrize("step", [811, 812, 813, 814, 900])
def test_a_command_whose_steps_are_past_is_still_read(page, reader, step):
    page.beat(step, Phase.STEP, 1.0)
    reader.send([DUMP])

    assert page.read_commands() == [DUMP]


def test_a_torn_epoch_word_is_not_believed(page, reader, tmp_path):
    reader.send([DUMP])
    assert page.epoch() == 1

    with open(tmp_path / "rank00003.page", "r+b") as file:
        file.seek(64)
        file.write(struct.pack("=I", 9))
    assert page.epoch() == 1

    assert reader.send([DUMP]) == 1  # nothing valid to count from
    assert page.epoch() == 1


def test_sending_to_a_rank_that_is_not_there_says_so(reader):
    with pytest.raises(SpoolError, match=r"no control page .*rank00003\.page: the rank has not started"):
        reader.send([DUMP])


def good(**changes):
    entry = {"id": "x", "action": "dump", "first_step": 1}
    return {**entry, **changes}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (good(action="explode"), "'explode' is not a valid Action"),
        (good(action=None), "None is not a valid Action"),
        (good(colour="red"), "colour"),
        ({"id": "x", "action": "dump"}, "first_step"),
        (good(first_step="1"), "'first_step' is '1', expected int"),
        (good(num_steps=True), "'num_steps' is True, expected int"),
        (good(num_steps=1.0), "'num_steps' is 1.0, expected int"),
        (good(scope="h.0"), "'scope' is str, expected a list"),
        (good(scope=[1]), "'scope' is [1], expected names"),
        (good(action=["dump"]), "is not a valid Action"),
        ("dump", "found str, expected an object"),
        (None, "found NoneType, expected an object"),
    ],
)
def test_a_command_that_is_not_understood_is_left_out_and_named(page, tmp_path, entry, reason):
    content = json.dumps({"epoch": 1, "commands": [good(id="a"), entry, good(id="b")]})
    (tmp_path / "rank00003.cmd").write_text(content)

    assert [command.id for command in page.read_commands()] == ["a", "b"]
    assert "rank00003.cmd is left out: " in page.command_problem
    assert reason in page.command_problem


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"commands": 5}', b"[" * 100_000, b'{"commands": [' + b" " * (1 << 20)],
)
def test_a_malformed_command_file_is_no_command(page, tmp_path, content):
    (tmp_path / "rank00003.cmd").write_bytes(content)

    assert page.read_commands() == []
    assert "cannot be read" in page.command_problem


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_content_of_the_command_file_raises(tmp_path_factory, content):
    directory = tmp_path_factory.mktemp("page")
    page = ControlPage(directory, 0)
    (directory / "rank00000.cmd").write_bytes(content)

    assert page.read_commands() == []
    assert page.command_problem
    page.close()


def test_a_missing_or_linked_command_file_is_no_command(page, tmp_path):
    assert page.read_commands() == []
    assert "No such file" in page.command_problem

    (tmp_path / "secret").write_text(json.dumps({"commands": [good()]}))
    (tmp_path / "rank00003.cmd").symlink_to(tmp_path / "secret")
    assert page.read_commands() == []


def test_a_failed_send_leaves_the_old_set_and_epoch(page, reader, tmp_path, monkeypatch):
    reader.send([DUMP])

    def full(descriptor, *args, **kwargs):
        os.close(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(SpoolError, match="No space left"):
        reader.send([])
    monkeypatch.undo()

    assert page.epoch() == 1
    assert page.read_commands() == [DUMP]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank00003.cmd", "rank00003.page"]


def test_a_closed_page_takes_beats_and_keeps_its_epoch(page, reader):
    reader.send([DUMP])
    page.beat(5, Phase.STEP, 1.0)
    assert page.epoch() == 1
    page.close()
    page.close()

    page.beat(6, Phase.STEP, 2.0)

    assert page.epoch() == 1
    beat = reader.heartbeat()
    assert beat is not None
    assert beat.step == 5


def test_a_forked_child_does_not_beat(page, reader):
    page.beat(5, Phase.STEP, 1.0)

    child = os.fork()
    if child == 0:
        page.beat(6, Phase.STEP, 2.0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

    beat = reader.heartbeat()
    assert beat is not None
    assert beat.step == 5
    page.beat(7, Phase.STEP, 3.0)
    beat = reader.heartbeat()
    assert beat is not None
    assert beat.step == 7


HAMMER = """
import sys
from pathlib import Path
from trainermon.core.control import ControlPage, Phase
page = ControlPage(Path(sys.argv[1]), 0)
print("ready", flush=True)
for step in range(20_000_000):  # the test ends it
    page.beat(step, Phase(step % 5), step * 0.5)
    if step % 16 == 0:
        page.epoch()
"""


def test_no_torn_beat_is_ever_believed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HAMMER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    reader = ControlReader(tmp_path, 0)
    last, seen = -1, set()
    try:
        for _ in range(300_000):
            beat = reader.heartbeat()
            if beat is None:
                continue
            assert (beat.phase, beat.time_s) == (beat.step % 5, beat.step * 0.5)
            assert beat.generation == beat.step + 1
            assert beat.step >= last
            last = beat.step
            seen.add(last)
            if len(seen) == 10_000:
                break
    finally:
        process.kill()
        process.communicate()
        reader.close()
    assert len(seen) > 100, "the two processes did not run at the same time"


@pytest.mark.parametrize("task", ["everything", "", None, ["tensor"]])
def test_a_command_with_a_task_that_no_dump_has_is_left_out_and_reported(tmp_path, task):
    page, reader = ControlPage(tmp_path, 0), ControlReader(tmp_path, 0)
    reader.send([DUMP])
    path = next(tmp_path.glob("*.cmd"))
    sent = json.loads(path.read_text())
    path.write_text(json.dumps(sent | {"commands": [{**sent["commands"][0], "task": task}, *sent["commands"]]}))

    assert page.read_commands() == [DUMP]
    assert "is not a valid DumpTask" in page.command_problem
    page.close()
    reader.close()
