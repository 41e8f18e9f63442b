"""The command `trainermon`, and `python -m trainermon`: Ctrl-C is quiet before the command line is even imported."""

from __future__ import annotations

import signal
import sys


def run() -> int:
    """Run the command line and return its exit status; see `trainermon.cli.main`."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process, and nothing is said
    from trainermon.cli import main

    signal.signal(signal.SIGINT, before)
    return main()


if __name__ == "__main__":
    sys.exit(run())
