"""The random generators that a call may draw from: their state before it, so that it can be repeated."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class GeneratorStates:
    """The state of the CPU's generator, of those of some devices, and of generators that were passed as arguments."""

    cpu: torch.Tensor
    devices: tuple[tuple[torch.device, torch.Tensor], ...]
    passed: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()

    @classmethod
    def current(cls, values: Iterable[Any]) -> GeneratorStates:
        """Return the present states; `values` are the arguments of a call. Cost: 5 µs, and as much for each device."""
        devices, passed = set(), []
        for value in values:
            if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
                devices.add(value.device)
            elif isinstance(value, torch.Generator):
                passed.append((value, value.get_state()))
        states = tuple((device, _module_of(device).get_rng_state(device)) for device in sorted(devices, key=str))
        return cls(torch.get_rng_state(), states, tuple(passed))

    @property
    def have_moved(self) -> bool:
        """Whether one of the generators is in another state now: numbers have been drawn."""
        now = self._now()
        pairs = zip((self.cpu, *dict(self.devices).values()), (now.cpu, *dict(now.devices).values()), strict=True)
        drawn = any(not torch.equal(generator.get_state(), state) for generator, state in self.passed)
        return drawn or not all(torch.equal(before, after) for before, after in pairs)

    def put_back(self) -> None:
        """Set every one of these generators to this state."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices:
            _module_of(device).set_rng_state(state, device)
        for generator, state in self.passed:
            generator.set_state(state)

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Draw the same numbers again in a block, which leaves the generators as it found them."""
        found = self._now()
        self.put_back()
        try:
            yield
        finally:
            found.put_back()

    def _now(self) -> GeneratorStates:
        return GeneratorStates(
            torch.get_rng_state(),
            tuple((device, _module_of(device).get_rng_state(device)) for device, _ in self.devices),
            tuple((generator, generator.get_state()) for generator, _ in self.passed),
        )


def _module_of(device: torch.device) -> Any:
    return getattr(torch, device.type)
