"""Two sound runs in other types, or of other kernels, agree, whatever their values were rounded through."""

import types

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.analysis.compare.small_models import build, record
from trainermon.analysis.compare import CompareOptions, Mode, compare
from trainermon.analysis.compare.answer.summary import headline

BF16 = torch.bfloat16
every_level = pytest.mark.parametrize("level", ["L0", "L1", "mix"])
every_mode = pytest.mark.parametrize("mode", [Mode.STATISTICS, Mode.TENSOR])


def compared(folder, mode=Mode.STATISTICS):
    (comparison,) = compare(folder / "target", folder / "golden", options=CompareOptions(mode=mode))
    return comparison


class Placed(nn.Module):
    """Turns what it is given by angles, of which a buffer has the frequencies and which are computed in float32."""

    frequencies: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(8) / 8))
        self.embed, self.out = nn.Embedding(40, 16), nn.Linear(16, 40)

    def forward(self, ids):
        hidden = self.embed(ids)
        angles = torch.arange(ids.shape[1])[:, None].float() * self.frequencies.float()
        one, other = hidden.chunk(2, -1)
        cos, sin = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        hidden = torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
        return functional.cross_entropy(self.out(hidden).float().flatten(0, 1), ids.roll(1, 1).flatten())

    @staticmethod
    def batch(size):
        return torch.arange(size * 12).reshape(size, 12) * 7 % 40


def placed():
    torch.manual_seed(1)
    return Placed()


@every_level
@every_mode
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_buffer_that_came_through_a_coarser_type_is_rounding(level, mode, dtype, tmp_path):
    record(tmp_path / "target", placed(), level=level, dtype=dtype)
    record(tmp_path / "golden", placed(), level=level)

    assert set(compared(tmp_path, mode).row_counts()) <= {"pass", "unmatched"}


@every_level
def test_a_buffer_of_other_values_is_not(level, tmp_path):
    target = placed()
    target.frequencies *= 1.1
    record(tmp_path / "target", target, level=level, dtype=BF16)
    record(tmp_path / "golden", placed(), level=level)

    assert "warning" in compared(tmp_path).row_counts() or compared(tmp_path).blamed


def under_autocast(model):
    run = model.forward

    def forward(self, batch):
        with torch.autocast("cpu", BF16):
            return run(batch)

    model.forward = types.MethodType(forward, model)
    return model


@every_level
@every_mode
@pytest.mark.parametrize("family", ["language", "images", "table"])
def test_autocast_beside_float32_is_one_note(level, mode, family, tmp_path):
    record(tmp_path / "target", under_autocast(build(family)), level=level)
    record(tmp_path / "golden", build(family), level=level)

    comparison = compared(tmp_path, mode)

    assert comparison.notes[0] == "the target runs in bfloat16, the golden dump in float32"
    assert set(comparison.row_counts()) <= {"pass", "unmatched"}


@every_level
@every_mode
def test_autocast_beside_weights_in_bfloat16_is_one_note(level, mode, tmp_path):
    record(tmp_path / "target", under_autocast(build("language")), level=level)
    record(tmp_path / "golden", build("language"), level=level, dtype=BF16)

    comparison = compared(tmp_path, mode)

    assert comparison.notes == (
        "products of matrices are given float32 in the target, and bfloat16 in the golden dump",
    )
    assert set(comparison.row_counts()) <= {"pass", "unmatched"}


class Masked(nn.Module):
    """Adds a mask to what it mixes, if it is given one."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, hidden, mask=None):
        return self.mix(hidden) if mask is None else self.mix(hidden) + mask


class Masking(Placed):
    """Gives its layers a mask, or none."""

    def __init__(self, mask):
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(2))
        self.mask = mask

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden, self.mask)
        return functional.cross_entropy(self.out(hidden).flatten(0, 1), ids.roll(1, 1).flatten())


def masking(mask):
    torch.manual_seed(1)
    return Masking(mask)


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_mask_that_changes_nothing_is_on_one_side_only(level, tmp_path):
    record(tmp_path / "target", masking(None), level=level)
    record(tmp_path / "golden", masking(torch.zeros(16)), level=level)

    comparison = compared(tmp_path)

    assert set(comparison.row_counts()) == {"pass", "unmatched"}
    assert headline(comparison).startswith("The dumps agree: ")
    assert (
        "on one side only, the first of a call of both sides Module.layers.0.Masked.forward.0.input.1, a tensor in the "
        "golden dump alone" in headline(comparison)
    )


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_mask_that_changes_something_is_an_error(level, tmp_path):
    record(tmp_path / "target", masking(None), level=level)
    record(tmp_path / "golden", masking(torch.linspace(-1, 1, 16)), level=level)

    comparison = compared(tmp_path)

    rows = {row.target.place: row.result for row in comparison.blamed[0].rows if row.target}
    assert comparison.blamed[0].key == "Module.layers.0.Masked.forward.0"
    assert rows["input.1"] == "error"


def test_where_something_differs_and_nothing_is_to_blame_the_first_of_another_type_is_named(tmp_path):
    target = placed()
    target.frequencies *= 1.1
    record(tmp_path / "target", target, level="L1", dtype=BF16)
    record(tmp_path / "golden", placed(), level="L1")

    said = headline(compared(tmp_path))

    assert said.startswith("No call is to blame: ")
    assert "; the first that has another type is Functional.embedding.0.forward.input." in said
    assert " (bfloat16, float32 in the golden dump)" in said
