"""What ranks recorded adds up over any split, and says which rank is to blame."""

import numpy as np
import pytest

from trainermon.analysis.environment.compare import compare_packs
from trainermon.analysis.environment.differences import DifferenceLevel
from trainermon.analysis.environment.rules import LevelRules
from trainermon.core.environment.pack import EnvironmentPack

WHOLE = np.arange(12, dtype=np.float32).reshape(3, 4)


def part(values, number):
    return {
        "hash": f"{number:016x}",
        "count": int(values.size),
        "min": float(values.min()),
        "max": float(values.max()),
        "sum": float(values.sum()),
        "sum_sq": float((values**2).sum()),
        "nonfinite": 0,
    }


def weight(regions):
    return {"shape": [3, 4], "dtype": "float32", "regions": regions}


def pack(*ranks):
    return EnvironmentPack(sections={}, ranks={rank: {"weights": {"w": regions}} for rank, regions in enumerate(ranks)})


def compared(one, other):
    return [(row.level, row.reason) for row in compare_packs(one, other, LevelRules()).rows]


WHOLE_PACK = pack(weight({"0": part(WHOLE, 30)}))
SPLIT = (weight({"0": part(WHOLE[:2], 2**64 - 10)}), weight({"8": part(WHOLE[2:], 40)}))


def test_shards_add_up_to_the_whole():
    assert compared(WHOLE_PACK, pack(*SPLIT)) == [(DifferenceLevel.SAME, "")]


def test_copies_count_once():
    assert compared(WHOLE_PACK, pack(*SPLIT, *SPLIT)) == [(DifferenceLevel.SAME, "")]


def test_a_shard_that_is_missing_is_said():
    assert compared(WHOLE_PACK, pack(SPLIT[0])) == [
        (DifferenceLevel.ERROR, "of the second, 8 of 12 elements were recorded")
    ]


def test_a_copy_with_other_bits_is_blamed_on_its_rank():
    other = weight({"0": part(WHOLE, 31)})
    rows = compare_packs(WHOLE_PACK, pack(*(weight({"0": part(WHOLE, 30)}),) * 2, other), LevelRules()).rows

    assert [row.values[1] for row in rows if row.reason == "copies of one parameter differ"] == [
        "rank 2 has other bits than rank 0"
    ]


@pytest.mark.parametrize(
    ("values", "reason"),
    [(WHOLE.T, "same values in another order, or nearly so"), (WHOLE + 1, "other values")],
)
def test_other_bits_are_explained(values, reason):
    assert compared(WHOLE_PACK, pack(weight({"0": part(values, 31)}))) == [(DifferenceLevel.ERROR, reason)]


def inputs(*hashes, samples):
    return EnvironmentPack(
        sections={},
        ranks={
            rank: {"data": {"0": {"args.0": {"hash": each, "samples": samples[rank], "shape": [2], "dtype": "int64"}}}}
            for rank, each in enumerate(hashes)
        },
    )


@pytest.mark.parametrize(
    ("other", "level", "reason"),
    [
        (inputs("a", "b", samples=("1", "2")), DifferenceLevel.SAME, {""}),
        (inputs("c", "b", samples=("1", "2")), DifferenceLevel.WARNING, {"same samples in another order", ""}),
        (inputs("b", "a", samples=("2", "1")), DifferenceLevel.WARNING, {"same samples on other ranks"}),
        (inputs("d", "e", samples=("3", "0")), DifferenceLevel.WARNING, {"same samples on other ranks"}),
        (inputs("a", "e", samples=("1", "4")), DifferenceLevel.ERROR, {"other samples", ""}),
    ],
)
def test_samples_are_found_again(other, level, reason):
    comparison = compare_packs(inputs("a", "b", samples=("1", "2")), other, LevelRules())

    assert comparison.sections["data"] is level
    assert {row.reason for row in comparison.rows} == reason


def test_the_first_draw_that_differs_is_named():
    def drawn(*values):
        draws = [{"name": f"torch_random.rand.{n}", "crc32": value, "stack": f"File x.py, line {n}, in f, rand()"}
                 for n, value in enumerate(values)]  # fmt: skip
        return EnvironmentPack(sections={}, ranks={0: {"random": {"states": {"torch": "1"}, "draws": draws}}})

    rows = compare_packs(drawn("a", "b", "c"), drawn("a", "x", "y"), LevelRules()).of(DifferenceLevel.ERROR)

    assert [(row.name, row.values) for row in rows] == [
        ("rank 0, draw 1", ("torch_random.rand.1 b in File x.py, line 1, in f, rand()",
                            "torch_random.rand.1 x in File x.py, line 1, in f, rand()"))
    ]  # fmt: skip
