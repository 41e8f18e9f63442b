"""What is made of one dump's graph: small enough to be kept, and to be handed from one process to another.

A graph itself needs some 300 MB for 100,000 calls. So whoever reads one makes at once what was asked for, and forgets
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainermon.analysis.compare.comparison import CompareOptions, collector_off
from trainermon.analysis.compare.merging.beginnings import Beginning
from trainermon.analysis.compare.verdicts import differs
from trainermon.analysis.graph.alike import AlikeTrees
from trainermon.analysis.graph.chosen import describe_node, find_node, names_like, node_screen
from trainermon.analysis.graph.document import as_document
from trainermon.analysis.graph.findings import worst_within
from trainermon.analysis.graph.flow import find_flow
from trainermon.analysis.graph.levels import began, read_at_level
from trainermon.analysis.graph.markdown import as_markdown
from trainermon.analysis.graph.meetings import RankCollectives, collectives_of
from trainermon.analysis.graph.overflow import overflow_levels, overflow_sentence
from trainermon.analysis.graph.page.output import BESIDE, FOUND, all_details, details_of, draw_rank
from trainermon.analysis.graph.page.overlay import GraphOverlay, describe_overlay, lay_over, overlay_line
from trainermon.analysis.graph.page.packing import PackedRank
from trainermon.analysis.graph.reading import DumpGraph, GraphPlace
from trainermon.analysis.graph.screen import TreeScreen
from trainermon.core.terminal.escapes import printable

_alike = AlikeTrees()
"""What the dumps that this process reads have in common."""


class GraphReport(NamedTuple):
    """What was asked for of one graph.

    Attributes:
        label: Step and rank.
        level: How far ranks were put together, see `levels.py`.
        model: The class of the model.
        num_nodes: How many nodes it has.
        sentence: The answer in one line.
        whole: Whether all was judged, and nothing is known to be missing.
        found: Whether it has a finding, or differs from what it was compared with.
        began: When its first finding ran; None: it has none, or no call is to blame.
        screen: What stands below the sentence: the tree as text.
        document: What `--json` prints of it; None: not asked for.
        markdown: A text for an issue; None: likewise.
        rank: Its part of the page; None: likewise.
        collectives: What of it may meet other ranks; None: likewise.
        details: Those of all nodes, as the file beside the page has them; None: likewise.
        chosen: The node that was asked for; None: none was, or the graph has no such node.
        near: Keys of calls that are like the name of the node that was asked for, where the graph has none.
    """

    label: str
    level: str
    model: str
    num_nodes: int
    sentence: str
    whole: bool
    found: bool
    began: Beginning | None
    screen: str
    document: Mapping[str, Any] | None = None
    markdown: str | None = None
    rank: PackedRank | None = None
    collectives: RankCollectives | None = None
    details: tuple[bytes, ...] | None = None
    chosen: int | None = None
    near: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The model and the sentence."""
        return f"{self.model}: {self.sentence}"


