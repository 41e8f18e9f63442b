"""Faults are found and rounding is not: sound runs that differ in their arithmetic against single faults."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainermon.analysis.compare import CompareOptions, Mode, compare
from trainermon.analysis.compare.answer.summary import headline
from trainermon.analysis.compare.items import DumpCall, DumpRow
from trainermon.analysis.compare.noise import MAX_ROUNDING, ROUNDOFF, least_rounding, rounding
from trainermon.analysis.compare.verdicts import ERROR

SHAPE = [4, 64]


def tensor(scale, *, mean=0.0, dtype="torch.float32", **more):
    form = {"type": "torch.Tensor", "dtype": dtype, "shape": SHAPE, "requires_grad": True}
    return form | {"Max": scale, "Min": -scale, "Mean": mean, "Norm": 8 * scale} | more


def chain(folder, scales, **more):
    """Write a dump of calls one after the other; each takes what the one before it gave."""
    data = {}
    for index in range(1, len(scales)):
        call = {"input_args": [tensor(scales[index - 1], **more)], "input_kwargs": {}}
        data[f"Functional.gelu.{index - 1}.forward"] = call | {"output": [tensor(scales[index], **more)]}
    folder.mkdir()
    (folder / "dump.json").write_text(json.dumps({"task": "statistics", "level": "L1", "data": data}))
    return folder


def blamed(ours, theirs, **options):
    (comparison,) = compare(ours, theirs, options=CompareOptions(**options))
    return [call.key for call in comparison.blamed]


@pytest.mark.parametrize("faulty", range(1, 6))
@pytest.mark.parametrize("factor", [1.01, 3.0, 0.0])
def test_one_faulty_call_of_five_is_blamed_and_no_other(faulty, factor, tmp_path):
    sound = [1.0, 0.8, 2.0, 0.5, 0.9, 0.7]
    wrong = [scale * (factor if index >= faulty else 1) for index, scale in enumerate(sound)]

    assert blamed(chain(tmp_path / "a", wrong), chain(tmp_path / "b", sound)) == [
        f"Functional.gelu.{faulty - 1}.forward"
    ]


@pytest.mark.parametrize(("dtype", "ulp"), [("torch.float32", 2**-23), ("torch.bfloat16", 2**-7)])
def test_a_last_place_is_rounding(dtype, ulp, tmp_path):
    sound = [1.0, 0.8, 2.0, 0.5]
    other = [scale * (1 + ulp * index) for index, scale in enumerate(sound)]

    (comparison,) = compare(chain(tmp_path / "a", other, dtype=dtype), chain(tmp_path / "b", sound, dtype=dtype))
    assert comparison.row_counts() == {"pass": 6}


def test_a_mean_that_is_zero_but_for_rounding_is_no_difference(tmp_path):
    ours, theirs = (chain(tmp_path / name, [1.0, 1.0], mean=mean) for name, mean in (("a", 3e-9), ("b", -1e-9)))

    assert blamed(ours, theirs) == []


def test_what_two_runs_of_one_side_differ_by_is_noise(tmp_path):
    one, other, ours = (chain(tmp_path / name, [1.0, scale]) for name, scale in (("1", 0.8), ("2", 0.81), ("a", 0.79)))

    assert blamed(ours, one) == ["Functional.gelu.0.forward"]
    assert blamed(ours, one, baseline=(one, other)) == []


@pytest.mark.parametrize("field", ["shape", "requires_grad"])
def test_another_kind_of_tensor_is_an_error(field, tmp_path):
    more = {"shape": [8, 32], "requires_grad": False}

    (comparison,) = compare(
        chain(tmp_path / "a", [1.0, 1.0], **{field: more[field]}), chain(tmp_path / "b", [1.0, 1.0])
    )
    assert {row.result for row in comparison.rows()} == {ERROR}


def with_type_of_one(folder, index, dtype):
    """Write a chain of five calls, of which one returns another type."""
    path = chain(folder, [1.0, 0.8, 2.0, 0.5, 0.9, 0.7]) / "dump.json"
    content = json.loads(path.read_text())
    content["data"][f"Functional.gelu.{index}.forward"]["output"][0]["dtype"] = dtype
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("index", range(5))
def test_another_type_of_one_result_is_an_error(index, tmp_path):
    ours = with_type_of_one(tmp_path / "a", index, "torch.bfloat16")

    (comparison,) = compare(ours, with_type_of_one(tmp_path / "b", index, "torch.float32"))

    assert [(row.target.place, row.result) for row in comparison.rows() if row.result != "pass"] == [
        ("output.0", ERROR)
    ]
    assert comparison.notes == ()


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_another_type_of_the_whole_run_is_one_note(dtype, factor, tmp_path):
    sound = [1.0, 0.8, 2.0, 0.5]
    ours = chain(tmp_path / "a", [*sound[:2], 2.0 * factor, 0.5 * factor], dtype=f"torch.{dtype}")

    (comparison,) = compare(ours, chain(tmp_path / "b", sound))

    assert comparison.notes == (f"the target runs in {dtype}, the golden dump in float32",)
    assert [call.key for call in comparison.blamed] == (["Functional.gelu.1.forward"] if factor > 1 else [])
    assert comparison.row_counts()[ERROR] == len(comparison.blamed)


def test_counted_nans_are_seen_though_all_statistics_are_finite(tmp_path):
    ours = chain(tmp_path / "a", [1.0, 0.8], nans=0, infs=0)
    text = (ours / "dump.json").read_text()
    (ours / "dump.json").write_text(text.replace('"nans": 0', '"nans": 1').replace('"nans": 1', '"nans": 0', 1))

    assert blamed(ours, chain(tmp_path / "b", [1.0, 0.8], nans=0, infs=0)) == ["Functional.gelu.0.forward"]


def test_what_an_operation_makes_of_a_value_that_is_not_finite_is_not_its_fault(tmp_path):
    """The hyperbolic tangent of infinity is one."""
    ours = chain(tmp_path / "a", [1.0, math.inf, 1.0, 0.9])
    theirs = chain(tmp_path / "b", [1.0, 0.8, 0.66, 0.6])

    assert blamed(ours, theirs) == ["Functional.gelu.0.forward"]


def test_a_nan_of_msprobe_and_one_of_ours_are_the_same(tmp_path):
    ours = chain(tmp_path / "a", [1.0, 0.8], nans=1, infs=0)
    theirs = chain(tmp_path / "b", [math.nan, math.nan])

    assert blamed(ours, theirs) == []


def test_checksums_allow_for_no_rounding(tmp_path):
    ours, theirs = (chain(tmp_path / name, [1.0, 1.0, 1.0], md5="0a1b") for name in "ab")
    text = (ours / "dump.json").read_text()
    first_output = text.replace('"0a1b"', '"ffff"').replace('"ffff"', '"0a1b"', 1)
    (ours / "dump.json").write_text(first_output)

    (comparison,) = compare(ours, theirs)
    assert [call.key for call in comparison.blamed] == ["Functional.gelu.0.forward"]
    assert [call.result for call in comparison.calls] == ["error", "warning"]


@pytest.mark.parametrize("wrapped", ["module.fc", "0.module.module.fc"])
def test_a_module_is_matched_whatever_a_wrapper_adds_to_its_name(tmp_path, wrapped):
    bare = wrapped.replace("module.", "")
    calls = {"forward.0": 1.0, "forward.1": 2.0, "forward.2": 3.0}
    dumps = []
    for name in (wrapped, bare):
        call = {"input_args": [tensor(1.0)], "input_kwargs": {}}
        keys = {f"Module.{name}.Linear.{key}": call | {"output": [tensor(scale)]} for key, scale in calls.items()}
        dumps.append(tmp_path / name)
        dumps[-1].mkdir()
        (dumps[-1] / "dump.json").write_text(json.dumps({"task": "statistics", "level": "L0", "data": keys}))

    (comparison,) = compare(*dumps)

    assert comparison.call_counts() == {"pass": 3}


def test_other_calls_in_between_do_not_shift_a_fuzzy_match(tmp_path):
    ours, theirs = chain(tmp_path / "a", [1.0, 2.0, 3.0]), chain(tmp_path / "b", [1.0, 2.0, 3.0])
    (ours / "dump.json").write_text((ours / "dump.json").read_text().replace("Functional.gelu", "Torch.gelu"))

    (exact,) = compare(ours, theirs)
    (fuzzy,) = compare(ours, theirs, options=CompareOptions(fuzzy=True))
    assert exact.call_counts() == {"unmatched": 4}
    assert fuzzy.call_counts() == {"pass": 2}


FLOATING = sorted(name for name in ROUNDOFF if name != "tf32")
DAMAGES = {"zeroed": lambda x: 0 * x, "tripled": lambda x: -3 * x, "0.72 of it": lambda x: 0.72 * x}


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("damage", DAMAGES)
def test_no_type_is_so_coarse_that_damage_is_rounding(dtype, damage, tmp_path):
    sound = [1.0, 0.8, 2.0]
    wrong = [sound[0], *map(DAMAGES[damage], sound[1:])]
    name = f"torch.{dtype}"

    assert blamed(chain(tmp_path / "a", wrong, dtype=name), chain(tmp_path / "b", sound, dtype=name)) == [
        "Functional.gelu.0.forward"
    ]


@pytest.mark.parametrize(("dtype", "ulp"), [("torch.float8_e4m3fn", 2**-3), ("torch.float8_e5m2", 2**-2)])
def test_the_last_place_of_eight_bits_is_rounding(dtype, ulp, tmp_path):
    ours, theirs = (chain(tmp_path / name, [1.0, last], dtype=dtype) for name, last in (("a", 1 + ulp), ("b", 1.0)))

    assert blamed(ours, theirs) == []


@given(
    unit=st.sampled_from(sorted(set(ROUNDOFF.values()))),
    shape=st.lists(st.integers(1, 2**20), min_size=1, max_size=4),
    name=st.sampled_from(["gelu", "lstm", "view", "sum", "linear"]),
    direction=st.sampled_from(["forward", "backward"]),
    inner=st.integers(0, 1000),
)
def test_rounding_is_bounded_whatever_the_type_and_the_number_of_terms(unit, shape, name, direction, inner):
    item = DumpRow("input.0", "input", "torch.float32", tuple(shape), requires_grad=True)
    call = DumpCall(f"Functional.{name}.0.{direction}", "Functional", name, direction, 0, "", (item,))

    assert 0 < rounding(call, inner, unit) <= MAX_ROUNDING < 0.5
    assert 0 < least_rounding(unit) <= MAX_ROUNDING


UNKNOWN = {"Max": None, "Min": None, "Mean": None, "Norm": None}


def test_rows_without_statistics_are_not_compared_and_the_first_line_says_so(tmp_path):
    ours, theirs = (
        chain(tmp_path / name, [1.0, 1.0, 1.0], **UNKNOWN, dtype="torch.float4_e2m1fn_x2") for name in ("a", "b")
    )

    (comparison,) = compare(ours, theirs)

    assert comparison.row_counts() == {"not compared": 4}
    assert comparison.call_counts() == {"not compared": 2}
    assert "4 rows were not compared" in headline(comparison)
    (message,) = next(iter(comparison.rows())).messages
    assert message == "not compared: no statistics of float4_e2m1fn_x2 in the target and the golden dump."


def test_what_was_compared_beside_rows_without_statistics_is_told_apart(tmp_path):
    for name in ("a", "b"):
        folder = chain(tmp_path / name, [1.0, 1.0])
        content = json.loads((folder / "dump.json").read_text())
        content["data"]["Functional.gelu.0.forward"]["output"] = [tensor(1.0) | UNKNOWN]
        (folder / "dump.json").write_text(json.dumps(content))

    (comparison,) = compare(tmp_path / "a", tmp_path / "b")

    assert comparison.row_counts() == {"pass": 1, "not compared": 1}
    assert headline(comparison).startswith("1 row was not compared, Functional.gelu.0.forward.output.0: ")
    assert "agree" not in headline(comparison)


def test_an_empty_tensor_has_nothing_to_differ_by(tmp_path):
    ours, theirs = (chain(tmp_path / name, [1.0, 1.0], **UNKNOWN, shape=[0, 64]) for name in ("a", "b"))

    (comparison,) = compare(ours, theirs)

    assert comparison.row_counts() == {"pass": 2}


def test_checksums_of_other_kinds_are_not_compared(tmp_path):
    for name, kind in (("a", "md5"), ("b", "xxh64")):
        folder = chain(tmp_path / name, [1.0, 1.0])
        content = json.loads((folder / "dump.json").read_text())
        for row in [*content["data"]["Functional.gelu.0.forward"]["input_args"]]:
            row[kind] = "0123"
        (folder / "dump.json").write_text(json.dumps(content))

    (comparison,) = compare(tmp_path / "a", tmp_path / "b", options=CompareOptions(mode=Mode.CHECKSUM))

    assert comparison.row_counts()["not compared"] >= 1
