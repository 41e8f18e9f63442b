"""Which code is run, the commit of its repository, hashes of files, its arguments; and how it failed."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainermon.core.environment.literals import masked_code
from trainermon.core.environment.secrets import Redactor, is_secret_name

GIT_LIMIT_S = 5.0
MAX_FILE_BYTES = 1 << 26

_SURE = re.compile(r"(?i)(api|access|auth|bearer|hf|hub)_?(key|token)")
_CODE_OF_FRAME = re.compile(r'^( *File "[^\n]*", line \d+[^\n]*\n)( [^\n]*)', re.MULTILINE)


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


def failure_text(error: BaseException, words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the traceback of an error of the script, as Python prints it, without secrets.

    Those of its arguments, of its environment and of the variables of the frames that failed are found in messages,
    too; of variables only texts, by a name that is a secret's alone.
    """
    redactor = Redactor()
    redactor.learn(environ)
    redactor.arguments(words)
    for variables in _variables(error):
        redactor.learn({name: value for name, value in variables.items() if type(value) is str and _is_sure(name)})
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return redactor.text(_CODE_OF_FRAME.sub(lambda match: match[1] + masked_code(match[2]), text))


def _variables(error: BaseException) -> Iterator[dict[str, Any]]:
    """Yield the variables of each frame that an error, and those that led to it, came through."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        left += [one.__cause__, one.__context__]
        for frame, _ in traceback.walk_tb(one.__traceback__):
            yield dict(frame.f_globals)
            yield dict(frame.f_locals)


def _is_sure(name: str) -> bool:
    """Return whether no key of a dict, and no token of a text, goes by this name; else words would be struck out."""
    return is_secret_name(name, "1") or bool(_SURE.search(name))
