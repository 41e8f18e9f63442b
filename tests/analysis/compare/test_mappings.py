"""Which calls and rows belong together under the mapping files that msprobe takes, and across frameworks."""

import json

import pytest

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.analysis.compare import compare
from trainermon.analysis.compare.items import read_rows
from trainermon.analysis.compare.mappings import read_mappings
from trainermon.analysis.compare.matching import match_calls
from trainermon.cli import main
from trainermon.core.errors import ConfigError


def matched(target, golden, **files):
    """Return the full names of the rows that belong together, a missing one as None."""
    pairs = match_calls(read_rows(target), read_rows(golden), mappings=read_mappings(**files))
    return {
        (ours and f"{pair.target.key}.{ours.place}", theirs and f"{pair.golden.key}.{theirs.place}")
        for pair in pairs
        for ours, theirs in pair.rows()
    }


def names(*pairs, places=("input.0", "output.0")):
    return {(f"{ours}.{place}", f"{theirs}.{place}") for ours, theirs in pairs for place in places}


@pytest.fixture
def mindspore(tmp_path):
    one = tensor("Float32")
    data = {
        "Mint.concat.0.forward": forward(one, output=one),
        "Functional.dense.0.forward": forward(one, one, output=one),
        "Functional.abs.0.forward": forward(one, output=one),
        "Cell.norm.LayerNorm.forward.0": forward(one, output=one, parameters={"gamma": one}),
        "Cell.fc1.Dense.forward.0": forward(one, output=one),
        "Cell.fc1.Dense.parameters_grad.0": {"embedding_table": [one]},
    }
    return write_dump(tmp_path / "mindspore", data, framework="mindspore")


@pytest.fixture
def pytorch(tmp_path):
    one = tensor()
    data = {
        "Torch.cat.0.forward": forward(one, output=one),
        "Functional.linear.0.forward": forward(one, one, output=one),
        "Tensor.abs.0.forward": forward(one, output=one),
        "Module.norm.LayerNorm.forward.0": forward(one, output=one, parameters={"weight": one}),
        "Module.fc1.Linear.forward.0": forward(one, output=one),
        "Module.fc1.Linear.parameters_grad.0": {"weight": [one]},
    }
    return write_dump(tmp_path / "pytorch", data)


ACROSS = (
    names(
        ("Mint.concat.0.forward", "Torch.cat.0.forward"),
        ("Functional.dense.0.forward", "Functional.linear.0.forward"),
        ("Functional.abs.0.forward", "Tensor.abs.0.forward"),
        ("Cell.norm.LayerNorm.forward.0", "Module.norm.LayerNorm.forward.0"),
        ("Cell.fc1.Dense.forward.0", "Module.fc1.Linear.forward.0"),
    )
    | {("Functional.dense.0.forward.input.1", "Functional.linear.0.forward.input.1")}
    | {("Cell.norm.LayerNorm.forward.0.parameters.gamma", "Module.norm.LayerNorm.forward.0.parameters.weight")}
    | {("Cell.fc1.Dense.parameters_grad.0.embedding_table", "Module.fc1.Linear.parameters_grad.0.weight")}
)


def test_mindspore_names_find_those_of_pytorch_without_a_file(mindspore, pytorch):
    assert matched(mindspore, pytorch) == ACROSS


def test_it_works_the_other_way_round(mindspore, pytorch):
    assert matched(pytorch, mindspore) == {(theirs, ours) for ours, theirs in ACROSS}


def test_an_api_mapping_pairs_arguments_by_place_and_leaves_out_what_it_does_not_list(mindspore, pytorch, tmp_path):
    file = tmp_path / "api.yaml"
    api = "ms_api: Functional.dense, pt_api: Functional.linear"
    file.write_text(f"- {{{api}, ms_args: [0], pt_args: [1], ms_output: [0], pt_output: [0]}}")
    expected = {
        ("Functional.dense.0.forward.input.0", "Functional.linear.0.forward.input.1"),
        ("Functional.dense.0.forward.input.1", None),
        ("Functional.dense.0.forward.output.0", "Functional.linear.0.forward.output.0"),
        (None, "Functional.linear.0.forward.input.0"),
    }

    found = matched(mindspore, pytorch, api=file)

    assert {pair for pair in found if "dense" in str(pair) or "linear" in str(pair)} == expected


def test_an_api_mapping_also_maps_within_one_framework(tmp_path):
    one = tensor()
    target = write_dump(tmp_path / "a", {"Fused.norm.0.forward": forward(one, output=one)})
    golden = write_dump(tmp_path / "b", {"Functional.layer_norm.0.forward": forward(one, output=one)})
    file = tmp_path / "api.json"
    file.write_text(json.dumps([{"ms_api": "Fused.norm", "pt_api": "Functional.layer_norm"}]))

    assert matched(target, golden, api=file) == names(("Fused.norm.0.forward", "Functional.layer_norm.0.forward"))


