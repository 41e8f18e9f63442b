"""The command `trainermon` in a real terminal: a pseudo-terminal whose other end the test reads and types into."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

LIMIT_S = 900.0
CTRL_C = b"\x03"
# The terminal has to be the process's own: that is whom Ctrl-C interrupts. Tests that run in the background ignore it.
_START = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class TerminalProgram:
    """A command whose standard error, and standard output unless that is redirected, is a terminal."""

    def __init__(self, process: subprocess.Popen, terminal: int) -> None:
        self.process = process
        self.shown = b""
        self._terminal = terminal

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def read_until(self, text: bytes) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while text not in self.shown:
            assert self._read(deadline_s), f"expected {text!r}, found {self.shown!r}"

    def end(self) -> int:
        """Return the exit status, once all that was shown is read."""
        deadline_s = time.monotonic() + LIMIT_S
        while self._read(deadline_s):
            pass
        return self.process.wait(LIMIT_S)

    def screen(self) -> list[str]:
        """Return the lines that are left on the screen: what was erased or written over is not among them."""
        lines = [""]
        text = re.sub("\x1b\\[[0-9;]*m", "", self.shown.decode()).replace("\r\n", "\n")
        at = 0
        for part in text.replace("\x1b[K", "\0"):
            if part == "\n":
                lines.append("")
                at = 0
            elif part == "\r":
                at = 0
            elif part == "\0":
                lines[-1] = lines[-1][:at]
            else:
                lines[-1] = lines[-1][:at].ljust(at) + part + lines[-1][at + 1 :]
                at += 1
        return [line.rstrip() for line in lines if line.strip()]

    def _read(self, deadline_s: float) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline_s - time.monotonic()))
        try:
            read = os.read(self._terminal, 65536) if ready else b""
        except OSError:  # the other end is closed
            read = b""
        self.shown += read
        return bool(read)


@contextlib.contextmanager
def in_terminal(
    words: Sequence[str], cwd: Path, *, redirected: Path | None = None, **variables: str
) -> Iterator[TerminalProgram]:
    """Run `trainermon WORDS` in `cwd`; standard output goes into the file `redirected`, else to the terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    environment = {name: value for name, value in environment.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= variables
    command = [sys.executable, "-c", _START, sys.executable, "-m", "trainermon", *words]
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, ours)
        output = stack.enter_context(redirected.open("wb")) if redirected else theirs
        process = subprocess.Popen(
            command, stdin=theirs, stdout=output, stderr=theirs, cwd=cwd, env=environment, start_new_session=True
        )
        os.close(theirs)
        try:
            yield TerminalProgram(process, ours)
        finally:
            process.kill()
            process.wait()
