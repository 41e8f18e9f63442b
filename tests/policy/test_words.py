"""Pages for people are in plain idiomatic English: phrases that one has to read twice stay out."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
# What was said at the time stays.
PAGES = [name for name in TRACKED.split("\0") if name and not name.startswith(("docs/decisions/", "CHANGELOG"))]

INSTEAD = {
    r"\b(?:hold|holds|held)\b(?: [a-z`]+){0,4} against\b": "compare … with, check … against",
    r"\bbut for\b": "except for",
    r"\bof whom\b": "whose",
    r",? of which (?:the|only|no|a|dumps|recordings|there)\b": "whose, that",
    r"\bso many\b": "the name of the number",
    r"\bcannot be meant\b": "is refused",
    r"\bstands? beside\b": "is given with",
    r"\bis no (?:fault|error|input|origin|hardware|danger|training|collapse|shard)\b": "is not a",
    r"\bwhat it came to\b": "the result",
    r"\b(?:is|are) told once\b": "is reported once",
    r"\b(?:job|training|Job|name) goes on (?:as|at|in|with)\b": "continues",
    r"\bprocess beside\b": "separate process",
}


def odd_phrases(text: str) -> list[str]:
    plain = " ".join(text.split())
    return [f"{found[0]!r}: say {better!r}" for odd, better in INSTEAD.items() for found in re.finditer(odd, plain)]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_odd_phrase(name):
    assert odd_phrases((ROOT / name).read_text(encoding="utf-8")) == []


def test_an_odd_phrase_is_found():
    assert odd_phrases("It holds a dump\nagainst another, but for masks.") != []
    assert odd_phrases("It compares two dumps, except for masks.") == []
