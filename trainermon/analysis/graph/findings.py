"""What is wrong where: verdicts of a comparison, or values that are not finite, laid over the nodes of a graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.compare.answer.frozen import frozen_parameters
from trainermon.analysis.compare.answer.remarks import first_differing
from trainermon.analysis.compare.answer.summary import causes_of, headline
from trainermon.analysis.compare.answer.whereabouts import lines_of
from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.verdicts import ERROR, NOT_COMPARED, PASS, UNMATCHED, WARNING, CallResult
from trainermon.analysis.graph.tree import GraphKind, GraphNode, GraphTree, NodeSide, module_of
from trainermon.analysis.graph.values import GraphValue, ValueUse
from trainermon.dump.files.reader import gap_notes, read_stacks

if TYPE_CHECKING:
    from trainermon.analysis.diagnosis.origin import Origin


class NodeVerdict(IntEnum):
    """How bad a node is; the worst of what is within a box is the box's."""

    NONE = 0
    PASS = 1
    UNMATCHED = 2
    WARNING = 3
    ERROR = 4
    BLAMED = 5


_VERDICTS = {
    PASS: NodeVerdict.PASS,
    UNMATCHED: NodeVerdict.UNMATCHED,
    NOT_COMPARED: NodeVerdict.NONE,
    WARNING: NodeVerdict.WARNING,
    ERROR: NodeVerdict.ERROR,
}
_FROM_HERE = "the dumps differ from here on, and no call is to blame"
_MODULES = ("Module.", "Cell.")
_finite = attrgetter("is_finite")


class GraphFinding(NamedTuple):
    """A node at which something began, and what is said of it.

    Attributes:
        node: Index of the node.
        message: What is wrong with it, in a sentence without its name.
    """

    node: int
    message: str


class GraphFindings(NamedTuple):
    """What is wrong with the calls of one dump.

    Attributes:
        sentence: The answer in one line.
        findings: Where it began, in the order in which it ran.
        verdicts: uint8 [n]: a `NodeVerdict` per node, of the node itself.
        errors: float64 [n]: largest relative difference of its results; NaN: none is known.
        nonfinite: bool [n]: whether the node gave (as a parameter: has) a value that is not finite.
        whole: Whether all was judged, and nothing is known to be missing.
    """

    sentence: str
    findings: tuple[GraphFinding, ...]
    verdicts: NDArray[np.uint8]
    errors: NDArray[np.float64]
    nonfinite: NDArray[np.bool_]
    whole: bool = True


def judge_alone(tree: GraphTree, *directories: Path) -> GraphFindings:
    """Return what the dumps in `directories`, whose tree is `tree`, say by themselves: whether and where not finite.

    Of several ranks each has an origin; that which stands first in the whole is theirs.

    An infinity that a mask needs is no finding; what counts are parameters, gradients and what the model returns.
    """
    nonfinite = nonfinite_of(tree)
    verdicts = np.zeros(len(tree.nodes), np.uint8)
    errors = np.full(len(tree.nodes), np.nan)
    origin, node, where = _first_origin(tree, directories) if nonfinite.any() else (None, None, "")
    if origin is None:
        is_cut, unread = bool(gap_notes(*directories)), num_unread(tree)
        sentence = all_finite(unread, int(nonfinite.sum()), is_cut=is_cut)
        if len(tree.nodes) == 1:
            sentence = f"No call was dumped in {directories[0]}."
        is_whole = not is_cut and not unread and len(tree.nodes) > 1
        return GraphFindings(sentence, (), verdicts, errors, nonfinite, is_whole)
    verdicts[nonfinite] = NodeVerdict.WARNING
    if node is None:
        return GraphFindings(f"{_first(origin)}{where}.", (), verdicts, errors, nonfinite)
    verdicts[node] = NodeVerdict.BLAMED
    finding = GraphFinding(node, origin.reason)
    return GraphFindings(f"{_first(origin)}{where}.", (finding,), verdicts, errors, nonfinite)


def judge_against(tree: GraphTree, comparison: Comparison) -> GraphFindings:
    """Return what `comparison` says of each node of `tree`, the tree of its target or of both sides."""
    verdicts = np.zeros(len(tree.nodes), np.uint8)
    errors = np.full(len(tree.nodes), np.nan)
    told = causes_of(comparison)
    causes = {
        (_side(one.call), key, one.place if _is_parameter(one.place) else ""): (at, one.words)
        for at, one in enumerate(told)
        for key in comparison.members_of(one.call.key)
    }
    is_once = sum(_is_parameter(one.origin) for one in comparison.blamed) > sum(
        _is_parameter(one.place) for one in told
    )
    results = {
        key: result
        for result in comparison.calls
        if result.target is not None
        for key in comparison.members_of(result.key)
    }
    differing = None if told else first_differing(comparison)  # nobody is to blame: that is where to look
    if differing is not None:
        why = frozen_parameters(comparison.calls) or _FROM_HERE
        causes = {(NodeSide.BOTH, key, ""): (0, why) for key in comparison.members_of(differing.key)}
    found: list[tuple[int, GraphFinding]] = []
    for place, node in enumerate(tree.nodes):
        result = results.get(node.call.key) if node.call is not None else None
        if node.side is not NodeSide.BOTH:
            verdicts[place] = NodeVerdict.UNMATCHED
        elif result is not None:
            verdicts[place], errors[place] = _of_node(node, result, is_once=is_once)
        if (cause := causes.get((node.side, _key(node), node.slot))) is not None:
            verdicts[place] = NodeVerdict.BLAMED if told else verdicts[place]
            found.append((cause[0], GraphFinding(place, cause[1])))
    found.sort(key=itemgetter(0))
    findings = tuple(finding for _, finding in found)
    return GraphFindings(headline(comparison), findings, verdicts, errors, nonfinite_of(tree), comparison.is_whole)


