"""Attention with one projection for q, k and v beside attention with three, which do the same."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainermon.analysis.compare.comparison import CompareOptions, compare_pair, pairs_of
from trainermon.analysis.compare.mappings import read_mappings
from trainermon.analysis.compare.merging.joining import join_sides, texts_between
from trainermon.analysis.compare.merging.merge import read_sides
from trainermon.cli import main
from trainermon.core.errors import ConfigError

SCRIPT = """
import json, sys
import torch
from torch import nn
from torch.nn import functional
from trainermon import PrecisionDebugger

folder, kind, task, spoiled = sys.argv[1:]


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        if kind == "fused":
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1) if kind == "fused" else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads)

    def forward(self, x):
        return x + self.attention(self.norm(x))


model = nn.Sequential(*(Block(16, 4) for _ in range(2)))
generator = torch.Generator().manual_seed(0)
weights = {}
for name, shape in (("weight", (16, 16)), ("bias", (16,))):
    for layer in range(2):
        for part in "qkv":
            weights[f"{layer}.attention.{part}.{name}"] = torch.randn(shape, generator=generator) / 4
        weights[f"{layer}.attention.out.{name}"] = torch.randn(shape, generator=generator) / 4
        weights[f"{layer}.norm.{name}"] = torch.ones(16)
if kind == "fused":
    for layer in range(2):
        for name in ("weight", "bias"):
            parts = [weights.pop(f"{layer}.attention.{part}.{name}") for part in "qkv"]
            weights[f"{layer}.attention.qkv.{name}"] = torch.cat(parts)
if spoiled:
    weights[spoiled][3] *= 1.5
model.load_state_dict(weights)
with open(f"{folder}.json", "w") as file:
    json.dump({"dump_path": folder, "level": "mix", "task": task}, file)
debugger = PrecisionDebugger(f"{folder}.json")
debugger.start(model)
model(torch.randn(2, 5, 16, generator=generator)).pow(2).sum().backward()
debugger.stop()
debugger.step()
"""
SPLIT = "*.attention.q", "*.attention.k", "*.attention.v"
FUSED = "*.attention.qkv"


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Return a function that gives the dump of a model of a kind, made once."""
    known = {}
    folder = tmp_path_factory.mktemp("joining")
    (folder / "train.py").write_text(SCRIPT)

    def made(kind, task="statistics", spoiled=""):
        if (kind, task, spoiled) not in known:
            known[kind, task, spoiled] = path = folder / f"dump{len(known)}"
            words = [sys.executable, str(folder / "train.py"), str(path), kind, task, spoiled]
            subprocess.run(words, check=True, env=os.environ)
        return known[kind, task, spoiled]

    return made


def rules(folder, target, golden, **more):
    path = folder / "match.json"
    path.write_text(json.dumps([{"target": target, "golden": golden, **more}]))
    return read_mappings(match=path)


def compared(target, golden, mappings):
    (pair,) = pairs_of(target, golden, CompareOptions()).pairs
    return compare_pair(pair, CompareOptions(mappings=mappings))


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("several_is_target", [True, False])
def test_a_split_and_a_fused_projection_agree(dump, tmp_path, task, several_is_target):
    split, fused = dump("split", task), dump("fused", task)
    sides = (split, fused) if several_is_target else (fused, split)
    names = (list(SPLIT), FUSED) if several_is_target else (FUSED, list(SPLIT))

    found = compared(*sides, rules(tmp_path, *names))

    assert found.call_counts().keys() == {"pass"}
    left = [(call.key, row) for call in found.calls for row in call.rows if row.result != "pass"]
    assert left == []
    assert len(found.members) == 10


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_a_wrong_row_of_a_fused_weight_is_to_blame(dump, tmp_path, task):
    found = compared(
        dump("fused", task, "1.attention.qkv.weight"), dump("split", task), rules(tmp_path, FUSED, list(SPLIT))
    )

    (blamed,) = found.blamed
    assert (blamed.key, blamed.origin) == ("Module.1.attention.qkv.Linear.forward.0", "parameters.weight")


def test_a_wrong_one_of_several_is_to_blame(dump, tmp_path):
    found = compared(
        dump("split", "tensor", "0.attention.k.bias"), dump("fused", "tensor"), rules(tmp_path, SPLIT, FUSED)
    )

    (blamed,) = found.blamed
    assert (blamed.key, blamed.origin) == ("Module.0.attention.{q,k,v}.Linear.forward.0", "parameters.bias")
    assert found.members[blamed.key] == tuple(f"Module.0.attention.{part}.Linear.forward.0" for part in "qkv")


