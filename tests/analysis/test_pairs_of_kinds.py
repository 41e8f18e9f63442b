"""Dumps of every dtype in every layout: a changed tensor is found, or said not to be judged, and no tool falls over."""

import pytest

from tests.dumped_kinds import TASKS, dumped, kind_of
from tests.tensor_kinds import numbers
from tests.tensor_pairs import SIDES, is_equal, pairs
from trainermon import PrecisionDebugger
from trainermon.analysis.compare import compare
from trainermon.analysis.compare.answer.summary import headline
from trainermon.analysis.compare.items import OUTPUT
from trainermon.analysis.compare.verdicts import NOT_COMPARED, PASS
from trainermon.analysis.graph.findings import NodeVerdict
from trainermon.analysis.graph.reading import read_graphs
from trainermon.dump.files.reader import read_dump

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: quantized, sparse and masked tensors may change
# The numbers of a row are about as large as those of its opposite: statistics do not tell them apart.
SEEN = {"statistics": ["zeroed"], "tensor": ["negated"], "md5": ["zeroed", "negated"]}
SHAPE_ALONE = {"meta", "fake"}
UNREAD = {"quint4x2 expanded", "quint2x4 expanded"}  # torch reads none that is quantized by channels, and expanded


@pytest.fixture(scope="module", params=TASKS)
def dumps(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    found = {name: dumped(folder / name, make(numbers()), request.param, pairs) for name, make in SIDES.items()}
    PrecisionDebugger.close()
    return request.param, found


@pytest.fixture(scope="module")
def tensors():
    return {name: pairs(make(numbers())) for name, make in SIDES.items()}


def layout_of(name):
    return name.partition(" ")[2]


def unread(names):
    return {name for name in names if layout_of(name) == "wrapped"} | UNREAD


def of_outputs(entries_or_calls, told):
    return {kind_of(each.key) for each in entries_or_calls if ".kinds." in each.key and told(each)}


def test_every_pair_has_an_entry_and_numbers_unless_nothing_can_read_it(dumps, tensors):
    _, folders = dumps
    dump = read_dump(folders["sound"])
    names = set(tensors["sound"])

    assert of_outputs(dump.entries, lambda entry: entry.outputs) == names
    without = of_outputs(dump.entries, lambda entry: any(one.max is None for one in entry.outputs))
    shapes = {name for name in names if layout_of(name) in SHAPE_ALONE | {"empty"}}
    assert without == shapes | unread(names)
    assert dump.info.errors
    assert "has no memory of its own" in dump.info.first_error


@pytest.mark.parametrize("damage", ["zeroed", "negated"])
def test_no_change_is_said_to_be_equal(dumps, tensors, damage):
    task, folders = dumps
    if damage not in SEEN[task]:
        return
    (comparison,) = compare(folders[damage], folders["sound"])

    sides = tensors["sound"], tensors[damage]
    equal = {name for name in sides[0] if is_equal(sides[0][name], sides[1][name], layout_of(name))}
    judged = {name for name in equal if layout_of(name) not in SHAPE_ALONE} - unread(equal)
    passing = of_outputs(
        comparison.calls, lambda call: any(row.result == PASS for row in call.rows if row.target.state == OUTPUT)
    )
    assert passing == judged
    if task == "tensor":  # the graph's verdicts are of the same rows, which take seconds to read
        return
    [graph] = read_graphs(folders[damage], folders["sound"])
    places = [place for place, node in enumerate(graph.tree.nodes) if node.call is not None]
    nodes = [graph.tree.nodes[place].call for place in places if graph.found.verdicts[place] == NodeVerdict.PASS]
    assert of_outputs(nodes, lambda _: True) == judged


def test_equal_dumps_are_equal_and_what_was_not_read_is_said(dumps, tensors):
    _, folders = dumps

    (comparison,) = compare(folders["again"], folders["sound"])

    names = set(tensors["sound"])
    uncompared = of_outputs(comparison.calls, lambda call: any(row.result == NOT_COMPARED for row in call.rows))
    assert uncompared == {name for name in names if layout_of(name) in SHAPE_ALONE} | unread(names)
    assert "rows were not compared" in headline(comparison)
