"""Entries are found where they stand, and become the tree that their files describe."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.analysis.graph import entries
from trainermon.analysis.graph.entries import read_entries, read_entry
from trainermon.analysis.graph.tree import GraphKind, read_tree
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import read_dump

RECORDED = Path(__file__).parents[1] / "compare" / "recorded"
SOUND = RECORDED / "sound" / "step0" / "rank0"


@pytest.mark.parametrize("layout", [{}, {"indent": 1}, {"ensure_ascii": False, "indent": 4}])
def test_an_entry_is_read_again_from_where_it_stands(layout, tmp_path):
    data = json.loads((SOUND / "dump.json").read_bytes())["data"]
    data = {"Functional.größe.0.forward": {"input_args": [{"type": "str", "value": "ä\n{"}]}, **data}
    whole = {"task": "statistics", "before": {"data": {}}, "data": data, "after": [1]}
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(whole, **layout), encoding="utf-8")

    found = list(read_entries(tmp_path))

    assert {entry.key: entry.value for entry in found} == data
    assert all(read_entry(path, entry.start, entry.length) == data[entry.key] for entry in found)


@pytest.mark.parametrize("read", [read_entries, lambda folder: read_dump(folder).entries])
@pytest.mark.parametrize("name", ["dump.json", "dump.partial.jsonl"])
def test_an_integer_of_more_digits_than_python_reads_hides_no_entry(tmp_path, read, name):
    keys = [f"Torch.abs.{number}.forward" for number in range(3)]
    data = {key: {"input_args": [{"type": "int", "value": "HUGE"}], "output": []} for key in keys}
    texts = {
        "dump.json": json.dumps({"task": "tensor", "data": data}),
        "dump.partial.jsonl": "".join(json.dumps({"key": key, "value": data[key]}) + "\n" for key in keys),
    }
    (tmp_path / name).write_text(texts[name].replace('"HUGE"', "1" + "0" * 5000))

    found = list(read(tmp_path))

    assert [one.key for one in found] == keys


words = st.sampled_from(
    [
        "Torch.größe.0.forward",
        "Module.a.B.forward.1",
        "a",
        "Module.a.B.parameters_grad.0",
        'F.q"\\.0.forward',
        "é.backward",
    ]
)
values = st.recursive(
    st.none() | st.floats() | st.text('a"\\{}:, ü', max_size=4) | st.sampled_from(["Torch.a.0.forward", '": {']),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=6,
)


@given(
    data=st.dictionaries(words, values, max_size=5),
    head=values,
    layout=st.fixed_dictionaries(
        {
            "indent": st.sampled_from([None, 1]),
            "separators": st.sampled_from([None, (",", ":"), (" ,\t", " :\r\n")]),
        }
    ),
    piece=st.sampled_from([1, 7, 100, 1 << 20]),
)
def test_entries_are_those_of_a_json_parser_whatever_the_keys_the_layout_and_the_pieces(
    data, head, layout, piece, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("dump")
    text = json.dumps({"head": head, "data": data, "tail": head}, **layout)
    (folder / "dump.json").write_text(text)

    with patch.multiple(entries, _PIECE=piece, _WINDOW=piece):
        found = list(read_entries(folder))

    expected = {key: value for key, value in json.loads(text)["data"].items() if isinstance(value, dict)}
    assert json.dumps({entry.key: entry.value for entry in found}) == json.dumps(expected)
    for entry in found:
        assert json.dumps(read_entry(folder / "dump.json", entry.start, entry.length)) == json.dumps(entry.value)


def test_of_entries_with_the_same_key_the_last_counts_as_in_json(tmp_path):
    one, other = (json.dumps(forward(output=tensor(value=value))) for value in (1.0, 2.0))
    key = "Torch.relu.0.forward"
    (tmp_path / "dump.json").write_text(f'{{"data": {{"{key}": {one}, "{key}": {other}}}}}')

    tree = read_tree(tmp_path)

    (node,) = [node for node in tree.nodes if node.call is not None]
    assert node.call.values[0].norm == 2.0


def test_a_dump_that_was_cut_off_is_read_up_to_its_last_whole_line(tmp_path):
    path = tmp_path / "dump.partial.jsonl"
    lines = [
        {"info": {}, "task": "statistics", "level": "L1"},
        {"key": "Torch.relu.0.forward", "value": {"output": []}},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"key": "Torch.relu.1.forw')

    (entry,) = read_entries(tmp_path)

    assert entry.key == "Torch.relu.0.forward"
    assert read_entry(path, entry.start, entry.length) == {"output": []}


@pytest.mark.parametrize("text", ["", "{", '{"data": {"a": {', '{"data": 3}', "[]", '{"data": {"a": {}'])
def test_a_damaged_dump_is_refused(text, tmp_path):
    (tmp_path / "dump.json").write_text(text)

    with pytest.raises(DumpError, match=r"damaged|not a dump"):
        read_tree(tmp_path)


def test_a_file_that_has_changed_is_noticed(tmp_path):
    folder = write_dump(tmp_path / "dump", {"Torch.relu.0.forward": forward(output=tensor())})
    (entry,) = read_entries(folder)
    (folder / "dump.json").write_text("{}" * 500)

    with pytest.raises(DumpError, match="has changed since it was read"):
        read_entry(folder / "dump.json", entry.start, entry.length)


parents = st.lists(st.integers(-1, 30), max_size=30).map(
    lambda numbers: [number if number < len(numbers) else -1 for number in numbers]
)


@given(numbers=parents)
def test_what_runs_within_a_call_is_the_range_behind_it(numbers, tmp_path_factory):
    """Also where a damaged file says that calls run within one another in a circle: then each is there once."""
    keys = [f"Module.m{place}.Box.forward.0" for place in range(len(numbers))]
    construct = {key: keys[number] if number >= 0 else None for key, number in zip(keys, numbers, strict=True)}
    folder = tmp_path_factory.mktemp("dump") / "dump"
    tree = read_tree(write_dump(folder, {key: forward(output=tensor()) for key in keys}, construct=construct))

    places = {node.call.key: place for place, node in enumerate(tree.nodes) if node.call is not None}
    assert sorted(places) == sorted(keys)
    assert tree.sizes[0] == len(tree.nodes)
    for key in keys:
        chain = _chain(construct, key)
        if chain is not None:
            within = {other for other in keys if key in (_chain(construct, other) or ())}
            start = places[key]
            assert {key for key, at in places.items() if start < at < start + tree.sizes[start]} == within


def _chain(construct, key):
    """Return what a call runs in, by its file; None if that is a circle."""
    found = []
    while construct[key] is not None:
        key = construct[key]
        if key in found:
            return None
        found.append(key)
    return found


def test_a_backward_is_placed_like_its_forward_and_gradients_of_parameters_in_it(tmp_path):
    inner, outer = "Module.net.fc.Linear", "Module.net.Net"
    keys = [f"{inner}.forward.0", f"{outer}.forward.0", f"{inner}.parameters_grad.0", f"{inner}.backward.0"]
    keys.append(f"{outer}.backward.0")
    data = {key: forward(output=tensor(), parameters={"weight": tensor()}) for key in keys if "forward" in key}
    data |= {key: {"input": [tensor()], "output": [tensor()]} for key in keys if "backward" in key}
    data[keys[2]] = {"weight": [tensor()]}
    folder = write_dump(tmp_path / "dump", data, construct={keys[0]: keys[1], keys[1]: None})

    tree = read_tree(folder)

    names = [(node.kind, node.name) for node in tree.nodes[1:]]
    assert names == [
        (GraphKind.MICRO_STEP, "micro step 0"),
        (GraphKind.SECTION, "forward"),
        (GraphKind.MODULE, "net"),
        (GraphKind.PARAMETER, "weight"),
        (GraphKind.MODULE, "fc"),
        (GraphKind.PARAMETER, "weight"),
        (GraphKind.SECTION, "backward"),
        (GraphKind.MODULE, "net"),
        (GraphKind.MODULE, "fc"),
        (GraphKind.GRADIENTS, "gradients of parameters"),
    ]


def test_a_forward_after_a_backward_begins_a_micro_step_and_the_optimizer_none(tmp_path):
    words = ["mul.0.forward", "mul.0.backward", "mul.1.forward", "relu.0.forward", "mul.1.backward", "add_.0.forward"]
    value = {"input": [tensor()], "input_args": [tensor()], "output": [tensor()]}
    tree = read_tree(write_dump(tmp_path / "dump", {f"Torch.{word}": value for word in words}))

    groups = [tree.nodes[place].name for place in range(len(tree.nodes)) if tree.parents[place] == 0]
    assert groups == ["micro step 0", "micro step 1", "after the backward"]
    within = {node.call.key: tree.nodes[tree.parents[place]].name for place, node in enumerate(tree.nodes) if node.call}
    assert within["Torch.add_.0.forward"] == "after the backward"
    assert within["Torch.relu.0.forward"] == "forward"
