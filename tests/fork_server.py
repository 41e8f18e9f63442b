"""Starts Python scripts by forking a process that has imported torch, which takes longer than many a test.

A script runs as if started by itself, with arguments, environment, working directory and session of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
READ_BY_IMPORTS = ("TORCH_COMPILE_DISABLE",)
"""Variables that torch reads when it is imported: where one differs, another process is forked."""


class ForkedProcess:
    """A running script, with what tests use of `subprocess.Popen`."""

    def __init__(self, server: _ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server, self._descriptor = server, os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Whether it has ended, waited for or not."""
        return self.returncode is not None or self._ends_within(0)

    def wait(self, timeout_s: float) -> int:
        """Return the exit status, or minus the number of the signal that killed it.

        Raises:
            subprocess.TimeoutExpired: It has not ended within that time.
        """
        if self.returncode is None:
            if not self._ends_within(timeout_s):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s)
            self.returncode = self._server.ask(collect=self.pid)
            os.close(self._descriptor)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill_session(self) -> None:
        """Kill it with all that it has forked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _ends_within(self, timeout_s: float) -> bool:
        return bool(select.select([self._descriptor], [], [], timeout_s)[0])


def start_script(
    script: Path, *arguments: str, output: Path, environment: Mapping[str, str], folder: Path | None = None
) -> ForkedProcess:
    """Start `script` with exactly the variables of `environment`; what it writes goes to the file `output`.

    It runs in `folder`, otherwise where this process does.
    """
    server = _server(*((name, environment[name]) for name in READ_BY_IMPORTS if name in environment))
    argv = [str(script), *arguments]
    return ForkedProcess(
        server, server.ask(argv=argv, output=str(output), folder=str(folder or Path.cwd()), environment={**environment})
    )


class _ForkServer:
    """The process that is forked; it ends with this one."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self._process.communicate)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, **request: object) -> int:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


_servers: dict[tuple[tuple[str, str], ...], _ForkServer] = {}


def _server(*variables: tuple[str, str]) -> _ForkServer:
    """Return the process to fork; another one where somebody has ended it, which must not cost every later test."""
    if variables not in _servers or _servers[variables].has_ended():
        _servers[variables] = _ForkServer(dict(variables))
    return _servers[variables]


def _serve() -> dict:
    """Fork for every request, and tell exit statuses; return a request only in the process that has it to do."""
    for line in sys.stdin:
        request = json.loads(line)
        if "collect" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["collect"], 0)[1])
        elif not (answer := os.fork()):
            return request
        os.write(1, f"{answer}\n".encode())
    sys.exit()


def _become(request: dict) -> None:
    """Make this process one that was started for the request."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    with open(os.devnull) as nothing, open(request["output"], "w") as output:
        for descriptor, file in ((0, nothing), (1, output), (2, output)):
            os.dup2(file.fileno(), descriptor)
    sys.argv[:] = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in added if folder not in ("", *sys.path)]
    if any(Path(folder, "sitecustomize.py").exists() for folder in added if folder):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        importlib.import_module("warnings").simplefilter("ignore")


def main() -> None:
    importlib.import_module("torch._dynamo")  # which every optimizer imports with its first step
    gc.freeze()
    request = _serve()
    _become(request)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
