"""Every folder of the package has a README that names its modules, and names nothing that is not there."""

import re
import subprocess
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILES = 25
TRACKED = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
FILES = [PurePosixPath(name) for name in TRACKED.split("\0") if name and (ROOT / name).is_file()]
PACKAGE = PurePosixPath("trainermon")
MODULES = [path for path in FILES if path.suffix == ".py" and path.is_relative_to(PACKAGE)]
FOLDERS = sorted({module.parent for module in MODULES})
READMES = [path for path in FILES if path.name == "README.md" and path.parent != PurePosixPath()]

_CODE = re.compile(r"`([^`\n]+)`")
_FOLDER = re.compile(r"\]\((\w+)/README\.md\)")
_SOURCE = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|js|c)")


def file_cells(text: str) -> list[str]:
    """Return the cells under `file` of the first table whose columns are `what it decides` and `file`."""
    _, _, table = text.partition("| what it decides | file |\n|---|---|\n")
    rows = table.partition("\n\n")[0].splitlines()
    return [row.split("|")[2] for row in rows if row.startswith("|")]


def named_modules(text: str) -> Counter[str]:
    """Count how often the table gives each module; that of the folder itself, `__init__.py`, may be left out."""
    names = Counter(name for cell in file_cells(text) for name in _CODE.findall(cell) if name.endswith(".py"))
    del names["__init__.py"]
    return names


def named_folders(text: str) -> set[str]:
    return {name for cell in file_cells(text) for name in _FOLDER.findall(cell)}


def missing_sources(text: str) -> list[str]:
    named = [code for code in _CODE.findall(text) if _SOURCE.fullmatch(code)]
    return [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in FILES)]


def crowded(files: list[PurePosixPath]) -> dict[str, int]:
    """Return the folders that have more files than a reader can take in at a glance."""
    counts = Counter(str(path.parent) for path in files)
    return {folder: count for folder, count in counts.items() if count > MAX_FILES}


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_the_readme_of_a_folder_names_its_own_modules_once_each(folder):
    modules = {path.name for path in MODULES if path.parent == folder} - {"__init__.py"}
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")

    assert named_modules(text) == Counter(modules)


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_the_readme_of_a_folder_leads_to_its_folders(folder):
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")

    assert named_folders(text) == {other.name for other in FOLDERS if other.parent == folder}


def test_no_folder_of_the_package_is_crowded():
    assert crowded([path for path in FILES if path.is_relative_to(PACKAGE)]) == {}


@pytest.mark.parametrize("page", READMES, ids=str)
def test_every_source_file_that_a_readme_names_is_there(page):
    assert missing_sources((ROOT / page).read_text(encoding="utf-8")) == []


def test_only_the_table_names_modules():
    table = "| what it decides | file |\n|---|---|\n| x, `c.py` | `a.py`, [d](d/README.md) |"
    text = f"See `b.py`.\n\n{table}\n\n| y | `e.py` |"

    assert named_modules(text) == Counter(["a.py"])
    assert named_folders(text) == {"d"}


def test_a_crowded_folder_is_found():
    files = [PurePosixPath(f"full/{number}.py") for number in range(MAX_FILES + 1)]

    assert crowded(files) == {"full": MAX_FILES + 1}
    assert crowded(files[1:]) == {}


def test_what_is_missing_is_found():
    assert missing_sources("see `taps/no_such_module.py`, `guard.py`, `hooks/guard.py` and `taps/guard.py`") == [
        "taps/no_such_module.py",
        "taps/guard.py",
    ]
