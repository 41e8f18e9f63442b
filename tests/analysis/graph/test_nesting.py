"""Calls of dumps that name no module stand in the functions that made them; dumps of odd sizes and shapes."""

import ast
import inspect
import json
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.analysis.graph.graph_calls import function_call
from tests.recorded_dump import record_dump
from trainermon.analysis.graph.flow import find_flow
from trainermon.analysis.graph.folding import fold_children
from trainermon.analysis.graph.nesting import nest_by_stack
from trainermon.analysis.graph.reading import read_graphs
from trainermon.analysis.graph.screen import path_of
from trainermon.analysis.graph.tree import GraphKind, build_tree, number_nodes, read_tree
from trainermon.cli import main


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(4, 4)

    def activate(self, hidden):
        return torch.tanh(torch.relu(hidden))

    def forward(self, hidden):
        return hidden + self.activate(self.mlp(hidden))


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(3))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return torch.square(hidden)


def _calls_in(function):
    """Return the names that the source of a function calls."""
    tree = ast.parse(inspect.getsource(function).lstrip())
    return {getattr(node.func, "attr", "") for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_a_function_is_in_the_function_whose_source_calls_it(tmp_path):
    torch.manual_seed(0)
    model = _Model()
    record_dump(tmp_path, lambda: model(torch.randn(2, 4)).sum().backward(), model=model, level="L1", task="statistics")

    (flat,), (nested,) = read_graphs(tmp_path), read_graphs(tmp_path, by_stack=True)

    named = {_Layer.activate: "activate", _Layer.forward: "forward", _Model.forward: "forward"}
    for name, function in (("tanh", _Layer.activate), ("relu", _Layer.activate), ("square", _Model.forward)):
        assert name in _calls_in(function)
        places = [place for place, node in enumerate(nested.tree.nodes) if node.name == name and node.call is not None]
        within = {nested.tree.nodes[nested.tree.parents[place]].name.split(" ")[0] for place in places}
        assert within == {named[function]}
        assert len(places) == 2 * (1 if name == "square" else 3)
    assert any("activate" in path_of(nested.tree, at) for at in range(len(nested.tree.nodes)))
    keys = [[node.call.key for node in graph.tree.nodes if node.call is not None] for graph in (flat, nested)]
    assert keys[0] == keys[1]


def _frame(line, function):
    return f"File /job/train.py, line {line}, in {function}, \n x()"


stacks = st.lists(st.lists(st.tuples(st.integers(1, 3), st.sampled_from("fgh")), max_size=4), max_size=12)


@given(stacks)
def test_calls_stay_in_order_and_each_is_in_its_own_functions(frames):
    keys = [f"Torch.x.{place}.forward" for place in range(len(frames))]
    calls = {key: function_call("x", place=place, number=place) for place, key in enumerate(keys)}
    root = build_tree(calls, "model")

    nest_by_stack(
        root, {key: [_frame(*one) for one in reversed(lines)] for key, lines in zip(keys, frames, strict=True)}
    )

    tree = number_nodes(root)
    assert [node.call.key for node in tree.nodes if node.call is not None] == keys
    for place, node in enumerate(tree.nodes):
        if node.call is None:
            continue
        lines = frames[node.call.number]
        expected = [f"{inner[1]} (train.py:{outer[0]})" for outer, inner in zip(lines, lines[1:])]  # noqa: B905, RUF007
        path = path_of(tree, place).split(" > ")[2:-1]
        assert path == expected[len(expected) - len(path) :]


def test_a_call_without_a_stack_and_lines_of_libraries_are_left_alone(tmp_path):
    data = {f"Torch.{name}.0.forward": forward(tensor(), output=tensor()) for name in ("one", "two")}
    folder = write_dump(tmp_path / "dump", data)
    library = "File /x/site-packages/torch/nn.py, line 3, in inner, \n y()"
    (folder / "stack.json").write_text(f'{{"0": [["Torch.one.0.forward"], ["{library}"]]}}'.replace("\n", "\\n"))

    (graph,) = read_graphs(folder, by_stack=True)

    assert [node.name for node in graph.tree.nodes] == ["model", "micro step 0", "forward", "one", "two"]


def test_5000_children_are_few_lines_and_all_have_their_edges(tmp_path, capsys):
    names = [f"Torch.f{place % 2}.{place // 2}.forward" for place in range(5_000)]
    data = {key: forward(tensor(order=place), output=tensor(order=place + 1)) for place, key in enumerate(names)}
    folder = write_dump(tmp_path / "dump", data)

    tree = read_tree(folder)

    assert len(find_flow(tree).edges) == 4_999
    (fold,) = fold_children(tree, 2)
    assert (len(fold.members), len(fold.first)) == (2_500, 2)
    assert main(["graph", str(folder), "-o", str(tmp_path / "graph.html")]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 12


def test_60_levels_are_60_levels_also_where_names_are_not_ascii(tmp_path, capsys):
    keys = [f"Module.{'.'.join(['größe'] * (place + 1))}.Ebene.forward.0" for place in range(60)]
    construct = {key: before for before, key in zip((None, *keys), keys, strict=False)}
    value = float("nan")
    data = {key: forward(tensor(), output=tensor(value=value if key == keys[-1] else 1.0)) for key in reversed(keys)}
    folder = write_dump(tmp_path / "dump", data, construct=construct)

    tree = read_tree(folder)

    assert tree.sizes.tolist()[2:] == list(range(61, 0, -1))
    assert {node.name for node in tree.nodes if node.kind is GraphKind.MODULE} == {"größe"}
    assert main(["graph", str(folder)]) == 0
    assert "größe" in capsys.readouterr().out


def test_a_dump_that_was_cut_off_is_drawn_as_far_as_it_goes(tmp_path):
    folder = record_dump(tmp_path / "dump", lambda: torch.relu(torch.randn(3)), level="L1", task="statistics")
    whole = read_tree(folder)
    (key,) = [node.call.key for node in whole.nodes if node.name == "relu"]
    lines = [
        '{"info": {}, "task": "statistics", "level": "L1"}',
        '{"stack": 0, "frames": []}',
        f'{{"key": "{key}", "value": {{"output": []}}, "stack": 0}}',
        '{"key": "Torch.tanh.0.forward", "val',
    ]
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "dump.partial.jsonl").write_text("\n".join(lines))

    (graph,) = read_graphs(cut, by_stack=True)

    assert [node.call.key for node in graph.tree.nodes if node.call is not None] == [key]


def test_modules_of_recorded_dumps_stay_as_they_are(capsys):
    sound = str(Path(__file__).parents[1] / "compare" / "recorded" / "sound")
    assert main(["graph", sound, "--nest", "stack"]) == 0
    assert "layers.0–2 Block  ×3" in capsys.readouterr().out


def test_what_the_script_itself_calls_has_no_function_in_common_with_the_rest(tmp_path):
    keys = ("Torch.randn.0.forward", "Torch.relu.0.forward", "Torch.tanh.0.forward")
    write_dump(tmp_path / "dump", {key: forward(output=tensor(value=1.0 + at)) for at, key in enumerate(keys)})
    script = "File /a/train.py, line 9, in <module>, \n net(torch.randn(2))"
    within = [f"File /a/train.py, line {line}, in forward, \n torch.relu(x)" for line in (4, 5)]
    stacks = {"0": [[keys[0]], [script]], **{str(at): [[keys[at]], [within[at - 1], script]] for at in (1, 2)}}
    (tmp_path / "dump" / "stack.json").write_text(json.dumps(stacks))

    (nested,) = read_graphs(tmp_path / "dump", by_stack=True)

    paths = {node.name: path_of(nested.tree, place) for place, node in enumerate(nested.tree.nodes)}
    assert paths["relu"].endswith("forward > forward (train.py:9) > relu")
    assert paths["tanh"].endswith("forward > forward (train.py:9) > tanh")
    assert paths["randn"].endswith("forward > randn")
