"""FSDP2: `fully_shard` over a mesh, with hybrid sharding and tensor-parallel DTensors; also DTensors without FSDP.

What is public is used: the parameters are DTensors, and mesh, placements and local tensors say what is where. What is
seen between backward and reduction is not public: groups of parameters, their unsharded parameters, and the function
that reduces a group. Each of these is looked for when the monitor is attached, and its absence is an `AttachError`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainermon.core.errors import AttachError
from trainermon.core.values import Coordinates, Placement
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.names import plain_name
from trainermon.hooks.patch import Patch
from trainermon.hooks.replayable import Replayable
from trainermon.hooks.tensor_hooks import hook_accumulated, hook_leaf
from trainermon.monitor.frameworks import plain
from trainermon.monitor.frameworks.dtensor import dtype_name, is_dtensor, is_partial, local, placements_of
from trainermon.monitor.frameworks.fsdp_replay import FsdpReplayable
from trainermon.monitor.taps.training import GradientVersion, HeldParameter, OptimizerState, TapHandle

logger = logging.getLogger("trainermon")

# What is read of torch's private classes; found in torch 2.13.
GROUP_ATTRIBUTES = ("fsdp_params", "modules", "post_backward", "reduce_grads", "is_sharded", "is_unsharded")
PARAM_ATTRIBUTES = ("_module_info", "mesh_info", "mp_policy", "unsharded_accumulated_grad")
REDUCE = "foreach_reduce"


class Fsdp2Training(plain.PlainTraining):
    """How a model under FSDP2 (`fully_shard`) is watched: the optimizer steps shards, backward runs on whole ones.

    Attributes:
        groups: What FSDP gathers and reduces together, with its virtual stage.
        managed: FSDP's own record of each parameter; None for one that it does not manage.
    """

    keeps_parameters = False
    framework = "fsdp2"
    counts_writes = False
    holds_replicas = False
    groups: Sequence[tuple[int, Any]]
    managed: Sequence[Any]

    def replayable(self) -> Replayable:
        """Return how all ranks replay a step together; models whose DTensors nobody gathers cannot be replayed."""
        if not self.groups:
            return Replayable(refusal="tensor-parallel DTensors communicate in forward and backward")
        return FsdpReplayable(self)

    # ------------------------------------------------------------------ gradients

    def watch_accumulation(self, guard: FaultGuard, reached: Callable[[int], None]) -> list[TapHandle]:
        """Call `reached(stage)` at the end of each group's backward; return the hooks.

        Hooks on sharded parameters would slow down offloading; there are some only on those that FSDP does not manage.
        """
        handles = self._post_accumulate(guard, lambda index, _parameter: reached(self.parameters[index].stage))
        for stage, group in self.groups:
            before = guard.wrap(_report_group, group, stage, reached)
            handles.append(Patch(group, "post_backward", before=before))
        return handles

    def watch_unreduced(self, guard: FaultGuard, see: Callable[[int, Tensor], None]) -> list[TapHandle]:
        """Call `see(index, gradient)` with each parameter's gradient before FSDP's reduce-scatter; return the hooks.

        `index` is the parameter's position in `parameters`; `guard` contains errors of `see`. For parameters that FSDP
        does not manage, it is called when their gradient is there.
        """
        index_of = self._index_of()

        def before(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            for managed, gradient in zip(args[0], args[1], strict=True):
                if id(managed) in index_of:  # another model may be reduced by the same function
                    see(index_of[id(managed)], gradient)

        modules = {sys.modules[type(group).__module__] for _, group in self.groups}
        handles: list[TapHandle] = [Patch(module, REDUCE, before=guard.wrap(before)) for module in modules]
        return handles + self._post_accumulate(guard, lambda index, p: self._see_local(index, p.grad, see))

    def watch_micro_gradients(self, guard: FaultGuard, see: Callable[[int, Tensor], None]) -> list[TapHandle]:
        """Call `see(index, gradient)` with this rank's part of what a single backward adds; return the hooks.

        They are on the unsharded parameters, which exist from the first forward on.
        """
        hooks, index_of = _LateHooks(), self._index_of()

        def hook_of(index: int) -> Callable[[Tensor], None]:
            return guard.wrap(lambda gradient: self._see_local(index, gradient, see))

        for _, group in self.groups:
            wanted = [
                (managed, hook_of(index_of[id(managed)])) for managed in group.fsdp_params if id(managed) in index_of
            ]
            hooks.register(guard, group.modules, wanted)
        own = [
            hook_leaf(parameter.tensor, hook_of(index))
            for index, parameter in enumerate(self.parameters)
            if self.managed[index] is None
        ]
        return [hooks, *own]

    def is_reduced_now(self) -> bool:
        """Return, at the end of a backward, whether its gradients were reduced (`set_requires_gradient_sync`)."""
        return any(group.reduce_grads for _, group in self.groups)

    def gradients_are_gone(self) -> bool:
        """Return whether the script has dropped all gradients: sharded ones, and those that await their reduction."""
        return super().gradients_are_gone() and not any(
            _has_gradient(managed) for managed in self.managed if managed is not None
        )

    def reduced_gradients(self) -> list[Tensor | None]:
        """Return the local part of `.grad` of each parameter; None where it is a partial sum or empty."""
        return [self._local_gradient(index, p.tensor.grad) for index, p in enumerate(self.parameters)]

    def gradient_versions(self) -> list[GradientVersion]:
        """Return by parameter its gradient and how often that and its local part were written to."""
        pairs = zip(super().gradient_versions(), self.reduced_gradients(), strict=True)
        return [(whole, count if part is None else count + part._version) for (whole, count), part in pairs]

    # ------------------------------------------------------------------ optimizer

    def values(self) -> list[Tensor | None]:
        """Return this rank's shard of each parameter; None where it is empty."""
        return [local(p.tensor) if p.owned.length != 0 else None for p in self.parameters]

    def used_weights(self) -> list[Tensor | None]:
        """Return by parameter the copy that the forward gathered, where it is still there; None elsewhere.

        FSDP gathers nothing anew while there is one, though the optimizer steps the shards.
        """
        gathered = {id(managed) for _, group in self.groups if group.is_unsharded for managed in group.fsdp_params}
        if not gathered:
            return [None] * len(self.parameters)
        return [local(managed._unsharded_param) if id(managed) in gathered else None for managed in self.managed]

    def states(self) -> list[OptimizerState | None]:
        """Return by parameter the local part of its optimizer state; None before its first step or if it is empty."""
        return [
            None
            if found is None or p.owned.length == 0
            else OptimizerState(local(p.tensor), {k: local(v) for k, v in found.state.items()}, found.group)
            for p, found in zip(self.parameters, super().states(), strict=True)
        ]

    # ------------------------------------------------------------------ parts

    def _index_of(self) -> dict[int, int]:
        """Return the index of each parameter by the id of FSDP's record of it."""
        return {id(managed): index for index, managed in enumerate(self.managed) if managed is not None}

    def _post_accumulate(self, guard: FaultGuard, call: Callable[[int, Tensor], None]) -> list[TapHandle]:
        """Have `call(index, parameter)` called when a parameter that FSDP does not manage got a gradient."""
        return [
            hook_accumulated(p.tensor, guard.wrap(call, index))
            for index, p in enumerate(self.parameters)
            if self.managed[index] is None
        ]

    def _see_local(self, index: int, gradient: Tensor | None, see: Callable[[int, Tensor], None]) -> None:
        local = self._local_gradient(index, gradient, is_unsharded=self.managed[index] is not None)
        if local is not None:
            see(index, local)

    def _local_gradient(self, index: int, gradient: Tensor | None, *, is_unsharded: bool = False) -> Tensor | None:
        parameter = self.parameters[index]
        placement = parameter.placement if is_unsharded else parameter.owned
        if gradient is None or placement.length == 0:
            return None
        if is_partial(gradient):
            _warn_of_partial(parameter.name)
            return None
        found: Tensor = local(gradient)
        return found