def test_a_cell_mapping_replaces_whole_names_and_parts(tmp_path):
    one = tensor()
    target = write_dump(
        tmp_path / "a",
        {
            f"Module.{name}.forward.0": forward(one, output=one)
            for name in ("fc1.Dense", "backbone.1.Block", "head.Out")
        },
    )
    golden = write_dump(
        tmp_path / "b",
        {f"Module.{name}.forward.0": forward(one, output=one) for name in ("fc9.Linear", "layers.1.Block", "head.Out")},
    )
    file = tmp_path / "cell.yaml"
    file.write_text("fc1.Dense: fc9.Linear\nbackbone: layers\n")

    assert matched(target, golden, cell=file) == names(
        ("Module.fc1.Dense.forward.0", "Module.fc9.Linear.forward.0"),
        ("Module.backbone.1.Block.forward.0", "Module.layers.1.Block.forward.0"),
        ("Module.head.Out.forward.0", "Module.head.Out.forward.0"),
    )


def test_a_data_mapping_pairs_rows_of_different_calls(tmp_path):
    one = tensor()
    target = write_dump(tmp_path / "a", {"Fused.mlp.0.forward": forward(one, output=one)})
    data = {f"Functional.{name}.0.forward": forward(one, output=one) for name in ("linear", "gelu", "relu")}
    golden = write_dump(tmp_path / "b", data)
    file = tmp_path / "data.yaml"
    file.write_text(
        "Fused.mlp.0.forward.input.0: Functional.linear.0.forward.input.0\n"
        "Fused.mlp.0.forward.output.0: Functional.gelu.0.forward.output.0\n"
        "Fused.other.0.forward.output.0: Functional.relu.0.forward.output.0\n"
    )

    assert matched(target, golden, data=file) == {
        ("Fused.mlp.0.forward.input.0", "Functional.linear.0.forward.input.0"),
        ("Fused.mlp.0.forward.output.0", "Functional.gelu.0.forward.output.0"),
        (None, "Functional.linear.0.forward.output.0"),
        (None, "Functional.gelu.0.forward.input.0"),
        (None, "Functional.relu.0.forward.input.0"),
        (None, "Functional.relu.0.forward.output.0"),
    }


LAYERS = """
TopLayer:
  backbone: model.decoder
Block:
  attention.qkv: self_attention.linear_qkv(Linear)
  attention: self_attention
"""


