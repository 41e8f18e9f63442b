"""Nothing in the repository names a package registry's host or a path of somebody's machine."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
# in pieces, so that this file does not name what it looks for
REGISTRY = re.compile(
    "|".join([r"(extra-)?index" + "-url", r"https?://[a-z.]*/" + r"(simple|packages)/", '"resolved"' + ': *"http']),
    re.IGNORECASE,
)
HOME = re.compile(r"/(home|Users|root)/[A-Za-z]")


def tracked_texts():
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix != ".png":  # files recorded with an earlier version are not all text
            yield name, path.read_text(encoding="utf-8", errors="replace")


def test_no_registry_address_and_no_home_folder_is_named():
    found = [name for name, text in tracked_texts() if REGISTRY.search(text) or HOME.search(text)]

    assert found == []


def test_an_address_and_a_home_folder_are_seen():
    assert REGISTRY.search("pip install --index" + "-url x")
    assert REGISTRY.search("https://host.example/" + "simple/")
    assert HOME.search("/home/" + "somebody")
