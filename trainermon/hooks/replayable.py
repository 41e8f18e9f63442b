"""What a replay of a step must know of the framework that the step ran under."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from torch import Tensor, nn


def nothing() -> None:
    """Do nothing; the default where a function is expected that restores something."""


class Replayable:
    """What a framework must provide so that a step can be replayed.

    The defaults suit a model on one rank that does not communicate.

    Attributes:
        refusal: Why no step can be replayed; "" if one can.
        joint: The model communicates in its forward or backward: a replay needs every rank.
        shadowed: The parameters may stand aside for leaves of our own that share their storage. False where hooks of
            the framework know them; then the replay's backward runs into what `set_aside` has put aside.
        accumulates: Without shadows: backward may write to `.grad`. False: gradients are asked for one by one, and no
            hook behind a parameter fires; a model with reentrant checkpointing is refused then.
        entries: What the training loop calls, one module per root; empty: the roots themselves.
    """

    refusal: str = ""
    joint: bool = False
    shadowed: ClassVar[bool] = True
    accumulates: ClassVar[bool] = True
    entries: Sequence[nn.Module] = ()

    def __init__(self, *, refusal: str = "") -> None:
        self.refusal = refusal

    def handed(self, stage: int) -> Iterable[tuple[nn.Module, str]]:
        """Return the places, beside the arguments, where the framework gives the root of `stage` its input tensors.

        Each is (module, attribute), as for a pipeline stage's input.
        """
        del stage
        return ()

    def generators(self) -> Callable[[], None]:
        """Save the state of the framework's own random generators; return a function that restores it."""
        return nothing

    def expects_overflow(self) -> bool:
        """Return whether non-finite gradients are normal now, as a dynamic loss scale is being adjusted.

        The answer is the same on all ranks.
        """
        return False

    def gradients_vanished(self) -> bool:
        """Return whether this rank has gradients, and they hold no finite element but zeros. May wait for the device.

        Then, if they held others before, they were clipped by a norm that was not finite: NaN gives NaN everywhere,
        infinity zero and NaN. The norm is the same on all ranks. Only asked of a framework that tells no norm itself.
        """
        return False

    def not_ready(self) -> str:
        """Return why the step just computed cannot be replayed; "" if it can. Never waits for the device."""
        return ""

    def set_aside(self) -> AbstractContextManager[None]:
        """Return a context that restores, or protects, all that a replay would change outside the root modules.

        Such are gradient buffers and counters of the framework.
        """
        return nullcontext()

    def between_micro_steps(self) -> None:
        """Clear what the backward of one replayed micro step left behind, before the next one's forward."""

    def own_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of this rank's own part of each parameter that is gathered for a forward."""
        yield from ()
