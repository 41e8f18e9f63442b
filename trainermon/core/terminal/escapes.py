"""Text of others on a terminal: it is shown, and not obeyed."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return `text` with everything a terminal might obey, and line ends, written as escapes."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
