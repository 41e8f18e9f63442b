"""What each line of source code did: how often it ran, in which direction, and what is wrong with its calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainermon.analysis.graph.findings import NodeVerdict
from trainermon.analysis.graph.reading import DumpGraph
from trainermon.analysis.graph.tree import GraphKind, NodeSide, module_of
from trainermon.dump.files.reader import stack_of
from trainermon.dump.files.records import BACKWARD
from trainermon.dump.files.sources import SourceFrame, is_library, parse_frame


class LineMessage(NamedTuple):
    """What is said of a call where something began.

    Attributes:
        key: The call's key.
        module: The innermost module that it is in, or that it is, `layers.1.norm (RMSNorm)`; "" if none is known.
        text: The sentence, without its name.
    """

    key: str
    module: str
    text: str

    @property
    def name(self) -> str:
        """The call, and the module that it is in: lines of a helper run in several."""
        return self.key if not self.module or self.key.startswith("Module.") else f"{self.key} in {self.module}"


@dataclass(slots=True, kw_only=True)
class LineCalls:
    """The calls that one line of source code made, over all dumps that were looked at.

    Attributes:
        file: Path of the file.
        line: Number of the line.
        function: The function around it.
        code: Its text.
        forwards: How many calls there were.
        backwards: How many backwards of such calls.
        verdict: The worst verdict of any of them.
        error: Largest relative difference of their results; NaN: none is known.
        nonfinite: How many of them gave a value that is not finite.
        messages: What is said of those where something began; of several steps once.
        is_nearest: Whether one of these was made in this very line, and not in what it called.
    """

    file: str
    line: int
    function: str
    code: str
    forwards: int = 0
    backwards: int = 0
    verdict: NodeVerdict = NodeVerdict.NONE
    error: float = math.nan
    nonfinite: int = 0
    messages: tuple[LineMessage, ...] = ()
    is_nearest: bool = False

    @property
    def is_library(self) -> bool:
        """Whether the file belongs to an installed package, and not to the user's own code."""
        return is_library(self.file)


def lines_of(graphs: Iterable[DumpGraph]) -> list[LineCalls]:
    """Return the lines that made calls, in the order of files and lines.

    A call belongs to one line of each file in its stack, the innermost. A backward belongs to the line of its forward.
    Where something began is told of two lines at most: the innermost of all, and the innermost of the user's own.
    Cost: all graphs are read once, one at a time.
    """
    found: dict[tuple[str, int], LineCalls] = {}
    for graph in graphs:
        _add(found, graph)
    return [found[place] for place in sorted(found)]


def by_gravity(lines: Iterable[LineCalls]) -> list[LineCalls]:
    """Return the lines of which something is known to be wrong, the worst first.

    Of those where something began the one that made the call stands first, whosever it is, else the user's own before a
    library's.
    """
    wrong = [line for line in lines if line.verdict >= NodeVerdict.WARNING or line.nonfinite]
    return sorted(wrong, key=_gravity)


def _gravity(line: LineCalls) -> tuple[object, ...]:
    return -line.verdict, not line.is_nearest, line.is_library, -_size(line.error), line.file, line.line


def _size(error: float) -> float:
    return 0.0 if math.isnan(error) else error


def _add(found: dict[tuple[str, int], LineCalls], graph: DumpGraph) -> None:
    stacks = graph.stacks()
    places: dict[tuple[str, ...], tuple[SourceFrame, ...]] = {}
    said = {finding.node: finding.message for finding in graph.found.findings}
    columns = zip(
        graph.tree.nodes,
        graph.found.verdicts.tolist(),
        graph.found.errors.tolist(),
        graph.found.nonfinite.tolist(),
        strict=True,
    )
    for at, (node, verdict, error, is_nonfinite) in enumerate(columns):
        if node.call is None or node.side is NodeSide.GOLDEN:
            continue
        stack = stack_of(stacks, node.call.key)
        if stack not in places:
            places[stack] = tuple(_innermost(stack))
        for depth, frame in enumerate(places[stack]):
            line = found.get((frame.file, frame.line))
            if line is None:
                line = found[frame.file, frame.line] = LineCalls(**frame._asdict())
            is_told = depth == 0 or (not line.is_library and all(is_library(one.file) for one in places[stack][:depth]))
            line.verdict = max(line.verdict, NodeVerdict(verdict if is_told else min(verdict, NodeVerdict.WARNING)))
            line.error = max(line.error, error) if line.error == line.error else error
            line.nonfinite += is_nonfinite
            if node.kind is not GraphKind.PARAMETER:
                line.forwards += node.direction != BACKWARD
                line.backwards += node.direction == BACKWARD and node.kind is not GraphKind.GRADIENTS
            if at in said and is_told:
                line.is_nearest = line.is_nearest or depth == 0
                key = f"{node.call.key}{f'.{node.slot}' if node.slot else ''}"
                message = LineMessage(key, module_of(graph.tree, at), said[at])
                line.messages += () if message in line.messages else (message,)


def _innermost(stack: Sequence[str]) -> Iterator[SourceFrame]:
    """Yield the innermost frame of each file."""
    files = set()
    for frame in filter(None, map(parse_frame, stack)):
        if frame.file not in files:
            files.add(frame.file)
            yield frame
