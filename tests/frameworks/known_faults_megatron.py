"""One of two ranks: what monitors are known to get wrong of Megatron-Core, watched through `TrainerMon`."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.frameworks.torch_truth import PlacedJournal
from tests.reference import reference
from trainermon import TrainerMon
from trainermon.core.values import Kind

STEPS = 3
FACTORS = [1.0, 0.5, 0.25]
CONFIG = {
    "monitor_mbs_grad": True,
    "param_distribution": True,
    "mv_distribution": True,
    "cc_distribution": {"enable": True, "cc_pre_hook": True},
    "replay": {"enabled": False},
    "agent": {"start": False},
}


def monitor(run_id):
    """Return a monitor that collects everything that is summed up below."""
    return TrainerMon(CONFIG | {"run_id": run_id})


class RankRows(PlacedJournal):
    """The rows of this rank; methods that say so are collective."""

    def __init__(self, run_id):
        super().__init__(Path(os.environ["TRAINERMON_SPOOL"]) / run_id, dist.get_rank())
        assert not [event for event in self.events if event["type"] == "detached"]

    def placed(self, step, kind):
        """Yield (name, row, placement)."""
        for key, row in self.rows[step].items():
            if key.kind == kind and key.micro_step is None:
                yield key.name, row, self.placements[key]

    def number(self, step, label):
        """Return a number of the step."""
        return self.of(step, Kind.STEP)[label].sum

    def calls(self, step, operation, side):
        """Return the rows of all calls of collectives that are named so: what went in (`pre`) or came out (`post`)."""
        return [
            row
            for key, row in self.rows[step].items()
            if key.kind == Kind.COMM and f".{operation}" in key.name and key.slot.startswith(side)
        ]

    def check(self, step, kind, whole, *, tolerance, part_of):
        """Fail unless each row is its slice of a whole tensor, and all slices that count make up each tensor once.

        `tolerance` is relative to the largest norm of all; `part_of` cuts out what this rank's model has. Collective.
        """
        largest = max(float(tensor.double().norm()) for tensor in whole.values())
        counts = torch.zeros(len(whole), dtype=torch.float64)
        for name, row, placement in self.placed(step, kind):
            assert placement.shape == tuple(whole[name].shape), name
            flat = part_of(whole[name].double(), name).reshape(-1)
            length = flat.numel() if placement.length is None else placement.length
            expected = reference(flat[placement.offset : placement.offset + length])
            assert row.count == length == expected.count, (kind, name)
            for statistic in ("norm", "min", "max"):
                error = abs(getattr(row, statistic) - getattr(expected, statistic))
                assert error <= tolerance * largest, (step, kind, name, statistic, row, expected)
            counts[list(whole).index(name)] += row.count * placement.in_global_norm
        dist.all_reduce(counts)
        assert counts.tolist() == [tensor.numel() for tensor in whole.values()], (step, kind)

    def merged_norm(self, step):
        """Return the norm of all reduced gradients, each element once. Collective."""
        square = sum(row.sum_sq for _, row, place in self.placed(step, Kind.GRAD_REDUCED) if place.in_global_norm)
        total = torch.tensor(float(square), dtype=torch.float64)
        dist.all_reduce(total)
        return float(total.sqrt())


def plain_rows(run_id, *, wrapped):
    """Train without Megatron; return all rows but times, and this rank's own gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model = nn.parallel.DistributedDataParallel(net) if wrapped else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator, own = torch.Generator().manual_seed(dist.get_rank()), []
    with monitor(run_id) as watching:
        watching.set_monitor(model, optimizer)
        for _ in range(2):
            x = torch.randn(3, 4, generator=generator)
            own.append(torch.autograd.grad(net(x).square().mean(), list(net.parameters())))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = RankRows(run_id).rows
    assert sorted(rows) == [0, 1]
    kept = {
        (step, key): row for step in rows for key, row in rows[step].items() if key.kind not in (Kind.STEP, Kind.COMM)
    }
    return kept, own


