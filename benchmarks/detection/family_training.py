"""Trains one run of a family under the real monitor, on one process or split over ranks; time is simulated."""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.detection import family_faults
from benchmarks.detection.cases import Case
from benchmarks.detection.clock import Clock
from benchmarks.detection.family_cases import FAULTS, FAULTY, Segment, faults_of
from benchmarks.detection.family_faults import Site, sites_of, spoilt
from benchmarks.families.catalogue import FAMILIES
from benchmarks.families.family import Batch
from trainermon import TrainerMon

CONFIG = {
    "param_distribution": True,
    "ur_distribution": True,
    "xy_distribution": True,
    "forward_only": True,
    "checksum_interval": 1,
    "replay": {"enabled": False},
    "agent": {"start": False},
}
WARMUP, RESTART_EVERY, MAX_NORM = 50, 300, 1.0
SETTLING_STEPS = 1
"""Trained and not judged after a fault: FSDP2 writes what it loads without torch's noticing, nor the monitor's."""


class FamilyJob:
    """One rank of a run.

    Attributes:
        site: Where the model may be broken.
        rate_factor: What the learning rate is multiplied by.
        loss_factor: What the loss is multiplied by before the backward.
        spoilt_share: Share of the labels that are drawn anew.
        is_repeating: The last batch comes again and again.
        unreduced: Gradients are not reduced over ranks.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.family = FAMILIES[case.size]
        self.rank = dist.get_rank() if case.ranks > 1 else 0
        self.rate_factor = self.loss_factor = 1.0
        self.spoilt_share = 0.0
        self.is_repeating = self.unreduced = False
        self.clock = Clock(case)
        self._folder = folder
        self._batch: Batch | None = None
        self._generator = torch.Generator().manual_seed(case.number + self.rank)
        self._build()

    def run(self) -> list[Segment]:
        """Train, and return what was recorded, in its order."""
        config = {**CONFIG, "run_id": self.case.run_id, "output_dir": str(self._folder / "output")}
        segments: list[Segment] = []
        with self.clock.shown_to_monitor():
            monitor = TrainerMon({**config, "spool_dir": str(self._folder / "spool")})
            monitor.set_monitor(self.model, self.optimizer)
            faults = faults_of(self.case) if self.case.name == FAULTY else {}
            at = first = 0
            for end in sorted({*faults, self.case.steps}):
                for step in range(at, end):
                    self._step(step, monitor)
                segments.append(Segment(name="", at=at, first=first, steps=end - at))
                first, at = first + end - at, end
                for name in faults.get(end, ()):
                    segments.append(self._broken(name, end, first, monitor))
                    first += segments[-1].steps + SETTLING_STEPS
            monitor.close()
        return [segment for segment in segments if segment.steps]

    def _broken(self, name: str, at: int, first: int, monitor: TrainerMon) -> Segment:
        """Train on with a fault for a while, and put everything back to where it was."""
        state = self._state()
        num_steps = FAULTS[name].within + 3
        for age in range(num_steps):
            family_faults.apply(self, name, age)
            self._step(at + age, monitor)
        self._restore(state)
        for age in range(SETTLING_STEPS):
            self._step(at + age, monitor)
        self._restore(state)
        return Segment(name=name, at=at, first=first, steps=num_steps)

    def _state(self) -> dict[str, Any]:
        rival = getattr(self._net, "rival", ())
        held = {str(number): part.state_dict() for number, part in enumerate((self.model, self.optimizer, *rival))}
        return copy.deepcopy(held) | {"drawn": self._generator.get_state(), "torch": torch.get_rng_state()}

    def _restore(self, state: dict[str, Any]) -> None:
        rival = getattr(self._net, "rival", ())
        for number, part in enumerate((self.model, self.optimizer, *rival)):
            part.load_state_dict(copy.deepcopy(state[str(number)]))  # an optimizer trains on in what it loads
        self._generator.set_state(state["drawn"])
        torch.set_rng_state(state["torch"])
        self.model.train()
        self.rate_factor = self.loss_factor = 1.0
        self.spoilt_share = 0.0
        self.is_repeating = self.unreduced = False
        self.site.change = self.site.change_gradient = None

    def _build(self) -> None:
        torch.manual_seed(self.case.number)
        net = self._net = self.family.build()
        sites = sites_of(net)
        self.site = Site(sites[len(sites) // 4 + self.case.number % max(1, len(sites) // 2)])
        self.model: Any = net
        self.optimizer: Any = None
        if self.case.split.startswith("zero"):
            self.model = _deepspeed(net, int(self.case.split[-1]), self.family.rate)
            self.optimizer = self.model.optimizer
        else:
            self.model = _wrapped(net, self.case.split)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.family.rate)
        torch.manual_seed(self.case.number + 1000 * self.rank)  # other dropout on every rank

    def _rate(self, step: int) -> float:
        period = {"decayed": self.case.steps, "restarts": RESTART_EVERY}.get(self.case.name)
        shape = 1.0 if period is None else 0.51 + 0.49 * math.cos(math.pi * (step % period) / period)
        return self.family.rate * min(1.0, (step + 1) / WARMUP) * shape * self.rate_factor

    def _step(self, step: int, monitor: TrainerMon) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(step)
        batch = self._next()
        loss = self._trained_on(batch, monitor)
        self.clock.pass_by(self.clock.work(self.case.ranks, {}, self.rank, 1.0))
        self._make_step(monitor, loss)
        self.family.after_step(self.model, batch)

    def _next(self) -> Batch:
        if self._batch is None or not self.is_repeating:
            batch = self.family.draw(self._generator)
            self._batch = spoilt(batch, self._generator, share=self.spoilt_share) if self.spoilt_share else batch
        return self._batch

    def _trained_on(self, batch: Batch, monitor: TrainerMon) -> float:
        del monitor
        lonely = self.unreduced and isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync() if lonely else contextlib.nullcontext():
            loss = self.family.loss(self.model, batch)
            if self.case.split.startswith("zero"):
                self.model.backward(loss * self.loss_factor)
            else:
                (loss * self.loss_factor).backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def _make_step(self, monitor: TrainerMon, loss: float) -> None:
        if self.case.split.startswith("zero"):
            monitor.record(loss=loss)
            self.model.step()
            return
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        monitor.record(loss=loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _wrapped(net: nn.Module, split: str) -> nn.Module:
    if split == "ddp":
        return DistributedDataParallel(net)
    if split == "fsdp2":
        fsdp = importlib.import_module("torch.distributed.fsdp")
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for child in net.modules():
            if isinstance(child, nn.ModuleList):
                for block in child:
                    fsdp.fully_shard(block, mesh=mesh)
        fsdp.fully_shard(net, mesh=mesh)
    return net


def _deepspeed(net: nn.Module, stage: int, rate: float) -> Any:
    deepspeed = importlib.import_module("deepspeed")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    inner = torch.optim.AdamW(net.parameters(), lr=rate)
    return deepspeed.initialize(model=net, optimizer=inner, config=config)[0]
