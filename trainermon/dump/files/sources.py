"""The source code that a dump's stacks name: sources.json. Standard library only."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
import linecache
import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.core.environment.literals import masked_code
from trainermon.core.errors import DumpError
from trainermon.dump.files.records import SOURCES_FILE

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")
_MAX_CHARACTERS = 8 << 20
_FRAME = re.compile(r"File (.+?), line (\d{1,9}), in ([^,:\n]+)(?:[,:]\s*(.*))?", re.DOTALL)


class SourceFrame(NamedTuple):
    """A frame of stack.json: file, number of the line, the function around it, and the line's text ("": not known)."""

    file: str
    line: int
    function: str
    code: str


class SourcePart(NamedTuple):
    """Lines of a file that follow each other: the number of the first, and their texts."""

    first: int
    lines: tuple[str, ...]


class ClassPlace(NamedTuple):
    """Where a class of the model stands: its file, the line of `class`, and that of its `forward` (0: it has none)."""

    file: str
    line: int
    forward: int


@dataclasses.dataclass(frozen=True, slots=True)
class SourceFile:
    """What a dump has kept of a file of source code.

    Attributes:
        digest: 16 hexadecimal digits of the SHA-256 of the whole file as it was.
        num_lines: How many lines it had.
        parts: The lines that were kept, in order, without overlap.
    """

    digest: str
    num_lines: int
    parts: tuple[SourcePart, ...]

    def around(self, line: int) -> SourcePart | None:
        """Return the part in which the line with this number is, counted from 1; None: it was not kept."""
        at = bisect_right(self.parts, line, key=attrgetter("first")) - 1
        part = self.parts[at] if at >= 0 else None
        return part if part is not None and line < part.first + len(part.lines) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """The source code of a dump.

    Attributes:
        files: By the path that stacks name.
        classes: Where the classes of the model stand, by name; none of two that have one name.
    """

    files: Mapping[str, SourceFile] = dataclasses.field(default_factory=dict)
    classes: Mapping[str, ClassPlace] = dataclasses.field(default_factory=dict)


NO_SOURCES = Sources()


def parse_frame(text: str) -> SourceFrame | None:
    r"""Return the parts of a frame's text, in our wording, msprobe's, or on one line; None if it names no line.

    >>> parse_frame("File /a/model.py, line 7, in forward, \n return self.fc(x)")
    SourceFrame(file='/a/model.py', line=7, function='forward', code='return self.fc(x)')
    """
    match = _FRAME.fullmatch(text.strip())
    return match and SourceFrame(match[1], int(match[2]), match[3].strip(), masked_code((match[4] or "").strip()))


def is_library(file: str) -> bool:
    """Return whether a file, by its path, belongs to an installed package, and not to the user's own code."""
    return any(part in f"/{file}" for part in _LIBRARIES)


def sources_text(frames: Iterable[str], classes: Iterable[type], *, whole_files: bool) -> str:
    """Return the text of sources.json for the code that `frames` (texts of frames) and `classes` name.

    Kept are the functions around the frames' lines and the forwards of `classes`, alone the frames' lines that are in
    no function, or all files whole; always without secrets. Only Python is: files whose name ends in `.py`, and cells
    of notebooks; as they were when they were first looked at, which is what the frames show too. Classes of torch are
    left out, and files beyond eight million characters in all. Cost: each file is parsed once in a process, some 10 ms
    for a thousand lines; nothing for the code of the last dump.
    """
    return _sources_text(frozenset(frames), frozenset(classes), whole_files)


@functools.lru_cache(maxsize=2)
def _sources_text(frames: frozenset[str], classes: frozenset[type], whole_files: bool) -> str:  # noqa: FBT001  # cached
    wanted: defaultdict[str, set[int]] = defaultdict(set)
    for frame in filter(None, map(parse_frame, frames)):
        wanted[frame.file].add(frame.line)
    places = _class_places(classes)
    for place in places.values():
        wanted[place.file].update(filter(None, [place.line, place.forward]))
    files: dict[str, Any] = {}
    room = _MAX_CHARACTERS
    for name in sorted(wanted):
        lines = _lines(name)
        parts = list(_parts(lines, wanted[name], whole=whole_files)) if lines else []
        room -= sum(len(line) for part in parts for line in part.lines)
        if parts and room >= 0:
            whole = "\n".join(lines)
            files[name] = {
                "sha256": hashlib.sha256(whole.encode(errors="replace")).hexdigest()[:16],
                "lines": len(lines),
                "parts": [[part.first, "\n".join(part.lines)] for part in parts],
            }
    kept = {name: list(place) for name, place in places.items() if place.file in files}
    return json.dumps({"schema": 1, "files": files, "classes": kept}, indent=1) + "\n"


