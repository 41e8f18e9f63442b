"""Dumps of models that ranks share in different ways: Megatron-Core on gloo ranks, against the same model on one."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.ranks import run_ranks
from trainermon import PrecisionDebugger
from trainermon.analysis.compare import CompareOptions, Mode, compare
from trainermon.analysis.compare.answer.remarks import first_differing
from trainermon.analysis.compare.merging.splits import parse_sizes
from trainermon.cli import main
from trainermon.core.errors import ConfigError, DumpError

MODES = (Mode.STATISTICS, Mode.TENSOR)
ONE = {"dp": 1}
PAIRS = [
    ("tp", "whole"),
    ("tp-sequence", "whole"),
    ("tp-gated", "whole-gated"),
    ("pp", "whole-gated"),
    ("dp", "whole-in-turn"),
]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Dump all variants; every rank has a whole model in those named so, of which the first rank's counts."""
    folder = tmp_path_factory.mktemp("megatron")
    run_ranks(Path(__file__).parents[1] / "megatron_worker.py", str(folder), timeout_s=900)
    return folder


def compared(target, golden, mode, directory="step0/rank0"):
    (comparison,) = compare(target, golden / directory, options=CompareOptions(mode=mode, golden_sizes=ONE))
    return comparison


def assert_agrees(comparison):
    assert set(comparison.row_counts()) <= {"pass", "warning"}
    assert comparison.blamed == ()
    sizes = [row.difference.relative for row in comparison.rows() if row.difference.relative is not None]
    assert max(sizes) < 1e-5  # float32, added up in another order


@pytest.mark.distributed
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("split", "whole"), PAIRS)
def test_a_model_that_ranks_share_agrees_with_the_whole_one(dumps, split, whole, mode):
    comparison = compared(dumps / split, dumps / whole, mode)

    assert_agrees(comparison)
    assert comparison.mode is mode
    assert len(comparison.calls) > 150
    assert not any("differ" in note or "fit" in note for note in comparison.notes)


@pytest.mark.distributed
def test_the_whole_model_may_also_be_the_target(dumps):
    options = CompareOptions(target_sizes=ONE)

    (comparison,) = compare(dumps / "whole" / "step0" / "rank0", dumps / "tp-sequence", options=options)

    assert_agrees(comparison)


@pytest.mark.distributed
def test_of_replicas_with_different_data_the_one_that_agrees_is_compared(dumps, tmp_path):
    shutil.copytree(dumps / "dp" / "step0" / "rank1", tmp_path / "rank0")

    comparison = compared(dumps / "dp", tmp_path, Mode.STATISTICS, directory="rank0")

    assert_agrees(comparison)
    assert "the replicas had different data: only dp 1 is compared, which agrees best" in comparison.notes


@pytest.mark.distributed
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("faulty", "whole", "place"),
    [
        ("tp-part-fault", "whole", "decoder.layers.1.mlp.linear_fc1.ColumnParallelLinear"),
        ("tp-copy-fault", "whole", "decoder.layers.1.input_layernorm.SequenceLayerNorm"),
        ("pp-fault", "whole-gated", "decoder.layers.1.mlp.linear_fc1.ColumnParallelLinear"),
    ],
)
def test_a_fault_on_one_rank_is_found_where_it_is(dumps, faulty, whole, place, mode):
    comparison = compared(dumps / faulty, dumps / whole, mode)

    assert [call.key for call in comparison.blamed] == [f"Module.{place}.forward.{call}" for call in range(2)]
    told = f"rows of its ranks should be copies but differ, the first is Module.{place}.forward.0.output.0 (most: tp 1)"
    copies_differ = any(told in note for note in comparison.notes)
    assert copies_differ == (faulty == "tp-copy-fault")


