"""One model whole, under DDP, FSDP2 and DTensors: sound dumps are not blamed for their split, faults are found."""

from pathlib import Path

import pytest

from tests.analysis.compare import torch_splits_worker
from tests.ranks import run_ranks
from trainermon.analysis.compare import CompareOptions, Mode, compare
from trainermon.analysis.compare.answer.summary import headline

FAULTY = "Module.blocks.1.norm.LayerNorm.forward.0"
every_level = pytest.mark.parametrize("level", torch_splits_worker.LEVELS)
every_mode = pytest.mark.parametrize("mode", [Mode.TENSOR, Mode.STATISTICS])


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("splits")
    for world_size in torch_splits_worker.VARIANTS:
        run_ranks(Path(torch_splits_worker.__file__), str(folder), world_size=world_size)
    return folder


@pytest.mark.distributed
@every_mode
@every_level
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("ddp", "one"),
        ("one", "ddp"),
        ("fsdp2", "ddp"),
        ("ddp", "fsdp2"),
        ("fsdp2", "one"),
        ("tp", "one"),
        ("one", "tp"),
    ],
)
def test_a_sound_run_is_not_blamed_for_its_split(dumps, ours, theirs, level, mode):
    for comparison in compare(dumps / level / ours, dumps / level / theirs, options=CompareOptions(mode=mode)):
        assert headline(comparison).startswith("The dumps agree: "), comparison.label
        assert comparison.blamed == ()
        assert set(comparison.row_counts()) <= ({"pass"} if level == "L0" else {"pass", "unmatched"})
        assert not any("should be copies" in note for note in comparison.notes)
        assert max(row.difference.relative or 0.0 for row in comparison.rows()) < 1e-5


@pytest.mark.distributed
@every_mode
@every_level
@pytest.mark.parametrize(("ours", "theirs"), [("ddp", "one"), ("fsdp2", "ddp"), ("fsdp2", "one"), ("tp", "one")])
def test_a_module_that_computes_otherwise_is_found_over_another_split(dumps, ours, theirs, level, mode):
    found = compare(dumps / level / f"{ours}-fault", dumps / level / theirs, options=CompareOptions(mode=mode))

    assert {call.key for comparison in found if "step0" in comparison.label for call in comparison.blamed} == {FAULTY}
