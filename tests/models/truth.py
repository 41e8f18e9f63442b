"""What a training holds, copied by hooks of our own in a second run of it that no monitor watches.

A loop is written once and run twice: with `Watched`, which hands everything to a `TrainerMon`, and with `Truth`, which
copies whole tensors. Both trainings make the same bits, so every row of the first must be the moments of the tensor of
the second.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from tests.journal_rows import RankJournal
from tests.reference import assert_equal
from trainermon import TrainerMon
from trainermon.core.catalogue import FROZEN_MOVED
from trainermon.core.values import Kind

MOMENTS = {"exp_avg": Kind.EXP_AVG, "exp_avg_sq": Kind.EXP_AVG_SQ}
CONFIG = {
    "wg_distribution": True,
    "monitor_mbs_grad": True,
    "param_distribution": True,
    "mv_distribution": True,
    "xy_distribution": True,
    "agent": {"start": False},
}
COMPARED = (
    Kind.GRAD_UNREDUCED,
    Kind.GRAD_REDUCED,
    Kind.PARAM_ORIGIN,
    Kind.PARAM_UPDATED,
    Kind.EXP_AVG,
    Kind.EXP_AVG_SQ,
    Kind.STATE,
    Kind.ACTV,
    Kind.ACTV_GRAD,
    Kind.LOSS,
)


class Watched:
    """The training with a monitor."""

    def __init__(self, folder, config):
        self.folder, self.config = folder, config
        self.models = []

    def start(self, model, optimizer, micro_steps=1):
        """Begin to watch `optimizer`'s steps of `model`."""
        self.models.append(model)
        self.monitor = TrainerMon(
            CONFIG | {"run_id": "run", "spool_dir": str(self.folder), "output_dir": str(self.folder)} | self.config
        )
        self.monitor.set_monitor(model, optimizer, micro_steps)

    def backward(self, loss):
        """Run the backward that ends a micro step."""
        loss.backward()

    def expect(self, micro_steps):
        """Say how many micro steps the step has."""
        self.monitor.expect_micro_steps(micro_steps)

    def record(self, loss):
        """Record the loss of a micro step."""
        self.monitor.record(loss=loss)

    @contextlib.contextmanager
    def step(self):
        """Surround whatever follows the last backward: clipping, and the optimizer's step."""
        yield

    def skipped(self):
        """Say that what was done since the last step was thrown away."""

    def close(self):
        """End the training."""
        self.monitor.close()