@pytest.mark.distributed
@pytest.mark.parametrize(("split", "whole"), [*PAIRS, ("tp-mix", "whole-mix"), ("tp-part-fault", "whole")])
def test_a_graph_shows_the_whole_with_the_verdicts_of_compare(dumps, split, whole, capsys):
    comparison = compared(dumps / split, dumps / whole, None)
    words = [str(dumps / split), str(dumps / whole / "step0" / "rank0"), "--golden-split", "dp=1"]

    main(["graph", *words, "--json"])

    (found,) = json.loads(capsys.readouterr().out)
    first = first_differing(comparison)
    expected = comparison.blamed or (() if first is None else (first,))
    assert [finding["key"] for finding in found["findings"]] == [call.key for call in expected]
    nodes = found["nodes"]
    calls = nodes["module"] + nodes["function"] + nodes["collective"] + nodes["gradients"]
    assert calls == len(comparison.calls)
    alone = sum(1 for call in comparison.calls if call.target is None or call.golden is None)
    assert found["verdicts"]["unmatched"] >= alone


@pytest.mark.distributed
@pytest.mark.parametrize("mode", MODES)
def test_functions_are_matched_by_the_modules_that_call_them(dumps, mode):
    comparison = compared(dumps / "tp-mix", dumps / "whole-mix", mode)

    assert comparison.blamed == ()
    modules = [call for call in comparison.calls if call.key.startswith("Module.")]
    assert {call.result for call in modules} <= {"pass", "warning"}
    functions = [call for call in comparison.calls if call.target and call.golden and call not in modules]
    assert len(functions) > 400
    assert any("each rank's own and were left out" in note for note in comparison.notes)


@pytest.mark.distributed
def test_of_dumps_that_do_not_tell_their_layout_the_user_can(dumps, tmp_path, capsys):
    shutil.copytree(dumps / "tp", tmp_path / "tp", ignore=shutil.ignore_patterns("dump_info.json"))
    golden = str(dumps / "whole" / "step0" / "rank0")

    main(["compare", str(tmp_path / "tp"), golden, "--target-split", "tp=2", "--golden-split", "dp=1"])

    text = capsys.readouterr().out
    assert "rows      0 error," in text
    assert " 0 unmatched\n" in text
    assert "is merged from 2 ranks (tp 2)" in text


@pytest.mark.distributed
def test_a_dump_says_how_the_model_is_shared(dumps):
    info = json.loads((dumps / "pp" / "step0" / "rank1" / "dump_info.json").read_text())
    layout = json.loads((dumps / "tp-sequence" / "step0" / "rank1" / "dump_info.json").read_text())["layout"]
    gated = json.loads((dumps / "tp-gated" / "step0" / "rank0" / "dump_info.json").read_text())["layout"]

    assert info["layout"]["axes"] == {"tp": [0, 1], "cp": [0, 1], "dp": [0, 1], "pp": [1, 2], "ep": [0, 1]}
    assert info["layout"]["renamed"] == {"decoder.layers.0": "decoder.layers.1"}
    assert layout["axes"]["tp"] == [1, 2]
    assert layout["splits"]["decoder.layers.0.mlp.linear_fc2.weight"] == [1, 1]
    assert "decoder.layers.0.input_layernorm.weight" in layout["partial"]
    assert gated["splits"]["decoder.layers.0.mlp.linear_fc1.weight"] == [0, 2]


def dump_step(folder, rank, model, *batch, level="L0"):
    """Dump a step of a model of which the loss is the mean over its batch."""
    PrecisionDebugger(dump_path=folder, level=level, task="tensor")
    PrecisionDebugger.start(model, rank_id=rank)
    model(*batch).pow(2).mean().backward()
    PrecisionDebugger.stop()
    PrecisionDebugger.close()


@pytest.mark.parametrize("mode", MODES)
def test_replicas_with_parts_of_a_larger_batch_are_one_batch(tmp_path, mode):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    batch = torch.randn(6, 5)
    for rank in range(2):
        dump_step(tmp_path / "replicas", rank, model, batch[3 * rank : 3 * rank + 3])
    dump_step(tmp_path / "whole", 0, model, batch)

    options = CompareOptions(mode=mode, target_sizes={"dp": 2})
    (comparison,) = compare(tmp_path / "replicas", tmp_path / "whole", options=options)

    assert_agrees(comparison)
    assert any("gradients of 2 replicas were averaged" in note for note in comparison.notes)