def without_graph(label: str, level: str, why: str) -> GraphReport:
    """Return the report of a dump that has no graph: `why` is a sentence."""
    return GraphReport(label, level, "", 0, why, whole=False, found=False, began=None, screen="")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportMaker:
    """Reads graphs, and makes of each what was asked for. It can be handed to another process.

    Attributes:
        options: How dumps are compared.
        by_stack: Whether calls that no module is known for are in the functions of the script that made them.
        depth: How many levels of calls the tree on the screen unfolds.
        colour: Whether the screen is coloured by escape codes.
        overflow: Whether levels of overflow are told.
        golden: The folder that dumps are held against; "": none.
        num_dumps: How many dumps are reported on.
        document: Whether a document is asked for.
        markdown: Whether a text for an issue is.
        page: Whether a part of a page is.
        details: Whose tensors are on the page: one of `page.output.DETAILS`, or None.
        served: Whether the page asks a server for them.
        node: The key or the path of a node that is told in full; None: none.
        overlays: Numbers that are laid over the nodes.
    """

    options: CompareOptions
    by_stack: bool = False
    depth: int = 1
    colour: bool = False
    overflow: bool = False
    golden: str = ""
    num_dumps: int = 1
    document: bool = False
    markdown: bool = False
    page: bool = False
    details: str | None = None
    served: bool = False
    node: str | None = None
    overlays: tuple[GraphOverlay, ...] = ()

    def read(self, place: GraphPlace) -> DumpGraph:
        """Return the graph that comes from `place`.

        Raises:
            DumpError: A dump is damaged.
        """
        alike = _alike if self.num_dumps > 1 else None
        return read_at_level(place, options=self.options, by_stack=self.by_stack, alike=alike)

    def __call__(self, place: GraphPlace) -> GraphReport:
        """Return the report of the graph that comes from `place`.

        Raises:
            DumpError: A dump is damaged.
        """
        with collector_off():  # until the graph is gone: to look at it once takes as long as a tenth of reading it
            return self.report(self.read(place))

    def report(self, graph: DumpGraph) -> GraphReport:
        """Return the report of a graph.

        Raises:
            DumpError: Its dump has changed since it was read.
        """
        tree, found, comparison = graph.tree, graph.found, graph.comparison
        laid = {one.name: lay_over(tree, one) for one in self.overlays}
        over = {one.name: describe_overlay(tree, one, laid[one.name]) for one in self.overlays}
        chosen = None if self.node is None else find_node(tree, self.node)
        node = None if chosen is None else describe_node(tree, found, find_flow(tree), details_of(graph), chosen)
        report = GraphReport(
            label=graph.label,
            level=graph.level,
            model=tree.nodes[0].name,
            num_nodes=len(tree.nodes),
            sentence=found.sentence,
            whole=found.whole,
            found=bool(found.findings) or (comparison is not None and differs(comparison.row_counts())),
            began=began(graph),
            screen=self._screen(graph, [overlay_line(*one) for one in over.items()], node),
            chosen=chosen,
            near=tuple(names_like(tree, self.node)) if self.node is not None and node is None else (),
        )
        if self.document:
            document = as_document(graph.directory, tree, found, find_flow(tree), overflow=self.overflow)
            more = {"overlays": over} if over else {}
            report = report._replace(document={**document, **more, **({} if node is None else {"node": node})})
        if self.markdown:
            text = as_markdown(graph, details_of(graph), self._tree(graph), golden=self.golden)
            report = report._replace(markdown=text)
        if self.page:
            rank = draw_rank(graph, self._choice, self.num_dumps, served=self.served, overlays=laid)
            report = report._replace(rank=rank, collectives=collectives_of(graph) if self.num_dumps > 1 else None)
        if self.details == BESIDE:
            report = report._replace(details=tuple(all_details(graph)))
        return report

    @property
    def _choice(self) -> str | None:
        """Whose tensors are in the page itself: of many ranks that are served none is at hand any more."""
        return self.details if self.details or not self.served else FOUND if self.num_dumps > 1 else BESIDE

    def _screen(self, graph: DumpGraph, overlays: Sequence[str], node: Mapping[str, Any] | None) -> str:
        lines = [*map(printable, overlays), ""]
        if self.overflow:
            lines = [overflow_sentence(graph.tree, overflow_levels(graph.tree)), *lines]
        name, num_nodes = printable(graph.tree.nodes[0].name), len(graph.tree.nodes)
        lines.append(f"{name}, {printable(graph.label)}: {num_nodes:,} nodes")
        notes = [f"note: {printable(note)}" for note in graph.notes]
        tree = self._tree(graph, colour=self.colour) if node is None else f"\n{node_screen(node)}"
        return "\n".join((*lines, *([tree] if tree else []), *notes))

    def _tree(self, graph: DumpGraph, *, colour: bool = False) -> str:
        tree, found = graph.tree, graph.found
        return (
            TreeScreen(
                tree=tree,
                found=found,
                worst=worst_within(tree, found.verdicts),
                depth=self.depth,
                colour=colour,
                levels=worst_within(tree, overflow_levels(tree)) if self.overflow else None,
            )
            .render()
            .rstrip("\n")
        )
