"""Writes beside every pinned version the hashes of all its files: `make lock`, in an environment with pip-tools.

Versions are chosen by people (CONTRIBUTING.md); what is installed under that version later must be what was there then.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pip._internal.req.constructors import install_req_from_line
from pip._vendor.packaging.version import Version
from piptools.repositories import PyPIRepository


def main(paths: Sequence[str]) -> int:
    """Rewrite the lock files, each with its comments, references and order."""
    repository = PyPIRepository([], cache_dir=str(Path.home() / ".cache" / "pip-tools"))
    for path in map(Path, paths):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        path.write_text("\n".join(_hashed(repository, text.splitlines())) + "\n", encoding="utf-8")
    return 0


def _hashed(repository: PyPIRepository, lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines, each pin with the hashes that stood there and those of every file that the index offers.

    What stood there stays, as another index may offer other files of the same version (torch's CPU and CUDA builds).
    """
    for line in lines:
        if not line.strip() or line.startswith(("#", "-")):
            yield line
            continue
        requirement = line.partition("--hash")[0].strip()
        hashes = sorted({*re.findall(r"sha256:[0-9a-f]{64}", line), *_offered(repository, requirement)})
        yield " \\\n".join([requirement, *(f"    --hash={each}" for each in hashes)])


def _offered(repository: PyPIRepository, requirement: str) -> set[str]:
    """Return the hashes of all files of a pinned version; downloads them only where the index does not say.

    None of a version that this index does not have, as it may not have both builds of torch.
    """
    wanted = install_req_from_line(requirement)
    (pin,) = wanted.specifier
    with repository.allow_all_wheels():  # files for other machines too
        candidates = repository.find_all_candidates(wanted.name)
        links = [each.link for each in candidates if each.version == Version(pin.version)]
        if all(link.hash_name == "sha256" for link in links):
            return {f"sha256:{link.hash}" for link in links}
        return set(repository.get_hashes(wanted))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
