"""The training loop of all cases, with a place for whatever a training script gets wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Batch = Any
STEPS = 40


def rank_of_job() -> int:
    """Return this process's rank, 0 without a job."""
    return dist.get_rank() if dist.is_initialized() else 0


def _nothing(_step: int) -> None:
    """Do nothing."""


@dataclasses.dataclass(kw_only=True)
class Loop:
    """A training: every place in which a script can go wrong is a field.

    Attributes:
        model: What is trained and watched.
        optimizer: Likewise; None where the model is an engine that has one.
        batch: Returns the batch of a step and a micro step.
        loss_of: Returns the loss of a batch.
        steps: How many there are.
        micro_steps: How many batches a step has.
        context: Where forward and backward of a micro step take place.
        backward: Called with the loss.
        between: Called after the last backward, before the update.
        update: Takes the optimizer's step.
        zero: Clears the gradients after the update.
        before: Called at the beginning of a step.
        after: Called at its end.
        save: Returns what a checkpoint holds.
        restore: Goes on from that.
    """

    model: Any
    optimizer: Any
    batch: Callable[[int, int], Batch]
    loss_of: Callable[[Any, Batch], Tensor]
    steps: int = STEPS
    micro_steps: int = 1
    context: Callable[[int, int], contextlib.AbstractContextManager[Any]] = lambda _step, _micro: (
        contextlib.nullcontext()
    )
    backward: Callable[[Tensor], None] = lambda loss: loss.backward()
    between: Callable[[int], None] = _nothing
    update: Callable[[int], None] | None = None
    zero: Callable[[], None] | None = None
    before: Callable[[int], None] = _nothing
    after: Callable[[int], None] = _nothing
    save: Callable[[], dict[str, Any]] | None = None
    restore: Callable[[dict[str, Any]], None] | None = None

    def run(self, monitor: Any, first: int, last: int) -> list[float]:
        """Train steps `first` to before `last`, and return their losses."""
        return [self._step(monitor, step) for step in range(first, last)]

    def _step(self, monitor: Any, step: int) -> float:
        self.before(step)
        losses = []
        for micro in range(self.micro_steps):
            with self.context(step, micro):
                loss = self.loss_of(self.model, self.batch(step, micro))
                monitor.record(loss=loss)
                self.backward(loss if self.micro_steps == 1 else loss / self.micro_steps)
            losses.append(loss.item())
        self.between(step)
        (self.update or self._update)(step)
        (self.zero or self.optimizer.zero_grad)()
        self.after(step)
        return sum(losses) / len(losses)

    def _update(self, _step: int) -> None:
        self.optimizer.step()

    def checkpoint(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        if self.save is not None:
            return self.save()
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        if self.restore is not None:
            self.restore(saved)
        else:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])


def digest(model: Any) -> str:
    """Return a digest of all parameters and buffers that this rank holds."""
    found = hashlib.sha256()
    for module in model if isinstance(model, list) else [model]:
        for tensor in _tensors(module):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            found.update(local.detach().to(torch.float64).contiguous().numpy().tobytes())
    return found.hexdigest()


def _tensors(module: nn.Module) -> list[Any]:
    held = [*nn.Module.parameters(module), *nn.Module.buffers(module)]  # Megatron calls other things `buffers`
    return [getattr(tensor, "ds_tensor", tensor) for tensor in held]
