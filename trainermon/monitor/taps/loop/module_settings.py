"""How the modules of the model are set, as a number for each class, so that ranks can be compared."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping

from torch import nn

from trainermon.core.catalogue import MODULE_SETTINGS_SERIES
from trainermon.core.values import Kind, Placement, SeriesKey
from trainermon.hooks.names import plain_name
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.loop.loop_taps import LoopTap
from trainermon.monitor.taps.training import Training

_DIGEST_BYTES = 6  # a number that float64 holds
_BY_DESIGN = "expert"  # part of the names of modules that ranks may have others of


class ModuleSettings(LoopTap):
    """Tells once, of each class of modules, a number that is another one where one of them is set otherwise.

    That covers what a module prints of itself (`extra_repr`) and its attributes that are floats: epsilons, shares of a
    dropout, scales. Only where data-parallel ranks hold the same modules. No tensor is read;
    some microseconds a module.

    Args:
        training: What is watched.
        collector: Takes the rows, one for each class.
    """

    looks_for = "modules that ranks have set otherwise"

    def __init__(self, training: Training, collector: Collector) -> None:
        placements = [parameter.placement for parameter in training.parameters]
        has_peers = any("dp" in (*p.replicated_over, *p.partitioned_over) for p in placements)
        self._digests = digests_of(training.roots) if has_peers else {}
        self._collector = collector

    def step_ended(self) -> None:
        """File the rows, in the first step alone."""
        for name, digest in self._digests.items():
            key = SeriesKey(Kind.STEP, MODULE_SETTINGS_SERIES, slot=name)
            placement = Placement(dtype="float64", shape=(), replicated_over=("dp",))
            self._collector.put(self._collector.table.id_of(key, placement), float(digest))
        self._digests = {}


def digests_of(roots: Iterable[nn.Module]) -> Mapping[str, int]:
    """Return, by the name of each class of modules within `roots`, a digest of how all of them are set."""
    found: dict[str, list[str]] = {}
    for stage, root in enumerate(roots):
        for path, module in root.named_modules():
            if _BY_DESIGN not in path:
                found.setdefault(type(module).__name__, []).append(f"{stage} {plain_name(path)} {_settings_of(module)}")
    digests = {name: hashlib.sha256("\n".join(lines).encode()).digest() for name, lines in found.items()}
    return {name: int.from_bytes(digest[:_DIGEST_BYTES], "big") for name, digest in digests.items()}


def _settings_of(module: nn.Module) -> str:
    printed = ""
    with contextlib.suppress(Exception):  # the model's own code, which may need what is not there yet
        printed = module.extra_repr()
    floats = {name: value for name, value in vars(module).items() if type(value) is float}
    return f"{printed} {sorted(floats.items())}"
