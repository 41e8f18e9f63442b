"""What of DeepSpeed is watched, and a refusal of everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from trainermon.core.errors import AttachError

ENGINES = frozenset({"DeepSpeedEngine", "PipelineEngine"})
HINT = "pass what deepspeed.initialize returned: the engine as the model, and its optimizer or none"


def find_engine(chunk: nn.Module) -> Any | None:
    """Return the DeepSpeed engine that `chunk` is, possibly inside a compiled wrapper; None if it is none."""
    inner = getattr(chunk, "_orig_mod", chunk)
    return inner if _first_of_deepspeed(inner).endswith("Engine") else None


def is_of_deepspeed(chunks: Sequence[nn.Module], optimizer: object) -> bool:
    """Return whether DeepSpeed trains this model, with or without its engine at hand. Imports nothing."""
    if any(find_engine(chunk) is not None for chunk in chunks):
        return True
    if any(kind.__module__.startswith("deepspeed.runtime.") for kind in type(optimizer).__mro__):
        return True
    return any(_is_marked(chunk) for chunk in chunks)


def _is_marked(chunk: nn.Module) -> bool:
    """Return whether an engine has left its marks on its inner module; up to 0.17 stage 0 leaves none."""
    hooks = chunk._forward_pre_hooks.values()
    if any(getattr(hook, "__module__", "").startswith("deepspeed.runtime.") for hook in hooks):
        return True
    return any(hasattr(parameter, mark) for parameter in chunk.parameters() for mark in ("ds_id", "_hp_mapping"))


def check(engine: Any, optimizer: Any) -> None:
    """Raise an error for a DeepSpeed set-up whose numbers are not known to be right.

    Raises:
        AttachError: An engine, an optimizer or a way of parallelism that is not watched.
    """
    _check_arguments(engine, optimizer)
    for found, reason in _not_watched(engine):
        if found:
            raise AttachError(
                f"deepspeed: found {reason}, which trainermon does not watch; train without it, or unwatched"
            )


def _check_arguments(engine: Any, optimizer: Any) -> None:
    kind = _first_of_deepspeed(engine)
    if kind not in ENGINES:
        raise AttachError(f"model: found {kind}, expected {' or '.join(sorted(ENGINES))} of DeepSpeed")
    if engine.optimizer is None or type(engine.optimizer).__name__ in ("DummyOptim", "DeepSpeedZeRoOffload"):
        raise AttachError("deepspeed: the engine has no optimizer, so there is no training step to watch")
    known = (None, engine.optimizer, getattr(engine, "basic_optimizer", None))
    unwrapped = getattr(optimizer, "optimizer", None)  # accelerate's wrapper around the engine's
    if not any(optimizer is one for one in known) and unwrapped is not engine.optimizer:
        raise AttachError(f"optimizer: found a {type(optimizer).__name__} that is not the engine's own; {HINT}")


def _not_watched(engine: Any) -> list[tuple[bool, str]]:
    held = engine.optimizer
    zenflow = getattr(engine, "zenflow", False)
    compiled = engine.is_deepcompile_enabled()
    offload = engine.zero_offload_optimizer() if engine.zero_optimization() else None
    scaler = getattr(engine, "torch_autocast_z0_gradscaler", None) or getattr(held, "torch_autocast_gradscaler", None)
    inner = type(engine.basic_optimizer).__name__
    return [
        (bool(zenflow), "ZenFlow"),
        (bool(compiled), "DeepCompile"),
        (scaler is not None, "torch_autocast in float16 with a scaler of torch's"),
        (inner.startswith(("Onebit", "ZeroOne")), f"{inner}, which reduces compressed gradients in its own step"),
        (
            str(getattr(offload, "device", "")).endswith("nvme"),
            "an optimizer on NVMe, where its states are not in memory",
        ),
        (engine.sequence_parallel_size > 1, "sequence parallelism"),
        (engine.autotp_size() > 1, "automatic tensor parallelism"),
        (_tensor_parallel_size(engine) > 1, "tensor parallelism by an mpu"),
        (any(type(m).__module__.endswith("auto_ep_layer") for m in engine.module.modules()), "AutoEP"),
    ]


def _tensor_parallel_size(engine: Any) -> int:
    sizes = ("get_slice_parallel_world_size", "get_tensor_model_parallel_world_size", "get_model_parallel_world_size")
    size = next((getattr(engine.mpu, name) for name in sizes if hasattr(engine.mpu, name)), None)
    return 1 if size is None else int(size())


def _first_of_deepspeed(instance: object) -> str:
    mro = type(instance).__mro__
    return next((kind.__name__ for kind in mro if kind.__module__.startswith("deepspeed.runtime.")), "")
