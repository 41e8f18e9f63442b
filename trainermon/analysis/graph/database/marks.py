"""What a `.vis.db` file says is wrong with its nodes, as findings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from trainermon.analysis.graph.database.schema import ERROR_FROM, WARNING_FROM
from trainermon.analysis.graph.findings import (
    GraphFinding,
    GraphFindings,
    NodeVerdict,
    all_finite,
    nonfinite_of,
    num_unread,
)
from trainermon.analysis.graph.overflow import OverflowLevel, innermost, overflow_levels
from trainermon.analysis.graph.tree import GraphKind, GraphTree, NodeSide
from trainermon.dump.files.records import BACKWARD

_RELATIVE = ("MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr")
_END_OF_TEXT = re.compile(r"""["'], ["']""")
_WORDS = {"pass": NodeVerdict.PASS, "warning": NodeVerdict.WARNING, "error": NodeVerdict.ERROR}


class CallMarks(NamedTuple):
    """What is said of a call.

    Attributes:
        verdict: Of the call.
        error: Largest relative difference of its results; NaN: none is known.
        parameters: Verdict and relative difference of each of its parameters, by their place.
        message: Why it does not pass.
    """

    verdict: NodeVerdict
    error: float
    parameters: Mapping[str, tuple[NodeVerdict, float]]
    message: str


def marks_of(precision: float | None, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> CallMarks:
    """Return what a row of tb_nodes says of its call."""
    parameters = {
        f"parameters{place.rpartition('.parameters')[2]}": (
            _WORDS.get(form.get("Result"), NodeVerdict.NONE),
            relative_error(form),
        )
        for place, form in inputs.items()
        if ".parameters." in place
    }
    errors = [error for form in outputs.values() if not math.isnan(error := relative_error(form))]
    return CallMarks(_verdict(precision), max(errors, default=math.nan), parameters, _message({**inputs, **outputs}))


def relative_error(form: Mapping[str, Any]) -> float:
    """Return the largest relative difference of a tensor's statistics, which is written in per cent; NaN: none."""
    known = [float(form[name][:-1]) / 100 for name in _RELATIVE if str(form.get(name)).endswith("%")]
    return max(known, default=math.nan)


def find_marked(tree: GraphTree, marks: Mapping[str, CallMarks]) -> GraphFindings:
    """Return the verdicts of a comparison that msprobe made; its first error is the finding."""
    verdicts = np.zeros(len(tree.nodes), np.uint8)
    errors = np.full(len(tree.nodes), np.nan)
    for place, node in enumerate(tree.nodes):
        said = marks.get(node.call.key) if node.call is not None else None
        if node.side is not NodeSide.BOTH:
            verdicts[place] = NodeVerdict.UNMATCHED
        elif said is not None and node.kind is GraphKind.PARAMETER:
            verdicts[place], errors[place] = said.parameters.get(node.slot, (NodeVerdict.NONE, math.nan))
        elif said is not None:
            verdicts[place], errors[place] = said.verdict, said.error
    calls = [place for place, node in enumerate(tree.nodes) if node.call is not None and not node.slot]
    wrong = {level: [place for place in calls if verdicts[place] == level] for level in _WORDS.values()}
    first = innermost(tree, wrong[NodeVerdict.ERROR] or wrong[NodeVerdict.WARNING])
    counts = (
        f"{_counted(len(wrong[NodeVerdict.ERROR]), 'error')} and {_counted(len(wrong[NodeVerdict.WARNING]), 'warning')}"
    )
    if first is None:
        lone = sum(verdicts[place] == NodeVerdict.UNMATCHED for place in calls)
        but = f", but {lone:,} are on one side only" if lone else ""
        return GraphFindings(f"For msprobe all calls pass{but}.", (), verdicts, errors, nonfinite_of(tree), not lone)
    key = _key(tree, first)
    findings = (GraphFinding(first, marks[key].message),) if wrong[NodeVerdict.ERROR] else ()
    return GraphFindings(
        f"msprobe counts {counts}; the first is {key}.", findings, verdicts, errors, nonfinite_of(tree)
    )


def find_nonfinite(tree: GraphTree) -> GraphFindings:
    """Return where the values of a dump stop being finite: the first call that was given finite ones only.

    An infinity that a mask needs is no finding; what counts are parameters and the backward.
    """
    nonfinite = nonfinite_of(tree)
    errors = np.full(len(tree.nodes), np.nan)
    verdicts = np.zeros(len(tree.nodes), np.uint8)
    counts = [at for at in np.flatnonzero(nonfinite).tolist() if _counts(tree, at)]
    if not counts:
        number, unread = int(nonfinite.sum()), num_unread(tree)
        masked = f"{number:,} calls give values that are not finite, as masks may be."
        sentence = masked if number else all_finite(unread)
        return GraphFindings(sentence, (), verdicts, errors, nonfinite, not unread)
    verdicts[nonfinite] = NodeVerdict.WARNING
    critical = np.flatnonzero(overflow_levels(tree) == OverflowLevel.CRITICAL).tolist()
    first = innermost(tree, critical or counts)
    assert first is not None
    verdicts[first] = NodeVerdict.BLAMED
    finding = GraphFinding(first, "gives a value that is not finite, and was given finite ones only")
    return GraphFindings(
        f"The first value that is not finite arose in {_key(tree, first)}.", (finding,), verdicts, errors, nonfinite
    )


def _counts(tree: GraphTree, place: int) -> bool:
    node = tree.nodes[place]
    return node.kind is GraphKind.PARAMETER or node.direction == BACKWARD


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' * (number != 1)}"


def _key(tree: GraphTree, place: int) -> str:
    call = tree.nodes[place].call
    return call.key if call is not None else ""


def _verdict(precision: float | None) -> NodeVerdict:
    if precision is None:
        return NodeVerdict.NONE
    if precision >= ERROR_FROM:
        return NodeVerdict.ERROR
    return NodeVerdict.WARNING if precision >= WARNING_FROM else NodeVerdict.PASS


def _message(forms: Mapping[str, Any]) -> str:
    """Return what is said of the first tensor that does not pass."""
    for place, form in forms.items():
        if form.get("Result") in ("error", "warning"):
            return f"{place}: {first_message(form) or form['Result']}"
    return "marked as an error"


def first_message(form: Mapping[str, Any]) -> str:
    """Return the first of the messages about a tensor, which are one text: a list as Python shows it."""
    return _END_OF_TEXT.split(str(form.get("Err_message", "")).strip("[]"))[0].strip("\"' ")
