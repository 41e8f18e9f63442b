"""A small model, its training in whatever wrapper, and the truth about it, for the frameworks that come with torch.

The truth is threefold: float64 gradients of an unsharded copy on this rank's batches and on everybody's; what the
framework's own accessors say the whole tensors are; and the norm that its clipping returned.
"""

import contextlib
import copy
import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.weight_truth import assert_weights_add_up
from trainermon import TrainerMon
from trainermon.monitor.environment.weights import recorded_weights, training_of

STEPS = 2
MAX_NORM = 0.25
CONFIG = {
    "monitor_mbs_grad": True,
    "param_distribution": True,
    "mv_distribution": True,
    "ur_distribution": True,
    "xy_distribution": True,
    "gradient_signs": {"level": "L2"},
    "histograms": {
        "kinds": ["grad_unreduced", "grad_reduced", "param_origin", "param_updated", "exp_avg"],
        "step_interval": 1,
    },
    "agent": {"start": False},
}


class Block(nn.Module):
    def __init__(self, width, hidden, *, reentrant):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width)
        self.reentrant = reentrant

    def body(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x):
        return self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)


class Net(nn.Module):
    """Sizes that divide by no number of ranks, one parameter with fewer rows than ranks, zeros in the gradients."""

    def __init__(self, *, reentrant=None, hidden=(9, 5)):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block(6, size, reentrant=reentrant) for size in hidden])
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((self.head(self.norm(x)) * self.scale).flatten(0, 1).float(), targets.flatten())


@dataclasses.dataclass
class Variant:
    """One way to train: how the model is wrapped, and the framework's own way to do what the truth needs.

    `whole(model, optimizer, what)` returns whole tensors by name, `what` being value, gradient, exp_avg or exp_avg_sq;
    `sync(model, is_last)` is a context in which one micro step runs.
    """

    wrap: Callable[[Net], tuple[Any, Any]]
    whole: Callable[[Any, Any, str], dict]
    sync: Callable[[Any, bool], Any] = lambda model, is_last: contextlib.nullcontext()
    clip: Callable[[Any], Any] = lambda model: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    micro_steps: int = 2
    model: dict = dataclasses.field(default_factory=dict)
    groups: dict = dataclasses.field(default_factory=dict)
    config: dict = dataclasses.field(default_factory=dict)
    data_rank: int | None = None
    data_size: int | None = None


def batch(step, micro, rank):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randint(11, (2, 4), generator=generator), torch.randint(3, (2, 4), generator=generator)


def reference_gradients(net, weights, step, *, ranks, micro_steps):
    """Return, by name, one float64 gradient per (rank, micro step), each of its loss divided by the micro steps."""
    net.load_state_dict({name: weight.double() for name, weight in weights.items()})
    found = []
    for rank in ranks:
        for micro in range(micro_steps):
            net.zero_grad()
            (net(*batch(step, micro, rank)) / micro_steps).backward()
            found.append({name: p.grad.clone() for name, p in net.named_parameters()})
    return found


def total(gradients, scale=1.0):
    return {name: sum(g[name] for g in gradients) * scale for name in gradients[0]}


def truth_of_step(variant, model, optimizer, *, net, step, before):
    rank, size = variant.data_rank, variant.data_size
    everybody = reference_gradients(net, before, step, ranks=range(size), micro_steps=variant.micro_steps)
    mine = everybody[rank * variant.micro_steps : (rank + 1) * variant.micro_steps]
    return {
        "micro": mine,
        "unreduced": total(mine),
        "reference": total(everybody, 1 / size),
        "param_origin": before,
        "grad_reduced": variant.whole(model, optimizer, "gradient"),
    }


def train(variant, *, monitored, run_id):
    """Return losses, final weights, and, if monitored, the truth of every step."""
    torch.manual_seed(0)
    net = Net(**variant.model)
    reference = copy.deepcopy(net).double()
    model, optimizer = variant.wrap(net)
    losses, truth = [], []
    with contextlib.ExitStack() as stack:
        if monitored:
            monitor = stack.enter_context(TrainerMon(CONFIG | variant.config | {"run_id": run_id}))
            dtype = next(model.parameters()).dtype
            wholes = {name: weight.to(dtype) for name, weight in reference.named_parameters() if weight.requires_grad}
            assert_weights_add_up(recorded_weights([model], training_of([model], optimizer)), wholes)
            monitor.set_monitor(model, optimizer, grad_acc_steps=variant.micro_steps, **variant.groups)
        for step in range(STEPS):
            before = variant.whole(model, optimizer, "value") if monitored else {}
            for micro in range(variant.micro_steps):
                with variant.sync(model, micro == variant.micro_steps - 1):
                    loss = model(*batch(step, micro, variant.data_rank)) / variant.micro_steps
                    loss.backward()
                losses.append(loss.detach().clone())
            if monitored:
                truth.append(truth_of_step(variant, model, optimizer, net=reference, step=step, before=before))
            norm = variant.clip(model)
            optimizer.step()
            if monitored:
                truth[-1]["norm"] = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
                for kind, what in (("param_updated", "value"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
                    truth[-1][kind] = variant.whole(model, optimizer, what)
            optimizer.zero_grad()
    return losses, variant.whole(model, optimizer, "value"), truth


def identical(a, b):
    pairs = [*zip(a[0], b[0], strict=True), *((a[1][name], b[1][name]) for name in a[1])]
    return len(pairs) > 10 and all(torch.equal(x, y) for x, y in pairs)


def main(variants):
    """Run every variant twice on this rank, without and with the monitor, and write down the truth."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in sys.argv[2:]:
        variant = variants[name]()
        variant.data_rank = rank if variant.data_rank is None else variant.data_rank
        variant.data_size = dist.get_world_size() if variant.data_size is None else variant.data_size
        alone = train(variant, monitored=False, run_id=name)
        watched = train(variant, monitored=True, run_id=name)
        torch.save({"identical": identical(alone, watched), "steps": watched[2]}, folder / f"{name}-{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's own end is not always clean