def test_a_layer_mapping_renames_paths_below_classes_and_the_functions_within(tmp_path):
    one = tensor("Float32")
    target = write_dump(
        tmp_path / "a",
        {
            "Mint.mul.0.forward": forward(one, output=one),
            "Cell.backbone.layers.0.attention.qkv.Dense.forward.0": forward(one, output=one),
            "Mint.mul.1.forward": forward(one, output=one),
            "Cell.backbone.layers.0.attention.Attention.forward.0": forward(one, output=one),
            "Cell.backbone.layers.0.Block.forward.0": forward(one, output=one),
        },
        construct={"Mint.mul.1.forward": "Cell.backbone.layers.0.attention.Attention.forward.0"},
        framework="mindspore",
    )
    two = tensor()
    inner = "Module.model.decoder.layers.0.self_attention.SelfAttention.forward.0"
    golden = write_dump(
        tmp_path / "b",
        {
            "Module.model.decoder.layers.0.self_attention.linear_qkv.Linear.forward.0": forward(two, output=two),
            "Tensor.mul.0.forward": forward(two, output=two),
            inner: forward(two, output=two),
            "Module.model.decoder.layers.0.Layer.forward.0": forward(two, output=two),
        },
        construct={"Tensor.mul.0.forward": inner},
    )
    file = tmp_path / "layer.yaml"
    file.write_text(LAYERS)
    prefix, other = "Cell.backbone.layers.0", "Module.model.decoder.layers.0"

    found = matched(target, golden, layer=file)

    assert found == names(
        (
            f"{prefix}.attention.qkv.Dense.forward.0",
            f"{other}.self_attention.linear_qkv.Linear.forward.0",
        ),
        ("Mint.mul.1.forward", "Tensor.mul.0.forward"),
        (f"{prefix}.attention.Attention.forward.0", inner),
        (f"{prefix}.Block.forward.0", f"{other}.Layer.forward.0"),
    ) | {("Mint.mul.0.forward.input.0", None), ("Mint.mul.0.forward.output.0", None)}


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("api", "ms_api: x", "found a dict at the top, expected a list of rules"),
        ("api", "- ms_api: x\n  pt_api: Functional.y", "rule 1: ms_api is 'x', expected a family and a function"),
        ("api", "- {ms_api: A.x, pt_api: B.y, ms_arg: [0]}", "rule 1: found the key 'ms_arg', expected one of ms_api"),
        (
            "api",
            "- {ms_api: A.x, pt_api: B.y, ms_args: [0, 1], pt_args: [0]}",
            "A.x: ms_args has 2 places and pt_args has 1",
        ),
        ("api", "- {ms_api: A.x, pt_api: B.y, ms_args: 0, pt_args: [0]}", "A.x: ms_args is 0, expected a list"),
        ("cell", "- a\n- b", "found a list at the top, expected `name of the target: golden name`"),
        ("cell", "a: {b: c}", "found 'a': {'b': 'c'}, expected a name of the target and one of the golden dump"),
        ("data", "a: 3", "found 'a': 3, expected a name"),
        ("layer", "TopLayer: backbone", "below 'TopLayer': found a str at the top"),
        ("layer", "a: [", "is neither YAML nor JSON"),
        ("layer", "!!python/object/apply:os.system [echo]", "is neither YAML nor JSON"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(kind, text, message, tmp_path):
    file = tmp_path / "mapping.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError) as caught:
        read_mappings(**{kind: file})

    assert str(file) in str(caught.value)
    assert message in str(caught.value)


ATTACKS = {
    "bomb": "\n".join(
        ["- &a0 [x, x, x, x, x, x, x, x, x]"] + [f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    ),
    "bomb below a name": "a: {b: &a [x, x]}\nc: [*a, *a]",
    "no date": "a: 2024-13-45",
    "deep": "[" * 1_500,
    "digits": f"a: {'9' * 5_000}",
    "hexadecimal digits": f"a: 0x{'f' * 5_000}",
    "hexadecimal digits as a place": f"- {{ms_api: A.x, pt_api: B.y, ms_args: [0x{'f' * 5_000}], pt_args: [0]}}",
    "digits as a name": f"0x{'f' * 5_000}: a",
    "a place that is a list": "- {ms_api: A.x, pt_api: B.y, ms_args: [[0, 1]], pt_args: [0]}",
    "long": "a: [" + ", ".join(["xxxx"] * 5_000) + "]",
    "large": f"# {'x' * (1 << 20)}\na: b",
}


@pytest.mark.parametrize(("kind", "ending"), [("api", "yaml"), ("cell", "yaml"), ("layer", "yaml"), ("cell", "json")])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_that_was_made_to_do_harm_is_refused_in_one_short_line(kind, ending, attack, tmp_path):
    file = tmp_path / f"mapping.{ending}"
    file.write_text(ATTACKS[attack])

    with pytest.raises(ConfigError) as caught:
        read_mappings(**{kind: file})

    message = str(caught.value).replace(str(file), "")
    assert len(message) < 500
    assert "\n" not in message


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml, given as cell mapping: cannot be read"):
        read_mappings(cell=tmp_path / "gone.yaml")


def test_a_dump_of_mindspore_equals_one_of_pytorch_in_type(mindspore, pytorch):
    (comparison,) = compare(mindspore, pytorch)

    assert comparison.row_counts() == {"pass": len(ACROSS)}


def test_names_of_a_file_that_are_nowhere_are_told(mindspore, pytorch, tmp_path, capsys):
    file = tmp_path / "cell.yaml"
    file.write_text("fc1.Dense: fc1.Linear\nfc7.Dense: fc7.Linear\n")

    assert main(["compare", str(mindspore), str(pytorch), "--cell-mapping", str(file)]) == 0

    expected = "note      1 names of the cell mapping are nowhere in the target; the first is fc7.Dense"
    assert expected in capsys.readouterr().out.splitlines()


def test_options_without_a_file_are_what_is_built_in(mindspore, pytorch, capsys):
    assert main(["compare", str(mindspore), str(pytorch), "-am", "-cm"]) == 0

    assert f"{len(ACROSS)} pass, 0 unmatched" in capsys.readouterr().out


def test_the_command_says_which_file_is_wrong(mindspore, pytorch, tmp_path, capsys):
    file = tmp_path / "layer.yaml"
    file.write_text("- x")

    assert main(["compare", str(mindspore), str(pytorch), "-lm", str(file)]) == 1

    assert f"{file}, given as layer mapping: found a list at the top" in capsys.readouterr().err