class Masked(torch.nn.Module):
    """A reader of words with a mask, which takes more calls than the words do and is the same in every batch."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8)
        self.places = torch.arange(6.0)

    def forward(self, words, mask):
        bias = self.places + mask
        for _ in range(20):
            bias = torch.sin(bias) * torch.cos(bias) + self.places
        return self.out(self.embed(words) + bias[:, None])


def dump_words(folder, rank, level, seed):
    torch.manual_seed(0)
    model = Masked()
    words = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(seed))
    dump_step(folder, rank, model, words, torch.arange(6.0), level=level)


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("same", [0, 1])
def test_replicas_of_other_words_are_not_one_batch_however_much_else_is_the_same(level, same, tmp_path):
    for rank in range(2):
        dump_words(tmp_path / "replicas", rank, level, seed=rank)
    dump_words(tmp_path / "one", 0, level, seed=same)

    (comparison,) = compare(
        tmp_path / "replicas", tmp_path / "one", options=CompareOptions(target_sizes={"dp": 2}, golden_sizes=ONE)
    )

    assert_agrees(comparison)
    assert f"the replicas had different data: only dp {same} is compared, which agrees best" in comparison.notes


def a_rank(folder, rank, size, **more):
    value = tensor(**more)
    info = {"layout": {"axes": {"tp": [rank, size]}, "splits": {}, "partial": [], "renamed": {}}}
    data = {"Module.fc.Linear.forward.0": forward(value, output=value)}
    return write_dump(folder / "step0" / f"rank{rank}", data, info=info)


def test_ranks_that_are_missing_are_named(tmp_path):
    for rank in (0, 2):
        a_rank(tmp_path / "a", rank, 4)
    a_rank(tmp_path / "b", 0, 1)

    with pytest.raises(DumpError, match="found 2 ranks of which tp has 4 places, but none of tp 1, 3: dump all ranks"):
        compare(tmp_path / "a", tmp_path / "b")


def test_ranks_of_equal_layouts_are_compared_one_by_one(tmp_path):
    for side in ("a", "b"):
        for rank in range(2):
            a_rank(tmp_path / side, rank, 2)

    comparisons = compare(tmp_path / "a", tmp_path / "b")

    assert [comparison.label for comparison in comparisons] == ["step0 rank0", "step0 rank1"]
    assert all(comparison.notes == () for comparison in comparisons)


@pytest.mark.parametrize("text", ["tp", "tp=0", "tp=two", "tensor=2", "tp=2;pp=2"])
def test_sizes_that_mean_nothing_are_refused(text):
    with pytest.raises(ConfigError, match="expected sizes such as tp=2,pp=4"):
        parse_sizes(text)


def test_sizes_that_mean_nothing_are_refused_on_the_command_line_too(tmp_path, capsys):
    a_rank(tmp_path, 0, 1)

    assert main(["compare", str(tmp_path), str(tmp_path), "--target-split", "tp"]) == 1

    assert "found 'tp', expected sizes such as tp=2,pp=4" in capsys.readouterr().err


def a_share(folder, rank, axes, data, partial=()):
    info = {"layout": {"axes": axes, "splits": {}, "partial": list(partial), "renamed": {}}}
    return write_dump(folder / "step0" / f"rank{rank}", data, info=info)


def norms(*values):
    """Return calls of a model and of norms outside of it, of tensors of one shape with these norms."""
    found = {"Module.fc.Linear.forward.0": forward(tensor(), output=tensor())}
    for number, value in enumerate(values):
        result = {**tensor(shape=(), value=value), "Min": value, "Mean": value}
        found[f"Torch.norm.{number}.forward"] = forward(tensor(value=value), output=result)
    return found


def test_norms_of_what_each_rank_has_are_no_finding_between_other_splits(tmp_path):
    for rank, values in enumerate([(3.0, 1.0), (4.0,)]):
        a_share(tmp_path / "a", rank, {"tp": [rank, 2]}, norms(*values))
        a_share(tmp_path / "b", rank, {"pp": [rank, 2]}, norms(6.9, 2.0) if rank == 0 else norms(1.5))

    (comparison,) = compare(tmp_path / "a", tmp_path / "b")

    assert {call.key for call in comparison.calls} == {"Module.fc.Linear.forward.0"}
    assert comparison.row_counts() == {"pass": 2}
    assert any("rows of functions are each rank's own" in note for note in comparison.notes)


def test_a_number_is_a_sum_of_parts_only_to_the_last_digits(tmp_path):
    for rank, value in enumerate([3.0, 4.0]):  # 5 is the norm of both: 7 is 1.4 times as much
        a_share(tmp_path / "a", rank, {"tp": [rank, 2]}, norms(value))
    a_share(tmp_path / "b", 0, {"tp": [0, 1]}, norms(6.8))

    (comparison,) = compare(tmp_path / "a", tmp_path / "b", options=CompareOptions(golden_sizes=ONE))

    assert comparison.blamed == ()


def test_a_split_sequence_beside_a_whole_one_is_no_difference(tmp_path):
    """One side has copies of what the other deals out along the sequence, and summands of the norm's gradient."""
    low, high, whole = 3.0, 4.0, 5.0
    key, gradients = "Module.norm.LayerNorm.forward.0", "Module.norm.LayerNorm.parameters_grad"
    for rank, (value, mean) in enumerate([(low, 0.25), (high, 0.5)]):
        part = {"Max": whole, "Min": -whole, "Mean": 0.0, "Norm": value}
        given = {**tensor(shape=(4, 2)), **part}
        summand = {**tensor(shape=(2,)), "Mean": mean}
        data = {key: forward(given, output=given), gradients: {"weight": [summand]}}
        a_share(tmp_path / "sequence", rank, {"tp": [rank, 2]}, data, partial=["norm.weight"])
        given = {**tensor(shape=(8, 2)), **part, "Norm": whole}
        data = {key: forward(given, output=given), gradients: {"weight": [{**tensor(shape=(2,)), "Mean": 0.75}]}}
        a_share(tmp_path / "whole", rank, {"tp": [rank, 2]}, data)

    for sides in (("sequence", "whole"), ("whole", "sequence")):
        (comparison,) = compare(*(tmp_path / side for side in sides))
        assert set(comparison.row_counts()) <= {"pass", "not compared"}
        assert comparison.row_counts()["pass"] >= 2


