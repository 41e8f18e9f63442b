"""Records labelled runs into a folder, once each: journals in `spool/`, and what each run was in `runs.jsonl`."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.detection.cases import Case
from benchmarks.detection.family_cases import Segment
from benchmarks.detection.family_training import FamilyJob
from benchmarks.detection.training import Job
from benchmarks.families.catalogue import FAMILIES
from trainermon.core.spool import spool_of

ROOT = Path(__file__).parents[2]
MANIFEST = "runs.jsonl"
LIMIT_S = 3600


def record(cases: Iterable[Case], folder: Path) -> list[Case]:
    """Record what is not in `folder` yet, and return all of `cases` as they were recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {case.run_id: case for case in cases}
    missing = [case for run_id, case in wanted.items() if run_id not in recorded(folder)]
    torch.set_num_threads(1)
    for case in missing:  # whatever an interrupted recording has left
        shutil.rmtree(spool_of_case(case, folder), ignore_errors=True)
    for case in missing:
        if case.ranks == 1:
            train(case, folder)
    for num_ranks, is_zero in sorted({_job_of(case) for case in missing if case.ranks > 1}):
        _train_on_ranks([case for case in missing if _job_of(case) == (num_ranks, is_zero)], folder, num_ranks)
    known = recorded(folder)
    return [known[run_id] for run_id in wanted]


def spool_of_case(case: Case, folder: Path) -> Path:
    """Return where the journals of a recorded run are."""
    return spool_of(case.run_id, folder / "output" / case.run_id, folder / "spool")


def recorded(folder: Path) -> dict[str, Case]:
    """Return what is in `folder`, by run id."""
    path = folder / MANIFEST
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {case.run_id: case for case in (Case(**json.loads(line)) for line in lines)}


def train(case: Case, folder: Path) -> None:
    """Train one run (or one rank of it), and note down what it was."""
    logging.getLogger("trainermon").setLevel(logging.ERROR)
    job = FamilyJob(case, folder) if case.size in FAMILIES else Job(case, folder)
    found = job.run()
    if job.rank != 0:
        return
    if isinstance(found, int):
        case = dataclasses.replace(case, first_bad=found)
    else:
        parts = [dataclasses.asdict(segment) for segment in found]
        (folder / f"{case.run_id}.json").write_text(json.dumps(parts), encoding="utf-8")
    with (folder / MANIFEST).open("a", encoding="utf-8") as manifest:
        manifest.write(json.dumps(dataclasses.asdict(case)) + "\n")


def segments(case: Case, folder: Path) -> list[Segment]:
    """Return the parts of a recorded training of a family, in the order in which they were recorded."""
    return [Segment(**part) for part in json.loads((folder / f"{case.run_id}.json").read_text(encoding="utf-8"))]


def _job_of(case: Case) -> tuple[int, bool]:
    """Return what runs have in common that one set of processes can train one after the other."""
    return case.ranks, case.split.startswith("zero")


def _train_on_ranks(cases: Sequence[Case], folder: Path, num_ranks: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as listed:
        json.dump([dataclasses.asdict(case) for case in cases], listed)
        listed.flush()
        job = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-m", "benchmarks.detection.ranks_worker", str(folder), listed.name]
        ranks = [
            subprocess.Popen(command, cwd=ROOT, env=os.environ | {k: str(v) for k, v in place.items()})
            for place in ({**job, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1} for rank in range(num_ranks))
        ]
        try:
            failed = [rank for rank, process in enumerate(ranks) if process.wait(LIMIT_S)]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    if failed:
        raise RuntimeError(f"ranks {failed} of a recorded job failed: see what they wrote above")
