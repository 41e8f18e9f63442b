"""NVML's stand-in as a shared library that the real pynvml loads, and processes that have it on their path."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml_stand_in.c")


@functools.cache
def library_folder():
    """Return a folder with `libnvidia-ml.so.1`; compiled once per process."""
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    folder = tempfile.TemporaryDirectory(prefix="nvml-")
    library = Path(folder.name) / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, SOURCE], check=True)
    return folder


def environment(told: Path) -> dict[str, str]:
    """Return what makes a process load the stand-in, which tells what the file `told` says."""
    folders = [library_folder().name, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(folders), "NVML_STAND_IN": str(told)}


def gpu(uuid, *, utilization=90, used=40_000, total=81_920, watt=512.5, celsius=61, mhz=1755, reasons=0, ecc=0, pid=0):
    """Return the line of a GPU, as `nvml_stand_in.c` reads it."""
    milliwatt = round(watt * 1000)
    return f"gpu {uuid} H100 {utilization} {used} {total} {milliwatt} {celsius} {mhz} {reasons} {ecc} {pid}\n"
