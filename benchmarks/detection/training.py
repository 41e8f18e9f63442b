"""Trains one labelled run under the real monitor, which leaves its journals in the spool.

Time is simulated: durations of steps and waits come from a random generator and not from the machine, whose own noise
nobody could repeat. Everything else is as in any training script.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.detection import faults
from benchmarks.detection.cases import Case
from benchmarks.detection.clock import STEP_S, Clock
from benchmarks.detection.model import LENGTH, SIZES, Gpt, Text
from trainermon import TrainerMon

CONFIG = {
    "param_distribution": True,
    "ur_distribution": True,
    "xy_distribution": True,
    "checksum_interval": 1,
    "replay": {"enabled": False},
    "agent": {"start": False},
}
WARMUP, DECAY, RATE, MAX_NORM = 20, 400, 3e-3, 1.0
RESTART_EVERY, EVALUATE_EVERY, CHECKPOINT_EVERY, RESUME_AT, OUTLIER_EVERY = 120, 25, 100, 150, 37
BALANCE = 0.05
EXPERTS = ("experts", "expert-collapse")
SCALED = ("float16-scaler", "loss-scale-collapse")
EXPLICIT = ("ranks-explicit", "straggler")
"""Runs whose ranks reduce their gradients by collectives of the script's own, for which it waits."""


class Job:
    """One rank of a run.

    Attributes:
        rate_factor: What the learning rate is multiplied by.
        gradient_factor: What all gradients are multiplied by.
        slow: By rank, how much longer than the others it needs.
        noisy: The next batch has nothing to do with the text.
        repeated: The batch that comes again and again, if one does.
        unreduced: Gradients are not reduced over ranks.
        done: Optimizer steps so far.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.rank = dist.get_rank() if case.ranks > 1 else 0
        self.size = SIZES[case.size]
        self.rate_factor = self.gradient_factor = 1.0
        self.slow: dict[int, float] = {}
        self.noisy = self.unreduced = False
        self.repeated: tuple[Tensor, Tensor] | None = None
        self.done = 0
        self.clock = Clock(case)
        self._folder = folder
        self._text = Text(case.number + self.rank, self.size.batch)
        self._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=25, enabled=case.name in SCALED)
        self._micro_steps = 4 if case.name == "accumulation" else 1
        self._build()

    def run(self) -> int:
        """Train; return the monitor's number of the step on which the fault began, -1 in a clean run."""
        began = -1
        with self.clock.shown_to_monitor():
            monitor = self._attach()
            for step in range(self.case.steps):
                if step == self.case.first_bad:
                    began = self.done
                if self.case.name == "resume" and step == RESUME_AT:
                    monitor.close()
                    self._restart()
                    monitor = self._attach()
                if step >= self.case.first_bad >= 0:
                    faults.apply(self, step - self.case.first_bad)
                self._step(step, monitor)
            monitor.close()
        return began

    def _build(self) -> None:
        torch.manual_seed(self.case.number)
        dropout = 0.1 if self.case.name in ("dropout", "ranks") else 0.0
        self.module = Gpt(self.size, dropout=dropout, experts=self.case.name in EXPERTS)
        self.model: nn.Module = self.module
        if self.case.ranks > 1 and self.case.name not in EXPLICIT:
            self.model = DistributedDataParallel(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=RATE)
        torch.manual_seed(self.case.number + 1000 * self.rank)  # other dropout on every rank
        if self.case.name in SCALED:  # gradients pass through half precision, as in a model that computes in it
            self.module.h[0].wire.change_gradient = lambda gradient: gradient.half().float()

    def _restart(self) -> None:
        saved = self.module.state_dict(), self.optimizer.state_dict()
        self._build()
        self.module.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])

    def _attach(self) -> TrainerMon:
        config: dict[str, Any] = {**CONFIG, "run_id": self.case.run_id, "output_dir": str(self._folder / "output")}
        config["spool_dir"] = str(self._folder / "spool")
        if self.case.name in EXPERTS:
            config |= {"recording_l2_features": True}
        if self.case.name in EXPLICIT:
            config |= {"cc_distribution": {"enable": True}}
        monitor = TrainerMon(config)
        monitor.set_monitor(self.model, self.optimizer, self._micro_steps, start_iteration=self.done)
        return monitor

    def _rate(self, step: int) -> float:
        period = RESTART_EVERY if self.case.name == "learning-rate-restarts" else DECAY
        at = step % period
        warm = min(1.0, (step + 1) / WARMUP) if step < WARMUP else 1.0
        return RATE * warm * (0.55 + 0.45 * math.cos(math.pi * at / period)) * self.rate_factor

    def _step(self, step: int, monitor: TrainerMon) -> None:
        self.optimizer.param_groups[0]["lr"] = self._rate(step)
        total = 0.0
        for _ in range(self._micro_steps):
            inputs, targets = self._batch(step)
            lonely = self.unreduced and isinstance(self.model, DistributedDataParallel)
            with self.model.no_sync() if lonely else contextlib.nullcontext():  # type: ignore[operator]
                loss = nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
                whole = (loss + BALANCE * self.module.imbalance) * self.gradient_factor
                self._scaler.scale(whole / self._micro_steps).backward()
            total += loss.item() / self._micro_steps
        self._wait(step)
        self._scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.module.parameters(), MAX_NORM)
        monitor.record(loss=total, tokens=self.size.batch * LENGTH * self._micro_steps, **self._scale())
        scale = self._scaler.get_scale()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.done += self._scaler.get_scale() >= scale
        self.optimizer.zero_grad()
        self._between(step)

    def _scale(self) -> dict[str, float]:
        return {"loss_scale": self._scaler.get_scale()} if self.case.name in SCALED else {}

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        if self.repeated is not None:
            return self.repeated
        if self.noisy:
            return self._text.noise()
        is_outlier = self.case.name == "outlier-batches" and step % OUTLIER_EVERY == OUTLIER_EVERY - 1
        return self._text.outlier() if is_outlier else self._text.draw()

    def repeat_batch(self, *, padding: bool = False) -> None:
        """Train on one batch from now on; of `padding`, all its tokens are the same."""
        if self.repeated is None:
            inputs, targets = self._text.draw()
            self.repeated = (inputs * 0, targets * 0) if padding else (inputs, targets)

    def _wait(self, step: int) -> None:
        hiccup = 3.0 if step % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1 else 1.0
        wait_s = self.clock.work(self.case.ranks, self.slow, self.rank, hiccup)
        if self.case.name not in EXPLICIT:
            self.clock.pass_by(wait_s)
            return
        for index, parameter in enumerate(self.module.parameters()):
            assert parameter.grad is not None
            work = dist.all_reduce(parameter.grad, async_op=True)
            assert work is not None
            self.clock.wait_s = 0.0 if index else wait_s
            work.wait()
            parameter.grad /= self.case.ranks

    def _between(self, step: int) -> None:
        if self.case.name == "evaluation" and step % EVALUATE_EVERY == EVALUATE_EVERY - 1:
            self.model.eval()
            with torch.no_grad():
                for _ in range(3):
                    self.model(self._text.draw()[0])
            self.model.train()
            self.clock.pass_by(5 * STEP_S)
