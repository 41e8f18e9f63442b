"""How often `trainermon diagnose` is right about mistakes as people write them, in models that nothing was tuned on.

    python -m benchmarks.bench_diagnosis_written

Each of `MISTAKES` happens in one step of a real training under the monitor; nothing is injected. It takes two minutes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.written_models import GraphNet, SegmentationNet, StateSpaceModel
from trainermon import TrainerMon
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import Diagnosis

STEPS, BAD_STEP = 60, 50
"""Alerts that know what is usual need some forty steps for that."""


class Mistake(NamedTuple):
    """What goes wrong, and what a diagnosis has to say of it.

    Attributes:
        family: Which model.
        verdict: The verdict.
        phase: The part of the step; "" where no value is bad.
        modules: One of these modules must be named, first or among the first three; empty: any will do.
        where: Path of the module that makes the mistake; "": the script does.
    """

    family: str
    verdict: str
    phase: str
    modules: tuple[str, ...] = ()
    where: str = ""


MISTAKES: Mapping[str, Mistake] = MappingProxyType(
    {
        "sign of the rate": Mistake("ssm", "located", "forward", ("mixers.1",), "mixers.1"),
        "gate that closes": Mistake("ssm", "located", "forward", ("mixers.0",), "mixers.0"),
        "learning rate of 0/0": Mistake("ssm", "located", "optimizer", ("any",)),
        "log of an empty weight": Mistake("ssm", "located", "parameter", ("mixers.0",)),
        "rate a thousandfold": Mistake("ssm", "alerted", ""),
        "node without edges": Mistake("graph", "located", "forward", ("rounds.1",), "rounds.1"),
        "no neighbour to attend to": Mistake("graph", "located", "forward", ("rounds.0",), "rounds.0"),
        "edge of no length": Mistake("graph", "located", "backward", ("distance",), "distance"),
        "own clipping by a norm of zero": Mistake("graph", "located", "before_step", ("any", "")),
        "penalty on a slope of zero": Mistake("graph", "not_reproduced", "backward"),
        "norm without eps": Mistake("unet", "located", "forward", ("contrast",), "contrast"),
        "half precision": Mistake("unet", "located", "forward", ("inner",), "inner"),
        "broken pixel": Mistake("unet", "located", "forward", ("(input)",)),
        "log of a saturated probability": Mistake("unet", "located", "forward", ("(loss)",)),
        "mask behind a logarithm": Mistake("unet", "located", "backward", ("(loss)",)),
        "nothing (ssm)": Mistake("ssm", "finite", ""),
        "nothing (graph)": Mistake("graph", "finite", ""),
        "nothing (unet)": Mistake("unet", "finite", ""),
    }
)
"""What the page says: a cause is right with verdict, step, phase and module."""


def train(name: str, folder: Path) -> None:
    """Train with the mistake `name` under the monitor, which writes into `folder`."""
    torch.manual_seed(0)
    mistake = MISTAKES[name]
    model, loss_of = _FAMILIES[mistake.family]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = TrainerMon({"run_id": "run", "output_dir": str(folder), "agent": {"linger_s": 0, "wait_s": 60}})
    monitor.set_monitor(model, optimizer)
    for step in range(STEPS):
        is_bad = step == BAD_STEP
        if mistake.where:
            model.get_submodule(mistake.where).broken = name if is_bad else ""  # type: ignore[assignment]
        loss = loss_of(model, name if is_bad else "")
        monitor.record(loss=loss)
        loss.backward()  # type: ignore[no-untyped-call]
        if is_bad:
            _AFTER.get(name, _nothing)(model, optimizer)
        optimizer.step()
        if is_bad and name == "log of an empty weight":
            _empty_weight(model)
        optimizer.zero_grad()
    monitor.close()


def _nothing(_model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    pass


def _clip(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).sum() * 0
    for gradient in gradients:
        gradient.mul_(0).div_(norm)


def _empty_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("mixers.0.log_a").copy_(torch.zeros(8).log().neg())


def _set_rate(rate: float) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    def change(_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = rate

    return change


_AFTER: Mapping[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = MappingProxyType(
    {
        "own clipping by a norm of zero": _clip,
        "learning rate of 0/0": _set_rate(float("nan")),
        "rate a thousandfold": _set_rate(1.0),
    }
)


def _state_space() -> tuple[nn.Module, Callable[[nn.Module, str], Tensor]]:
    def loss_of(model: nn.Module, _mistake: str) -> Tensor:
        tokens = torch.arange(4)[:, None] + torch.arange(13) + torch.randint(4, (4, 1))
        logits = model(tokens[:, :-1] % 16)
        return functional.cross_entropy(logits.flatten(0, 1), (tokens[:, 1:] % 16).flatten())

    return StateSpaceModel(), loss_of


def _graph() -> tuple[nn.Module, Callable[[nn.Module, str], Tensor]]:
    edges = torch.tensor([(i, j) for i in range(6) for j in range(6) if i != j]).T

    def loss_of(model: nn.Module, mistake: str) -> Tensor:
        places = torch.randn(6, 3).requires_grad_()
        energy = model(places, edges)
        loss: Tensor = (energy - places.detach().square().mean()).square()
        if mistake == "penalty on a slope of zero":
            (slope,) = torch.autograd.grad(energy, places, create_graph=True)
            loss = loss + ((slope * 0).square().sum(1).sqrt() - 1).square().mean()
        return loss

    return GraphNet(), loss_of


def _segmentation() -> tuple[nn.Module, Callable[[nn.Module, str], Tensor]]:
    def loss_of(model: nn.Module, mistake: str) -> Tensor:
        image = torch.randn(2, 1, 8, 8)
        target = (image > 0).float()
        if mistake == "broken pixel":
            image[0, 0, 3, 3] = float("nan")
        logits = model(image)
        if mistake == "log of a saturated probability":
            probability = (logits * 1e4).sigmoid()
            return -(target * probability.log() + (1 - target) * (1 - probability).log()).mean()
        if mistake == "mask behind a logarithm":
            zero = logits * 0
            return torch.where(target > 2, zero.sqrt(), logits).square().mean()
        return functional.binary_cross_entropy_with_logits(logits, target)

    return SegmentationNet(), loss_of


_FAMILIES: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {"ssm": _state_space, "graph": _graph, "unet": _segmentation}
)


def is_right(mistake: Mistake, found: Diagnosis) -> bool:
    """Return whether a diagnosis says of a training what was wrong in it."""
    named = (found.module, *found.candidates)[:3]
    is_named = not mistake.modules or "any" in mistake.modules or any(one in named for one in mistake.modules)
    is_placed = not mistake.phase or (found.step == BAD_STEP + _LATER.get(found.phase.value, 0) and found.rank == 0)
    return (
        found.verdict.value == mistake.verdict and is_named and is_placed and mistake.phase in ("", found.phase.value)
    )


_LATER = {"parameter": 1, "optimizer": 1}
"""Nobody looks at what was made of a weight before the next step, without a configuration."""


def main() -> None:
    """Run all trainings, and print a line for each and the figures."""
    right = {}
    for name, mistake in MISTAKES.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", f"from {__name__ if __name__ != '__main__' else _OWN} import *"]
            command[-1] += f"; train({name!r}, Path({folder!r}))"
            subprocess.run(command, check=True, capture_output=True)
            found = diagnose(Path(folder) / "run")
        right[name] = is_right(mistake, found)
        sys.stdout.write(f"{'right' if right[name] else 'WRONG'}  {mistake.family:5}  {name}: {found.headline}\n")
        sys.stdout.flush()
    faults = [is_fine for name, is_fine in right.items() if not name.startswith("nothing")]
    clean = [is_fine for name, is_fine in right.items() if name.startswith("nothing")]
    sys.stdout.write(f"first cause right: {sum(faults)} of {len(faults)}; clean runs: {sum(clean)} of {len(clean)}\n")


_OWN = "benchmarks.bench_diagnosis_written"

if __name__ == "__main__":
    main()
