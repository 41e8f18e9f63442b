"""Whatever is installed from a lock is the file that was locked."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEV = ROOT / "requirements" / "dev.lock"
DOCKERFILE = ROOT / "docker" / "Dockerfile"
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
    makefile = (ROOT / "Makefile").read_text()
    recipes = [
        makefile.replace("||", "\n").replace("$(LOCKED)", "install --quiet --require-hashes"),
        DOCKERFILE.read_text(),
    ]
    commands = re.findall(r"install (?:(?!&&|;)[^\n]|\\\n)*(?:-r|--requirement) \S+\.lock", "\n".join(recipes))

    assert len(commands) >= 5
    assert all("--require-hashes" in command for command in commands)


def test_every_build_of_torch_is_the_same_version():
    versions = {
        re.search(r"^torch==([\d.]+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE)[1]
        for name in ("torch.lock", "torch_cpu.lock")
    }

    assert len(versions) == 1


@pytest.mark.parametrize("name", ["demo.lock", "image.lock", "cuda.lock", "light.lock"])
def test_what_is_installed_for_less_has_the_versions_that_are_tested(name):
    pins = {pin.partition("==")[0]: pin for pin in re.findall(r"^[\w.-]+==\S+", DEV.read_text(), re.MULTILINE)}
    found = re.findall(r"^[\w.-]+==\S+", (ROOT / "requirements" / name).read_text(), re.MULTILINE)

    assert [pin for pin in found if pins.get(pin.partition("==")[0], pin) != pin] == []


def test_mindspore_is_tested_with_the_same_versions_beside_it():
    base, dev, found = (
        dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE))
        for name in ("base.lock", "dev.lock", "mindspore.lock")
    )
    usual = base | dev

    assert "torch" not in found
    assert {name for name, version in found.items() if usual.get(name, version) != version} == {"numpy"}


@pytest.mark.parametrize("room", ["agent/hang", "dump", "replay", "statistics"])
def test_what_depends_on_torchs_build_is_tested_with_both(room):
    tested = re.search(r"^CUDA_TESTS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()

    assert f"tests/{room}" in tested
    assert all((ROOT / place).exists() for place in tested)
