"""The README of a folder names its modules, and names nothing that is not there."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
FILES = [ROOT / name for name in TRACKED.split("\0") if name]
NAMES = {path.name for path in FILES}
READMES = [path for path in FILES if path.name == "README.md" and path.parent != ROOT]
MODULES = [path for path in FILES if path.suffix == ".py" and path.is_relative_to(ROOT / "trainermon")]
FACE = {"__init__", "__main__", "cli"}

_CODE = re.compile(r"`([^`\n]+)`")
_SOURCE = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|js|c)")


def readmes_for(module: Path) -> list[Path]:
    """Return the READMEs of the module's folder and of those around it, within the package."""
    folders = [folder for folder in module.parents if folder.is_relative_to(ROOT / "trainermon")]
    return [readme for folder in folders if (readme := folder / "README.md").exists()]


def names_in(text: str) -> set[str]:
    return {word for code in _CODE.findall(text) for word in re.findall(r"\w+", code)}


def missing_sources(text: str) -> list[str]:
    named = [code for code in _CODE.findall(text) if _SOURCE.fullmatch(code)]
    return [name for name in named if Path(name).name not in NAMES]


def test_every_module_is_named_in_a_readme():
    left_out = [
        str(module.relative_to(ROOT))
        for module in MODULES
        if module.stem not in FACE
        and not any(module.stem in names_in(page.read_text()) for page in readmes_for(module))
    ]

    assert left_out == []


@pytest.mark.parametrize("page", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_source_file_that_a_readme_names_is_there(page):
    assert missing_sources(page.read_text(encoding="utf-8")) == []


def test_what_is_missing_is_found():
    assert missing_sources("see `taps/no_such_module.py` and `guard.py`") == ["taps/no_such_module.py"]
