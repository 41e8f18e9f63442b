"""Whatever is installed from a lock is the file that was locked."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
PIN = re.compile(r"[A-Za-z0-9._-]+==[^\s;]+( *;.*)?")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_requirement_is_pinned_and_has_the_hashes_of_its_files(lock):
    lines = lock.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()

    for line in filter(None, lines):
        if not line.startswith(("#", "-r ")):
            pin, *hashes = re.split(r" +(?=--hash)", line)
            assert PIN.fullmatch(pin.strip()), line
            assert hashes, pin
            assert all(HASH.fullmatch(each.strip()) for each in hashes), line


def test_locks_are_installed_with_their_hashes_demanded():
    recipes = [(ROOT / "Makefile").read_text(), (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")]
    commands = [
        line
        for text in recipes
        for line in text.splitlines()
        if re.search(r"pip .*install.* (-r|--requirement) .*\.lock", line)
    ]

    assert len(commands) >= 3
    assert all("--require-hashes" in command for command in commands)
