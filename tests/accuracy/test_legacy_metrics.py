"""msprobe's measures and words: as the tool itself gives them, `recorded/` has what it said (`record_legacy.py`)."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.accuracy.legacy_cases import cases
from trainermon.accuracy.legacy_metrics import LegacyCall, legacy_verdict, ulp_errors
from trainermon.accuracy.legacy_standards import Edition, Standard, operation_of, ratio_limits, standard_of

RECORDED = {
    edition: json.loads((Path(__file__).with_name("recorded") / name).read_text(encoding="utf-8"))
    for edition, name in ((Edition.V26, "legacy_26.json"), (Edition.V8, "legacy_8.json"))
}
# Integers of 8 bits are "not compared" in version 8, which calls that an error.
MENDED = {Edition.V8: ("int8.differs", "quantised.one", "quantised.two"), Edition.V26: ()}


def verdict_of(operation, exact, given, edition):
    is_quantised = operation == "npu_dynamic_quant"
    return legacy_verdict(given, exact, LegacyCall(operation, edition, is_quantised=is_quantised))


@pytest.mark.parametrize("edition", Edition)
def test_every_number_and_word_is_the_tools_own(edition):
    numbers = 0
    for name, operation, exact, given in cases():
        golden_dtype, _dtype, _shape, *expected, word = RECORDED[edition]["rows"][name]
        if name in MENDED[edition]:
            continue

        found = verdict_of(operation, exact, given, edition)

        assert (found.status, found.golden_dtype) == (word if word == "SKIP" else word.lower(), golden_dtype), name
        for (measure, mine), theirs in zip(dataclasses.asdict(found.metrics).items(), expected, strict=True):
            if theirs == " ":
                assert mine is None, (name, measure)
            else:
                numbers += 1
                assert mine == pytest.approx(float(theirs), rel=1e-9, abs=1e-9, nan_ok=True), (name, measure)
    assert numbers > 700


def test_each_measure_is_among_the_recorded_ones():
    rows = [row[3:-1] for recorded in RECORDED.values() for row in recorded["rows"].values()]

    assert all(any(row[column] != " " for row in rows) for column in range(17))


def test_units_in_the_last_place_of_eight_bits_are_the_tools_without_their_sign():
    recorded = RECORDED[Edition.V26]["float8"]
    numbers = np.array(recorded["numbers"])

    found = ulp_errors(np.roll(numbers, 1), numbers, "float8_e4m3fn")

    assert found.tolist() == pytest.approx(np.abs(recorded["errors"]).tolist(), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_each_of_the_256_numbers_of_eight_bits_is_read_as_torch_reads_it(dtype):
    given = torch.arange(256).to(torch.uint8).view(dtype)

    verdict = legacy_verdict(given, given.double(), LegacyCall("clone"))
    counted = given.double().isfinite()

    assert legacy_verdict(given[counted], given[counted].double(), LegacyCall("clone")).metrics.ulp_max == 0
    assert math.isnan(verdict.metrics.cosine or 0) == bool(given.double().isnan().any())


@pytest.mark.parametrize(
    ("operation", "standard"),
    [
        ("mul_", Standard.ABSOLUTE),
        ("masked_fill", Standard.BINARY),
        ("matmul", Standard.ULP),
        ("conv2d", Standard.THOUSANDTH),
        ("softmax", Standard.BENCHMARK),
    ],
)
def test_each_list_of_version_8_has_its_own_rule_and_version_26_has_one(operation, standard):
    assert standard_of(operation, "bfloat16", Edition.V8) is standard
    assert standard_of(operation, "bfloat16", Edition.V26) is Standard.BENCHMARK
    assert standard_of(operation, "int64", Edition.V26) is Standard.BINARY
    assert standard_of(operation, "bfloat16", Edition.V26, has_float8_inputs=True) is Standard.ABSOLUTE
    assert standard_of(operation, "float8_e5m2", Edition.V26) is Standard.ULP


def test_levels_are_those_of_version_26():
    assert ratio_limits("matmul", Edition.V26).max_relative == 2
    assert ratio_limits("embedding", Edition.V26).rmse == 1.5
    assert ratio_limits("softmax", Edition.V26) == ratio_limits("matmul", Edition.V8)


def test_the_operation_of_a_key_may_have_a_prefix():
    assert [operation_of(key) for key in ("Tensor.__add__.0", "Torch.linalg.svd.12", "nonsense")] == [
        "__add__",
        "linalg.svd",
        "",
    ]
