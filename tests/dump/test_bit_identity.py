"""A dump of every step, and a replay of every step, change no bit of a training whose bits are easy to change."""

import functools
from pathlib import Path

import pytest
import torch

from tests.dump import workbench
from tests.dump.workbench import identical, train, wrong_gradients
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("checkpointing", ["none", "nonreentrant", "reentrant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_watching_changes_no_bit(tmp_path, dtype, checkpointing):
    run = functools.partial(train, dtype=dtype, checkpointing=checkpointing, steps=2)
    plain = run()

    assert identical(plain, run("statistics", directory=tmp_path / "statistics"))
    assert identical(plain, run("tensor", directory=tmp_path / "tensor"))
    replayed = run("replay", directory=tmp_path / "replay")
    assert identical(plain, replayed)
    assert [result.status for result in replayed.results] == ["clean"] * 2
    assert wrong_gradients(replayed) == []
    # the model notices what must not be done
    assert not identical(plain, run("full_backward"))
    assert not identical(plain, run("alias"))


@pytest.mark.parametrize("checkpointing", ["none", "reentrant"])
@pytest.mark.parametrize("returns", ["logits", "both"])
def test_replayed_gradients_are_the_ranks_own_whatever_the_model_returns(tmp_path, returns, checkpointing):
    run = train("replay", directory=tmp_path, returns=returns, checkpointing=checkpointing, steps=2)

    assert wrong_gradients(run) == []
    assert identical(run, train(returns=returns, checkpointing=checkpointing, steps=2))


def test_micro_steps_are_replayed_one_by_one(tmp_path):
    run = train("replay", directory=tmp_path, micro_steps=3, steps=1)

    own = run.gradients[0]["blocks.0.up.weight"]
    replayed = workbench.replayed_gradients(tmp_path / "step0", "blocks.0.up.weight")
    assert run.results[0].micro_steps == len(replayed) == 3
    torch.testing.assert_close(sum(replayed), own)
    assert identical(run, train(micro_steps=3, steps=1))


@pytest.mark.distributed
def test_watching_changes_no_bit_under_ddp():
    texts = run_ranks(Path(workbench.__file__))

    assert ["done" in text for text in texts] == [True, True]
