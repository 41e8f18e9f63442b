"""No text names a package registry's host or a path of somebody's machine; what catches everything says why."""

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
# No index has a package of ours; whoever registers the name first could have it installed.
UNPUBLISHED = re.compile("pip install " + r"""[^`|"\n]*?(?<![\w./-])trainermon(?![\w/-])(?!-[\d*])""")

# What is caught, then the reason, on the same line and in words.
UNREASONED = re.compile(
    r"^ *except(?: [^#\n]*\b(?:Base)?Exception\b[^#\n]*)?:(?: *#(?: noqa: BLE001)?[ -]*)?$", re.MULTILINE
)


def tracked_texts():
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix != ".png":  # files recorded with an earlier version are not all text
            yield name, path.read_text(encoding="utf-8", errors="replace")


def test_no_registry_address_and_no_home_folder_is_named():
    found = [name for name, text in tracked_texts() if REGISTRY.search(text) or HOME.search(text)]

    assert found == []


def test_nobody_is_told_to_install_a_name_that_is_not_published():
    assert [name for name, text in tracked_texts() if UNPUBLISHED.search(text)] == []


def test_a_name_that_is_not_published_is_seen():
    assert UNPUBLISHED.search("pip install " + "trainermon")
    assert UNPUBLISHED.search("pip install " + "--upgrade 'trainermon[ray]'")
    assert not UNPUBLISHED.search("pip install " + "dist/trainermon-0.1.0-py3-none-any.whl")


def test_an_address_and_a_home_folder_are_seen():
    assert REGISTRY.search("pip install --index" + "-url x")
    assert REGISTRY.search("https://host.example/" + "simple/")
    assert HOME.search("/home/" + "somebody")


def test_what_catches_everything_says_why():
    found = [name for name, text in tracked_texts() if name.endswith(".py") and UNREASONED.search(text)]

    assert found == []


def test_a_missing_reason_is_seen():
    assert UNREASONED.search("    except Exception as error:")
    assert UNREASONED.search("except (OSError, BaseException):  # noqa: BLE001 -")
    assert UNREASONED.search("except" + ":")
    assert not UNREASONED.search("    except Exception:  # noqa: BLE001 - the border: training goes on")
    assert not UNREASONED.search("    except CheckException:")
