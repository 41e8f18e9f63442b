"""Trying every call changes no bit of a training whose bits are easy to change."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.dump.workbench import BATCH, LENGTH, VOCABULARY, Network
from trainermon import PrecisionDebugger

MODES = ("improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "relations")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(folder=None, dtype=torch.float32, checkpointing="none", **block):
    """Return losses, gradients, weights, buffers and the generator's state after two steps."""
    torch.manual_seed(7)
    model = Network(checkpointing).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    debugger = None
    if folder is not None:
        task = {"task": "free_benchmark", "dump_path": str(folder / "dump"), "free_benchmark": block}
        (folder / "free.json").write_text(json.dumps(task))
        debugger = PrecisionDebugger(folder / "free.json")
    found: list[torch.Tensor] = []
    for _ in range(2):
        if debugger:
            debugger.start(model)
        text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        if debugger:
            debugger.stop()
            debugger.step()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    PrecisionDebugger.close()
    return [*found, *model.state_dict().values(), torch.get_rng_state()]


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("checkpointing", ["none", "nonreentrant", "reentrant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_trying_every_call_changes_no_bit(tmp_path, mode, dtype, checkpointing):
    block = {"pert_mode": mode, "report": "all"}

    assert same(trained(dtype=dtype, checkpointing=checkpointing), trained(tmp_path, dtype, checkpointing, **block))
    summary = json.loads((tmp_path / "dump" / "step1" / "rank0" / "free_benchmark.json").read_text())
    assert summary["calls"] > 30
    assert set(summary["results"]) == {"pass"}


def test_learning_from_the_cpu_changes_no_bit(tmp_path):
    block = {"if_preheat": True, "preheat_step": 1, "max_sample": 2}

    assert same(trained(), trained(tmp_path, **block))
    assert (tmp_path / "dump" / "free_benchmark_baseline_rank0.json").exists()


def test_what_draws_random_numbers_or_goes_wrong_leaves_the_training_alone(tmp_path):
    """Weights that were drawn anew would show, as would an error in a call that cannot be run in float64."""

    def step():
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        hidden = functional.dropout(layer(torch.randn(4, 8)), 0.5)
        return functional.gumbel_softmax(hidden), torch.rand(3)

    plain = step()
    (tmp_path / "free.json").write_text(
        json.dumps({"task": "free_benchmark", "dump_path": str(tmp_path / "dump"), "free_benchmark": {}})
    )
    debugger = PrecisionDebugger(tmp_path / "free.json")
    debugger.start()
    watched = copy.copy(step())
    debugger.stop()
    PrecisionDebugger.close()

    assert same(plain, watched)
