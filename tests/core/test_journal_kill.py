"""A rank that is killed while it writes, with its journal followed all the time."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
from pathlib import Path

from trainermon.core.journal import BlockRecord, HeaderRecord, JournalReader

WRITER = """
import array, os, struct, sys
from pathlib import Path
from trainermon.core.journal import Header, JournalWriter
from trainermon.core.values import Coordinates, Kind, SeriesKey, StatBlock
NUM_SERIES = 3000
attempt = int(sys.argv[2])
writer = JournalWriter(Path(sys.argv[1]), Header(
    run_id="run", attempt=attempt, coordinates=Coordinates(), host="node", pid=os.getpid(), started_s=0.0
), file_bytes=5 << 20, budget_bytes=1 << 30)
writer.add_series([SeriesKey(Kind.LOSS, str(i)) for i in range(NUM_SERIES)], [None] * NUM_SERIES)
ids = array.array("I", range(NUM_SERIES))
for step in range(20_000):
    values = array.array("d", [step]) * (8 * NUM_SERIES)
    if writer.append_block(StatBlock(step=step, time_s=0.0, series=ids, values=values)):
        os.write(1, struct.pack("=I", step))
"""
ROUNDS = 8


def run_until_killed(directory: Path, attempt: int, num_steps: int) -> int:
    """Start a rank, kill it after about `num_steps` acknowledged records; return how many were acknowledged."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, directory, str(attempt)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    received = b""
    while len(received) < 4 * num_steps:
        received += os.read(process.stdout.fileno(), 4)
    process.send_signal(signal.SIGKILL)
    received += process.communicate()[0]
    acknowledged = struct.unpack(f"={len(received) // 4}I", received)
    assert acknowledged == tuple(range(len(acknowledged))), "a record was skipped"
    return len(acknowledged)


def test_a_killed_rank_loses_no_acknowledged_record_and_repeats_none(tmp_path):
    source = random.Random(0)
    reader = JournalReader(tmp_path, 0)
    acknowledged: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    attempt = -1

    for round_number in range(ROUNDS + 1):
        if round_number < ROUNDS:
            acknowledged[round_number] = run_until_killed(tmp_path, round_number, source.randrange(1, 60))
        while records := reader.poll(1 << 20):
            for record in records:
                if isinstance(record, HeaderRecord):
                    attempt = record.header.attempt
                elif isinstance(record, BlockRecord):
                    assert (record.block.values == record.block.step).all()
                    found.setdefault(attempt, []).append(record.block.step)
        if round_number % 2:  # as if the agent were killed too
            reader.close()
            reader = JournalReader(tmp_path, 0, reader.cursor)
    reader.close()

    for round_number, count in acknowledged.items():
        steps = found.get(round_number, [])
        assert steps == list(range(len(steps)))
        assert count <= len(steps) <= count + 1, "the last one may be whole without its acknowledgement"
    assert (reader.corrupt, reader.lost_records, reader.lost_files) == (0, 0, 0)