class _LateHooks:
    """Tensor hooks on parameters that may not exist before the first forward."""

    def __init__(self) -> None:
        self._handles: list[TapHandle] = []

    def register(
        self, guard: FaultGuard, modules: Sequence[nn.Module], wanted: Sequence[tuple[Any, Callable[[Tensor], None]]]
    ) -> None:
        """Hook those that exist, and the others when one of `modules` begins its next forward."""
        missing = [(managed, hook) for managed, hook in wanted if not self._hook(managed, hook)]

        def before(_module: nn.Module, _args: tuple[Any, ...]) -> None:
            missing[:] = [(managed, hook) for managed, hook in missing if not self._hook(managed, hook)]

        if missing:  # FSDP's own hook, which makes the parameters, is always the first
            self._handles.extend(module.register_forward_pre_hook(guard.wrap(before)) for module in modules)

    def _hook(self, managed: Any, hook: Callable[[Tensor], None]) -> bool:
        unsharded = getattr(managed, "_unsharded_param", None)
        if unsharded is None or not unsharded.requires_grad:
            return False
        self._handles.append(unsharded.register_hook(hook))
        return True

    def remove(self) -> None:
        """Remove all of the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def recognises(chunks: Sequence[nn.Module], optimizer: object) -> bool:
    """Return whether a module of the model was given to `fully_shard`, or a parameter is a DTensor."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    return any(
        any(_is_fsdp(module) for module in chunk.modules()) or any(is_dtensor(p) for p in chunk.parameters())
        for chunk in chunks
    )