def test_megatron_that_is_only_installed_changes_no_plain_run():
    """Comes first: until here nothing has imported Megatron."""
    assert not any(name.startswith("megatron") for name in sys.modules)
    found = {}
    for when in ("hidden", "imported"):
        if when == "hidden":
            sys.modules["megatron"] = None
        else:
            del sys.modules["megatron"]
            from megatron.core import parallel_state  # noqa: F401
        for wrapped in (False, True):
            rows, own = plain_rows(f"{when}-{wrapped}", wrapped=wrapped)
            found.setdefault(wrapped, []).append(rows)
            for step, gradients in enumerate(own):
                unreduced = [row for (at, key), row in rows.items() if (at, key.kind) == (step, Kind.GRAD_UNREDUCED)]
                norms = [float(gradient.double().norm()) for gradient in gradients]
                assert sorted(row.norm for row in unreduced) == pytest.approx(sorted(norms * 2), rel=1e-6)
    for hidden, imported in found.values():
        assert hidden == imported


def test_rows_and_rates_are_right_whatever_is_sharded_and_whoever_schedules():
    from tests.frameworks.megatron.gpt import Layout

    bf16 = torch.bfloat16
    check_layout(Layout(distributed_optimizer=True), "before")
    check_layout(Layout(distributed_optimizer=True, dtype=bf16, overlap=True, bucket=1000), "after")
    check_layout(Layout(tp=2), "after")
    check_layout(Layout(), "inner")


def scheduler_of(optimizer, place):
    """Return a scheduler: Megatron's own of the outer optimizer, or torch's of the one that is within."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from tests.frameworks.megatron import gpt

    if place == "inner":
        inner = optimizer.chained_optimizers[0].optimizer
        return torch.optim.lr_scheduler.LambdaLR(inner, lambda step: FACTORS[min(step, 2)])
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = gpt.LEARNING_RATE, 0.0
    return OptimizerParamScheduler(
        optimizer,
        init_lr=gpt.LEARNING_RATE,
        max_lr=gpt.LEARNING_RATE,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=4,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=4,
        wd_incr_style="constant",
    )


def check_layout(layout, place):
    from tests.frameworks.megatron import gpt
    from tests.frameworks.megatron.truth import TOLERANCE, WholeModel

    gpt.initialise(layout)
    chunks, optimizer = gpt.build(layout)
    whole, truth, norms, rates = WholeModel(layout), [], [], []
    run_id = layout.name.replace(" ", ",")
    scheduler = scheduler_of(optimizer, place) if place == "before" else None
    with monitor(run_id) as watching:
        watching.set_monitor(chunks, optimizer, grad_acc_steps=gpt.MICRO_BATCHES)
        scheduler = scheduler or scheduler_of(optimizer, place)
        for step in range(STEPS):
            rates.append(optimizer.param_groups[0]["lr"])
            whole.optimizer.param_groups[0] |= {
                name: optimizer.param_groups[0][name] for name in ("lr", "weight_decay")
            }
            truth.append({k: v if k is Kind.GRAD_UNREDUCED else copies(v) for k, v in whole.step(step).items()})
            (done, norm, _), _ = gpt.train_step(layout, chunks, optimizer, step)
            assert done
            norms.append(norm)
            scheduler.step(*([] if place == "inner" else [1]))
    rows = RankRows(run_id)
    assert len(set(rates)) == STEPS

    def part_of(tensor, name):
        return gpt.part_of(tensor, name, layout)

    held = (Kind.GRAD_REDUCED, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.PARAM_UPDATED)
    for step in range(STEPS):
        for kind in held:
            rows.check(step, kind, truth[step][kind], tolerance=TOLERANCE[layout.dtype], part_of=part_of)
        assert rows.merged_norm(step) == pytest.approx(norms[step], rel=1e-6)
        assert rows.number(step, "learning_rate.0") == rates[step]
    if layout.distributed_optimizer:
        check_collectives(rows, chunks, norms)


def copies(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def check_collectives(rows, chunks, norms):
    """What comes out of all reductions of gradients, over all ranks, has the norm that Megatron computed."""
    buckets = sum(len(buffer.buckets) for chunk in chunks for buffer in chunk.buffers)
    for step, norm in enumerate(norms):
        scattered, gathered = rows.calls(step, "reduce_scatter", "post"), rows.calls(step, "all_gather", "post")
        assert len(scattered) == len(rows.calls(step, "reduce_scatter", "pre")) == buckets
        assert len(gathered) == buckets
        total = torch.tensor(sum(row.sum_sq for row in scattered), dtype=torch.float64)
        dist.all_reduce(total)
        assert float(total.sqrt()) == pytest.approx(norm, rel=1e-6)


def main():
    dist.init_process_group("gloo")
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(name, flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
