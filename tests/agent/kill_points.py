"""Kills an agent's store path before and after its system calls, lets another finish, and counts what is there.

A killed process leaves nothing but its files. So of all points at which these are the same, one stands for all.

Run as a program of its own: `kill_points.py WORKDIR VARIANT [NUM_RANDOM_KILLS [all]]` prints one JSON object. Each
attempt is a forked child of this process, which never starts a thread. `VARIANT` is `correct`, or one of the
deliberately broken writers below, of which the count must find something wrong. Without `all`, the correct writer is
killed throughout its first commit, and later only where a file has just come or gone.

Every step of every series holds a number of its own base, so that one sum tells how often each step is stored.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import duckdb  # noqa: F401  (imported before the fork, so that each child starts quickly)
import numpy as np

from trainermon.agent import commits, pipeline
from trainermon.agent.follower import JournalFollower
from trainermon.agent.pipeline import RecordPipeline
from trainermon.core.journal import Cursor, Header, JournalWriter, remove_before
from trainermon.core.values import Coordinates, Kind, SeriesKey, StatBlock
from trainermon.exporters.store import retention, segments, store
from trainermon.exporters.store.retention import RetentionPolicy, compact
from trainermon.exporters.store.segments import JournalPosition
from trainermon.exporters.store.store import SegmentWriter, open_run

# A broken writer has other functions in these modules.
commits_module: Any = commits
pipeline_module: Any = pipeline
retention_module: Any = retention
segments_module: Any = segments
store_module: Any = store

NUM_STEPS = 12
RANKS = (0, 1)
KEYS = tuple(SeriesKey(Kind.GRAD_REDUCED, f"h.{layer}.w") for layer in range(3))
BLOCK_BYTES = len(KEYS) * (8 * 8 + 4)
BASE = 8


def fill_spool(spool):
    for rank in RANKS:
        header = Header(
            run_id="run",
            attempt=1,
            coordinates=Coordinates(rank=rank, world_size=2),
            host="node",
            pid=1,
            started_s=0.0,
            series=KEYS,
            placements=(None,) * len(KEYS),
        )
        journal = JournalWriter(spool, header, file_bytes=2200)
        for step in range(NUM_STEPS):
            values = np.ones((8, len(KEYS)))
            values[3] = float(BASE**step)
            ids = np.arange(len(KEYS), dtype=np.uint32)
            assert journal.append_block(StatBlock(step=step, time_s=float(step), series=ids, values=values))
        journal.close()


class SlowFollower(JournalFollower):
    """Takes about two blocks of each rank per turn, so that there are several commits."""

    def news(self):
        return itertools.islice(super().news(), 2 * len(RANKS))


class InlineExecutor(Executor):
    """Runs the job at once, so that the system calls always come in the same order."""

    def submit(self, function, /, *arguments, **options):
        future = Future()
        future.set_result(function(*arguments))
        return future


def work(root):
    """Follow, commit and merge until everything is done, as the agent does."""
    pipeline_module.JournalFollower = SlowFollower
    segments = root / "run" / "nodes" / "node" / "segments"
    pipeline = RecordPipeline(
        root / "spool", segments, executor=InlineExecutor(), flush_bytes=6 * BLOCK_BYTES, flush_s=3600
    )
    while pipeline.step():
        pass
    done = pipeline.flush()
    while not done.done():
        pipeline.step()
    compact(segments, RetentionPolicy(full_detail_s=0.0), now_s=1e9)


def count(root):
    """Return how many (rank, series, step) are lost, how many stored more than once, and how many files are broken."""
    with open_run(root / "run") as connection:
        rows = connection.execute("SELECT sum(sum) FROM all_stats GROUP BY rank, name").fetchall()
    lost = (len(RANKS) * len(KEYS) - len(rows)) * NUM_STEPS
    twice = 0
    for (total,) in rows:
        digits = [int(total) // BASE**step % BASE for step in range(NUM_STEPS)]
        lost += digits.count(0)
        twice += sum(digit > 1 for digit in digits)
    return {"lost": lost, "twice": twice, "damaged": len(list((root / "run").rglob("*.damaged")))}


# --- where to kill -----------------------------------------------------------------------------------------------


class Events:
    """Counts the system calls that change a file, and calls `at_point` with a number before and after each.

    That number is twice the number of the call, plus one for after it.
    """

    CALLS = ("open", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir")

    def __init__(self, at_point):
        self.names = []
        self.at_point = at_point
        for name in self.CALLS:
            setattr(os, name, functools.partial(self._call, name, getattr(os, name)))

    def _call(self, name, call, *arguments, **options):
        if name == "open" and not (len(arguments) > 1 and arguments[1] & os.O_CREAT):
            return call(*arguments, **options)
        number = 2 * len(self.names)
        self.names.append(name)
        self.at_point(number)
        try:
            return call(*arguments, **options)
        finally:
            self.at_point(number + 1)


def kill_at(chosen):
    def at_point(number):
        if number == chosen:
            os.kill(os.getpid(), signal.SIGKILL)

    return at_point


def fingerprint(root):
    """Return a hash of all that another process would find below `root`."""
    found = hashlib.blake2b(digest_size=8)
    for path in sorted(root.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        found.update(f"{path.relative_to(root)} {path.stat().st_mode} {len(content)}\n".encode() + content)
    return found.hexdigest()


def in_child(function):
    """Run in a forked child; return (wait status, what it returned)."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            answer = function()
            os.write(write, json.dumps(answer).encode())
            status = 0
        except BaseException:  # noqa: BLE001  (the child must never return into the parent's code)
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return status, json.loads(text) if text else None


