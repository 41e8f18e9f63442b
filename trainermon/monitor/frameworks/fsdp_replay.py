"""What a replay under FSDP must put aside: all gradients, sharded and flat. The rest FSDP leaves as it found it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainermon.hooks.replayable import Replayable
from trainermon.monitor.frameworks.dtensor import local

# How many gradients are looked at first, one element of each, when asked whether all are gone.
NUM_PROBES = 8
# What FSDP1 notes on a flat parameter beside `.grad`.
FLAT_NOTES = ("_is_grad_none_mask", "_saved_grad_shard", "_post_backward_called")
_ABSENT = object()


class FsdpReplayable(Replayable):
    """How a step under FSDP is replayed: by all ranks, as in training, into gradients that are thrown away.

    Args:
        training: The set-up, FSDP1's or FSDP2's.
        flats: FSDP1's flat parameters.
        refusal: Why no step can be replayed; "" if one can.
    """

    joint = True
    shadowed = False

    def __init__(self, training: Any, *, flats: Sequence[nn.Parameter] = (), refusal: str = "") -> None:
        super().__init__(refusal=refusal)
        self._training = training
        self._flats = list(flats)

    def _holders(self) -> list[nn.Parameter]:
        """Return everything that has a `.grad`; the flat parameters first, of which others' gradients are views."""
        return [*self._flats, *(parameter for root in self._training.roots for parameter in root.parameters())]

    def not_ready(self) -> str:
        """Return why the step cannot be replayed (gradients not reduced or of another dtype), "" if it can."""
        if not self._training.is_reduced_now():
            return "the script has switched the reduction of gradients off"
        if any(p.grad is not None and p.grad.dtype is not p.dtype for p in self._holders()):
            return "gradients have another dtype than their parameters"
        return ""

    def gradients_vanished(self) -> bool:
        """Return whether no gradient of this rank has a finite element except zeros.

        One element of a few is read first.
        """
        owned = [gradient for gradient in self._training.reduced_gradients() if gradient is not None]
        probes = sorted(owned, key=Tensor.numel, reverse=True)[:NUM_PROBES]
        return bool(probes) and not (
            _any_ordinary([gradient.flatten()[gradient.numel() // 2] for gradient in probes]) or _any_ordinary(owned)
        )

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Return a context for a replay, in which parameters have no gradients.

        At its end the same gradients are put back.
        """
        holders = self._holders()
        gradients = [(holder, holder.grad) for holder in holders]
        notes = [(flat, name, vars(flat).get(name, _ABSENT)) for flat in self._flats for name in FLAT_NOTES]
        self.between_micro_steps()
        try:
            yield
        finally:
            for flat, name, note in notes:
                if note is not _ABSENT:
                    setattr(flat, name, note)
                else:
                    vars(flat).pop(name, None)
            for holder, gradient in gradients:
                holder.grad = gradient

    def between_micro_steps(self) -> None:
        """Drop the gradients of the last replayed backward."""
        for holder in self._holders():
            holder.grad = None

    def own_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of this rank's part of each parameter; those of which it has none are left out."""
        for parameter, value in zip(self._training.parameters, self._training.values(), strict=True):
            if value is not None:
                yield parameter.name, local(value)


def _any_ordinary(tensors: Sequence[Tensor]) -> bool:
    """Return whether one of `tensors` has a finite element that is not zero. Waits for the device."""
    found = [((tensor != 0) & tensor.isfinite()).any() for tensor in tensors]
    return bool(found) and bool(torch.stack(found).any())
