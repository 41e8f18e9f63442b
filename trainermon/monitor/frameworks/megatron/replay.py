"""What a replay under Megatron-Core must keep and put back: its generators, and what a forward adds up for the log.

Nothing here imports Megatron: a script that trains with it has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainermon.hooks.replayable import Replayable, nothing

RANDOM = "megatron.core.tensor_parallel.random"
MOE = "megatron.core.transformer.moe.moe_utils"
MTP = "megatron.core.transformer.multi_token_prediction"
HANDED = "input_tensor"
# Switches of modules by which a GEMM adds to `main_grad` itself.
FUSION = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
# Settings under which a forward or backward leaves more behind than is put back here; the value that is harmless.
REFUSED = (
    ("fp8", None, "the scaling history of FP8"),
    ("fp4", None, "the scaling history of FP4"),
    ("cuda_graph_impl", "none", "CUDA graphs"),
    ("enable_cuda_graph", False, "CUDA graphs"),
    ("external_cuda_graph", False, "CUDA graphs"),
    ("defer_embedding_wgrad_compute", False, "deferred weight gradients"),
    ("delay_wgrad_compute", False, "delayed weight gradients"),
    ("overlap_moe_expert_parallel_comm", False, "layers that the schedule calls one by one"),
    ("fine_grained_activation_offloading", False, "offloaded activations"),
    ("cpu_offloading", False, "offloaded activations"),
)


class MegatronReplayable(Replayable):
    """How a step of Megatron is replayed: each pipeline stage from the activations and gradients that it was given.

    Only the other axes communicate.

    Args:
        roots: What is below the wrappers, one per virtual pipeline stage.
        axes: The axes (`tp`, `cp` …) over which the forward communicates.
        scaler: Megatron's gradient scaler; None: there is none.
    """

    def __init__(self, roots: Sequence[nn.Module], axes: Sequence[str], scaler: Any) -> None:
        self._roots = roots
        self._scaler = scaler
        self.joint = any(axis != "pp" for axis in axes)
        super().__init__(refusal=self._find_refusal(is_pipeline="pp" in axes))

    def _find_refusal(self, *, is_pipeline: bool) -> str:
        config = next((m.config for root in self._roots for m in root.modules() if hasattr(m, "config")), None)
        for name, harmless, what in REFUSED:
            if getattr(config, name, harmless) not in (harmless, False, None):
                return f"{what} ({name}) cannot be put back"
        if is_pipeline and not all(self.handed(stage) for stage in range(len(self._roots))):
            return f"a stage of the pipeline has no module with {HANDED}, in which it is handed its activation"
        return ""

    def handed(self, stage: int) -> list[tuple[nn.Module, str]]:
        """Return (module, attribute) of each place where `set_input_tensor` puts a pipeline stage's input."""
        return [(module, HANDED) for module in self._roots[stage].modules() if HANDED in vars(module)]

    def generators(self) -> Callable[[], None]:
        """Save the states that Megatron tracks by name; return a function that restores them.

        Only generators' states are copied: other states are replaced when they are drawn from.
        """
        module = sys.modules.get(RANDOM)
        tracker = module.get_cuda_rng_tracker() if module is not None else None
        if tracker is None:
            return nothing
        states = tracker.get_states()
        kept = {name: _state_of(state) for name, state in states.items()}

        def put_back() -> None:
            for name, state in states.items():
                if isinstance(state, torch.Generator):
                    state.set_state(kept[name])
            tracker.set_states(dict(states))

        return put_back

    def expects_overflow(self) -> bool:
        """Return whether non-finite gradients are normal now: a dynamic loss scale is above its least value."""
        least = getattr(self._scaler, "min_scale", None)
        return least is not None and float(self._scaler.scale) > float(least)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Return a context for a replay, in which matrix products do not add weight gradients to `main_grad`.

        At its end the sums of auxiliary losses, which Megatron keeps for its log, are restored.
        """
        switches = [
            (module, name)
            for root in self._roots
            for module in root.modules()
            for name in FUSION
            if vars(module).get(name) is True
        ]
        sums = [(tracker, _copy_of(tracker)) for tracker in _trackers()]
        for module, name in switches:
            setattr(module, name, False)
        try:
            yield
        finally:
            for module, name in switches:
                setattr(module, name, True)
            for tracker, copy in sums:
                _put_back(tracker, copy)


def _state_of(state: Any) -> Any:
    return state.get_state() if isinstance(state, torch.Generator) else state


def _trackers() -> Iterator[dict[str, Any]]:
    """Yield the dicts in which Megatron adds up auxiliary losses of the forward."""
    moe, mtp = sys.modules.get(MOE), sys.modules.get(MTP)
    find = getattr(moe, "get_moe_layer_wise_logging_tracker", None)
    if find is not None:
        yield find()
    yield from (found for found in [getattr(getattr(mtp, "MTPLossLoggingHelper", None), "tracker", None)] if found)


def _copy_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy_of(inside) for name, inside in value.items()}
    return (value, value.detach().clone()) if isinstance(value, Tensor) else value


def _put_back(tracker: dict[str, Any], copy: dict[str, Any]) -> None:
    for name in tracker.keys() - copy.keys():
        del tracker[name]
    for name, kept in copy.items():
        if isinstance(kept, dict):
            _put_back(tracker[name], kept)
        elif isinstance(kept, tuple) and kept and isinstance(kept[0], Tensor):
            tracker[name] = kept[0]
            with torch.no_grad():
                kept[0].copy_(kept[1])
        else:
            tracker[name] = kept
