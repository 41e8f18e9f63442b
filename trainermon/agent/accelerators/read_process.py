"""The process that asks the driver of the accelerators, so that one that hangs holds up nothing but this process.

    python -m trainermon.agent.accelerators.read_process nvml --every 2

It writes a line of JSON (`AcceleratorSample`) to its standard output every so many seconds, until its standard input
ends. If the driver cannot be asked at all it says why, as a last line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trainermon.agent.accelerators.npu_smi import NpuSmiReader
from trainermon.agent.accelerators.nvml import NvmlReader
from trainermon.agent.accelerators.readings import AcceleratorReading, AcceleratorSample, ReaderError, encode

NICE = 10


class AcceleratorReader(Protocol):
    """Asks one kind of driver."""

    def read(self) -> Sequence[AcceleratorReading]:
        """Return a reading of every accelerator."""


READERS: Mapping[str, Callable[[], AcceleratorReader]] = {"nvml": NvmlReader, "npu-smi": NpuSmiReader}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write samples until standard input ends, or the driver refuses; return the exit status."""
    parser = argparse.ArgumentParser(description="Read the accelerators of this node every few seconds.")
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("--every", type=float, metavar="SECONDS", required=True)
    given = parser.parse_args(arguments)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    try:
        reader = READERS[given.reader]()
        while True:
            began_s = time.monotonic()
            _say(AcceleratorSample(time_s=time.time(), readings=reader.read()))
            if _has_ended(max(0.0, given.every - (time.monotonic() - began_s))):
                return 0
    except ReaderError as error:
        _say(AcceleratorSample(time_s=time.time(), problem=str(error)))
    except BrokenPipeError:  # whoever started this was killed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _say(sample: AcceleratorSample) -> None:
    sys.stdout.write(encode(sample) + "\n")
    sys.stdout.flush()


def _has_ended(wait_s: float) -> bool:
    """Wait; return whether standard input has ended meanwhile."""
    readable, _, _ = select.select([sys.stdin], [], [], wait_s)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    raise SystemExit(main())
