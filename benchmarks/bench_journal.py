"""What the journal and the control page cost the training process: CPU time per record, per check and per beat.

    python benchmarks/bench_journal.py [DIRECTORY]

DIRECTORY (default: the spool's own place) decides which disk is measured. CPU time includes the kernel's, that is, the
copy into the page cache; the shares of the CRC and of the system call alone are measured beside it in the same run. In
a virtual machine the call is eight times as dear where the host must first back the page cache with memory: look at the
smallest round too.
"""

from __future__ import annotations

import array
import functools
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from trainermon.core.control import ControlPage, ControlReader, Phase
from trainermon.core.journal import Header, JournalReader, JournalWriter
from trainermon.core.journal.frames import encode_block
from trainermon.core.journal.spool_thread import SpoolThread
from trainermon.core.spool import open_spool
from trainermon.core.values import Coordinates, Kind, Placement, SeriesKey, StatBlock

ROUNDS = 9
APPENDS = 20
HEADER = Header(run_id="bench", attempt=1, coordinates=Coordinates(), host="node", pid=os.getpid(), started_s=0.0)


def cpu_us(action: Callable[[], object], count: int) -> list[float]:
    """Return the CPU time of one `action` in microseconds, for each of several rounds of `count`."""
    rounds = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        for _ in range(count):
            action()
        rounds.append((time.process_time() - begin) / count * 1e6)
    return rounds


def report(name: str, rounds: list[float]) -> None:
    median = statistics.median(rounds)
    print(f"{name:<58} {median:9.3f} us  ({min(rounds):.3f} .. {max(rounds):.3f}, {len(rounds)} rounds)")


def make_writer(directory: Path, num_series: int, thread: SpoolThread | None = None) -> JournalWriter:
    placement = Placement(dtype="bfloat16", shape=(4096, 4096), partitioned_over=("dp",))
    keys = [SeriesKey(Kind.GRAD_REDUCED, f"layers.{index}.mlp.fc.weight") for index in range(num_series)]
    writer = JournalWriter(directory, HEADER, thread=thread)
    writer.add_series(keys, [placement] * num_series)
    return writer


def bench_appends(directory: Path, num_series: int) -> None:
    directory.mkdir()
    writer = make_writer(directory, num_series)
    values = array.array("d", itertools.repeat(1.5, 8 * num_series))
    block = StatBlock(step=1, time_s=0.0, series=array.array("I", range(num_series)), values=values)
    payload = encode_block(block)
    title = f"{num_series} series ({(32 + 24 + 68 * num_series) / 1000:.0f} KB)"

    report(f"append, {title}", cpu_us(lambda: writer.append_block(block), APPENDS))
    report(f"  its CRC alone, {title}", cpu_us(lambda: [zlib.crc32(buffer) for buffer in payload], APPENDS))
    descriptor = os.open(directory / "plain", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    report(f"  its system call alone, {title}", cpu_us(lambda: os.writev(descriptor, payload), APPENDS))
    os.close(descriptor)
    report(f"new file with the table of {num_series} series", cpu_us(lambda: writer._open_next(1), 5))
    print(f"{'  skipped, dropped files':<58} {writer.skipped:>6}, {writer.dropped_files}")
    writer.close()
    shutil.rmtree(directory)


def bench_hand_over(directory: Path, num_series: int) -> None:
    """Time what a step waits for a record that a thread writes, in elapsed time, with a pause between records."""
    directory.mkdir()
    writer = make_writer(directory, num_series)
    (directory / "handed").mkdir()
    thread = SpoolThread()
    handing = make_writer(directory / "handed", num_series, thread)
    block = StatBlock(
        step=1, time_s=0.0, series=array.array("I", range(num_series)), values=array.array("d", bytes(64 * num_series))
    )
    for name, one in (("written by the step", writer), ("handed to the thread", handing)):
        elapsed = []
        for _ in range(300):
            time.sleep(0.001)
            begin = time.perf_counter()
            one.append_block(block)
            elapsed.append((time.perf_counter() - begin) * 1e6)
        report(f"elapsed: {num_series} series {name}", elapsed)
        one.close()
    thread.close()
    shutil.rmtree(directory)


def bench_reading(directory: Path, num_series: int) -> None:
    directory.mkdir()
    writer = make_writer(directory, num_series)
    block = StatBlock(
        step=1, time_s=0.0, series=array.array("I", range(num_series)), values=array.array("d", bytes(64 * num_series))
    )
    reader = JournalReader(directory, 0)
    reader.poll()
    rounds = []
    for _ in range(ROUNDS):
        for _ in range(50):
            writer.append_block(block)
        begin = time.process_time()
        reader.poll()
        rounds.append((time.process_time() - begin) / 50 * 1e6)
    report(f"the agent reads and checks one block of {num_series} series", rounds)
    report("the agent polls a journal with nothing new", cpu_us(reader.poll, 500))
    reader.close()
    writer.close()
    shutil.rmtree(directory)


def bench_page(directory: Path) -> None:
    page, reader = ControlPage(directory, 0), ControlReader(directory, 0)
    report("epoch()", cpu_us(page.epoch, 200_000))
    report("beat()", cpu_us(functools.partial(page.beat, 812, Phase.STEP, 1.5e9), 100_000))
    report("the agent's heartbeat()", cpu_us(reader.heartbeat, 10_000))
    page.close()
    reader.close()


def main() -> None:
    parent = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("/var/tmp")
    root = Path(tempfile.mkdtemp(prefix="trainermon-bench-", dir=parent))
    try:
        directory = open_spool(root / "bench")
        for num_series in (1000, 3000):
            bench_appends(directory / str(num_series), num_series)
        for num_series in (50, 1000):
            bench_hand_over(directory / f"handed{num_series}", num_series)
        bench_reading(directory / "read", 3000)
        bench_page(directory)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
