"""Whether model and optimizer still hold the parameters that are watched, and what to say if not."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from trainermon.hooks.names import plain_name
from trainermon.monitor.taps.training import HeldParameter

_LOOKS = 6  # modules a call, 5 µs
_NAMED = 5  # parameters that a message lists
_MAX_SCANS = 16  # that found nothing: a model whose modules change all the time is not looked at for ever
_NEEDS_GRADIENT = operator.attrgetter("requires_grad")
_AGAIN = "; close() this monitor and call set_monitor again to watch them"


class HeldPlaces:
    """Looks, at some modules a call, for parameters that were replaced, added, or unfrozen since this was made.

    Attributes:
        gone: Positions of the watched parameters that the model does not hold any more.
        successors: By position, what is in the place of those now, None for nothing.
        late: Parameters that were put in, or unfrozen, since, and that the optimizer steps. One that is in the place of
            a watched one has its shape and type: its rows go on.

    Args:
        parameters: Those that are watched.
        roots: The model.
        optimizer: What steps them.
        of_late: What the framework does with parameters that are put in, or unfrozen, so late, in words.
    """

    def __init__(
        self, parameters: Sequence[HeldParameter], roots: Sequence[nn.Module], optimizer: Any, of_late: str = ""
    ) -> None:
        self._parameters, self._roots, self._optimizer = parameters, roots, optimizer
        self._of_late = of_late
        self.gone: frozenset[int] = frozenset()
        self.successors: Mapping[int, nn.Parameter | None] = {}
        self.late: Sequence[HeldParameter] = ()
        self._watched = {id(parameter.tensor) for parameter in parameters}
        self._known = {id(parameter.tensor) for parameter in parameters}
        self._scans_left = _MAX_SCANS
        self._begin()

    def look(self) -> str:
        """Return what has changed, in words; "" where nothing was found.

        Costs some microseconds, and once, where something is found, as much as going through all parameters.
        """
        modules = itertools.islice(self._modules, self._num_modules)
        is_same = all([*map(id, held.values())] == before for held, before in modules)
        is_same = is_same and True not in map(_NEEDS_GRADIENT, self._frozen)
        if (is_same and num_stepped(self._optimizer) == self._num_stepped) or not self._scans_left:
            return ""
        message = self._scan()
        self._scans_left -= not message
        self._begin()
        return message

    def follow(self, optimizer: Any) -> None:
        """Compare with what `optimizer` steps from now on; the next look goes through all parameters."""
        self._optimizer, self._num_stepped = optimizer, -1

    def _begin(self) -> None:
        """Take the model as it is now for what is to be found later."""
        modules = [module for root in self._roots for module in root.modules()]
        places = [
            (held, [*map(id, held.values())])
            for module in modules
            if not isinstance(module, torch.jit.ScriptModule)  # whose dictionary is a view of C++, made anew each time
            for held in _dictionaries(module)
        ]
        self._modules = itertools.cycle(places)
        self._num_modules = min(2 * _LOOKS, len(places))
        self._frozen = [p for p in self._named().values() if not p.requires_grad and id(p) not in self._known]
        self._num_stepped = num_stepped(self._optimizer)

    def _named(self) -> dict[tuple[int, str], nn.Parameter]:
        return {
            (stage, plain_name(name)): parameter
            for stage, root in enumerate(self._roots)
            for name, parameter in root.named_parameters()
        }

    def _scan(self) -> str:
        """Return what is to be said of parameters of which nothing was said yet."""
        now = self._named()
        held = {id(parameter) for parameter in now.values()}
        lost = [i for i, p in enumerate(self._parameters) if id(p.tensor) not in held and i not in self.gone]
        self.gone |= {*lost}
        self.successors = {i: now.get((self._parameters[i].stage, self._parameters[i].name)) for i in self.gone}
        replaced = {(self._parameters[i].stage, self._parameters[i].name) for i in lost}
        trained = {key: p for key, p in now.items() if p.requires_grad and id(p) not in self._known}
        new = [name for (stage, name), p in trained.items() if (stage, name) not in replaced]
        stepped = [p for group in self._optimizer.param_groups for p in group["params"]]
        self.late = self._late(now, {*map(id, stepped)})
        foreign = [p for p in stepped if p.requires_grad and id(p) not in self._known | held]
        self._known |= {id(p) for p in (*trained.values(), *foreign)}
        parts = []
        if lost:
            names = _listed([self._parameters[i].name for i in lost])
            parts.append(
                f"the model holds another parameter in the place of {names} than at set_monitor, or none (a module was "
                "replaced, or load_state_dict(assign=True)): nothing but its gradient is shown from now on, if it is "
                "stepped and has the same shape, and rows of the last steps may be those of the old one"
            )
        if new:
            parts.append(
                f"parameters require a gradient that did not, or were not there, at set_monitor: {_listed(new)} (of "
                "those that are stepped the gradients are shown)"
            )
        if self._of_late and (new or lost):
            parts.append(self._of_late)
        if foreign:
            parts.append(f"the optimizer has been given {len(foreign)} parameters that the model does not hold")
        return "; ".join(parts) + _AGAIN if parts else ""

    def _late(self, now: Mapping[tuple[int, str], nn.Parameter], stepped: Set[int]) -> Sequence[HeldParameter]:
        before = {(held.stage, held.name): held.placement for held in self._parameters}
        usual = self._parameters[0].placement
        found = []
        for (stage, name), p in now.items():
            dtype = str(p.dtype).removeprefix("torch.")
            placement = dataclasses.replace(usual, dtype=dtype, shape=tuple(p.shape))
            is_late = p.requires_grad and id(p) not in self._watched and id(p) in stepped
            if is_late and before.get((stage, name), placement) == placement:
                found.append(HeldParameter(name, p, placement, stage))
        return found


class HeldModules:
    """Looks, at some modules a call, for modules that were replaced, and for parameters that were unfrozen.

    For frameworks that put parameters of their own in the place of the model's: the parameters themselves tell nothing.
    """

    def __init__(self, parameters: Sequence[HeldParameter], roots: Sequence[nn.Module]) -> None:
        self._roots = roots
        watched = {id(parameter.tensor) for parameter in parameters}
        named = ((plain_name(name), p) for root in roots for name, p in root.named_parameters())
        self._frozen = {name: p for name, p in named if not p.requires_grad and id(p) not in watched}
        self._scans_left = _MAX_SCANS
        self._begin()

    def look(self) -> str:
        """Return what has changed, in words; "" where nothing was found. Some microseconds, as `HeldPlaces.look`."""
        modules = itertools.islice(self._places, self._num_places)
        is_same = all([*map(id, held.values())] == before for held, before in modules)
        if (is_same and True not in map(_NEEDS_GRADIENT, self._frozen.values())) or not self._scans_left:
            return ""
        before, parts = self._modules, []
        self._scans_left -= 1
        self._begin()
        changed = [name for name, module in self._modules.items() if before.get(name) is not module]
        unfrozen = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        for name in unfrozen:
            del self._frozen[name]
        if changed:
            outer = [name for name in changed if not any(name.startswith(f"{other}.") for other in changed)]
            parts.append(
                f"the model holds another module in the place of {_listed(outer)} than at set_monitor, or none was "
                "there: rows of its parameters go on being those of the old one, if there are any"
            )
        if unfrozen:
            parts.append(f"parameters require a gradient that did not at set_monitor: {_listed(unfrozen)}")
        return "; ".join(parts) + _AGAIN if parts else ""

    def _begin(self) -> None:
        self._modules = {plain_name(name): module for root in self._roots for name, module in root.named_modules()}
        places = [
            (module._modules, [*map(id, module._modules.values())])
            for module in self._modules.values()
            if module._modules and not isinstance(module, torch.jit.ScriptModule)
        ]
        self._places = itertools.cycle(places)
        self._num_places = min(_LOOKS, len(places))


def num_stepped(optimizer: Any) -> int:
    """Return how many parameters are in the groups of a torch optimizer."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def unstepped(optimizer: Any, parameters: Sequence[HeldParameter]) -> frozenset[int]:
    """Return the positions of the parameters that are in no group of the optimizer.

    None where all are: then it holds copies of its own, of which this cannot be told.
    """
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = frozenset(i for i, parameter in enumerate(parameters) if id(parameter.tensor) not in stepped)
    return frozenset() if len(found) == len(parameters) else found


def _dictionaries(module: nn.Module) -> Iterator[Mapping[str, Any]]:
    yield module._modules
    yield module._parameters


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
