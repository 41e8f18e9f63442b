"""A fault in the second forward of activation checkpointing alone is held against no gradient that is right."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.analysis.compare.small_models import Block, record
from trainermon.analysis.compare import compare
from trainermon.analysis.compare.answer.summary import causes_of, headline


class Checkpointed(nn.Module):
    """Blocks of which one may be off in its second forward alone."""

    def __init__(self, *, reentrant, checkpointed=True):
        super().__init__()
        torch.manual_seed(3)
        self.start = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Block(16) for _ in range(3))
        self.reentrant, self.checkpointed = reentrant, checkpointed

    def forward(self, rows):
        hidden = self.start(rows)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant) if self.checkpointed else layer(hidden)
        return hidden.pow(2).mean()

    @staticmethod
    def batch(size):
        return torch.randn(4 * size, 16, generator=torch.Generator().manual_seed(4)).requires_grad_()


def off_in_call(module, number):
    """Make what `module` returns larger in its call of that number."""
    calls = iter(range(100))
    module.register_forward_hook(lambda _, given, made: 1.2 * made if next(calls) == number else None)


def compared(folder, reentrant, level, number, **more):
    target = Checkpointed(reentrant=reentrant, **more).eval()
    if number is not None:
        off_in_call(target.layers[1].up, number)
    record(folder / "target", target, level=level)
    record(folder / "golden", Checkpointed(reentrant=reentrant, **more).eval(), level=level)
    (comparison,) = compare(folder / "target", folder / "golden")
    return comparison


every_kind = pytest.mark.parametrize("reentrant", [True, False])
every_level = pytest.mark.parametrize("level", ["L0", "mix"])


@every_kind
@every_level
def test_it_is_placed_in_the_recomputed_part_and_what_is_not_known_is_said(reentrant, level, tmp_path):
    comparison = compared(tmp_path, reentrant, level, 1)

    assert headline(comparison).startswith("The first difference arose in Module.layers.1.Block.backward.0")
    assert "ran a second time (activation checkpointing), which the dump does not have" in headline(comparison)


@every_kind
@every_level
def test_sound_ones_agree(reentrant, level, tmp_path):
    comparison = compared(tmp_path, reentrant, level, None)

    assert comparison.recomputed
    assert causes_of(comparison) == []


@every_level
def test_without_checkpoints_nothing_is_doubted(level, tmp_path):
    comparison = compared(tmp_path, True, level, None, checkpointed=False)

    assert comparison.recomputed == {}


class Within(nn.Module):
    """Blocks that checkpoint what they do themselves, as transformers' do: the call of the block is not repeated."""

    def __init__(self, parts, *, reentrant):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Pieces(parts, reentrant) for _ in range(3))

    def forward(self, rows):
        for layer in self.layers:
            rows = layer(rows)
        return rows.pow(2).mean()

    batch = staticmethod(Checkpointed.batch)


class Pieces(nn.Module):
    """Four modules in a row; each of `parts` names those that one checkpoint spans."""

    def __init__(self, parts, reentrant):
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Linear(16, 16) for _ in range(4))
        self.parts, self.reentrant = parts, reentrant

    def forward(self, rows):
        for names in self.parts:
            rows = checkpoint(self.run, rows, names, use_reentrant=self.reentrant)
        return rows

    def run(self, rows, names):
        for name in names:
            rows = rows + torch.tanh(self.get_submodule(name)(rows))
        return rows


def answer(folder, parts, reentrant, level, name="one"):
    """Return what is said where a module of one block computes something else when its forward is repeated."""
    target = Within(parts, reentrant=reentrant)
    off_in_call(target.layers[1].get_submodule(name), 1)
    record(folder / "target", target, level=level)
    record(folder / "golden", Within(parts, reentrant=reentrant), level=level)
    (comparison,) = compare(folder / "target", folder / "golden")
    assert len(causes_of(comparison)) == 1
    return headline(comparison)


@every_kind
@every_level
@pytest.mark.parametrize("name", ["one", "three"])
def test_a_block_that_checkpoints_all_it_does_is_named_as_a_whole(reentrant, level, name, tmp_path):
    said = answer(tmp_path, [["one", "two", "three", "four"]], reentrant, level, name)

    assert said.startswith("The first difference arose in Module.layers.1.Pieces.backward.0, ")
    assert "the forward ran a second time (activation checkpointing), which the dump does not have" in said


@every_kind
@every_level
def test_of_a_block_in_which_each_part_has_its_own_checkpoint_only_that_part_is_doubted(reentrant, level, tmp_path):
    said = answer(tmp_path, [["one", "two"], ["three", "four"]], reentrant, level)

    assert "Module.layers.1." in said
    assert "three" not in said
    assert "four" not in said
    assert "the forward ran a second time " in said
