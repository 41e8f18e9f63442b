"""The lines of code behind the calls of dumps, their texts, and whether two dumps ran the same code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from trainermon.analysis.compare.answer.summary import placed
from trainermon.analysis.compare.comparison import CompareOptions
from trainermon.analysis.compare.merging.beginnings import Beginning, first_of
from trainermon.analysis.compare.merging.places import LonePlace
from trainermon.analysis.graph.levels import began
from trainermon.analysis.graph.reading import DumpGraph, lone_graphs, read_graphs
from trainermon.analysis.source.lines import LineCalls, lines_of
from trainermon.core.errors import DumpError
from trainermon.dump.files.sources import SourceFile, Sources, read_sources

_MAX_NAMED = 12


class CodeDifference(NamedTuple):
    """A file of which the two sides have run different code.

    Attributes:
        file: Its path on the target's side.
        lines: The lines of a unified diff, from golden to target, without its head.
    """

    file: str
    lines: tuple[str, ...]


class SourceReport(NamedTuple):
    """The lines of code behind the calls of dumps.

    Attributes:
        sentence: What is wrong, in one line, as `trainermon graph` says it.
        lines: The lines that made calls, by file and number.
        texts: By file, the text of each line that was kept, by its number; with what stacks tell of the others.
        differences: Files whose code differs between the two sides; none without a golden dump.
        has_golden: Whether there was one.
        whole: Whether all was judged, and nothing is known to be missing.
    """

    sentence: str
    lines: tuple[LineCalls, ...]
    texts: Mapping[str, Mapping[int, str]]
    differences: tuple[CodeDifference, ...]
    has_golden: bool
    whole: bool

    def file_named(self, name: str) -> str:
        """Return the path that ends in `name`, of those with calls.

        Raises:
            DumpError: There is none, or several.
        """
        files = sorted({line.file for line in self.lines})
        found = [file for file in files if file == name or file.endswith(f"/{name}")]
        if len(found) == 1:
            return found[0]
        before, _, number = name.rpartition(":")
        if not found and any(file == before or file.endswith(f"/{before}") for file in files if before):
            raise DumpError(
                f"{name} names no line: found {number!r} behind {before}, expected a number, as {before}:12"
            )
        if not files:
            raise DumpError(f"{name} cannot be shown: the dump has no stacks, so no call is known to be made in a file")
        wrong = "is the end of several files" if found else "is none of the files"
        raise DumpError(f"{name} {wrong} with calls: expected one of {', '.join((found or files)[:_MAX_NAMED])}")


def read_report(
    path: Path,
    golden: Path | None = None,
    *,
    step: int | None = None,
    rank: int | None = None,
    options: CompareOptions | None = None,
) -> SourceReport:
    """Return the lines of code behind the calls of the dumps below `path`, held against those below `golden`.

    `options` say how dumps are compared.

    Raises:
        DumpError: There is no dump of that step and rank, or one is damaged.
    """
    seen = _Seen()
    damaged: list[LonePlace] = []
    graphs = read_graphs(path, golden, step=step, rank=rank, options=options, damaged=damaged)
    lines = lines_of(seen.noting(graphs))
    for lone in (*damaged, *lone_graphs(path, golden, step=step, rank=rank, options=options)):
        seen.note(None, lone.place.label, f"Not judged: {lone.why}.", whole=False)
    return SourceReport(
        sentence=seen.sentence,
        whole=seen.whole,
        lines=tuple(lines),
        texts=_texts(lines, seen.target),
        differences=tuple(differences(seen.target, seen.golden)),
        has_golden=golden is not None,
    )


class _Seen:
    """What is kept of graphs that go by one at a time: the sentence on where it began, and the source code."""

    def __init__(self) -> None:
        self._said: list[tuple[Beginning | None, str, str]] = []
        self._whole: list[bool] = []
        self.target: dict[str, SourceFile] = {}
        self.golden: dict[str, SourceFile] = {}

    @property
    def sentence(self) -> str:
        """What is said of the graph in which it began first; of several with its step and rank."""
        _, label, sentence = self._said[first_of([one[0] for one in self._said], self._whole)]
        return placed(label, sentence) if len(self._said) > 1 else sentence

    @property
    def whole(self) -> bool:
        """Whether all was judged, and nothing is known to be missing."""
        return all(self._whole)

    def note(self, beginning: Beginning | None, label: str, sentence: str, *, whole: bool) -> None:
        """Keep what is said of one dump."""
        self._said.append((beginning, label, sentence))
        self._whole.append(whole)

    def noting(self, graphs: Iterable[DumpGraph]) -> Iterator[DumpGraph]:
        for graph in graphs:
            self.note(began(graph), graph.label, graph.found.sentence, whole=graph.found.whole)
            try:
                self._keep_sources(graph)
            except DumpError as error:
                self.note(None, graph.label, f"Its code is not shown: {error}.", whole=False)
            yield graph

    def _keep_sources(self, graph: DumpGraph) -> None:
        for sources in graph.sources():
            _add_files(self.target, sources)
        if graph.comparison is not None:
            _add_files(self.golden, read_sources(graph.comparison.golden))


def _add_files(files: dict[str, SourceFile], sources: Sources) -> None:
    """Add what `sources` have of each file; ranks may have kept different functions of one file."""
    for name, file in sources.files.items():
        known = files.get(name)
        parts = file.parts if known is None or known.digest != file.digest else (*known.parts, *file.parts)
        files[name] = SourceFile(file.digest, file.num_lines, parts)


def _texts(lines: Iterable[LineCalls], files: Mapping[str, SourceFile]) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = {}
    for line in lines:
        found.setdefault(line.file, {})[line.line] = line.code
    for name, file in files.items():
        found.setdefault(name, {}).update(_numbered(file))
    return {name: dict(sorted(texts.items())) for name, texts in found.items()}


def _numbered(file: SourceFile) -> dict[int, str]:
    return {number: text for part in file.parts for number, text in enumerate(part.lines, part.first)}


def differences(target: Mapping[str, SourceFile], golden: Mapping[str, SourceFile]) -> Iterator[CodeDifference]:
    """Yield the files that both sides have, by path or else by name, and whose kept lines differ."""
    for name, file in sorted(target.items()):
        other = golden.get(name) or _only_namesake(name, golden)
        if other is None or other.digest == file.digest:
            continue
        before, after = (list(_numbered(one).values()) for one in (other, file))
        lines = tuple(difflib.unified_diff(before, after, lineterm="", n=2))[2:]
        if lines:
            yield CodeDifference(name, lines)


def _only_namesake(name: str, files: Mapping[str, SourceFile]) -> SourceFile | None:
    found = [file for path, file in files.items() if PurePosixPath(path).name == PurePosixPath(name).name]
    return found[0] if len(found) == 1 else None
