"""What lies in journals, in the store and in the run directory may be wrong or somebody else's: the agent goes on."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.agent.nodes import expected, wait_for
from trainermon.agent.assembly import assemble, read_token
from trainermon.agent.lifecycle.summary import summarise
from trainermon.agent.settings import load_settings
from trainermon.cli import main
from trainermon.core.errors import StoreError
from trainermon.core.events import WarningEvent
from trainermon.core.journal import Header, JournalWriter
from trainermon.core.values import Coordinates, Kind, Placement, SeriesKey, StatBlock
from trainermon.exporters.store import damaged, segments
from trainermon.exporters.store.segments import cover
from trainermon.exporters.store.store import open_run

GOOD = [SeriesKey(Kind.GRAD_REDUCED, "good")]
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a second user is needed")


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def scramble(path):
    """Change what is in the middle; the end, where Parquet looks first, stays."""
    content = bytearray(path.read_bytes())
    content[8 : len(content) // 2] = bytes(len(content) // 2 - 8)
    path.write_bytes(content)


def make_directory(path):
    path.unlink()
    path.mkdir()


def assembled(run):
    """Return the parts of an agent in this process, made as often as the agent tries."""
    with ThreadPoolExecutor(1) as executor:
        for _ in range(3):
            try:
                return executor.submit(assemble, run.spool, load_settings(run.spool), run.node_dir, executor).result()
            except StoreError:
                continue
        raise AssertionError("three times no agent")


def close(parts):
    parts.pipeline.close()
    parts.exports.close()
    parts.watch.close()


def follow_to_the_end(run):
    """Store everything that the journals hold; return what is known then of gaps."""
    with ThreadPoolExecutor(1) as executor:
        parts = None
        for _ in range(3):
            with contextlib.suppress(StoreError):
                parts = parts or assemble(run.spool, load_settings(run.spool), run.node_dir, executor)
        while parts.pipeline.step():
            pass
        done = parts.pipeline.flush()
        wait_for(lambda: parts.pipeline.step() or done.done(), "the last commit")
        close(parts)
    return parts.pipeline.status.set_aside


def writer_of(run, keys, *, rank=0, attempt=1, file_bytes=64 << 20):
    header = Header(
        run_id=run.run_id,
        attempt=attempt,
        coordinates=Coordinates(rank=rank, world_size=2, dp=rank, dp_size=2),
        host="node",
        pid=1,
        started_s=float(attempt),
        series=tuple(keys),
        placements=tuple(Placement(dtype="float32", shape=(1,)) for _ in keys),
    )
    return JournalWriter(run.spool, header, file_bytes=file_bytes)


def append_step(writer, step, *, num_series):
    values = np.ones((8, num_series))
    values[6] = np.arange(num_series) != 5  # so that rules have something to say about most
    writer.append_block(StatBlock(step=step, time_s=1.0, series=np.arange(num_series, dtype=np.uint32), values=values))


@pytest.mark.parametrize(
    ("damage", "place"), [(truncate, 0), (truncate, 2), (empty, 2), (scramble, 1), (scramble, 2), (make_directory, 1)]
)
def test_an_agent_comes_up_whatever_segment_is_damaged(run, damage, place):
    writer = writer_of(run, GOOD, file_bytes=1)  # a file for each step
    for step in range(3):
        append_step(writer, step, num_series=1)
        follow_to_the_end(run)
    before = cover(run.node_dir / "segments")
    path = before[place].path
    damage(path)
    append_step(writer, 3, num_series=1)

    found = follow_to_the_end(run)

    assert [damaged.name for damaged in found.damaged] == [f"{path.name}.damaged"]
    with open_run(run.output) as connection:
        steps = [step for (step,) in connection.execute("SELECT step FROM all_stats ORDER BY step").fetchall()]
    # What was in the newest one is read again, where the journal is still there; nothing is there twice.
    assert steps in ([step for step in range(4) if step != place], [0, 1, 2, 3])
    assert follow_to_the_end(run).damaged == found.damaged
    added = {segment.first for segment in cover(run.node_dir / "segments")} - {segment.first for segment in before}
    assert min(added) == 4  # a number is never given again: exporters remember how far they are by it


def test_an_agent_comes_up_although_every_segment_is_damaged(run):
    writer = writer_of(run, GOOD)
    for step in range(3):
        append_step(writer, step, num_series=1)
        follow_to_the_end(run)
    for segment in cover(run.node_dir / "segments"):
        truncate(segment.path)
    append_step(writer, 3, num_series=1)

    found = follow_to_the_end(run)

    assert len(found.damaged) == 3
    with open_run(run.output) as connection:  # the journal's one file is still there, so nothing at all is lost
        assert connection.execute("SELECT step FROM all_stats ORDER BY step").fetchall() == [(0,), (1,), (2,), (3,)]


def test_a_segment_that_cannot_be_read_for_now_is_left_alone(run, monkeypatch):
    append_step(writer_of(run, GOOD), 0, num_series=1)
    follow_to_the_end(run)

    def fail(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as away:
        away.setattr(segments, "is_whole", fail)
        away.setattr(damaged, "is_whole", fail)
        with pytest.raises(OSError, match="Stale"), ThreadPoolExecutor(1) as executor:
            assemble(run.spool, load_settings(run.spool), run.node_dir, executor)

    assert follow_to_the_end(run).damaged == []


@pytest.mark.parametrize("command", [["query", "SELECT count(*) AS n FROM stats"], ["diagnose"]])
@pytest.mark.parametrize("damaged_one", [(truncate, 0), (scramble, 1)])
def test_offline_tools_say_in_one_line_what_is_damaged(run, command, damaged_one, capfd, caplog):
    damage, place = damaged_one
    writer = writer_of(run, GOOD)
    for step in range(2):
        append_step(writer, step, num_series=1)
        follow_to_the_end(run)
    path = cover(run.node_dir / "segments")[place].path
    damage(path)

    main([command[0], str(run.output), *command[1:]])

    assert f"{path} is damaged and left out" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


HOSTILE = [
    SeriesKey(Kind.GRAD_REDUCED, "half \ud800 a character"),
    SeriesKey(Kind.GRAD_REDUCED, "calls", call=1 << 40),
    SeriesKey(Kind.ACTV, "'; DROP TABLE series; --\0\n\x1b[31m"),
    SeriesKey(Kind.ACTV, "slot", "\udfff"),
    SeriesKey(Kind.GRAD_REDUCED, "good"),
]


@pytest.mark.parametrize("attempt", [1, 1 << 40])
def test_names_and_numbers_that_cannot_be_stored_cost_no_other_row(make_run, attempt):
    run = make_run(world_size=2, outputs={"format": ["csv", "tensorboard"]})
    event = WarningEvent(message="half \udc00")
    writer = writer_of(run, HOSTILE, rank=1, attempt=attempt)
    for step in range(3):
        append_step(writer, step, num_series=len(HOSTILE))
    writer.append_event(event)
    writer.close()
    rank = run.rank(0, start_agent=True)
    rank.steps(0, 5)

    wait_for(lambda: run.stored() == expected(0, range(5)), "all rows of rank 0 in the store")
    wait_for(lambda: "monitor-store-incomplete" in [alert["rule"] for alert in run.alerts()], "an alert")
    assert run.status()["problem"] == ""
    assert "gradient-nonfinite" in " ".join(alert["rule"] for alert in run.alerts())
    assert run.get_json("api/alerts")
    folder = run.node_dir / "quarantine"
    assert [json.loads(line) for path in folder.iterdir() for line in path.read_text("ascii").splitlines()]
    rank.end()
    run.gone()
    for name in ("csv", "tensorboard"):
        assert any(path.stat().st_size for path in (run.output / name).rglob("*") if path.is_file())
    assert summarise(run.output)


def test_an_output_path_that_is_no_text_is_as_good_as_any(make_run, tmp_path):
    folder = tmp_path / os.fsdecode(b"out \xff\xfe")
    folder.mkdir(mode=0o700)
    run = make_run(output=str(folder / "run"))
    run.output = folder / "run"
    run.output.mkdir(mode=0o700)
    rank = run.rank(start_agent=True)
    rank.steps(0, 4, nan=True)
    rank.end()

    run.gone()

    assert run.stored() == expected(0, range(4)) or len(run.stored()) == 4
    assert run.alerts()


def lay_out_for_victim(run, owner):
    """Another user has been there first, with links to files of the victim."""
    shutil.rmtree(run.output)
    victim = run.output.with_name("victim")
    victim.write_text("secret line\n")
    victim.chmod(0o600)
    run.node_dir.mkdir(parents=True)
    for name in ("alerts.jsonl", "agent.log", "token", "prometheus_sd.json"):
        (run.node_dir / name).symlink_to(victim)
    for path in (run.output, run.output / "nodes", run.node_dir):
        os.chown(path, owner, owner)
        path.chmod(0o777)
    return victim


@needs_root
def test_a_run_directory_of_somebody_else_is_refused_and_nothing_is_written_through_it(run):
    victim = lay_out_for_victim(run, NOBODY)
    before = (victim.read_text(), victim.stat().st_mode)

    with pytest.raises(PermissionError, match="belongs to user 65534"):
        assembled(run)
    rank = run.rank(start_agent=True)
    rank.steps(0, 3, nan=True)
    wait_for(lambda: "belongs to user" in run.status().get("problem", ""), "a problem in the status file")

    assert (victim.read_text(), victim.stat().st_mode) == before
    assert {path.name for path in run.node_dir.iterdir()} == {
        "alerts.jsonl", "agent.log", "token", "prometheus_sd.json",
    }  # fmt: skip


@pytest.mark.parametrize("level", ["", "nodes", "nodes/HOST"])
def test_a_run_directory_that_others_can_write_to_is_refused(run, level):
    folder = run.output / level.replace("HOST", run.node_dir.name)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o775)

    with pytest.raises(PermissionError, match="chmod go-w"):
        assembled(run)


def test_the_folders_of_a_run_are_private_whatever_the_umask(run):
    old = os.umask(0)
    try:
        close(assembled(run))
    finally:
        os.umask(old)

    for folder in (run.node_dir.parent, run.node_dir, run.node_dir / "segments"):
        assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("known", ["link", "readable", "foreign", "empty"])
def test_a_token_that_another_user_may_know_is_replaced(tmp_path, known):
    path, target = tmp_path / "token", tmp_path / "one-line"
    target.write_text("known to somebody")
    target.chmod(0o600)
    if known == "link":
        path.symlink_to(target)
    else:
        path.write_text("" if known == "empty" else "known to somebody")
        path.chmod(0o644 if known == "readable" else 0o600)
    if known == "foreign":
        if os.geteuid() != 0:
            pytest.skip("a second user is needed")
        os.chown(path, NOBODY, NOBODY)

    token = read_token(path)

    assert token != "known to somebody"
    assert len(token) > 30
    assert not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(path) == token
    assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("known to somebody", 0o600)
