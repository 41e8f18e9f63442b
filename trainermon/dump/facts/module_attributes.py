"""What a module of torch.nn is besides its own parameters: numbers, words, buffers, the parameters of its projection.

Of other modules nothing is written: their forward may be anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from trainermon.dump.forms import LaterText

_OF_TORCH = "torch.nn.modules."
_PLAIN = (bool, int, float, str, type(None))
# Longer ones are no setting.
_MAX_ITEMS = 8
COUNTER = "num_batches_tracked"
"""The buffer in which a normalisation counts its batches."""


@dataclasses.dataclass(slots=True, eq=False)
class ConstructedModule:
    """The attributes of one module for the files, read once for training and once for evaluation.

    Attributes:
        module: The module.
    """

    module: nn.Module
    _texts: dict[bool, LaterText] = dataclasses.field(default_factory=dict)

    def text(self) -> LaterText | None:
        """Return the module's plain attributes as a JSON object; None: it is none of torch's own modules."""
        known = self._texts.get(self.module.training)
        if known is None and is_torchs(self.module):
            known = self._texts[self.module.training] = LaterText(dict(_plain_attributes(self.module)))
        return known


def is_torchs(module: nn.Module) -> bool:
    """Return whether a module's class is one of torch.nn's own."""
    return type(module).__module__.startswith(_OF_TORCH)


def has_further(module: nn.Module) -> bool:
    """Return whether `further_tensors` may have any of a module of torch.nn; most have none. Cost: 0.1 µs."""
    return bool(module._buffers) or isinstance(module, nn.MultiheadAttention)


def further_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield by name what the forward of a module of torch.nn reads besides its own parameters.

    These are buffers, but not statistics that are being collected, and the parameters of attention's projection, whose
    own forward is never called.
    """
    if not (module.training and "running_mean" in module._buffers):
        for name, buffer in module._buffers.items():
            if buffer is not None and name != COUNTER:
                yield name, buffer
    if isinstance(module, nn.MultiheadAttention):
        for name, parameter in module.out_proj.named_parameters():
            yield f"out_proj.{name}", parameter


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        if type(value) in _PLAIN:
            yield name, value
        elif type(value) in (list, tuple) and len(value) <= _MAX_ITEMS and all(type(one) in _PLAIN for one in value):
            yield name, list(value)
