"""Run directories made by hand: stored rows, and dumps of small models."""

from __future__ import annotations

import dataclasses
import json
import math

import duckdb
import numpy as np

from tests.journal_rows import only_spool
from trainermon.agent.follower import JournalFollower
from trainermon.core.journal import BlockRecord, Cursor, Header
from trainermon.core.values import Coordinates, Kind, Placement, SeriesKey, StatBlock
from trainermon.dump.files.records import DumpInfo
from trainermon.dump.writer import DumpWriter
from trainermon.exporters.store.segments import JournalPosition
from trainermon.exporters.store.store import SegmentWriter

FINITE = (4, -1.0, 2.0, 1.0, 5.0, 0, 0, 0)
ALL_NAN = (4, math.inf, -math.inf, 0.0, 0.0, 0, 4, 0)
ONE_INF = (4, -1.0, 2.0, 1.0, 5.0, 0, 0, 1)
MASK = (4, 0.0, 0.0, 0.0, 0.0, 2, 0, 2)


def store(run_dir, steps, *, attempt=1, modules=(), dtype="", placements=None, node="node"):
    """Commit `steps`: {step: {rank: {SeriesKey: moments}}}, tell modules in definition order and the type of all.

    `placements` has a placement by key instead.
    """
    writer = SegmentWriter(run_dir / "nodes" / node / "segments")
    placed = placements or {}
    for step, ranks in steps.items():
        for rank, rows in ranks.items():
            keys = tuple(rows)
            header = Header(
                run_id="run",
                attempt=attempt,
                coordinates=Coordinates(rank=rank, world_size=2),
                host="node",
                pid=1,
                started_s=0.0,
                series=keys,
                placements=tuple(
                    Placement(dtype=dtype, shape=(int(rows[key][0]),)) if dtype else placed.get(key) for key in keys
                ),
            )
            values = np.ascontiguousarray(np.array(list(rows.values()), np.float64).T)
            block = StatBlock(
                step=step, time_s=float(step), series=np.arange(len(keys), dtype=np.uint32), values=values
            )
            writer.add(header, keys, block)
    writer.commit({0: JournalPosition(attempt, Cursor(0, step))})
    if modules:
        (run_dir / "ranks").mkdir(exist_ok=True)
        (run_dir / "ranks/rank00000.json").write_text(json.dumps({"modules": list(modules)}))


def store_journals(run_dir):
    """Commit what the ranks of a run wrote into its own spool, types of tensors too."""
    follower = JournalFollower(only_spool(run_dir / "spool"))
    writer = SegmentWriter(run_dir / "nodes/node/segments")
    while news := follower.poll():
        for header, found in news:
            if isinstance(found, BlockRecord):
                writer.add(header, header.series, found.block)
    writer.commit(follower.positions)
    follower.close()


def grad(name, kind=Kind.GRAD_REDUCED):
    return SeriesKey(kind, name)


def actv(name, slot):
    return SeriesKey(Kind.ACTV, name, slot)


def dump(run_dir, rank, weight, *, step=5, attempt=1, **info):
    """Write the replay of a one-layer model whose weight has these (max, nans, infs)."""
    maximum, nans, infs = weight
    folder = run_dir / f"dumps/replay/attempt{attempt}/step{step}/rank{rank}"
    fields = {"id": "replay", "step": step, "attempt": attempt, "rank": rank, "replay": True, "micro_steps": 1}
    writer = DumpWriter(folder, dataclasses.replace(DumpInfo(**fields), **info))
    numbers = {"Max": maximum, "Min": -1.0, "Mean": 0.0, "Norm": 1.0, "nans": nans, "infs": infs, "zeros": 0}
    form = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 2], "requires_grad": True, **numbers}
    value = {"input_args": [], "input_kwargs": {}, "output": [dict(form)], "parameters": {"weight": dict(form)}}
    writer.add("Module.fc.Linear.forward.0", value)
    writer.close()


def drop_columns(run_dir, columns):
    """Take columns out of the segments of a run, as if another version had written them."""
    connection = duckdb.connect()
    for path in run_dir.rglob("*.parquet"):
        query = f"SELECT decode(key), decode(value) FROM parquet_kv_metadata('{path}')"
        (key, value), *_ = connection.execute(query).fetchall()
        connection.execute(
            f"CREATE OR REPLACE TABLE rows AS SELECT * EXCLUDE ({', '.join(columns)}) FROM read_parquet('{path}')"
        )
        connection.execute(f"COPY rows TO '{path}' (FORMAT parquet, KV_METADATA {{{key}: '{value}'}})")
    connection.close()
