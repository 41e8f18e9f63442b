"""The lines of code around a frame, as far as the file is on this machine and still the one that ran."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainermon.analysis.diagnosis.page.markup import text

CONTEXT = 5
_FRAME = re.compile(r"File (.+?), line (\d{1,9}), in ([^,:\n]+)(?:[,:]\s*(.*))?", re.DOTALL)
_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeExcerpt:
    """A line of the user's code, to be shown on the page of a diagnosis.

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


def excerpt(frame: str) -> CodeExcerpt | None:
    """Return the source lines around `frame` (`File …, line N, in f: code`); None if it names no line.

    A file is only looked into if it is Python and its line is the one that was recorded: what a dump names might be any
    file of this machine, and the page may be passed on.
    """
    match = _FRAME.fullmatch(frame.strip())
    if match is None:
        return None
    file, line, function, code = match[1], int(match[2]), match[3].strip(), (match[4] or "").strip()
    found = CodeExcerpt(file=file, line=line, function=function, code=code)
    lines, missing = _read(Path(file))
    if not missing and not (code and 0 < line <= len(lines) and lines[line - 1].strip() == code):
        missing = "the file has changed since"
    if missing:
        return CodeExcerpt(file=file, line=line, function=function, code=code, missing=missing)
    first = max(0, line - 1 - CONTEXT)
    context = tuple(enumerate(lines[first : line + CONTEXT], first + 1))
    return CodeExcerpt(file=found.file, line=line, function=function, code=code, context=context)


def _read(path: Path) -> tuple[list[str], str]:
    try:
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return [], "the file is not on this machine"
        return path.read_text(encoding="utf-8").split("\n"), ""
    except (OSError, ValueError) as error:
        return [], f"the file cannot be read: {error}"


def render_excerpt(found: CodeExcerpt, title: str) -> str:
    """Return the HTML of a box, titled `title`, with a line of the user's code and the lines around it."""
    place = f"<code>{text(found.file)}</code>, line {found.line}, in <code>{text(found.function)}</code>"
    missing = f' <span class="dim">({text(found.missing)})</span>' if found.missing else ""
    return f'<div class="code"><header>{text(title)} {place}{missing}</header><pre>{"".join(_rows(found))}</pre></div>'


def _rows(found: CodeExcerpt) -> Iterator[str]:
    for number, line in found.context or ((found.line, found.code),):
        mark = ' class="hit"' if number == found.line else ""
        yield f"<div{mark}><i>{number}</i>{text(line.expandtabs(4)) or ' '}</div>"
