"""What the ranks wrote about themselves in the run directory."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from trainermon.agent.accelerators.matching import RankAccelerator
from trainermon.core.journal import Header


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """What a rank wrote about itself in `ranks/rank00000.json`.

    Attributes:
        parameters: Number of its parameters' elements.
        bytes_per_step: Bytes that it writes to its journal per step.
        accelerator: The device that it trains on; None: none, or not known.
    """

    parameters: int = 0
    bytes_per_step: int = 0
    accelerator: RankAccelerator | None = None


class RankFiles:
    """Reads the file of each rank once per attempt, in the worker's thread.

    Args:
        run_dir: The run directory.
        executor: Reads.
    """

    def __init__(self, run_dir: Path, executor: Executor) -> None:
        self._run_dir = run_dir
        self._executor = executor
        self._files: dict[int, RankFile] = {}
        self._asked: set[tuple[int, int]] = set()

    def __len__(self) -> int:
        return len(self._files)

    @property
    def num_parameters(self) -> int:
        """Number of parameters that the ranks of this node have reported."""
        return sum(file.parameters for file in self._files.values())

    @property
    def bytes_per_step(self) -> int:
        """The most bytes that a rank writes per step; 0 if none has reported it."""
        return max((file.bytes_per_step for file in self._files.values()), default=0)

    @property
    def accelerators(self) -> dict[int, RankAccelerator]:
        """By rank that trains on one, its accelerator."""
        return {rank: file.accelerator for rank, file in self._files.items() if file.accelerator is not None}

    def read_new(self, headers: Mapping[int, Header]) -> None:
        """Schedule reading the files of ranks that are new or in a new attempt; never waits."""
        for rank, header in headers.items():
            if (rank, header.attempt) not in self._asked:
                self._asked.add((rank, header.attempt))
                loop = asyncio.get_running_loop()
                job = loop.run_in_executor(self._executor, read_rank_file, self._run_dir, rank)
                job.add_done_callback(partial(self._keep, rank))

    def _keep(self, rank: int, job: asyncio.Future[RankFile]) -> None:
        self._files[rank] = job.result()


def read_rank_file(run_dir: Path, rank: int) -> RankFile:
    """Return numbers that `rank` wrote about itself (`RankFile`); zeros where its file cannot be read."""
    try:
        plain = json.loads((run_dir / "ranks" / f"rank{rank:05d}.json").read_text(encoding="utf-8"))
        return RankFile(
            parameters=int(plain.get("parameters", 0)),
            bytes_per_step=int(plain.get("bytes_per_step", 0)),
            accelerator=RankAccelerator.of(plain),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return RankFile()
