"""What the taps would see of an engine: copies of all that `DeepSpeedTraining` hands out, and their statistics."""

import collections
from typing import Any

import torch
import torch.distributed as dist

from trainermon.core.values import NO_ELEMENTS, Coordinates, Moments
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.frameworks.deepspeed import describe
from trainermon.monitor.gradient_probe.readings import GradientReader
from trainermon.statistics.kernel import moments


def statistics(tensor):
    """Return the moments of a tensor by the monitor's own kernel."""
    row = torch.empty((1, 8), dtype=torch.float64)
    moments((tensor.detach(),), row)
    return Moments(*row[0].tolist())


class Watch:
    """Attached from its making to `remove`; what it saw of the last step is in its attributes."""

    def __init__(self, engine, optimizer=None):
        self.training = describe(
            [engine], optimizer, Coordinates(rank=dist.get_rank(), world_size=dist.get_world_size())
        )
        self.reader = GradientReader(self.training, self.training.coordinates or Coordinates())
        self.faults = []
        self.outcomes, self.decisions = [], []
        self.forget()
        guard = FaultGuard(self.faults.append)
        self._handles = [
            *self.training.watch_step(guard, entry=self._entry, exit=self._exit),
            *self.training.watch_decision(guard, self._decide),
            *self.training.watch_accumulation(guard, lambda stage: self.reached.append(stage)),
            *self.training.watch_unreduced(guard, self._unreduced),
            *self.training.watch_micro_gradients(guard, self._micro),
        ]

    def forget(self):
        self.reached = []
        self.unreduced = {}
        self.micro = collections.defaultdict(list)

    def _unreduced(self, index, gradient):
        assert index not in self.unreduced, "reported twice in one step"
        self.unreduced[index] = gradient.detach().clone()

    def _micro(self, index, gradient):
        self.micro[index].append(gradient.detach().clone())

    def _entry(self):
        self.signs = self.reader.read()
        self.reduced = self._taken(self.training.reduced_gradients())
        self.before = self._taken(self.training.values())
        self.rates = self.training.learning_rates()

    def _decide(self, nonfinite):
        self.decisions.append(nonfinite)
        self.at_decision = self._taken(self.training.values())

    def _exit(self, outcome):
        self.outcomes.append(outcome)
        self.after = self._taken(self.training.values())
        states = self.training.states()
        self.states = {
            name: self._taken([None if found is None else found.state.get(name) for found in states])
            for name in ("exp_avg", "exp_avg_sq")
        }

    def _taken(self, tensors):
        return [None if tensor is None else (tensor.detach().clone(), statistics(tensor)) for tensor in tensors]

    def remove(self):
        for handle in self._handles:
            handle.remove()

    def merged(self, taken):
        """Return the moments of each whole parameter, merged over ranks by placement, and how many copies counted.

        A collective of the test's.
        """
        shown = [
            (p.name, p.owned.in_global_norm, found[1])
            for p, found in zip(self.training.parameters, taken, strict=True)
            if found is not None
        ]
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, shown)
        merged = collections.defaultdict(lambda: NO_ELEMENTS)
        for name, counts, found in (entry for rank in everywhere for entry in rank):
            if counts:
                merged[name] = merged[name].merge(found)
        return merged
