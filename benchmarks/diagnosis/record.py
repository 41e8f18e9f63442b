"""Trains cases into a folder, once each, and stores what their ranks wrote down as an agent does."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.diagnosis.cases import SPLITS, Case
from tests.ranks import run_ranks
from trainermon.agent.follower import JournalFollower
from trainermon.core.journal import BlockRecord
from trainermon.core.spool import spool_of
from trainermon.exporters.store.store import SegmentWriter

MANIFEST = "runs.jsonl"
LIMIT_S = 900


def record(cases: Sequence[Case], folder: Path) -> list[Case]:
    """Train what is not in `folder` yet, and return all of `cases` as they were trained."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        known = recorded(folder)
        missing = [case for case in cases if case.split == split and case.run_id not in known]
        if missing:
            _train(missing, folder)
    known = recorded(folder)
    return [known[case.run_id] for case in cases]


def recorded(folder: Path) -> dict[str, Case]:
    """Return what is in `folder`, by run id."""
    path = folder / MANIFEST
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {case.run_id: case for case in (Case(**json.loads(line)) for line in lines)}


def run_dir_of(case: Case, folder: Path) -> Path:
    """Return the directory of a recorded run."""
    return folder / "output" / case.run_id


def _spool_of(case: Case, folder: Path) -> Path:
    """Return where the journals of a recorded run are."""
    return spool_of(case.run_id, folder / "output" / case.run_id, folder / "spool")


def _train(cases: Sequence[Case], folder: Path) -> None:
    """Train cases of one split in one job, each a run of its own."""
    split, listed = cases[0].split, folder / f"{cases[0].split}.json"
    for case in cases:  # whatever an interrupted recording has left
        for left in (run_dir_of(case, folder), _spool_of(case, folder)):
            shutil.rmtree(left, ignore_errors=True)
    listed.write_text(json.dumps([dataclasses.asdict(case) for case in cases]), encoding="utf-8")
    script = Path(__file__).with_name("worker.py")
    run_ranks(script, str(folder), str(listed), world_size=SPLITS[split], timeout_s=LIMIT_S)
    trained = []
    for rank in range(SPLITS[split]):
        found = folder / f"{split}-rank{rank}.json"
        trained += [Case(**fields) for fields in json.loads(found.read_text(encoding="utf-8"))]
        found.unlink()
    listed.unlink()
    for case in trained:
        _store(_spool_of(case, folder), run_dir_of(case, folder) / "nodes" / "node" / "segments")
    with (folder / MANIFEST).open("a", encoding="utf-8") as manifest:
        manifest.writelines(json.dumps(dataclasses.asdict(case)) + "\n" for case in trained)


def _store(spool: Path, segments: Path) -> None:
    """Move all journals of a run into a segment."""
    follower, writer = JournalFollower(spool), SegmentWriter(segments)
    while news := follower.poll():
        for header, found in news:
            if isinstance(found, BlockRecord):
                writer.add(header, header.series, found.block)
    writer.commit(follower.positions)
    follower.close()
    shutil.rmtree(spool)
