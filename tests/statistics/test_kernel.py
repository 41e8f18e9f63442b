"""Which tensors the kernel takes, which it refuses, and what it leaves alone."""

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.statistics.numpy_moments import assert_moments, elements_of
from tests.strategies import INTEGERS, LAYOUTS, PATTERNS, fill, fixed
from trainermon.statistics import moments


@contextlib.contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@fixed
@given(
    patterns=st.lists(st.sampled_from(sorted(PATTERNS)), min_size=1, max_size=4),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    seed=st.integers(0, 99),
)
def test_the_result_has_the_same_bits_for_any_number_of_threads(compiled_rows, patterns, dtype, seed):
    stretch = fill("mixed", 200_000, dtype=dtype, seed=seed)
    long = torch.cat([torch.cat([fill(pattern, 70_000, dtype=dtype, seed=seed), stretch]) for pattern in patterns])
    tensors = [long[1:], *long.split(150_001), long.repeat(1 + 4_500_000 // long.numel())]
    tensors += [fill(pattern, 99, dtype=other, seed=seed) for pattern in PATTERNS for other in (dtype, *INTEGERS)]

    with threads(1):
        expected = compiled_rows(tensors)

    for number in (2, 5):
        with threads(number):
            np.testing.assert_array_equal(compiled_rows(tensors), expected)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_tensor_that_requires_grad_is_read_outside_of_autograd(rows_of, layout):
    tensor = LAYOUTS[layout](torch.randn(6, 40, requires_grad=True))
    version = tensor._version

    [row] = rows_of([tensor])

    assert_moments(row, elements_of(tensor))
    assert tensor._version == version


def test_a_parameter_is_a_tensor(rows_of):
    parameter = torch.nn.Parameter(torch.randn(30))

    [row] = rows_of([parameter])

    assert_moments(row, elements_of(parameter))


def test_a_complex_tensor_stands_for_both_its_parts(rows_of):
    tensor = torch.randn(9, 7, dtype=torch.complex64)

    rows = rows_of([tensor, tensor.conj().t(), tensor.conj().imag])

    assert_moments(rows[0], torch.view_as_real(tensor).double().numpy().ravel())
    assert_moments(rows[1], torch.view_as_real(tensor.conj().resolve_conj()).double().numpy().ravel())
    assert_moments(rows[2], -tensor.imag.double().numpy().ravel())


def test_a_sparse_tensor_stands_for_all_its_elements(rows_of):
    dense = torch.zeros(50, 8)
    dense[[3, 20]] = torch.randn(2, 8) + 5
    twice = torch.sparse_coo_tensor(torch.tensor([[3, 20, 3]]), dense[[3, 20, 3]], (50, 8), check_invariants=True)

    rows = rows_of([dense.to_sparse(1), twice])

    assert_moments(rows[0], elements_of(dense))
    assert_moments(rows[1], elements_of(twice.to_dense()))


def test_a_distributed_tensor_stands_for_its_local_shard(rows_of):
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # A group of four of which only this member exists: whoever communicates gets nonsense.
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        local = torch.randn(5, 6)
        sharded = DTensor.from_local(local.requires_grad_(), DeviceMesh("cpu", list(range(4))), [Shard(0)])

        rows = rows_of([sharded, torch.nn.Parameter(sharded.detach())])

        assert sharded.shape == (20, 6)
        assert_moments(rows[0], elements_of(local))
        assert_moments(rows[1], elements_of(local))
    finally:
        distributed.destroy_process_group()


def test_a_tensor_without_memory_is_refused(rows_of):
    freed = torch.randn(4, 6)
    views = (freed, freed.t(), freed[:, :2], freed[:, :2, None].expand(4, 2, 3))
    freed.untyped_storage().resize_(0)

    for tensor in views:
        with pytest.raises(
            ValueError, match=r"Tensor of shape \([0-9, ]+\) has no memory of its own, expected a tensor"
        ):
            rows_of([torch.randn(3), tensor])


def test_a_tensor_on_another_device_is_refused(rows_of):
    with pytest.raises(ValueError, match="tensor is on meta, expected the device of the rows: cpu"):
        rows_of([torch.empty(3, device="meta")])


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(1, 8, dtype=torch.float32),
        torch.empty(0, 8, dtype=torch.float64),
        torch.empty(8, 2, dtype=torch.float64).t(),
    ],
    ids=["dtype", "too few rows", "strided"],
)
def test_rows_that_do_not_fit_are_refused(out):
    with pytest.raises(ValueError, match="expected a contiguous float64 tensor with 8 columns and at least 1 rows"):
        moments([torch.ones(3)], out)


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=900
    )


def test_the_environment_chooses_the_torch_calls():
    code = "from trainermon.statistics import kernel_name; import sys; sys.stdout.write(kernel_name())"

    assert run_python(code, TRAINERMON_KERNEL="torch").stdout == "torch"


def test_readers_load_no_torch():
    code = "import sys, trainermon.core.derived; sys.exit('torch' in sys.modules)"

    assert run_python(code).returncode == 0


def test_plain_training_loads_no_distributed_tensors():
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "from trainermon.statistics import moments\n"
        "moments([torch.ones(3, 3).t(), torch.nn.Buffer(torch.ones(2))], torch.empty(2, 8, dtype=torch.float64))\n"
        "sys.stdout.write(repr([name for name in set(sys.modules) - before if name.startswith('torch')]))"
    )

    assert run_python(code).stdout == "[]"
