"""Fills the versions that tests install into the page of what works with what."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).with_name("compatibility.md")
LOCKS = Path(__file__).parents[1] / "requirements"
_PLACE = re.compile(r"(<!-- ([\w.-]+) -->)[^|\n]*?(?= \||$)", re.MULTILINE)
_PIN = re.compile(r"^([\w.-]+)==(?:\d+!)?([\w.]+)", re.MULTILINE)


def with_versions(text: str) -> str:
    """Return the page with the locked version of a package behind each `<!-- package -->`."""
    versions: dict[str, str] = {}
    for name in ("dev", "base", "torch"):
        versions |= dict(_PIN.findall((LOCKS / f"{name}.lock").read_text(encoding="utf-8")))
    return _PLACE.sub(lambda found: f"{found[1]}{versions[found[2]]}", text)