def worst_within(tree: GraphTree, verdicts: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return uint8 [n]: the worst verdict of each node and all that is within it."""
    worst = verdicts.tolist()
    parents = tree.parents.tolist()
    for place in range(len(worst) - 1, 0, -1):
        parent = parents[place]
        worst[parent] = max(worst[parent], worst[place])
    return np.array(worst, np.uint8)


def _key(node: GraphNode) -> str:
    return node.call.key if node.call is not None else ""


def _side(call: CallResult) -> NodeSide:
    """Return which side has a call; of a dump alone a key may be that of another call on the other side."""
    if call.target is None:
        return NodeSide.GOLDEN
    return NodeSide.BOTH if call.golden is not None else NodeSide.TARGET


def _is_parameter(place: str) -> bool:
    return place.startswith("parameters.")


def _of_node(node: GraphNode, result: CallResult, *, is_once: bool) -> tuple[NodeVerdict, float]:
    """Return the verdict and the relative difference of a call, or of one of its parameters, unless it is to blame.

    Where parameters are to blame, that is said at these; with `is_once` at one of them alone.
    """
    if node.kind is GraphKind.PARAMETER:
        row = next((row for row in result.rows if row.target and row.target.place == node.slot), None)
        if row is None:
            return NodeVerdict.NONE, math.nan
        size = row.difference.relative
        verdict = min(_VERDICTS[row.result], NodeVerdict.WARNING if is_once else NodeVerdict.ERROR)
        return verdict, math.nan if size is None else size
    is_explained = result.blamed and _is_parameter(result.origin)
    verdict = min(_VERDICTS[result.result], NodeVerdict.WARNING if is_explained else NodeVerdict.ERROR)
    return verdict, result.output_error


def nonfinite_of(tree: GraphTree) -> NDArray[np.bool_]:
    """Return bool [n]: whether the node gave (as a parameter: has) a value that is not finite."""
    nonfinite = np.zeros(len(tree.nodes), np.bool_)
    for place, node in enumerate(tree.nodes):
        if node.call is not None and not all(map(_finite, node.call.values)):  # few are looked at any closer
            nonfinite[place] = any(not value.is_finite for value in _made(node))
    return nonfinite


def all_finite(unread: int, masked: int = 0, *, is_cut: bool = False) -> str:
    """Return the answer of a dump without a value that is not finite where it matters.

    `unread` of its tensors have no statistics, `masked` calls gave what masks need; it may be cut off.
    """
    has = "one tensor has" if unread == 1 else f"{unread:,} tensors have"
    rest = (f"; {has} no statistics" if unread else "") + ("; the dump is not whole" if is_cut else "")
    if masked:
        calls = f"{masked:,} calls give values that are" if masked > 1 else "One call gives a value that is"
        read = "that were read " if rest else ""
        return f"The model's output, parameters and gradients {read}are finite. {calls} not, as masks may be{rest}."
    return f"Everything that was read is finite{rest}." if rest else "Everything is finite."


def num_unread(tree: GraphTree) -> int:
    """Return how many tensors have no statistics; one that is in several places is one, if the dump tells."""
    values = [value for node in tree.nodes if node.call is not None for value in node.call.values if value.is_unread]
    known = {value.identity for value in values if value.identity is not None}
    return len(known) + sum(value.identity is None for value in values)


def _first_origin(tree: GraphTree, directories: Sequence[Path]) -> tuple[Origin | None, int | None, str]:
    """Return the origin that stands first in the tree, its node, and where that is: of none in the tree the first."""
    found = [(origin, directory) for directory in directories if (origin := _origin(directory)) is not None]
    placed = [(_node_of(tree, origin), origin, directory) for origin, directory in found]
    if not placed:
        return None, None, ""
    node, origin, directory = min(placed, key=lambda one: math.inf if one[0] is None else one[0])
    return origin, node, _whereabouts(tree, node, origin, directory)


def _whereabouts(tree: GraphTree, node: int | None, origin: Origin, directory: Path) -> str:
    """Return the module that a function is in, and its lines, as they follow on its name; "" if nothing is known."""
    module = "" if node is None or origin.key.startswith(_MODULES) else module_of(tree, node)
    lines = lines_of(read_stacks(directory), origin.key)
    return (f" in {module}" if module else "") + (f", {lines}" if lines else "")


def _origin(directory: Path) -> Origin | None:
    from trainermon.analysis.diagnosis.origin import find_origin  # brings all that a diagnosis needs
    from trainermon.dump.files.reader import read_dump

    return find_origin(read_dump(directory))


def _made(node: GraphNode) -> Iterator[GraphValue]:
    is_parameter = node.kind is GraphKind.PARAMETER
    for value in node.call.values if node.call is not None else ():
        if value.slot == node.slot if is_parameter else value.use is ValueUse.GIVEN:
            yield value


def _node_of(tree: GraphTree, origin: Origin) -> int | None:
    if not origin.key:
        return None
    places: Mapping[tuple[str, str], int] = {(_key(node), node.slot): at for at, node in enumerate(tree.nodes)}
    return places.get((origin.key, origin.tensor.slot), places.get((origin.key, "")))


def _first(origin: Origin) -> str:
    micro_step = f", micro step {origin.micro_step}" if origin.micro_step is not None else ""
    slot = origin.tensor.slot
    where = f"{origin.module}.{slot.partition('.')[2]}" if slot.startswith("parameters.") else origin.module
    return f"The first value that is not finite arose in {where} ({origin.phase.value}{micro_step})"
