"""Ranks share a model, and some or all dumps do not tell how: no silent merge, and none refused in vain.

What is right comes from numpy: every rank's numbers are those of its part of one model.
"""

import json

import numpy as np
import pytest

from tests.analysis.compare.dumps import forward, write_dump
from trainermon.analysis.compare import distributed
from trainermon.cli import main
from trainermon.dump.files.records import INFO_FILE

SEED = 3
WEIGHTS = np.random.default_rng(SEED).normal(size=(4, 8, 4)).astype(np.float32)
GIVEN = np.random.default_rng(SEED + 1).normal(size=(3, 4)).astype(np.float32)


@pytest.fixture(autouse=True)
def in_one_process(monkeypatch):
    monkeypatch.setattr(distributed, "num_cores", lambda: 1)


def stored(array):
    wide = array.astype(np.float64)
    numbers = {"Max": wide.max(), "Min": wide.min(), "Mean": wide.mean(), "Norm": np.linalg.norm(wide)}
    statistics = {name: float(value) for name, value in numbers.items()}
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": list(array.shape), **statistics}


def a_rank(folder, *, rank, tp=1, pp=1, untold=False, weights=WEIGHTS):
    """Write one rank's dump of four layers: of each a part of the rows, and of all those of its stage."""
    part, stage = rank % tp, rank // tp
    rows, layers = 8 // tp, 4 // pp
    calls = {}
    for layer in range(layers):
        weight = weights[stage * layers + layer][part * rows : (part + 1) * rows]
        calls[f"Module.layers.{layer}.Linear.forward.0"] = forward(
            stored(GIVEN), output=stored(GIVEN @ weight.T), parameters={"weight": stored(weight)}
        )
    layout = {
        "axes": {"tp": [part, tp], "cp": [0, 1], "dp": [0, 1], "pp": [stage, pp], "ep": [0, 1]},
        "splits": {f"layers.{layer}.weight": [0, 1] for layer in range(layers) if tp > 1},
        "partial": [],
        "renamed": {f"layers.{n}": f"layers.{n + stage * layers}" for n in range(layers) if stage},
    }
    return write_dump(folder / "step0" / f"rank{rank}", calls, info=None if untold else {"layout": layout})


def a_side(folder, *, tp=1, pp=1, untold=(), weights=WEIGHTS):
    for rank in range(tp * pp):
        a_rank(folder, rank=rank, tp=tp, pp=pp, untold=rank in untold, weights=weights)
    return str(folder)


@pytest.fixture
def compared(tmp_path, capsys):
    """Compare two sides; give the status, the first line, and what was said on standard error."""

    def compare(*options, command="compare", **sides):
        words = [a_side(tmp_path / name, **side) for name, side in sides.items()]
        capsys.readouterr()
        status = main([command, *words, *options, "--exit-code"])
        shown = capsys.readouterr()
        return status, shown.out.partition("\n")[0], shown.err

    return compare


SPLITS = {"tp": {"tp": 2}, "pp": {"pp": 2}, "both": {"tp": 2, "pp": 2}}
SAID = {"tp": "tp=2", "pp": "pp=2", "both": "tp=2,pp=2"}


