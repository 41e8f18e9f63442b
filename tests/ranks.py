"""Starts the ranks of a small gloo job, each a process of its own, and waits for all of them."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]


def run_ranks(
    script: Path, *arguments: str, world_size: int = 2, timeout_s: float = 900, **variables: str
) -> list[str]:
    """Run `script` on every rank and return what each wrote; fail with that text if one did not end with status 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    # files, not pipes: a rank that waits for its full pipe to be read holds up the one that is being read
    outputs = [tempfile.TemporaryFile("w+") for _ in range(world_size)]  # noqa: SIM115  # closed when they are read
    for rank in range(world_size):
        environment = {name: str(value) for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment | variables,
                stdout=outputs[rank],
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        for process in processes:
            process.wait(timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        texts = [_read(output) for output in outputs]
    statuses = [process.returncode for process in processes]
    assert statuses == [0] * world_size, f"statuses {statuses}\n" + "\n--- next rank ---\n".join(texts)
    return texts


def _read(output: IO[str]) -> str:
    with output:
        output.seek(0)
        return output.read()
