"""A rank without a model, for tests of the agent: obeys lines on its standard input, and answers each with one line.

    python rank_process.py SPOOL RUN_ID RANK ATTEMPT WORLD_SIZE [START]

`steps FIRST N [nan]` writes N steps, `checksum STEP N` one with the checksum N of a replica, `gradient STEP A B` one
with a gradient that sums to A before its reduction and to B after it, `event JSON` an event, `commands` answers with
what the rank was ordered to do, `end` closes the journal and leaves. At the end of the input it leaves without a word,
as a rank that was killed does. With START the agent is started too, as local rank 0 does.
"""

import array
import dataclasses
import functools
import json
import math
import os
import sys
import time
from pathlib import Path

from trainermon.core.control import ControlPage, Phase
from trainermon.core.events import decode
from trainermon.core.journal import Header, JournalWriter
from trainermon.core.launcher import start_agent
from trainermon.core.spool import RankLock
from trainermon.core.values import Coordinates, Kind, Moments, Placement, SeriesKey, StatBlock

KEYS = (
    SeriesKey(Kind.LOSS, "loss"),
    SeriesKey(Kind.STEP, "duration_seconds"),
    *(SeriesKey(Kind.GRAD_REDUCED, f"h.{layer}.weight") for layer in range(4)),
    SeriesKey(Kind.UPDATE, "h.0.weight"),  # known, but never collected
)


def moments(step: int, rank: int, *, nan: bool) -> list[Moments]:
    """Loss, duration and four gradients; the sum of squares of the first gradient tells step and rank."""
    loss = 10.0 / (step + 1)
    rows = [Moments(1, loss, loss, loss, loss**2, 0, 0, 0), Moments(1, 0.1, 0.1, 0.1, 0.01, 0, 0, 0)]
    for layer in range(4):
        bad = 3 if nan and layer == 2 else 0
        rows.append(Moments(100, -1, 1, 0, 1000.0 * step + 10.0 * rank + 1, 0, bad, 0))
    return rows


def block(step: int, rank: int, *, nan: bool) -> StatBlock:
    rows = moments(step, rank, nan=nan)
    columns = zip(*map(dataclasses.astuple, rows), strict=True)
    values = array.array("d", [value for column in columns for value in column])
    return StatBlock(step=step, time_s=time.time(), series=array.array("I", range(len(rows))), values=values)


@functools.cache
def replica(journal: JournalWriter) -> int:
    """Return the number of a series of checksums, which joins the others now."""
    placement = Placement(dtype="float32", shape=(8,), replicated_over=("dp",))
    return journal.add_series([SeriesKey(Kind.CHECKSUM, "h.0.weight")], [placement])


def checksum_block(series: int, step: int, checksum: int) -> StatBlock:
    values = array.array("d", [2.0, checksum % 2**32, 2.0**32 + (checksum >> 32), *[0.0] * 5])
    return StatBlock(step=step, time_s=time.time(), series=array.array("I", [series]), values=values)


@functools.cache
def gradients(journal: JournalWriter) -> int:
    """Return the number of the first of two series, a gradient before and after its reduction, which join now."""
    placement = Placement(dtype="float32", shape=(8,), replicated_over=("dp",))
    kinds = (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED)
    return journal.add_series([SeriesKey(kind, "h.9.weight") for kind in kinds], [placement] * 2)


def gradient_block(series: int, step: float, given: float, reduced: float) -> StatBlock:
    columns = zip(*([8.0, -2.0, 2.0, total, 10.0, 0.0, 0.0, 0.0] for total in (given, reduced)), strict=True)
    values = array.array("d", [value for column in columns for value in column])
    return StatBlock(step=int(step), time_s=time.time(), series=array.array("I", [series, series + 1]), values=values)


def main() -> None:
    spool, run_id, rank, attempt, world_size = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])
    lock = RankLock(spool, rank)
    page = ControlPage(spool, rank)
    header = Header(
        run_id=run_id,
        attempt=attempt,
        coordinates=Coordinates(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size),
        host="node",
        pid=os.getpid(),
        started_s=time.time(),
        series=KEYS,
        placements=(None,) * len(KEYS),
    )
    journal = JournalWriter(spool, header)
    if sys.argv[6:]:
        # Only now: until the lock was taken, a leaving agent could still take the spool away with all that is in it.
        (spool / "agent.json").write_text(sys.argv[6], encoding="utf-8")
        start_agent(spool)
    answer("ready")
    for line in sys.stdin:
        verb, *words = line.split(maxsplit=1)
        text = words[0] if words else ""
        if verb == "steps":
            first, count, *nan = text.split()
            for step in range(int(first), int(first) + int(count)):
                page.beat(step, Phase.STEP, time.time())
                journal.append_block(block(step, rank, nan=bool(nan)))
        elif verb == "checksum":
            journal.append_block(checksum_block(replica(journal), *map(int, text.split())))
        elif verb == "gradient":
            journal.append_block(gradient_block(gradients(journal), *map(float, text.split())))
        elif verb == "event":
            journal.append_event(decode(json.loads(text)))
        elif verb == "commands":
            answer(json.dumps([page.epoch(), [command.id for command in page.read_commands()]]))
            continue
        elif verb == "end":
            page.beat(2**40, Phase.CLOSED, math.nan)
            journal.close()
            lock.close()
            answer(json.dumps([journal.cursor.file, journal.cursor.offset]))
            return
        answer("done")


def answer(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
