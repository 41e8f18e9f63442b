"""Mapping files mean what they mean to mindspore-probe: its own compare pairs the same rows."""

import csv
import json

import pytest
import yaml

from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.analysis.compare.record import OTHER_PYTHON, run
from trainermon.analysis.compare.items import read_rows
from trainermon.analysis.compare.mappings import read_mappings
from trainermon.analysis.compare.matching import match_calls

ONE = tensor(requires_grad=True)
INNER = "backbone.layers.0"
FILES = {
    "cell": (
        f"{INNER}.attention.qkv.Linear: model.decoder.layers.0.self_attention.linear_qkv.Linear\n"
        f"{INNER}.Block: model.decoder.layers.0.Layer\n"
    ),
    "data": (
        "Functional.linear.0.forward.input.0: Functional.linear.0.forward.input.1\n"
        "Fused.cat.0.forward.output.0: Torch.cat.0.forward.output.0\n"
    ),
    "layer": (
        "TopLayer:\n  backbone: model.decoder\n"
        "Block:\n  attention.qkv: self_attention.linear_qkv\n  attention: self_attention\n"
    ),
}
LAYERS = """
import sys
from msprobe.core.compare.layer_mapping import generate_data_mapping_by_layer_mapping
target, golden, file, output = sys.argv[1:]
generate_data_mapping_by_layer_mapping({"npu_path": target, "bench_path": golden}, file, output)
"""


def write_side(folder, prefix, names, function):
    """Write a dump in which `function` is called in the innermost of three modules, and linear outside."""
    keys = [f"Module.{prefix}.layers.0{name}.forward.0" for name in names]
    data = {
        f"{function}.0.forward": forward(ONE, output=ONE),
        "Functional.linear.0.forward": forward(ONE, ONE, output=ONE),
    } | {key: forward(ONE, output=ONE) for key in keys}
    parents = dict(zip(keys, [*keys[1:], None], strict=True))
    dump = write_dump(
        folder, data, construct={f"{function}.0.forward": None, "Functional.linear.0.forward": keys[0]} | parents
    )
    stack = {"0": [list(data), ["File train.py, line 1, in main, \n step()"]]}
    (dump / "stack.json").write_text(json.dumps(stack))
    return dump


def paired_by_msprobe(target, golden, kind, file, output):
    if kind == "layer":  # its command takes these where mindspore is installed; what reads them does not need it
        output.mkdir()
        run(OTHER_PYTHON, "-c", LAYERS, target / "dump.json", golden / "dump.json", file, output)
        (table,) = output.glob("data_mapping*.yaml")
        return set(yaml.safe_load(table.read_text()).items())
    run(
        *(OTHER_PYTHON.with_name("msprobe"), "compare", "-tp", target / "dump.json", "-gp", golden / "dump.json"),
        *("-o", output, f"-{kind[0]}m", file),
    )
    (table,) = output.glob("*.csv")
    with table.open(newline="") as rows:
        return {(row["NPU Name"], row["Bench Name"]) for row in csv.DictReader(rows)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_msprobe_pairs_the_same_rows(kind, tmp_path):
    ours = (".attention.qkv.Linear", ".attention.Attention", ".Block")
    theirs = (".self_attention.linear_qkv.Linear", ".self_attention.SelfAttention", ".Layer")
    target = write_side(tmp_path / "target", "backbone", ours, "Fused.cat")
    golden = write_side(tmp_path / "golden", "model.decoder", theirs, "Torch.cat")
    file = tmp_path / "mapping.yaml"
    file.write_text(FILES[kind])

    pairs = match_calls(read_rows(target), read_rows(golden), mappings=read_mappings(**{kind: file}))

    found = {
        (f"{pair.target.key}.{one.place}", f"{pair.golden.key}.{other.place}")
        for pair in pairs
        for one, other in pair.rows()
        if one and other
    }
    expected = paired_by_msprobe(target, golden, kind, file, tmp_path / "msprobe")
    assert found == {pair for pair in expected if "N/A" not in pair}
    assert found
