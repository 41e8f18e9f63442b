"""Where a difference arose is said with the module, its class, the library's line and the user's."""

import json

import pytest

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.analysis.compare import CompareOptions, compare
from trainermon.analysis.compare.answer.summary import headline

MUL, NORM, LAYER = (
    "Tensor.__mul__.3.forward",
    "Module.layers.1.norm.RMSNorm.forward.0",
    "Module.layers.1.Block.forward.0",
)
LIBRARY = "File /opt/lib/python3.11/site-packages/transformers/modeling.py, line 66, in forward, \n return weight * x"
TORCH = "File /opt/lib/python3.11/site-packages/torch/nn/modules/module.py, line 9, in _call_impl, \n return forward(x)"
HELPER = "File /srv/helpers.py, line 4, in scaled, \n return a * b"
SCRIPT = "File /srv/train.py, line 195, in step, \n out = model(**batch)"
NESTED = {MUL: NORM, NORM: LAYER, LAYER: None}


def sentence(tmp_path, frames, *, construct=None, key=MUL, stack=True):
    """Return what is said of two dumps of one multiplication in a norm, of which the results differ."""
    sides = {}
    for name, made in (("target", 2.0), ("golden", 1.0)):
        data = {each: forward(tensor(), output=tensor(value=made)) for each in (MUL, NORM, LAYER)}
        sides[name] = write_dump(tmp_path / name, data, construct=construct)
        (sides[name] / "stack.json").write_text(json.dumps({"0": [[key], frames]}))
    (comparison,) = compare(sides["target"], sides["golden"], options=CompareOptions(stack=stack))
    return headline(comparison)


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        ([LIBRARY, TORCH, SCRIPT], "modeling.py:66; from train.py:195"),
        ([TORCH, LIBRARY, TORCH, SCRIPT], "modeling.py:66; from train.py:195"),
        ([HELPER, SCRIPT], "helpers.py:4"),
        ([LIBRARY], "modeling.py:66"),
        ([TORCH], "module.py:9"),
    ],
)
def test_a_function_is_told_with_its_module_and_lines(frames, where, tmp_path):
    said = sentence(tmp_path, frames, construct=NESTED)

    assert said.startswith(f"The first difference arose in {MUL} in layers.1.norm (RMSNorm), {where}: its results ")


def test_without_modules_the_lines_are_told(tmp_path):
    said = sentence(tmp_path, [LIBRARY, SCRIPT])

    assert said.startswith(f"The first difference arose in {MUL}, modeling.py:66; from train.py:195: its results ")


def test_without_stacks_the_module_is_told(tmp_path):
    said = sentence(tmp_path, [LIBRARY, SCRIPT], construct=NESTED, stack=False)

    assert said.startswith(f"The first difference arose in {MUL} in layers.1.norm (RMSNorm): its results ")
