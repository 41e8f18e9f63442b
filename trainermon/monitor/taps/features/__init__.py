"""Features of special modules: attention, weight matrices, routers, FP8."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from functools import partial

from trainermon.core.config import MonitorConfig
from trainermon.core.errors import ConfigError
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.names import advice, chosen
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.features.attention import AttentionFeature
from trainermon.monitor.taps.features.feature import Feature, matrix_of
from trainermon.monitor.taps.features.fp8 import Fp8Feature, has_fp8
from trainermon.monitor.taps.features.routing import ChoiceEntropyFeature, LoadFeature, is_router
from trainermon.monitor.taps.features.weights import LinearFeature, SimilarityFeature
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.training import TapHandle, WatchedModule

__all__ = ["FeatureTaps", "check"]


class FeatureTaps:
    """Records the features (spectral norms, attention entropies, expert load, FP8 state) of the chosen modules.

    `l2_targets` names modules for most of them; expert load and FP8 state are taken of those in `targets`. What is
    carried from step to step (power iteration) lives as long as this object.

    Args:
        modules: Every module of the model.
        collector: Takes the rows.
        steps: Tells whether a training forward runs.
        guard: Contains errors of the hooks.
        config: What is asked for; without `recording_l2_features`, nothing.

    Attributes:
        are_any: Whether a feature is recorded.
    """

    def __init__(
        self,
        modules: Sequence[WatchedModule],
        collector: Collector,
        steps: MicroSteps,
        guard: FaultGuard,
        config: MonitorConfig,
    ) -> None:
        self._guard = guard
        self._handles: list[TapHandle] = []
        self._features: list[Feature] = []
        self.are_any = False
        if not config.recording_l2_features:
            return
        wanted = config.l2_targets
        for make, names in (
            (partial(AttentionFeature, order=config.sa_order), wanted.attention_hook),
            (LinearFeature, wanted.linear_hook),
            (SimilarityFeature, wanted.moe_router_weight_hook),
            (ChoiceEntropyFeature, wanted.moe_router_logit_hook),
        ):
            is_all = make is LinearFeature and names == ()
            found = [m for m in modules if (is_all and matrix_of(m.module) is not None) or _is_named(m, names or ())]
            self._features += [make(module, collector, steps) for module in found]
        for module in modules:
            if chosen(module.name, config.targets, module.stage, config.exclude):
                if is_router(module.module):
                    self._features.append(LoadFeature(module, collector, steps))
                if has_fp8(module.module):
                    self._features.append(Fp8Feature(module, collector, steps))
        self.are_any = bool(self._features)

    def attach(self) -> None:
        """Hook the modules whose features are recorded."""
        for feature in self._features:
            self._handles += feature.attach(self._guard)

    def detach(self) -> None:
        """Remove all hooks of the features."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for feature in self._features:
            feature.detach()

    def at_exit(self) -> None:
        """Record the features that are known only when the step is over.

        Call it before the step is sealed, and on collected steps only.
        """
        for feature in self._features:
            feature.at_exit()

    def new_step(self) -> None:
        """Drop what was seen in the step that has ended."""
        for feature in self._features:
            feature.new_step()


def check(modules: Sequence[WatchedModule], config: MonitorConfig, *, is_whole: bool = True) -> None:
    """Raise an error unless the modules that `l2_targets` names exist and have what their feature is made of.

    Args:
        modules: Every module of this rank.
        config: What is asked for.
        is_whole: These are all modules of the model: then a name that is not among them is wrong.

    Raises:
        ConfigError: A name or pattern names no module, or one without a weight matrix where that is needed.
    """
    if not config.recording_l2_features:
        return
    for key in ("attention_hook", "linear_hook", "moe_router_weight_hook", "moe_router_logit_hook"):
        for pattern in getattr(config.l2_targets, key) or ():
            found = [module for module in modules if _is_named(module, (pattern,))]
            if not found and is_whole:
                near = advice(pattern, [module.name for module in modules])
                raise ConfigError(f"l2_targets.{key}: {pattern!r} names no module; {near}")
            without = [module.name for module in found if matrix_of(module.module) is None]
            if without and key in ("linear_hook", "moe_router_weight_hook"):
                raise ConfigError(
                    f"l2_targets.{key}: {pattern!r} names {without[0]!r}, which has no weight of two dimensions"
                )


def _is_named(module: WatchedModule, patterns: Sequence[str]) -> bool:
    names = [pattern.removeprefix(f"{module.stage}:") for pattern in patterns]
    return any(module.name == name or fnmatch.fnmatchcase(module.name, name) for name in names)