@pytest.mark.parametrize(("command", "split"), [*(("compare", split) for split in SPLITS), ("graph", "both")])
@pytest.mark.parametrize("side", ["target", "golden"])
@pytest.mark.parametrize("which", ["first", "last", "middle"])
def test_one_rank_that_does_not_tell_its_part_is_named(which, side, command, split, compared):
    shared = SPLITS[split]
    last = np.prod(list(shared.values())) - 1
    rank = {"first": 0, "middle": (last + 1) // 2, "last": last}[which]
    sides = {"target": {}, "golden": {}} | {side: shared | {"untold": [rank]}}

    status, _, error = compared(command=command, **sides)

    assert status == 1
    assert f"{side}/step0/rank{rank} does not tell which part of the model it has" in error
    assert f"{INFO_FILE} is missing" in error
    assert f"--{side}-split {SAID[split]}" in error


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("side", ["target", "golden"])
def test_ranks_of_one_side_that_do_not_tell_their_parts_are_named(side, split, compared):
    """The other side has another split, which tells that ranks hold parts."""
    other = {"pp": 2} if split == "tp" else {"tp": 2}
    untold = SPLITS[split] | {"untold": range(4)}
    sides = {"target": other, "golden": other} | {side: untold}

    status, _, error = compared(**sides)

    number, name = 4 if split == "both" else 2, "golden side" if side == "golden" else side
    assert status == 1
    assert f"{number} dumps of the {name} do not tell which part of the model they have" in error


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("untold", [[1], range(4)])
@pytest.mark.parametrize("side", ["target", "golden"])
@pytest.mark.parametrize("is_other", [False, True])
def test_what_the_user_says_of_them_is_right(is_other, side, untold, split, compared):
    """As with all files there: of equal models all rows pass, of another weight the layer that has it is named."""
    other = WEIGHTS.copy()
    other[2] *= 1.5
    sides = {"target": {"weights": other if is_other else WEIGHTS}, "golden": {}}
    sides[side] = sides[side] | SPLITS[split] | {"untold": untold}

    status, first, _ = compared(f"--{side}-split", SAID[split], **sides)

    assert status == (3 if is_other else 0), first
    assert ("Module.layers.2.Linear.forward.0.parameters.weight" if is_other else "The dumps agree: 12 rows") in first


def test_layers_that_are_numbered_here_are_said_to_be(tmp_path, capsys):
    words = [a_side(tmp_path / "a", pp=2, untold=(0, 1)), a_side(tmp_path / "b")]

    main(["compare", *words, "--target-split", "pp=2"])

    assert "numbered over the stages in turn, as the dumps do not tell: layers" in capsys.readouterr().out


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("side", ["target", "golden"])
@pytest.mark.parametrize("told", [False, True])
def test_more_ranks_on_one_side_that_do_not_tell_are_said_in_the_first_line(told, side, split, compared):
    """Nothing tells whether they hold parts or are replicas: they are compared rank by rank."""
    whole, shared = {"untold": () if told else (0,)}, SPLITS[split] | {"untold": range(4)}
    sides = {"target": whole, "golden": whole} | {side: shared}

    status, first, _ = compared(**sides)

    assert status in (3, 4)
    assert "how these share the model is not known" in first
    assert f"--{side}-split" in first


def test_replicas_that_agree_need_no_word_on_parts(tmp_path, capsys):
    a_rank(tmp_path / "b", rank=0, untold=True)
    for rank in range(2):
        write_dump(tmp_path / "a" / "step0" / f"rank{rank}", whole_calls())

    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--exit-code"]) == 4

    first = capsys.readouterr().out.partition("\n")[0]
    assert first == "Step 0, rank 1: not compared: on the target's side only"


def whole_calls():
    return {
        f"Module.layers.{n}.Linear.forward.0": forward(
            stored(GIVEN), output=stored(GIVEN @ weight.T), parameters={"weight": stored(weight)}
        )
        for n, weight in enumerate(WEIGHTS)
    }


@pytest.mark.parametrize("side", ["target", "golden"])
def test_a_single_rank_that_does_not_tell_is_taken_for_the_whole_with_a_word(side, compared):
    other = WEIGHTS.copy()
    other[2] *= 1.5
    sides = {"target": {"tp": 2}, "golden": {"tp": 2}} | {side: {"untold": [0], "weights": other}}

    status, first, _ = compared(**sides)

    assert status == 3
    assert "Module.layers.2.Linear.forward.0.parameters.weight" in first
    assert f"{side}/step0/rank0 was taken for the whole model" in first


@pytest.mark.parametrize("untold", [(0,), (1,), (0, 1)])
def test_ranks_that_are_compared_one_by_one_need_not_tell(untold, compared):
    sides = {"target": {"tp": 2, "untold": untold}, "golden": {"tp": 2, "untold": untold}}

    status, first, error = compared(**sides)

    assert (status, error) == (0, "")
    assert first == "Step 0, rank 0: the dumps agree: 12 rows have equal statistics."


def test_parts_beside_other_parts_of_which_nobody_tells_are_told_by_their_shapes(compared):
    status, first, _ = compared(target={"tp": 2, "untold": range(2)}, golden={"pp": 2, "untold": range(2)})

    assert status == 3
    assert "parameters.weight has another shape, [4, 4] beside [8, 4]: another model, or parts of one" in first
    assert "--target-split" in first


@pytest.mark.parametrize("told", [{"tp": [0, 1]}, {}])
def test_ranks_in_one_place_are_not_merged(told, tmp_path, capsys):
    """Replicas beside tensor parallel ranks, or too small a split by the user: two would be taken for one place's."""
    for rank in range(4):
        write_dump(tmp_path / "b" / "step0" / f"rank{rank}", whole_calls(), info={"layout": {"axes": told}})
    sides = [a_side(tmp_path / "a", tp=2 if told else 1), str(tmp_path / "b")]

    assert main(["compare", *sides, *([] if told else ["--golden-split", "tp=2"])]) == 1

    error = capsys.readouterr().err
    assert "4 ranks" in error
    assert "--golden-split" in error


def test_a_place_that_no_rank_has_is_named_though_each_axis_is_complete(tmp_path, capsys):
    sides = [a_side(tmp_path / "a", tp=2, pp=2), a_side(tmp_path / "b")]
    for file in (tmp_path / "a" / "step0" / "rank2").iterdir():
        file.unlink()

    assert main(["compare", *sides]) == 1

    assert "found 3 ranks, but none of tp 0, pp 1" in capsys.readouterr().err


@pytest.mark.parametrize("layout", [[], 3, {"axes": [1]}, {"axes": {"tp": 3}}, {"axes": {"tp": ["a", 2]}}])
def test_a_damaged_layout_is_one_line(layout, tmp_path, capsys):
    sides = [a_side(tmp_path / "a", tp=2), a_side(tmp_path / "b")]
    (tmp_path / "a" / "step0" / "rank1" / INFO_FILE).write_text(json.dumps({"layout": layout}))

    assert main(["compare", *sides]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert "rank1" in line


def test_a_page_has_each_rank_where_the_ranks_cannot_be_put_together(tmp_path, capsys):
    sides = [a_side(tmp_path / side, tp=2, untold=(1,)) for side in "ab"]

    assert main(["graph", *sides, "-o", str(tmp_path / "page.html"), "--exit-code"]) == 0

    assert "the page has each rank by itself alone: " in capsys.readouterr().err