class Truth:
    """The training alone: copies of everything, by (step, kind, label of the series)."""

    def __init__(self, config):
        self.config = CONFIG | config
        self.models, self.tensors, self.current = [], {}, {}
        self.now = self.micro = 0
        self.is_stepping = False
        self.calls = Counter()

    def start(self, model, optimizer, micro_steps=1):
        """As `Watched.start`: put hooks on every module and parameter."""
        self.models.append(model)
        self.model, self.optimizer, self.several = model, optimizer, micro_steps > 1
        # before it is compiled or wrapped, names are those of the user's model
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.stepped = self.parameters
        if self.config["monitor_mbs_grad"]:
            for name, parameter in self.parameters.items():
                parameter.register_hook(lambda g, name=name: self._keep_micro(name, g))
        if self.config["xy_distribution"]:
            for name, module in model.named_modules():
                if name:
                    module.register_forward_pre_hook(lambda m, a, k, n=name: self._before(m, n, a, k), with_kwargs=True)
                    module.register_forward_hook(lambda m, _, output, n=name: self._behind(m, n, output))

    def backward(self, loss):
        """As `Watched.backward`."""
        loss.backward()
        self.micro += 1
        self.calls.clear()

    def expect(self, micro_steps):
        """As `Watched.expect`."""

    def record(self, loss):
        """As `Watched.record`."""
        self._keep(Kind.LOSS, f"loss@{self.micro}" if self.several else "loss", loss)

    @contextlib.contextmanager
    def step(self):
        """As `Watched.step`."""
        self.stepped = self._in_groups()
        for name, parameter in self.stepped.items():
            self._keep(Kind.PARAM_ORIGIN, name, parameter)
            if parameter.grad is not None:
                self._keep(Kind.GRAD_REDUCED, name, parameter.grad)
                self._keep(Kind.GRAD_UNREDUCED, name, parameter.grad)
        self.is_stepping = True  # what a closure evaluates again is no part of the step
        yield
        self.is_stepping = False
        for name, parameter in self.stepped.items():
            self._keep(Kind.PARAM_UPDATED, name, parameter)
            for key, state in self.optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(state) and key != "step" and (state.dim() or not parameter.dim()):
                    self._keep(MOMENTS.get(key, Kind.STATE), name if key in MOMENTS else f"{name}.{key}", state)
        self.tensors |= {(self.now, *key): tensor for key, tensor in self.current.items()}
        self.now += 1
        self.skipped()

    def skipped(self):
        """As `Watched.skipped`."""
        self.current, self.micro = {}, 0
        self.calls.clear()

    def close(self):
        """As `Watched.close`."""

    def _in_groups(self):
        """Return the parameters in the optimizer's groups; all where none is: it has copies of its own."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in self.parameters.items() if id(p) in held} or self.parameters

    def _keep_micro(self, name, gradient):
        if name in self.stepped:  # in the last step: what groups hold is looked at in steps
            self._keep(Kind.GRAD_UNREDUCED, f"{name}@{self.micro}", gradient)

    def _keep(self, kind, label, tensor):
        if self.is_stepping:
            return
        copy = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach().clone()
        self.current[kind, label] = torch.view_as_real(copy.resolve_conj()) if copy.is_complex() else copy

    def _before(self, module, name, args, kwargs):
        if module.training and torch.is_grad_enabled():
            self.calls[name] += 1
            self._look(name, "input", args)
            self._look(name, "input", kwargs)

    def _behind(self, module, name, output):
        if module.training and torch.is_grad_enabled():
            self._look(name, "output", output)

    def _look(self, name, side, value):
        call = f"#{self.calls[name] - 1}" if self.calls[name] > 1 else ""
        micro = f"@{self.micro}" if self.several else ""
        for path, tensor in _tensors(value):
            label = f"{name}.{side}{path or '.0'}{call}{micro}"
            self._keep(Kind.ACTV, label, tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda g, label=label: self._keep(Kind.ACTV_GRAD, label, g))


def _tensors(value):
    if torch.is_tensor(value):
        return [("", value)]
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = vars(value).items()
    else:
        return []
    return [(f".{key}{path}", tensor) for key, item in items for path, tensor in _tensors(item)]


def run_twice(loop, folder, config):
    """Run `loop(watch)` twice from one seed; return the truth, and the journal of the run that was watched.

    Fails if the monitor changed a bit of the weights, or let go of the model.
    """
    truth, watched = Truth(config), Watched(folder, config)
    for watch in (truth, watched):
        torch.manual_seed(3)
        loop(watch)
        watch.close()
    for alone, seen in zip(truth.models, watched.models, strict=True):
        for one, other in zip(alone.state_dict().values(), seen.state_dict().values(), strict=True):
            assert torch.equal(one.to_dense(), other.to_dense())
    journal = RankJournal(folder / "run")
    assert [event for event in journal.events if event["type"] in ("detached", "replay")] == []
    return truth, journal


def assert_rows_are_the_truth(truth, journal, *, without=()):
    """Fail unless there is a row for every tensor of every step, none else, and each is its tensor's moments."""
    expected = {key: t for key, t in truth.tensors.items() if key[1] in COMPARED and key[1] not in without}
    found = {
        (step, key.kind, key.label): row
        for step, rows in journal.rows.items()
        for key, row in rows.items()
        if key.kind in COMPARED and key.kind not in without and key.slot != FROZEN_MOVED  # a count, of no tensor
    }
    too_many, missing = found.keys() - expected.keys(), expected.keys() - found.keys()
    assert not too_many, f"too many: {sorted(too_many, key=str)[:9]}"
    assert not missing, f"missing: {sorted(missing, key=str)[:9]}"
    for key, tensor in expected.items():
        try:
            assert_equal(found[key], tensor)
        except AssertionError as error:
            raise AssertionError(f"{key}: {error}") from None
    assert {key[0] for key in found} == set(range(truth.now))