def describe(chunks: Sequence[nn.Module], optimizer: torch.optim.Optimizer, coordinates: Coordinates) -> Fsdp2Training:
    """Return how the training of FSDP2 modules and other DTensors is watched.

    Raises:
        AttachError: A parameter is placed in a way that cannot be merged over ranks, or not on a device yet, the
            optimizer steps none of them, or torch's own classes are not what they were.
    """
    groups = [(stage, group) for stage, chunk in enumerate(chunks) for group in _groups(chunk)]
    _check_groups([group for _, group in groups])
    found = [item for stage, chunk in enumerate(chunks) for item in _parameters(chunk, stage, coordinates)]
    training = Fsdp2Training(
        model=chunks[0],
        roots=tuple(chunks),
        modules=plain.modules_of(chunks),
        parameters=[parameter for parameter, _ in found],
        optimizer=optimizer,
    )
    training.groups = groups
    training.managed = [managed for _, managed in found]
    training.reduces = bool(groups)
    training.reduced_by_script = frozenset(
        i for i, (parameter, managed) in enumerate(found) if groups and not managed and not is_dtensor(parameter.tensor)
    )
    axes = {axis for p in training.parameters for axis in p.owned.partitioned_over}
    training.communicates = tuple(sorted(axes | ({"dp"} if groups else set())))
    if training.parameters:
        plain.require_stepped(training)
    return training


# ---------------------------------------------------------------------- what is where


def _parameters(chunk: nn.Module, stage: int, coordinates: Coordinates) -> Iterator[tuple[HeldParameter, Any]]:
    """Yield every parameter that requires a gradient, with FSDP's record of it; a shared one once."""
    managed_by = {
        (id(managed._module_info.module), managed._module_info.param_name): managed
        for group in _groups(chunk)
        for managed in group.fsdp_params
    }
    seen: set[int] = set()
    for path, module in chunk.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            if tensor.requires_grad and id(tensor) not in seen:
                seen.add(id(tensor))
                managed = managed_by.get((id(module), name))
                full_name = plain_name(f"{path}.{name}" if path else name)
                yield _parameter(full_name, tensor, managed, stage=stage, coordinates=coordinates), managed


