"""Functions that are hard to follow: repeated ones, replaced ones, custom ones, and those of the user's own."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.dump import messages_ranks
from tests.dump.test_debugger import strange
from tests.ranks import run_ranks
from trainermon import PrecisionDebugger
from trainermon.dump.files.reader import read_dump


@pytest.fixture(autouse=True)
def no_debugger_is_left():
    yield
    PrecisionDebugger.close()


def dumped(folder, run, level="L1", *, before=lambda debugger: None, **arguments):
    """Return the entries of what `run` does, by key."""
    PrecisionDebugger.close()
    debugger = PrecisionDebugger(dump_path=folder, level=level, **arguments)
    before(debugger)
    debugger.start()
    run()
    debugger.stop()
    debugger.step()
    dump = read_dump(folder / "step0/rank0")
    assert (dump.info.errors, dump.info.first_error) == (0, "")
    return {entry.key: entry for entry in dump.entries}


def numbers(entries, direction):
    """Return the numbers of all tensors of a direction, by key and slot."""
    return {
        (key, record.slot): (record.max, record.min, record.norm)
        for key, entry in entries.items()
        if entry.direction == direction
        for record in (*entry.inputs, *entry.outputs)
    }


class Twice(nn.Module):
    """Two segments that run the same functions, one of them inside another; their inputs are used elsewhere too."""

    def inner(self, x):
        return functional.linear(x, torch.eye(4) * 2).tanh()

    def outer(self, x, run):
        return run(self.inner, x.exp() + 1).sigmoid()

    def forward(self, x, run):
        x = run(self.inner, x.cos())
        x = run(lambda x: self.outer(x, run), x * 0.1)
        return run(self.inner, x).sum()


def plainly(function, x):
    return function(x)


def reentrantly(function, x):
    return checkpoint(function, x, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the inner one, in the forward
def test_functions_in_reentrant_checkpoints_have_the_gradients_of_plain_ones(tmp_path):
    model, x = Twice(), torch.randn(2, 4, requires_grad=True)

    plain = dumped(tmp_path / "plain", lambda: model(x, plainly).backward())
    repeated = dumped(tmp_path / "repeated", lambda: model(x, reentrantly).backward())

    assert numbers(plain, "forward") == numbers(repeated, "forward")
    expected, found = numbers(plain, "backward"), numbers(repeated, "backward")
    assert found == expected
    assert len({key for key, _ in found}) > 10


def test_two_backwards_of_one_segment_belong_to_its_two_calls(tmp_path):
    weight = torch.randn(4, 4, requires_grad=True)

    def run():
        for factor in (1.0, 2.0):
            (
                reentrantly(lambda x: functional.linear(x, weight), torch.ones(2, 4) * weight[0]) * factor
            ).sum().backward()

    entries = dumped(tmp_path, run)

    gradients = [entries[f"Functional.linear.{call}.backward"].inputs[0].max for call in range(2)]
    assert gradients == [1.0, 2.0]


def test_functions_of_a_validation_are_not_taken_for_those_that_a_checkpoint_repeats(tmp_path):
    weight = torch.randn(4, 4, requires_grad=True)

    def block(x):
        return functional.linear(x, weight).tanh()

    def run():
        with torch.no_grad():
            block(torch.ones(2, 4)).sum()
        checkpoint(block, torch.ones(2, 4), use_reentrant=False).sum().backward()

    entries = dumped(tmp_path, run)

    assert "Functional.linear.0.backward" not in entries
    assert "Functional.linear.1.backward" in entries


def test_a_function_that_a_framework_has_replaced_is_recorded_as_torchs(tmp_path, monkeypatch):
    """ZeRO stage 3 puts an autograd function in the place of `linear`, which no function mode sees."""
    from deepspeed.runtime.zero import linear as deepspeed_linear

    monkeypatch.setattr(functional, "linear", deepspeed_linear.zero3_linear_wrap)
    layer = nn.Linear(3, 2)

    entries = dumped(tmp_path, lambda: layer(torch.ones(1, 3)).sum().backward())

    assert [key for key in entries if "matmul" in key] == []  # what the replacement calls is part of it
    assert [record.shape for record in entries["Functional.linear.0.forward"].inputs] == [(1, 3), (2, 3), (2,)]
    assert entries["Functional.linear.0.backward"].inputs[0].shape == (1, 2)


@torch.library.custom_op("capture_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(("namespaces", "expected"), [([], True), (["capture_test"], True), (["other"], False)])
def test_custom_operators_are_recorded_by_their_namespace(tmp_path, namespaces, expected):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dump_path": str(tmp_path), "level": "L1", "custom_op_namespaces": namespaces}))
    entries = dumped(tmp_path, lambda: torch.ops.capture_test.double(torch.ones(2)), config_path=path)

    assert ("capture_test.double.0.forward" in entries) is expected
    if expected:
        assert entries["capture_test.double.0.forward"].outputs[0].max == 2.0


class Owner:
    @staticmethod
    def halve(x):
        return (x.exp() * 0.5) if x.sum() > 0 else 1 / 0


def test_a_registered_function_is_recorded_as_one_call_and_given_back(tmp_path):
    original = vars(Owner)["halve"]

    def run():
        with pytest.raises(ZeroDivisionError):
            Owner.halve(-torch.ones(2))
        Owner.halve(torch.ones(2, requires_grad=True)).sum().backward()
        torch.ones(2).sqrt()

    entries = dumped(tmp_path / "a", run, before=lambda debugger: debugger.register_custom_api(Owner, "halve", "Mine"))

    assert vars(Owner)["halve"] is original
    assert not any("exp" in key for key in entries)
    assert entries["Mine.halve.1.forward"].outputs[0].max == pytest.approx(0.5 * torch.e)
    assert entries["Mine.halve.1.backward"].outputs[0].max == pytest.approx(0.5 * torch.e)
    assert "Tensor.sqrt.0.forward" in entries  # also after the call that failed


@pytest.mark.distributed
def test_messages_and_collectives_are_recorded_wherever_they_are_called():
    texts = run_ranks(Path(messages_ranks.__file__))

    assert ["done" in text for text in texts] == [True, True], texts


@pytest.mark.parametrize("kind", ["bf16", "fp8", "complex", "sparse", "meta", "fake", "empty"])
def test_functions_of_tensors_of_every_kind_are_recorded(tmp_path, kind):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"dump_path": str(tmp_path), "risk_level": "ALL", "statistics": {"summary_mode": "md5"}})
    )
    tensor = strange(kind)

    entries = dumped(tmp_path, lambda: tensor.clone(), config_path=path)

    (record,) = entries["Tensor.clone.0.forward"].outputs
    largest = {"complex": 4.0, "meta": None, "fake": None, "empty": None}.get(kind, 2.0)
    assert (record.dtype, record.shape, record.max) == (str(tensor.dtype), tuple(tensor.shape), largest)


def test_a_write_through_an_alias_is_seen_in_the_other(tmp_path):
    def run():
        base = torch.ones(4) * 1.0
        view = base[:2]
        view.mul_(5.0)
        base.exp()
        alias = base.detach()
        alias.add_(1.0)
        base.sqrt()

    entries = dumped(tmp_path, run)

    assert entries["Tensor.mul_.0.forward"].inputs[0].max == 1.0
    assert entries["Tensor.exp.0.forward"].inputs[0].max == 5.0
    assert entries["Tensor.sqrt.0.forward"].inputs[0].max == 6.0
    assert entries["Tensor.sqrt.0.forward"].inputs[0].order != entries["Tensor.exp.0.forward"].inputs[0].order


def test_a_registered_function_can_be_restored(tmp_path):
    def before(debugger):
        debugger.register_custom_api(Owner, "halve")
        debugger.restore_custom_api(Owner, "halve")

    entries = dumped(tmp_path, lambda: Owner.halve(torch.ones(2)), before=before)

    assert not any(key.startswith("Owner.") for key in entries)
    assert "Tensor.exp.0.forward" in entries
