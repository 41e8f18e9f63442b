"""Trains with one fault after the other, unwatched and watched, and says whether a single bit differed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.control import ControlReader
from trainermon.core.values import Action, Command, DumpTask, Kind
from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.records import PARAMETERS_GRAD
from trainermon.monitor.session.gradient_check import FiniteGradientCheck
from trainermon.replay import agreement

FAULT_STEP, STEPS = 2, 4
INF, NAN = float("inf"), float("nan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong in `module` on `rank` in step 2, and the phase that a diagnosis has to name.

    Kinds: `weight` (an element becomes infinite), `transient` (one of an output), `backward` (the gradient of an output
    becomes NaN), `reduced` (an element of a gradient, after its reduction), `none`.
    """

    kind: str
    module: str = ""
    rank: int = 0
    phase: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A training and a fault. `build()` gives a `Job`; `around(monitor)` is entered around the watched training.

    `dump` names a dump that is ordered for step 2; `forced` has a sound step 2 replayed.
    """

    name: str
    build: Callable[[], Job]
    fault: Fault
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    dump: str = ""
    forced: bool = False
    around: Callable[[TrainerMon], contextlib.AbstractContextManager] = contextlib.nullcontext


@dataclasses.dataclass(kw_only=True)
class Job:
    """A model that can be trained.

    Attributes:
        model: For `set_monitor`, as is `optimizer`.
        modules: Every module of this rank's, by the name that the diagnosis gives it.
        spoil: Makes an element of the weight of a module infinite, of the part that this rank alone holds.
        step: Trains one step and returns what it computed.
        bits: Returns the tensors that must not differ after the training.
        options: Further arguments of `set_monitor`.
        spoil_gradient: Has an element of the reduced gradient of a module's weight made infinite; returns an end to it.
    """

    model: Any
    optimizer: Any
    modules: dict[str, torch.nn.Module]
    spoil: Callable[[torch.nn.Module], None]
    step: Callable[[int], list[torch.Tensor]]
    bits: Callable[[], list[torch.Tensor]]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    spoil_gradient: Callable[[torch.nn.Module], Callable[[], None]] | None = None


def inject(job: Job, fault: Fault) -> Callable[[], None]:
    """Put the fault in place; return what takes it away again."""
    module = job.modules.get(fault.module)
    if fault.kind == "none" or fault.rank != dist.get_rank() or module is None:
        return lambda: None
    if fault.kind == "weight":
        job.spoil(module)
        return lambda: None
    if fault.kind == "reduced":
        return job.spoil_gradient(module)
    hook = _spoil_output if fault.kind == "transient" else _spoil_gradient
    return module.register_forward_hook(hook).remove


def first_of(output):
    return output[0] if isinstance(output, tuple) else output


def _spoil_output(_module, _args, output):
    spoilt = first_of(output).clone()
    spoilt.view(-1)[1] = INF
    return (spoilt, *output[1:]) if isinstance(output, tuple) else spoilt


def _spoil_gradient(_module, _args, output):
    tensor = first_of(output)
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: gradient * NAN)


def train(case: Case, monitor: TrainerMon | None, folder: Path) -> list[torch.Tensor]:
    """Return all the bits of a training: of every step, of the end, and of the generators."""
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    job = case.build()
    if monitor is not None:
        monitor.set_monitor(job.model, job.optimizer, **job.options)
    found = []
    for step in range(STEPS):
        if case.dump and monitor is not None and step == 1:
            order = Command(id=case.dump, action=Action.DUMP, first_step=FAULT_STEP, task=DumpTask.TENSOR)
            ControlReader(only_spool(spool_of(case, folder)), dist.get_rank()).send([order])
        remove = inject(job, case.fault) if step == FAULT_STEP else lambda: None
        found += [tensor.detach().clone() for tensor in job.step(step)]
        remove()
    found += [tensor.detach().clone() for tensor in job.bits()]
    return [*found, torch.get_rng_state(), torch.tensor([random.random(), np.random.rand()])]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Whether all bits agree."""
    raw = [[t.contiguous().reshape(-1).view(torch.uint8) for t in tensors] for tensors in (left, right)]
    return len(left) == len(right) and all(map(torch.equal, *raw))


def spool_of(case: Case, folder: Path) -> Path:
    """Return where the spool of a case's run is."""
    return folder / "spool" / case.name


@contextlib.contextmanager
def forced(case: Case):
    """Have step 2 taken for one whose gradients are not finite."""
    checks: Any = FiniteGradientCheck
    real = checks.replay_if
    if case.forced:
        checks.replay_if = lambda check, nonfinite: real(check, nonfinite or check.step == FAULT_STEP)
    try:
        yield
    finally:
        checks.replay_if = real


def compare_gradients(case: Case, folder: Path, journal: RankJournal) -> dict[str, float]:
    """Return by parameter and micro step how far the replay's gradient norm is from that which the run itself had."""
    place = f"dumps/gradient-nonfinite/attempt1/step{FAULT_STEP}/rank{dist.get_rank()}"
    own = {
        (key.name, key.micro_step): row.norm
        for key, row in journal.rows[FAULT_STEP].items()
        if key.kind == Kind.GRAD_UNREDUCED and key.micro_step is not None
    }
    found = {}
    for entry in read_dump(folder / "output" / case.name / case.name / place).entries:
        if entry.direction == PARAMETERS_GRAD:
            for record in entry.outputs:
                norm = own[f"{entry.module}.{record.slot}", entry.micro_step]
                found[f"{entry.module}.{record.slot}:{entry.micro_step}"] = abs(record.norm - norm) / norm
    return found


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Train twice; return what a test has to look at on this rank."""
    expected = train(case, None, folder)
    spool = spool_of(case, folder)
    config = {
        "output_dir": str(folder / "output" / case.name),
        "run_id": case.name,
        "spool_dir": str(spool),
        "agent": {"start": False},
    }
    with TrainerMon(config | case.config) as monitor, case.around(monitor), forced(case):
        found = train(case, monitor, folder)
    journal = RankJournal(only_spool(spool), dist.get_rank())
    events = journal.events
    return {
        "gradients": compare_gradients(case, folder, journal) if case.forced else {},
        "dumps": [event for event in events if event["type"] == "dump"],
        "fault": dataclasses.asdict(case.fault),
        "same": same(expected, found),
        "replays": [event for event in events if event["type"] == "replay"],
        "others": [event for event in events if event["type"] in ("warning", "detached")],
    }


def main(cases: list[Case], *, wait_s: float = 60.0) -> None:
    """Run all cases, or those that are named on the command line; each rank writes what it found.

    `wait_s` is how long ranks wait for one another before a replay: machines that run tests may be busy.
    """
    torch.set_num_threads(1)
    agreement.WAIT_S = wait_s
    folder, only = Path(sys.argv[1]), sys.argv[2:]
    results = {}
    for case in cases:
        if not only or case.name in only:
            results[case.name] = run(case, folder)
            dist.barrier()
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