def _parameter(name: str, tensor: nn.Parameter, managed: Any, *, stage: int, coordinates: Coordinates) -> HeldParameter:
    if tensor.is_meta or nn.parameter.is_lazy(tensor):
        raise AttachError(f"model: parameter {name} has no values yet; call set_monitor after it was initialised")
    if not is_dtensor(tensor):
        whole = Placement(
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            replicated_over=("dp",),
            in_global_norm=coordinates.dp == 0 and coordinates.tp == 0,
        )
        return HeldParameter(name, tensor, whole, stage)
    unsharded_dtype = managed.mp_policy.param_dtype or tensor.dtype if managed else tensor.dtype
    whole, shard = placements_of(
        name,
        tensor,
        data_dims=_data_dims(name, tensor, managed) if managed else (),
        unsharded_dtype=unsharded_dtype,
        coordinates=coordinates,
    )
    return HeldParameter(name, tensor, whole, stage, shard)


def _data_dims(name: str, tensor: Any, managed: Any) -> Collection[int]:
    """Return the dimensions of the parameter's mesh that are FSDP's own: the first ones, or those it was told."""
    info, mesh = managed.mesh_info, tensor.device_mesh
    told = getattr(info, "dp_mesh_dims", None)
    if told is None:
        return range(info.mesh.ndim)
    names = {*told.shard_names, *told.replicate_names}
    if len(told.shard_names) > 1 or not names <= set(mesh.mesh_dim_names or ()):
        raise AttachError(
            f"model: parameter {name} is sharded over {told} of {mesh}; this version watches one sharded data-parallel "
            "dimension: flatten the mesh's dimensions before fully_shard"
        )
    return [i for i, dim_name in enumerate(mesh.mesh_dim_names) if dim_name in names]


# ---------------------------------------------------------------------- torch's own records


def _is_fsdp(module: nn.Module) -> bool:
    return any(cls.__name__ == "FSDPModule" and cls.__module__.startswith("torch.") for cls in type(module).__mro__)


def _groups(chunk: nn.Module) -> list[Any]:
    """Return FSDP's groups of parameters below `chunk`, each once."""
    states = [module._get_fsdp_state() for module in chunk.modules() if _is_fsdp(module)]  # type: ignore[operator]
    groups = [
        group
        for state in states
        for group in (getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])
        if group is not None
    ]
    return list({id(group): group for group in groups}.values())


def _check_groups(groups: Sequence[Any]) -> None:
    """Refuse what is not as it was in the versions of torch that this was written for, and what is unsharded now."""
    missing = {name for group in groups for name in GROUP_ATTRIBUTES if not hasattr(group, name)}
    missing |= {n for group in groups for p in group.fsdp_params for n in PARAM_ATTRIBUTES if not hasattr(p, n)}
    reducers = {getattr(sys.modules[type(group).__module__], REDUCE, None) for group in groups}
    for reduce in reducers:
        if reduce is None or list(inspect.signature(reduce).parameters)[:2] != ["fsdp_params", "unsharded_grads"]:
            missing.add(f"{REDUCE}(fsdp_params, unsharded_grads, …)")
    if missing:
        raise AttachError(
            f"torch {torch.__version__}: its fully_shard has no {', '.join(sorted(missing))}, which this version of "
            "trainermon reads; use a version of torch that the documentation names"
        )
    if not all(group.is_sharded for group in groups):
        raise AttachError(
            "model: its parameters are unsharded at the moment; call set_monitor before the first forward, or between "
            "two steps after model.reshard()"
        )


def _has_gradient(managed: Any) -> bool:
    """Return whether a gradient is there that has not been reduced yet."""
    unsharded = getattr(managed, "_unsharded_param", None)
    return managed.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)


def _report_group(
    group: Any, stage: int, reached: Callable[[int], None], _args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> None:
    if any(_has_gradient(managed) for managed in group.fsdp_params):
        reached(stage)


@functools.cache
def _warn_of_partial(name: str) -> None:
    logger.warning(
        "the gradient of %s is a partial sum over tensor-parallel ranks that torch has not reduced: it is left out",
        name,
    )
