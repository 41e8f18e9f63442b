"""Calls of torch's operator database, dumped and built again from the files: they give what was recorded."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.operators import operator_database
from tests.recorded_dumps import recorded
from trainermon import PrecisionDebugger
from trainermon.accuracy.families import Family, family_of
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import load_raw, read_dump
from trainermon.dump.files.records import FORWARD
from trainermon.replay.dumped_calls import rebuild


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Return the dump of one sample of every operation."""
    folder = tmp_path_factory.mktemp("dump")
    samples = []
    for op in operator_database():
        if torch.float32 in op.supported_dtypes("cpu") and not op.name.startswith("jiterator"):
            torch.manual_seed(0)
            samples.append((op, next(iter(op.sample_inputs_func(op, "cpu", torch.float32, requires_grad=False)))))
    debugger = PrecisionDebugger(dump_path=str(folder), task="tensor", level="L1")
    try:
        debugger.start()
        for op, sample in samples:
            op(sample.input, *sample.args, **sample.kwargs)
        debugger.stop()
        debugger.step()
    finally:
        PrecisionDebugger.close()
    [path] = folder.rglob("dump.json")
    return path.parent


def called_again(directory, data, entry):
    try:
        dumped = rebuild(directory, data, entry)
        args = pytree.tree_map_only(torch.Tensor, torch.clone, dumped.call.args)
        return dumped, dumped.call.function(*args, **dumped.call.kwargs)
    except (DumpError, AttributeError, TypeError) as error:
        return None, error


def are_equal(ones, others):
    ones, others = (
        [leaf.detach() for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        for value in (ones, others)
    )
    try:
        torch.testing.assert_close(ones, others, equal_nan=True)
    except AssertionError:
        return False
    return True


@pytest.mark.filterwarnings("ignore")
def test_what_is_built_again_gives_what_was_recorded(dump):
    data, lost, num_calls = load_raw(dump).data, [], 0
    for entry in read_dump(dump).entries:
        if entry.direction == FORWARD and family_of(entry.module) not in (Family.RANDOM, Family.UNDEFINED):
            num_calls += 1
            dumped, result = called_again(dump, data, entry)
            if dumped is None or not are_equal(result, dumped.result):
                lost.append(entry.key)

    assert num_calls > 500
    assert len(lost) <= 0.02 * num_calls, lost


def test_a_function_that_the_key_does_not_lead_to_is_named(dump):
    named = {entry.key: entry.function for entry in read_dump(dump).entries}

    assert named["Torch.i0e.0.forward"] == "torch.special.i0e"
    assert named["Torch.matmul.0.forward"] == ""
    assert "torch.linalg.svd" in named.values()


@pytest.mark.parametrize(
    "name",
    ["torch.load", "torch.linalg.os.system", "torch.fft.Tensor", "torch.special", "builtins.eval", "torch.fft.sys"],
)
def test_only_operations_on_tensors_are_called_by_name(dump, name):
    entry = next(entry for entry in read_dump(dump).entries if entry.key == "Torch.i0e.0.forward")

    with pytest.raises(DumpError, match=f"torch has no function {name}"):
        rebuild(dump, load_raw(dump).data, dataclasses.replace(entry, function=name))


def test_a_dump_that_names_no_function_is_searched_for_it(dump):
    """As msprobe's and older ones do not."""
    entry = next(entry for entry in read_dump(dump).entries if entry.key == "Torch.i0e.0.forward")

    dumped = rebuild(dump, load_raw(dump).data, dataclasses.replace(entry, function=""))

    assert dumped.call.function is torch.special.i0e


def test_an_empty_tensor_keeps_its_type(dump):
    entry = next(entry for entry in read_dump(dump).entries if entry.key.startswith("Torch.nonzero.0"))

    [result] = rebuild(dump, load_raw(dump).data, entry).result

    assert (result.dtype, result.numel()) == (torch.int64, 0)


def test_an_ellipsis_is_given_again(tmp_path):
    def step():
        torch.zeros(2, 3)[..., 1] = 5.0

    directory = recorded(tmp_path, step)
    [entry] = read_dump(directory).entries

    _, index, value = rebuild(directory, load_raw(directory).data, entry).call.args

    assert (index, value) == ((..., 1), 5.0)
