"""Starts the ranks of a small gloo job, each a process of its own, and waits for all of them.

The ranks are forked from one process that has imported what their script imports: torch, a framework and what these
bring take as long as many a test, and each rank would do it again.
"""

import contextlib
import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from tests.ports import free_port

ROOT = Path(__file__).parents[1]


def run_ranks(
    script: Path, *arguments: str, world_size: int = 2, timeout_s: float = 900, **variables: str
) -> list[str]:
    """Run `script` on every rank and return what each wrote; fail with that text if one did not end with status 0.

    What it does unless it is the main program is done once for all ranks, before they know their number.
    """
    common = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with contextlib.ExitStack() as stack:
        # files, not pipes: a rank that waits for its full pipe to be read holds up the one that is being read
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world_size)]
        descriptors = [output.fileno() for output in outputs]
        parent = subprocess.Popen(
            [sys.executable, __file__, ",".join(map(str, descriptors)), str(script), *arguments],
            env=os.environ | {name: str(value) for name, value in common.items()} | variables,
            stdout=outputs[0],
            stderr=subprocess.STDOUT,
            pass_fds=descriptors,
            start_new_session=True,
        )
        try:
            parent.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()
            texts = [_read(output) for output in outputs]
    assert parent.returncode == 0, "\n--- next rank ---\n".join(texts)
    return texts


def _read(output: IO[str]) -> str:
    output.seek(0)
    return output.read()


def _fork_ranks(descriptors: list[int]) -> int:
    """Return the number of this rank; the parent ends here when all ranks have, with status 0 if each did."""
    children = []
    for rank, descriptor in enumerate(descriptors):
        children.append(os.fork())
        if not children[-1]:
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            return rank
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(f"statuses {statuses}" if any(statuses) else 0)


def main() -> None:
    descriptors, script = [int(number) for number in sys.argv[1].split(",")], sys.argv[2]
    sys.argv[:] = sys.argv[2:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="imported")
    importlib.import_module("torch._dynamo")  # which every optimizer does with its first step
    rank = str(_fork_ranks(descriptors))
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
