"""Jobs of several ranks that take one step each in turn, so that a bare and a watched job are measured side by side.

A job is a script that calls `serve(step)` on every rank. The parent gives all its ranks the word for one step, and gets
the CPU time that each rank's process spent in it; a job's is their mean. The two jobs are processes of their own: what
a monitor replaces in one of them, on a class, say, cannot slow the other.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.measure import Ratio, cpu_ms, summarise

ROOT = Path(__file__).parents[1]
LIMIT_S = 300.0


def serve(step: Callable[[], object]) -> None:
    """Take a step for every line on standard input, answer with its CPU time, and leave at the end of the input."""
    answers = os.fdopen(int(os.environ["ANSWERS"]), "w", buffering=1)
    answers.write("ready\n")
    for _ in sys.stdin:
        answers.write(f"{cpu_ms(step)}\n")
    answers.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}\n")


@dataclasses.dataclass(slots=True)
class Job:
    """The running ranks of one job."""

    ranks: list[subprocess.Popen[str]]
    answers: list[int]
    log: Path

    @classmethod
    def start(
        cls, python: str, script: Path, arguments: Sequence[str], *, world_size: int, log: Path, **variables: str
    ) -> Job:
        """Start the ranks; each writes what it prints to `log`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        job = cls([], [], log)
        for rank in range(world_size):
            read, write = os.pipe()
            environment = _environment(rank, world_size, port) | {"ANSWERS": str(write)} | variables
            with log.open("a", encoding="utf-8") as output:
                job.ranks.append(
                    subprocess.Popen(
                        [python, str(script), *arguments],
                        env=os.environ | environment,
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        pass_fds=[write],
                        text=True,
                    )
                )
            os.close(write)
            job.answers.append(read)
        return job

    def ready(self) -> None:
        """Wait until every rank is."""
        for rank in range(len(self.ranks)):
            self._answer(rank)

    def step(self) -> float:
        """Let every rank take one step; return its CPU time in milliseconds, the mean of the ranks."""
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write("step\n")
            process.stdin.flush()
        return statistics.mean(float(self._answer(rank)) for rank in range(len(self.ranks)))

    def finish(self) -> float:
        """End the job; return rank 0's peak of resident memory in MiB."""
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.close()
        peaks = [float(self._answer(rank)) for rank in range(len(self.ranks))]
        for process in self.ranks:
            process.wait(LIMIT_S)
        return peaks[0]

    def kill(self) -> None:
        """Make sure that no rank is left."""
        for process in self.ranks:
            process.kill()
            process.wait()
        for descriptor in self.answers:
            os.close(descriptor)
        self.answers.clear()

    def _answer(self, rank: int) -> str:
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self.answers[rank], 1)
            if not byte:
                tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
                raise RuntimeError(f"rank {rank} ended early:\n" + "\n".join(tail))
            line += byte
        return line.decode()


def compare(base: Job, other: Job, *, pairs: int, warm_up: int) -> tuple[Ratio, float]:
    """Return what a step of `other` costs against one of `base`, and how many MiB more it needs at most."""
    try:
        base.ready()
        other.ready()
        for _ in range(warm_up):
            base.step(), other.step()
        measured = []
        for index in range(pairs):
            first = base.step() if index % 2 else None
            watched = other.step()
            measured.append((base.step() if first is None else first, watched))
        return summarise(measured), other.finish() - base.finish()
    finally:
        base.kill()
        other.kill()


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
    }
