"""Writes beside every pinned version the hashes of all its files: `make lock`, in an environment with pip-tools.

Versions are chosen by people (CONTRIBUTING.md); what is installed under that version later must be what was there then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pip._internal.req.constructors import install_req_from_line
from piptools.repositories import PyPIRepository


def main(paths: Sequence[str]) -> int:
    """Rewrite the lock files, each with its comments, references and order."""
    repository = PyPIRepository([], cache_dir=str(Path.home() / ".cache" / "pip-tools"))
    for path in map(Path, paths):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        path.write_text("\n".join(_hashed(repository, text.splitlines())) + "\n", encoding="utf-8")
    return 0


def _hashed(repository: PyPIRepository, lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if not line.strip() or line.startswith(("#", "-")):
            yield line
            continue
        requirement = line.partition("--hash")[0].strip()
        with repository.allow_all_wheels():  # files for other machines too
            hashes = sorted(repository.get_hashes(install_req_from_line(requirement)))
        yield " \\\n".join([requirement, *(f"    --hash={each}" for each in hashes)])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
