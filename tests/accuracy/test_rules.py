"""Whose rules give the verdict: faults that msprobe's overlook, and limits by others' own words."""

import pytest
import torch
from torch.nn import functional

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.judge import Status, judge_call
from trainermon.accuracy.rules import RuledVerdict, Rules


def judged(rules, function, *args, alter=lambda result: result, quantised=()):
    name = function.__name__
    result = alter(function(*args).clone())
    [found] = judge_call(
        name, OperationCall(function, args, {}), result, review=RuledVerdict(rules, name, quantised=quantised)
    )
    return found


def one_nan(result):
    result.view(-1)[len(result) // 2] = torch.nan
    return result


def test_one_nan_in_a_million_is_an_error_by_our_rules_where_msprobe_sees_none():
    x = torch.ones(1000, 1000)
    ours, theirs = (judged(rules, torch.neg, x, alter=one_nan) for rules in (Rules.TRAINERMON, Rules.MSPROBE))

    assert (ours.status, ours.reason) == (Status.ERROR, "not finite")
    assert theirs.status is Status.PASS
    assert ours.legacy is not None
    assert ours.legacy.status == "pass"
    assert ours.legacy.metrics.rmse == 0


def test_doubled_small_numbers_are_an_error_where_msprobe_passes_them():
    x = torch.rand(64, 64) * 1e-4

    assert judged(Rules.MSPROBE, torch.neg, x, alter=lambda y: 2 * y).status is Status.PASS
    assert judged(Rules.TRAINERMON, torch.neg, x, alter=lambda y: 2 * y).status is Status.ERROR


def test_a_mask_of_minus_infinity_is_a_pass_where_msprobe_has_an_error():
    x, mask = torch.randn(16, 16), torch.ones(16, 16, dtype=torch.bool).triu(1)

    def masked_fill(x, mask):
        return x.masked_fill(mask, -torch.inf)

    assert judged(Rules.TRAINERMON, masked_fill, x, mask).status is Status.PASS
    assert judged(Rules.MSPROBE, masked_fill, x, mask).status is Status.ERROR
    assert judged(Rules.TORCH, masked_fill, x, mask).status is Status.PASS
    assert judged(Rules.CANN, masked_fill, x, mask).status is Status.PASS


@pytest.mark.parametrize(("share", "status"), [(2.0**-14, Status.PASS), (2.0**-12, Status.ERROR)])
def test_the_vendors_rule_has_its_limit_on_the_mean(share, status):
    x = torch.rand(64, 64) + 1

    assert judged(Rules.CANN, torch.neg, x, alter=lambda y: y * (1 + share)).status is status


@pytest.mark.parametrize(("share", "status"), [(9 * 2.0**-13, Status.PASS), (11 * 2.0**-13, Status.ERROR)])
def test_the_vendors_rule_allows_one_element_ten_times_as_much(share, status):
    def one_off(result):
        result[3, 3] *= 1 + share
        return result

    assert judged(Rules.CANN, torch.neg, torch.rand(64, 64) + 1, alter=one_off).status is status


@pytest.mark.parametrize(("share", "status"), [(1e-6, Status.PASS), (2e-5, Status.ERROR)])
def test_torchs_rule_is_that_of_assert_close(share, status):
    x = torch.rand(64, 64) + 1

    assert judged(Rules.TORCH, torch.neg, x, alter=lambda y: y * (1 + share)).status is status


def test_version_8_takes_an_empty_result_for_an_error():
    x = torch.zeros(0, 3)

    assert judged(Rules.MSPROBE8, torch.neg, x).status is Status.ERROR
    assert judged(Rules.MSPROBE, torch.neg, x).status is Status.SKIP
    assert judged(Rules.TRAINERMON, torch.neg, x).status is Status.PASS


def test_a_quantised_result_may_be_off_by_one_if_its_operation_is_listed():
    x = torch.arange(10)

    assert judged(Rules.TRAINERMON, torch.neg, x, alter=lambda y: y + 1).status is Status.ERROR
    assert judged(Rules.TRAINERMON, torch.neg, x, alter=lambda y: y + 1, quantised=["neg"]).status is Status.PASS
    assert judged(Rules.TRAINERMON, torch.neg, x, alter=lambda y: y + 2, quantised=["neg"]).status is Status.ERROR


def test_a_wrong_shape_is_an_error_by_every_rule():
    for rules in Rules:
        found = judged(rules, functional.relu, torch.ones(4, 4), alter=lambda y: y[:2])
        assert found.status is Status.ERROR, rules


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_all_256_numbers_of_eight_bits_are_read_without_loss(dtype):
    codes = torch.arange(256).to(torch.uint8).view(dtype)

    def to_float(x):
        return x.to(torch.float32)

    assert judged(Rules.TRAINERMON, to_float, codes).status is Status.PASS
    assert judged(Rules.TRAINERMON, to_float, codes, alter=lambda y: y.nan_to_num(0.0, 0.0)).status is Status.ERROR
    subnormal = judged(Rules.TRAINERMON, to_float, codes, alter=lambda y: y.where(y.abs() > 2.0**-15, 1e-39))
    assert subnormal.status is Status.ERROR
