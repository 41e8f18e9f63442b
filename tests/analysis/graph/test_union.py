"""What one of two dumps alone has joins the tree of both, and nothing is lost."""

from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.graph.graph_calls import function_call
from trainermon.analysis.graph.tree import NodeSide, build_tree, number_nodes
from trainermon.analysis.graph.union import join_trees

NAMES = "abcdefgh"
sequences = st.lists(st.sampled_from(NAMES), unique=True)


def _tree(names):
    """Return the tree of functions that ran in this order, with one call each."""
    calls = [function_call(name, place=place) for place, name in enumerate(names)]
    return build_tree({call.key: call for call in calls}, "model")


@given(sequences, sequences)
def test_each_call_is_there_once_in_the_order_of_both(ours, theirs):
    root = _tree(ours)
    both = [f"Torch.{name}.0.forward" for name in ours if name in theirs]

    join_trees(root, _tree(theirs), {key: (key,) for key in both})

    nodes = [node for node in number_nodes(root).nodes if node.call is not None]
    names = [node.name for node in nodes]
    assert sorted(names) == sorted({*ours, *theirs})
    assert [name for name in names if name in ours] == ours
    for node in nodes:
        expected = {(True, True): NodeSide.BOTH, (True, False): NodeSide.TARGET, (False, True): NodeSide.GOLDEN}
        assert node.side is expected[node.name in ours, node.name in theirs]


@given(sequences, st.data())
def test_what_was_left_out_of_one_stands_where_it_was(names, data):
    """Where one side has all calls of the other, the graph of both is its own."""
    fewer = [name for name in names if data.draw(st.booleans())]
    root = _tree(fewer)
    keys = [f"Torch.{name}.0.forward" for name in fewer]

    join_trees(root, _tree(names), {key: (key,) for key in keys})

    assert [node.name for node in number_nodes(root).nodes if node.call is not None] == names
