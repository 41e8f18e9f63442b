"""The lines of code around a frame: as the dump has kept them, else from the file on this machine if it still fits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from trainermon.core.environment.literals import masked_code
from trainermon.dump.files.sources import NO_SOURCES, SourceFrame, SourcePart, Sources, function_around, parse_frame

CONTEXT = 5
_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeExcerpt:
    """A line of the user's code, to be shown with its surroundings.

    Attributes:
        file: Path of the source file.
        line: Number of the line.
        function: The function around it.
        code: The line's text, as recorded.
        context: The lines around it: (number, text).
        missing: Why there are none; "" if there are.
    """

    file: str
    line: int
    function: str
    code: str
    context: tuple[tuple[int, str], ...] = ()
    missing: str = ""


def excerpt(frame: str, sources: Sources = NO_SOURCES) -> CodeExcerpt | None:
    """Return the source lines around `frame` (`File …, line N, in f: code`); None if it names no line.

    They are those of `sources`, what the dump has kept. Without them, the file on this machine is looked into if it is
    Python and its line is the one that was recorded: what a dump names might be any file of this machine, and what is
    shown may be passed on.
    """
    place = parse_frame(frame)
    if place is None:
        return None
    first, lines, missing = _around(place, sources)
    at = place.line - first
    begin = max(0, at - CONTEXT)
    context = tuple(enumerate(lines[begin : at + CONTEXT + 1], first + begin))  # of functions with thousands of lines
    return CodeExcerpt(
        file=place.file,
        line=place.line,
        function=place.function,
        code=place.code,
        context=() if missing else context,
        missing=missing,
    )


def _around(place: SourceFrame, sources: Sources) -> tuple[int, tuple[str, ...], str]:
    """Return the number of a first line, lines from there on, and why there are none."""
    kept = sources.files.get(place.file)
    part = kept.around(place.line) if kept is not None else None
    if part is not None and _is_recorded(part, place):
        return part.first, part.lines, ""
    lines, missing = _read(place.file)
    here = function_around(lines, place.line)
    if here is not None and place.code and _is_recorded(here, place):
        return here.first, here.lines, ""
    return 1, (), missing or "the file has changed since"


def _is_recorded(part: SourcePart, place: SourceFrame) -> bool:
    """Return whether the frame's line is the one in `part`; within a part more may have been told to be secret."""
    return masked_code(part.lines[place.line - part.first].strip()) == place.code


def _read(name: str) -> tuple[tuple[str, ...], str]:
    path = Path(name)
    try:
        if path.suffix != ".py" or not path.is_file() or (status := path.stat()).st_size > _MAX_BYTES:
            return (), "the file is not on this machine"
        return _lines(path, status.st_ino, status.st_ctime_ns), ""
    except (OSError, ValueError) as error:
        return (), f"the file cannot be read: {error}"


@lru_cache(maxsize=8)
def _lines(path: Path, *state: int) -> tuple[str, ...]:
    """Return the lines of a file in this `state`; frames of one file come one after the other."""
    del state
    return tuple(path.read_text(encoding="utf-8").split("\n"))
