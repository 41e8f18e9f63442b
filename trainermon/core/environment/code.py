"""Which code is run: the commit of the repository around the working directory, and hashes of files."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainermon.core.environment.secrets import Redactor

GIT_LIMIT_S = 5.0
MAX_FILE_BYTES = 1 << 26


def collect_code(folder: Path, files: Iterable[Path], redactor: Redactor) -> dict[str, str | bool]:
    """Return commit, remote and state of the repository around `folder`, and the SHA-256 of each of `files`.

    A diff is hashed, never kept. What git does not tell within five seconds is left out.
    """
    found: dict[str, str | bool] = {}
    commit = _git(folder, "rev-parse", "HEAD")
    if commit:
        status = _git(folder, "status", "--porcelain", "--untracked-files=no") or b""
        found["git.commit"] = commit.decode(errors="replace").strip()
        found["git.dirty"] = bool(status)
        remote = _git(folder, "remote", "get-url", "origin")
        if remote:
            found["git.remote"] = redactor.text(remote.decode(errors="replace").strip())
        if status:
            found["git.diff_sha256"] = hashlib.sha256(_git(folder, "diff", "HEAD") or b"").hexdigest()
    for path in files:
        digest = sha256_of(path)
        if digest:
            found[f"file.{redactor.text(path.name)}"] = digest
    return found


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file; "" if it cannot be read, or is larger than any source is."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return ""
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _git(folder: Path, *arguments: str) -> bytes | None:
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-c", "core.fsmonitor=false", "-C", str(folder), "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(  # noqa: S603  # git, with fixed arguments
            command, capture_output=True, timeout=GIT_LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def script_arguments(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the arguments of a script without secrets, those of its environment among them."""
    redactor = Redactor()
    redactor.learn(environ)
    return redactor.arguments(words)
