"""Finds, or installs, and starts the real server programs that tests use.

A program is looked for on the PATH, then in the cache of a former run, then asked of the package manager: as root it is
installed, otherwise its package is only unpacked into the cache. On a machine without a package manager a test that
needs the program is skipped. A package manager that fails is a failure, and in CI so is its absence: there a skipped
test would look like a passed one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

# Debian package of each program, and the path of the program in it.
PROGRAMS = {
    "prometheus": ("prometheus", "usr/bin/prometheus"),
    "promtool": ("prometheus", "usr/bin/promtool"),
    "prometheus-alertmanager": ("prometheus-alertmanager", "usr/bin/prometheus-alertmanager"),
    "amtool": ("prometheus-alertmanager", "usr/bin/amtool"),
    "prometheus-pushgateway": ("prometheus-pushgateway", "usr/bin/prometheus-pushgateway"),
    "chromium": ("chromium", "usr/bin/chromium"),
    "influxd": ("influxdb", "usr/bin/influxd"),
    "rclone": ("rclone", "usr/bin/rclone"),
    "victoria-metrics": ("victoria-metrics", "usr/bin/victoria-metrics"),
    "systemd-analyze": ("systemd", "usr/bin/systemd-analyze"),
}
CACHE = Path(__file__).parents[1] / "build" / "test-programs"
START_S = 600.0


@functools.cache
def find_program(name: str) -> str:
    """Return the path of a program, installed if need be; skips or fails the test that asks for it otherwise."""
    package, inside = PROGRAMS[name]
    unpacked = CACHE / package / inside
    found = shutil.which(name) or (str(unpacked) if unpacked.exists() else None)
    if found:
        return found
    if not shutil.which("apt-get"):
        reason = f"{name} is not on the PATH and there is no apt-get to get it with"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    try:
        with installing():
            if os.geteuid() != 0:
                _unpack(package)
            elif not shutil.which(name):  # another process may have installed it meanwhile
                _install(package)
    except subprocess.CalledProcessError as error:
        pytest.fail(f"{name} could not be installed: {error}\n{error.stdout}")
    found = shutil.which(name) or (str(unpacked) if unpacked.exists() else None)
    return found or pytest.fail(f"{name} is not in the package {package}, expected {inside}")


@contextlib.contextmanager
def installing() -> Iterator[None]:
    """Hold the lock of the cache: the processes that run tests side by side install one after the other."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wait_until(condition: Callable[[], object], *, timeout_s: float = START_S, what: str) -> None:
    """Return as soon as `condition` gives something true; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not seen within {timeout_s} s: {what}")
        time.sleep(0.05)


@contextlib.contextmanager
def running(command: Sequence[str], *, log: Path, ready: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server and wait until it is ready; it has ended when the block is left."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: process.poll() is not None or ready(), what=f"{command[0]} ready, its output is in {log}")
        if process.poll() is not None:
            pytest.fail(f"{command[0]} ended with status {process.returncode}:\n{log.read_text()[-4000:]}")
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=900)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _install(package: str) -> None:
    with _no_service_starts():
        arguments = ["install", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", package]
        _with_fresh_lists(arguments, Path.cwd())


def _unpack(package: str) -> None:
    folder = CACHE / package
    folder.mkdir(parents=True, exist_ok=True)
    _with_fresh_lists(["download", package], folder)
    for archive in folder.glob("*.deb"):
        _call(["dpkg", "-x", archive.name, "."], folder)


def _with_fresh_lists(arguments: Sequence[str], folder: Path) -> None:
    """Call apt-get, and once more after an update: a fresh image has no package lists, an old one stale ones."""
    try:
        _call(["apt-get", *arguments], folder)
    except subprocess.CalledProcessError:
        if os.geteuid() != 0:
            raise
        _call(["apt-get", "update"], folder)
        _call(["apt-get", *arguments], folder)


def _call(command: Sequence[str], folder: Path) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(
        command, cwd=folder, env=environment, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@contextlib.contextmanager
def _no_service_starts() -> Iterator[None]:
    """Keep the package manager from starting what it installs; a policy that is there already stays."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()