def fresh(workdir):
    root = workdir / "case"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(workdir / "spool", root / "spool", copy_function=shutil.copy)
    (root / "spool").chmod(0o700)
    return root


def run_variant(root, variant, at_point=lambda number: None):
    events = Events(at_point)
    VARIANTS[variant]()
    work(root)
    return events.names


def finish(root, variant):
    """Restart until done, and count; a restart that fails leaves the run stuck."""
    status, found = in_child(lambda: (run_variant(root, variant), count(root))[1])
    return found if status == 0 else {"stuck": 1}


def different_points(workdir, variant):
    """Return the names of the calls, and the first point at which the files are as they are there."""
    root, first = fresh(workdir), {}

    def run():
        names = run_variant(root, variant, lambda point: first.setdefault(fingerprint(root), point))
        return names, list(first.values())

    status, found = in_child(run)
    assert status == 0, "the variant does not even work without a kill"
    return found


def first_commit_and_changes(names, points):
    first = range(names.index("open"), names.index("unlink"))
    return [point for point in points if point // 2 in first or names[point // 2] in {"rename", "unlink"}]


def nearest_to_its_fault(names, points, variant):
    if variant == "merge_after_removal":
        return points[::-1]  # merging comes last
    return [point for point in points if point // 2 >= names.index("open")]


def enumerate_kills(workdir, variant, *, everywhere=False):
    names, points = different_points(workdir, variant)
    wrong = []
    if variant != "correct":
        points = nearest_to_its_fault(names, points, variant)
    elif not everywhere:
        points = first_commit_and_changes(names, points)
    for point in points:
        root = fresh(workdir)
        status, _ = in_child(lambda root=root, point=point: run_variant(root, variant, kill_at(point)))
        assert os.WIFSIGNALED(status), f"point {point} was not reached"
        found = finish(root, variant)
        if any(found.values()):
            wrong.append({"call": names[point // 2], "after": point % 2 == 1, **found})
            if variant != "correct":
                break
    return {"calls": names, "points": points, "wrong": wrong}


def kill_at_random(workdir, num_kills):
    root = fresh(workdir)
    chance = random.Random(num_kills)
    kills = 0
    for _ in range(num_kills):
        child = os.fork()
        if child == 0:
            run_variant(root, "correct")
            os._exit(0)
        time.sleep(chance.uniform(0.0, 0.12))
        os.kill(child, signal.SIGKILL)
        kills += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    return {"kills": kills, **finish(root, "correct")}


# --- writers that are broken on purpose ----------------------------------------------------------------------------


def correct():
    pass


class WriterWithCursorFile(SegmentWriter):
    """Keeps the positions in a file of its own: two renames where there must be one."""

    def __init__(self, directory):
        super().__init__(directory)
        path = directory / "cursors.json"
        places = json.loads(path.read_text()) if path.exists() else {}
        positions = {int(rank): JournalPosition(1, Cursor(*place)) for rank, place in places.items()}
        self.metadata = dataclasses.replace(self.metadata, positions=positions)


def write_cursors(batch):
    places = {rank: dataclasses.astuple(at.cursor) for rank, at in batch.metadata.positions.items()}
    tmp = batch.path.parent / "cursors.json.new"
    tmp.write_text(json.dumps(places))
    os.rename(tmp, batch.path.parent / "cursors.json")


def trim(batch, spool):
    for rank, position in batch.metadata.positions.items():
        remove_before(spool, rank, position.cursor)


def cursor_after():
    def commit(batch, spool):
        batch.write()
        write_cursors(batch)
        trim(batch, spool)

    commits_module.SegmentWriter = WriterWithCursorFile
    commits_module.commit = commit


def cursor_before():
    def commit(batch, spool):
        write_cursors(batch)
        batch.write()
        trim(batch, spool)

    commits_module.SegmentWriter = WriterWithCursorFile
    commits_module.commit = commit


def trim_before_commit():
    def commit(batch, spool):
        trim(batch, spool)
        batch.write()

    commits_module.commit = commit


def write_in_place():
    def write_segment(connection, query, path, metadata):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        real = segments_module.write_segment
        os.fsync(os.open(path, os.O_RDONLY))
        real(connection, query, path, metadata)

    store_module.write_segment = write_segment


def merge_after_removal():
    real = retention_module.write_segment

    def write_segment(connection, query, path, metadata):
        for inside in segments_module.cover(path.parent):
            inside.path.unlink()
        real(connection, query, path, metadata)

    retention_module.write_segment = write_segment


VARIANTS = {
    function.__name__: function
    for function in (
        correct,
        cursor_after,
        cursor_before,
        trim_before_commit,
        write_in_place,
        merge_after_removal,
    )
}


def main(workdir, variant, num_kills="0", where=""):
    (workdir / "spool").mkdir(mode=0o700)
    fill_spool(workdir / "spool")
    report = enumerate_kills(workdir, variant, everywhere=where == "all")
    report["random"] = kill_at_random(workdir, int(num_kills)) if int(num_kills) else {}
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