def test_joined_statistics_are_those_of_the_joined_tensor(dump, tmp_path):
    (pair,) = pairs_of(dump("split", "tensor"), dump("fused", "tensor"), CompareOptions()).pairs
    target, golden, _ = read_sides(pair.target, pair.golden)

    joined = join_sides(target, golden, rules(tmp_path, SPLIT, FUSED).joins).target

    call = next(call for call in joined.calls if call.key == "Module.1.attention.{q,k,v}.Linear.forward.0")
    for item in call.items:
        path = joined.tensor_path(item)
        elements = (
            path.whole(lambda part: torch.load(part).double().numpy())
            if hasattr(path, "whole")
            else torch.load(path).double().numpy()
        )
        assert item.shape == elements.shape
        expected = (elements.max(), elements.min(), elements.mean(), np.linalg.norm(elements))
        assert (item.max, item.min, item.mean, item.norm) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_several_can_stand_for_several(dump, tmp_path):
    found = compared(dump("split"), dump("split"), rules(tmp_path, SPLIT[:2], SPLIT[1::-1]))

    assert found.call_counts().keys() == {"pass"}


def test_another_order_leaves_statistics(dump, tmp_path):
    mappings = rules(tmp_path, [SPLIT[2], SPLIT[0], SPLIT[1]], FUSED, order="other")

    found = compared(dump("split", "tensor"), dump("fused", "tensor"), mappings)

    assert found.call_counts().keys() == {"pass"}


def test_the_same_wrong_order_is_a_difference(dump, tmp_path):
    found = compared(
        dump("split", "tensor"), dump("fused", "tensor"), rules(tmp_path, [SPLIT[2], SPLIT[0], SPLIT[1]], FUSED)
    )

    assert "error" in found.call_counts()


def test_the_command_says_what_was_joined_and_what_was_not(dump, tmp_path, capsys):
    path = tmp_path / "match.json"
    path.write_text(json.dumps([{"target": list(SPLIT), "golden": FUSED}, {"target": ["fc", "up"], "golden": "mlp"}]))

    assert main(["compare", str(dump("split")), str(dump("fused")), "--match", str(path)]) == 0

    shown = capsys.readouterr().out
    assert "*.attention.q + *.attention.k + *.attention.v = *.attention.qkv: 6 calls were joined" in shown
    assert "fc + up = mlp: no call of both sides is named so" in shown


def test_a_graph_has_no_call_of_one_side_alone(dump, tmp_path, capsys):
    path = tmp_path / "match.json"
    path.write_text(json.dumps([{"target": list(SPLIT), "golden": FUSED}]))

    for words in (["--match", str(path)], []):
        main(["graph", str(dump("split")), str(dump("fused")), "--json", *words])

        (found,) = json.loads(capsys.readouterr().out)
        assert (found["verdicts"]["unmatched"] == 0) == bool(words)


def test_a_file_for_tensorboard_has_each_joined_call_beside_what_it_is_held_against(dump, tmp_path):
    (tmp_path / "match.json").write_text(json.dumps([{"target": list(SPLIT), "golden": FUSED}]))
    path = tmp_path / "graph.vis.db"
    words = [str(dump("split")), str(dump("fused")), "--match", str(tmp_path / "match.json"), "-o", str(path)]

    assert main(["graph", *words]) == 0

    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT node_name, matched_node_link FROM tb_nodes WHERE data_source = ? AND node_name LIKE ?"
        ours = connection.execute(query, ("NPU", "Module.%.attention._.Linear.forward.0")).fetchall()
        theirs = connection.execute(query, ("Bench", "Module.%.attention.qkv.Linear.forward.0")).fetchall()
    assert len(ours) == 3 * len(theirs) == 6
    for name, link in ours:
        assert json.loads(link)[-1] == f"{name.rsplit('.', 4)[0]}.qkv.Linear.forward.0"
    for name, link in theirs:
        assert json.loads(link)[-1].rsplit(".", 4)[0] == name.rsplit(".", 4)[0]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"target": "a"}, "expected target, golden"),
        ({"target": "a", "golden": 3}, "golden is 3, expected a module's path"),
        ({"target": [], "golden": "b"}, r"target is \[\], expected a module's path"),
        ({"target": "a.*", "golden": "b"}, "the same number in all"),
        ({"target": "*a*b*c*d*", "golden": "*a*b*c*d*"}, r"its paths have 5 times `\*`, expected at most 4"),
        ({"target": ["a", "c"], "golden": "b", "order": "up"}, "order is 'up', expected same or other"),
    ],
)
def test_a_wrong_rule_is_named(tmp_path, rule, said):
    path = tmp_path / "match.json"
    path.write_text(json.dumps([{"target": ["x", "z"], "golden": "y"}, rule]))

    with pytest.raises(ConfigError, match=f"rule 2.*{said}"):
        read_mappings(match=path)


@given(st.lists(st.text("ab.", max_size=2), min_size=1, max_size=4), st.text("ab.", max_size=8))
def test_wildcards_stand_for_what_they_do_in_a_regular_expression(parts, name):
    match = re.fullmatch("(.*)".join(map(re.escape, parts)), name)

    assert texts_between(parts, name) == (match and match.groups())
