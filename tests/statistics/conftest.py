"""Both ways to compute moments, as functions from tensors to rows."""

import shutil

import pytest
import torch

from trainermon.statistics import compiled, fallback


def rows_by(compute):
    def rows(tensors, first_row=0):
        out = torch.full((first_row + len(tensors) + 1, 8), -7.0, dtype=torch.float64)
        compute(tensors, out, first_row)
        assert (out[:first_row] == -7.0).all(), "wrote before the first row"
        assert (out[-1] == -7.0).all(), "wrote behind the last row"
        return out[first_row:-1].numpy()

    return rows


@pytest.fixture(scope="session")
def compiled_rows():
    compute = compiled.load()
    if compute is None:
        assert not shutil.which("gcc"), "the kernel was not built, although there is a C compiler"
        pytest.skip("the kernel was not built: there is no C compiler")
    return rows_by(compute)


@pytest.fixture(scope="session", params=["c", "torch"])
def rows_of(request):
    if request.param == "torch":
        return rows_by(fallback.moments)
    return request.getfixturevalue("compiled_rows")
