"""Every function of torch that computes has a family that somebody decided on, and windows and factories are right."""

import pytest
import torch
from torch.overrides import get_testing_overrides

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.families import undecided
from trainermon.accuracy.judge import Status, judge_call

# They move nothing but facts about a tensor, change how it is kept, or talk to other ranks.
NO_NUMBERS = """
    all_gather all_gather_coalesced all_gather_single all_reduce all_reduce_coalesced all_to_all all_to_all_single
    backward broadcast const_data_ptr constant_ data_ptr dense_dim dim dim_order element_size get_device irecv
    is_coalesced is_conj is_contiguous is_distributed is_inference is_neg is_pinned is_set_to is_shared isend
    kaiming_uniform_ module_load ndimension nelement numel pin_memory q_per_channel_axis q_per_channel_scales
    q_per_channel_zero_points q_scale q_zero_point qscheme record_stream recv reduce reduce_scatter
    reduce_scatter_single register_hook register_post_accumulate_grad_hook requires_grad_ resize_as_sparse_
    retain_grad send share_memory_ size sparse_dim sparse_resize_ sparse_resize_and_clear_ storage storage_offset
    storage_type sym_float sym_int sym_ite sym_max sym_min sym_not sym_sum untyped_storage
"""
WINDOWS = ("hann_window", "hamming_window", "blackman_window", "bartlett_window", "kaiser_window")


def judged(name, function, args, kwargs, change=lambda result: result):
    result = change(function(*args, **kwargs))
    [found] = judge_call(name, OperationCall(function, args, kwargs), result)
    return found


def test_every_function_that_computes_has_a_family():
    names = {getattr(function, "__name__", "") for function in get_testing_overrides()}
    public = {name for name in names if name and not name.startswith("_")}

    assert len(public) > 800
    assert set(undecided(public)) - set(NO_NUMBERS.split()) == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("periodic", [True, False])
def test_windows_are_right_and_wrong_ones_found(name, dtype, periodic):
    kwargs = {"periodic": periodic} if dtype is None else {"periodic": periodic, "dtype": dtype}
    function = getattr(torch, name)

    found = judged(name, function, [400], kwargs)

    assert found.status is Status.PASS or (found.reason == "coarse" and dtype in (torch.bfloat16, torch.float16))
    assert judged(name, function, [400], kwargs, lambda made: made.roll(20)).status is Status.ERROR


def test_numbers_made_of_the_default_type_are_judged_against_float64():
    assert 0 < judged("hann_window", torch.hann_window, [400], {}).worst < 1
    assert judged("linspace", torch.linspace, [0, 1, 7], {}, lambda made: made * (1 + 1e-5)).status is Status.ERROR
    for name, args in (
        ("full", [(3,), 0.1]),
        ("tensor", [[0.1, 0.7]]),
        ("eye", [3]),
        ("arange", [5]),
        ("arange", [0, 1, 0.1]),
    ):
        assert judged(name, getattr(torch, name), args, {}).status is Status.PASS


@pytest.mark.parametrize("name", ["fold", "lp_pool2d", "affine_grid", "gumbel_softmax", "frobenius_norm"])
def test_functions_outside_the_database_are_right(name):
    torch.manual_seed(0)
    x = torch.randn(2, 12, 6)
    args = {
        "fold": [torch.randn(2, 12, 12), (4, 5), (2, 2), 1, 0, 1],
        "lp_pool2d": [torch.rand(2, 3, 8, 8), 2.0, 2],
        "affine_grid": [torch.randn(2, 2, 3), [2, 3, 5, 7], False],
        "gumbel_softmax": [x],
        "frobenius_norm": [x, [1, 2]],
    }[name]
    function = getattr(torch.nn.functional, name, None) or torch.ops.aten.frobenius_norm.dim
    found = judged(name, function, args, {})

    assert found.status is (Status.SKIP if name == "gumbel_softmax" else Status.PASS)
