"""What a contained callable does, and that nothing of the monitor goes along with a copy of what it is hooked on."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from trainermon import TrainerMon
from trainermon.core.errors import DumpError
from trainermon.hooks.guard import ContainedCall, FaultGuard

EVERYTHING = {
    "monitor_mbs_grad": True,
    "param_distribution": True,
    "xy_distribution": True,
    "agent": {"start": False},
}


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def through_torch_save(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.copy, copy.deepcopy, through_pickle, through_torch_save]


def hooks_of(model):
    return [
        hook
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    ]


def test_contained_passes_its_bound_arguments_first_and_returns_the_result():
    contained = FaultGuard(pytest.fail).wrap(lambda *args: args, 1, 2)

    assert contained(3) == (1, 2, 3)


@pytest.mark.parametrize(
    ("error", "has_trace"), [(DumpError("full"), False), (OSError("full"), False), (KeyError(1), True)]
)
def test_what_the_message_says_in_full_has_no_traceback(error, has_trace, caplog):
    FaultGuard(lambda message: None).trip(error)

    assert [bool(record.exc_info) for record in caplog.records] == [has_trace]


def test_after_the_first_fault_nothing_is_called_any_more():
    messages, calls = [], []

    def fail(number):
        calls.append(number)
        raise ValueError("planted")

    guard = FaultGuard(messages.append)
    first, second = guard.wrap(fail, 1), guard.wrap(fail, 2)

    assert [first(), second(), first()] == [None] * 3
    assert calls == [1]
    assert messages == ["the monitor detached itself after ValueError: planted; training goes on unwatched"]


@pytest.mark.parametrize("duplicate", COPIES)
def test_a_copy_does_nothing_whatever_it_is_called_with(duplicate):
    inert = duplicate(FaultGuard(pytest.fail).wrap(pytest.fail, "called"))

    assert not isinstance(inert, ContainedCall)
    assert inert("module", ("arguments",), {"output": 1}) is None
    assert inert("gradient") is None


@pytest.mark.parametrize("duplicate", COPIES[1:])
@pytest.mark.parametrize("moment", ["before", "after forward", "after backward"])
def test_a_watched_model_can_be_copied_at_any_moment_and_the_copy_is_not_watched(places, duplicate, moment):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    names = list(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters())
    with TrainerMon(EVERYTHING) as monitor:
        monitor.set_monitor(model, optimizer)
        x = torch.randn(3, 4, requires_grad=True) * 2
        output = model(x) if moment != "before" else None
        if moment == "after backward":
            output.sum().backward()

        twin = duplicate(model)

        assert len(hooks_of(model)) > 4
        assert not [hook for hook in hooks_of(twin) if isinstance(hook, ContainedCall)]
        assert list(twin.state_dict()) == names
        assert torch.equal(twin(x), model(x))
        optimizer.step()


def test_a_watched_model_that_was_saved_whole_can_be_loaded_without_trainermon(places, tmp_path):
    model = nn.Linear(4, 2)
    with TrainerMon(EVERYTHING) as monitor:
        monitor.set_monitor(model, torch.optim.SGD(model.parameters(), lr=0.1))
        torch.save(model, tmp_path / "model.pt")
    script = (
        "import sys, torch\n"
        "sys.modules['trainermon'] = None\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "print(model(torch.ones(1, 4)).tolist())"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert done.stdout == f"{model(torch.ones(1, 4)).tolist()}\n", done.stderr


def test_a_saved_tensor_with_a_contained_hook_gives_no_warning():
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(FaultGuard(pytest.fail).wrap(lambda gradient: None))

    assert torch.equal(through_torch_save(leaf), leaf)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # what a compiler has to say
def test_a_hook_that_runs_within_a_compiled_function_is_called_and_not_compiled():
    leaves = [torch.full((2,), float(number), requires_grad=True) for number in range(20)]
    seen, graphs = [], []

    def hook(number, gradient):
        seen.append((number, (gradient * 2).sum().item()))

    def compiler(graph, inputs):
        graphs.append(graph.code)
        return graph

    def go_back():
        torch._dynamo.graph_break()
        sum((leaf * leaf).sum() for leaf in leaves).backward()

    guard = FaultGuard(pytest.fail)
    for number, leaf in enumerate(leaves):
        leaf.register_hook(guard.wrap(hook, number))
    with torch._dynamo.config.patch(recompile_limit=3):
        torch.compile(go_back, backend=compiler)()

    assert sorted(seen) == [(number, 8.0 * number) for number in range(20)]
    assert len(graphs) == 1  # that of `go_back` itself
    torch._dynamo.reset()
