"""Starts the ranks of a small gloo job, each a process of its own, and waits for all of them.

The ranks are forked from one process that has imported what their script imports: torch, a framework and what these
bring take as long as many a test, and each rank would do it again.
"""

import gc
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path

from tests.fork_server import ROOT, start_script
from tests.ports import free_port


def run_ranks(
    script: Path,
    *arguments: str,
    world_size: int = 2,
    timeout_s: float = 900,
    patience_s: int = 30,
    **variables: str,
) -> list[str]:
    """Run `script` on every rank and return what each wrote; fail with that text if one did not end with status 0.

    What it does unless it is the main program is done once for all ranks, before they know their number. When one rank
    has failed, the others, which may wait for it for ever, are killed after `patience_s`.
    """
    common = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environment = os.environ | {name: str(value) for name, value in common.items()} | variables
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"rank{rank}.txt") for rank in range(world_size)]
        own = [folder, str(world_size), str(patience_s), str(script), *arguments]
        parent = start_script(Path(__file__), *own, output=outputs[0], environment=environment)
        try:
            parent.wait(timeout_s)
        finally:
            parent.kill_session()
            status = parent.wait(timeout_s)
            texts = [output.read_text() if output.exists() else "" for output in outputs]
    assert status == 0, "\n--- next rank ---\n".join(texts)
    return texts


def _fork_ranks(outputs: list[Path], patience_s: int) -> int:
    """Return the number of this rank; the parent ends here when all ranks have, with status 0 if each did."""
    ranks: dict[int, int] = {}
    for rank, output in enumerate(outputs):
        pid = os.fork()
        if not pid:
            if rank:
                descriptor = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
            return rank
        ranks[pid] = rank
    sys.exit("; ".join(_failures(ranks, patience_s)) or 0)


def _failures(ranks: dict[int, int], patience_s: int) -> list[str]:
    """Wait for all ranks, given by process, and tell how those ended that failed, the first one first."""

    def kill_others(*_: object) -> None:
        for process in ranks:
            os.kill(process, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill_others)
    failed = []
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process, None)
        if rank is not None and status:
            failed.append(f"rank {rank} ended with status {os.waitstatus_to_exitcode(status)}")
            if len(failed) == 1:
                signal.alarm(patience_s)
    return failed


def main() -> None:
    folder, world_size, patience_s, script = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    sys.argv[:] = sys.argv[4:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="imported")
    gc.freeze()  # a collection need not look at what was imported, which is a million objects
    rank = str(_fork_ranks([folder / f"rank{rank}.txt" for rank in range(world_size)], patience_s))
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
