"""What a machine is: read from files and libraries, and from the vendors' tools with a limit of five seconds."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

TOOL_LIMIT_S = 5.0
_LEVELS = (("v4", "avx512f"), ("v3", "avx2"), ("v2", "sse4_2"))
_VERSION_FILES = {
    "cuda.toolkit": ("/usr/local/cuda/version.json", r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"([^"]+)"'),
    "cann.toolkit": ("/usr/local/Ascend/ascend-toolkit/latest/version.cfg", r"\[([\d.\w]+):"),
    "cann.driver": ("/usr/local/Ascend/driver/version.info", r"Version=(\S+)"),
    "rocm": ("/opt/rocm/.info/version", r"(\S+)"),
    "nvidia.driver": ("/proc/driver/nvidia/version", r"Module\s+([\d.]+)"),
}


def collect_system() -> dict[str, str | int]:
    """Return what is known of this machine, by name; what there is not, or cannot be read, is left out.

    Runs `nvidia-smi` and `npu-smi` where there are any, each for at most five seconds; nothing else is run.
    """
    found: dict[str, str | int] = {
        "os": _os_name(),
        "kernel": f"{platform.system()} {platform.release()}",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "python.build": f"{platform.python_implementation()} {platform.python_compiler()}",
        "architecture": platform.machine(),
        "cpu.cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
    }
    for part in (_cpu(), _memory(), _versions(), _accelerators()):
        found.update(part)
    return found


def loaded_libraries() -> dict[str, str]:
    """Return the numeric libraries that this process has loaded, by their short name, with version or file name."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    wanted = re.compile(
        r"/lib((?:cu\w+|nccl|hccl|cudnn\w*|cublas\w*|mkl_\w+|openblas\w*|gomp|omp|iomp5|dnnl|rccl)[\w-]*)\.so"
    )
    paths = {line.split(maxsplit=5)[5].strip() for line in maps.splitlines() if line.count("/") > 1}
    return {match[1]: Path(path).name for path in sorted(paths) if (match := wanted.search(path))}


def _os_name() -> str:
    for line in _lines("/etc/os-release"):
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip().strip('"')
    return platform.platform()


def _cpu() -> Iterator[tuple[str, str | int]]:
    flags: set[str] = set()
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            yield "cpu.model", value.strip()
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    level = next((level for level, flag in _LEVELS if flag in flags), None)
    if level:
        yield "cpu.vector_level", f"x86-64-{level}"
    special = sorted(flags.intersection(["amx_bf16", "amx_tile", "avx512_bf16", "avx512_fp16", "sve", "sve2", "bf16"]))
    if special:
        yield "cpu.special", " ".join(special)


def _memory() -> Iterator[tuple[str, int]]:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal:"):
            yield "memory_gib", round(int(line.split()[1]) / 2**20)


def _versions() -> Iterator[tuple[str, str]]:
    for name, (path, pattern) in _VERSION_FILES.items():
        match = re.search(pattern, "\n".join(_lines(path)))
        if match:
            yield name, match[1]
    for name in ("nccl", "hccl", "cudnn"):
        library = ctypes.util.find_library(name) if shutil.which("ldconfig") else None
        if library:
            yield f"{name}.library", library


def _accelerators() -> Iterator[tuple[str, str | int]]:
    names = _run("nvidia-smi", "--query-gpu=name,memory.total,driver_version,vbios_version", "--format=csv,noheader")
    rows = [[cell.strip() for cell in line.split(",")] for line in names]
    if rows:
        yield "accelerator.count", len(rows)
        yield "accelerator.model", "; ".join(sorted({row[0] for row in rows}))
        yield "accelerator.memory", "; ".join(sorted({row[1] for row in rows if len(row) > 1}))
        yield "accelerator.driver", "; ".join(sorted({row[2] for row in rows if len(row) > 2}))
    listed = _run("npu-smi", "info", "-l")
    chips = [line.partition(":")[2].strip() for line in listed if "Chip Count" in line]
    if chips:
        yield "accelerator.count", sum(int(chip) for chip in chips if chip.isdigit())
        models = {
            line.split()[3] for line in _run("npu-smi", "info", "-m") if line[:1].strip() == "" and "Ascend" in line
        }
        yield "accelerator.model", "; ".join(sorted(models)) or "Ascend"


def _run(program: str, *arguments: str) -> list[str]:
    path = shutil.which(program)
    if path is None:
        return []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(  # noqa: S603  # a vendor's tool, with fixed arguments
            [path, *arguments], capture_output=True, text=True, timeout=TOOL_LIMIT_S, check=False, errors="replace"
        )
        return [line for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
    return []


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
