"""`SingleSave` with tensors of MindSpore, against numpy."""

import mindspore as ms
import numpy as np
import pytest

from trainermon import SingleComparator, SingleSave
from trainermon.rl.stages import stage_files

pytestmark = pytest.mark.mindspore


def saved(folder, monkeypatch, tensors):
    monkeypatch.setattr(SingleSave, "_instance", None)
    SingleSave(folder, fmk="mindspore")
    SingleSave.save(tensors)
    return {(file.key, file.part): np.load(file.path) for file in stage_files(folder)}


@pytest.mark.parametrize("dtype", [ms.float32, ms.float16, ms.bfloat16, ms.int64, ms.bool_, ms.complex64])
def test_tensors_are_stored_as_numpy_has_them(tmp_path, monkeypatch, dtype):
    x = np.arange(-3, 3).reshape(2, 3)

    found = saved(tmp_path, monkeypatch, {"x": ms.Tensor(x).astype(dtype), "all": {"a": [ms.Tensor(x, ms.float32)]}})

    np.testing.assert_array_equal(found["x", ""], x.astype(bool) if dtype is ms.bool_ else x)
    np.testing.assert_array_equal(found["all", "a.0"], x)


def test_the_rank_is_that_of_msrun_and_a_change_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK_ID", "2")
    saved(tmp_path / "a", monkeypatch, {"x": ms.Tensor([1.0, 2.0])})
    saved(tmp_path / "b", monkeypatch, {"x": ms.Tensor([1.0, 2.5])})

    found = SingleComparator.compare(tmp_path / "a", tmp_path / "b", tmp_path / "tables")

    assert found.sentence == (
        "The first difference is in x of step 0, rank 2: from element [1] on, 2 against 2.5; "
        "50.0% of the elements differ."
    )