def read_sources(directory: Path) -> Sources:
    """Return what the dump in `directory` has of its source code; nothing if it has no sources.json.

    Raises:
        DumpError: The file is damaged.
    """
    path = Path(directory) / SOURCES_FILE
    try:
        found = json.loads(path.read_bytes())
        files = {
            name: SourceFile(
                str(file["sha256"]),
                int(file["lines"]),
                tuple(SourcePart(int(first), tuple(masked_code(text).split("\n"))) for first, text in file["parts"]),
            )
            for name, file in found["files"].items()
        }
        places = found["classes"].items()
        classes = {name: ClassPlace(str(file), int(line), int(at)) for name, (file, line, at) in places}
    except FileNotFoundError:
        return NO_SOURCES
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DumpError(
            f"{path} cannot be read ({type(error).__name__}: {error}): it is damaged; delete it, and lines of code "
            "are taken from the files on this machine"
        ) from error
    return Sources(files, classes)


def _lines(name: str) -> tuple[str, ...]:
    """Return the lines of a Python file or of a notebook's cell; none of any other file."""
    entry = linecache.cache.get(name)
    is_cell = entry is not None and len(entry) == 4 and entry[1] is None  # it was put there, and not read from a file
    if not (is_cell or name.endswith(".py")):
        return ()
    return tuple(line.rstrip("\n") for line in linecache.getlines(name))


def _parts(lines: Sequence[str], wanted: Iterable[int], *, whole: bool = False) -> Iterator[SourcePart]:
    """Yield what is kept of a file, of which the lines with the numbers `wanted` are to be shown."""
    known = sorted(line for line in wanted if 0 < line <= len(lines))
    around = {(1, len(lines))} if whole else set(_innermost(_parsed("\n".join(lines)).functions, known))
    begin, end = 1, 0
    for first, last in [*sorted(around), (len(lines) + 2, 0)]:
        if first > end + 1:
            if end:
                yield SourcePart(begin, tuple(masked_code("\n".join(lines[begin - 1 : end])).split("\n")))
            begin = first
        end = max(end, last)


def function_around(lines: Sequence[str], line: int) -> SourcePart | None:
    """Return the innermost function around the line with this number, without secrets; the line alone if it is in none.

    None: there is no such line.
    """
    return next(_parts(lines, [line]), None)


def _innermost(functions: Iterable[tuple[int, int]], wanted: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the innermost of `functions` around each of the sorted lines `wanted`; the line itself if it is in none.

    Functions stand within one another or apart. Costs one pass.
    """
    waiting = sorted(functions, key=lambda one: (-one[0], one[1]))
    running: list[tuple[int, int]] = []
    for line in wanted:
        while waiting and waiting[-1][0] <= line:
            following = waiting.pop()
            while running and running[-1][1] < following[0]:
                running.pop()
            running.append(following)
        while running and running[-1][1] < line:
            running.pop()
        yield running[-1] if running else (line, line)


class _Parsed(NamedTuple):
    """First and last line of each function of a file, and the first line of each class by qualified name."""

    functions: tuple[tuple[int, int], ...] = ()
    classes: Mapping[str, int] = {}


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> _Parsed:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _Parsed()
    functions = [
        (min(part.lineno for part in (node, *node.decorator_list)), node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return _Parsed(tuple(functions), dict(_class_lines(tree, "")))


def _class_lines(node: ast.AST, above: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield f"{above}{child.name}", child.lineno
            yield from _class_lines(child, f"{above}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _class_lines(child, f"{above}{child.name}.<locals>.")
        else:
            yield from _class_lines(child, above)


def _class_places(classes: Iterable[type]) -> dict[str, ClassPlace]:
    """Return where the classes stand, by name; neither of two with one name, and none of torch's own."""
    found: dict[str, ClassPlace | None] = {}
    for each in set(classes):
        module: object = each.__module__  # a class may have set it to anything
        if not isinstance(module, str) or module.partition(".")[0] == "torch":
            continue
        code = getattr(each.__dict__.get("forward"), "__code__", None)
        file = getattr(sys.modules.get(module), "__file__", None) if code is None else code.co_filename
        line = _parsed("\n".join(_lines(file))).classes.get(each.__qualname__) if isinstance(file, str) else None
        if line is not None:
            place = ClassPlace(str(file), line, 0 if code is None else code.co_firstlineno)
            found[each.__name__] = None if each.__name__ in found else place
    return {name: place for name, place in found.items() if place is not None}