@pytest.mark.parametrize("side", ["target", "golden"])
def test_a_split_of_one_rank_is_refused(side, tmp_path, capsys):
    for folder in ("target", "golden"):
        a_share(tmp_path / folder, 0, {}, norms())
    words = ["compare", str(tmp_path / "target"), str(tmp_path / "golden"), f"--{side}-split", "tp=2,pp=2"]

    assert main(words) == 1

    where = tmp_path / side / "step0" / "rank0"
    assert f"found one rank in {where}, expected 4 by the split tp=2,pp=2" in capsys.readouterr().err


def ids(value):
    return tensor("torch.int64", (2, 3), value)


def looked_up(rank, weight, made, *, is_part):
    """Return the functions of a look-up and a loss, which masks targets; a part also masks what others look up."""
    mask = tensor("torch.bool", (2, 3), 1.0)
    data = (
        {"Tensor.__lt__.0.forward": forward(ids(9), {"type": "int", "value": 5 * rank}, output=mask)} if is_part else {}
    )
    data["Functional.embedding.0.forward"] = forward(
        ids(9), tensor(shape=(4, 4), value=weight), output=tensor(value=made)
    )
    data["Distributed.all_reduce.0.forward"] = forward(tensor(value=made), output=tensor(value=made))
    data["Functional.relu.0.forward"] = forward(tensor(value=3.0), output=tensor(value=3.0))
    data[f"Tensor.__lt__.{int(is_part)}.forward"] = forward(ids(7), {"type": "int", "value": 5 * rank}, output=mask)
    data["Torch.exp.0.forward"] = forward(tensor(value=2.0), output=tensor(value=2.0 if made else 3.0))
    return data


def test_what_ranks_alone_mask_is_matched_with_no_mask_of_the_whole(tmp_path):
    for rank in range(2):
        a_share(tmp_path / "a", rank, {"tp": [rank, 2]}, looked_up(rank, 1.0, 1.0, is_part=True))
    a_share(tmp_path / "b", 0, {"tp": [0, 1]}, looked_up(0, 1.0, 2.0, is_part=False))

    (comparison,) = compare(tmp_path / "a", tmp_path / "b", options=CompareOptions(golden_sizes=ONE))

    partners = {call.key: call.golden and call.golden.key for call in comparison.calls if "__lt__" in call.key}
    assert partners == {"Tensor.__lt__.0.forward": None, "Tensor.__lt__.1.forward": "Tensor.__lt__.0.forward"}
