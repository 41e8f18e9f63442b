"""FSDP1, `FullyShardedDataParallel`: flat parameters, of which each rank holds a range; every sharding strategy.

The flat parameter is the leaf that gradients arrive at, whether the original parameters are kept (`use_orig_params`) or
not, so everything before the reduction is watched there and cut into the original parameters by FSDP's own offsets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainermon.core.errors import AttachError
from trainermon.core.values import Coordinates, Placement
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.names import plain_name
from trainermon.hooks.replayable import Replayable
from trainermon.hooks.tensor_hooks import hook_accumulated, hook_leaf
from trainermon.monitor.frameworks import plain
from trainermon.monitor.frameworks.dtensor import dtype_name
from trainermon.monitor.frameworks.fsdp_replay import FsdpReplayable
from trainermon.monitor.frameworks.replicas import is_first_copy
from trainermon.monitor.taps.training import HeldParameter, OptimizerState, TapHandle

# What is read of torch's private records; found in torch 2.13.
HANDLE_ATTRIBUTES = ("flat_param", "uses_sharded_strategy", "_use_orig_params", "_get_flat_param_offsets")
FLAT_ATTRIBUTES = ("_fqns", "_shapes", "_numels", "_shard_param_infos", "_param_extensions", "_is_padding_mask")


class FlatPiece(NamedTuple):
    """One original parameter within a flat one.

    Attributes:
        flat: The flat parameter: whole in forward and backward, this rank's shard between steps.
        whole: Where the parameter is in the whole flat one.
        own: Where this rank's part of it is in the shard; empty where it has none.
        original: The parameter object that the optimizer has; None where it has the flat one.
    """

    flat: nn.Parameter
    whole: slice
    own: slice
    original: nn.Parameter | None


class Fsdp1Training(plain.PlainTraining):
    """How a model in FSDP1 is watched: the optimizer steps shards of flat parameters, or views of them.

    Attributes:
        wrappers: Every FSDP module.
        pieces: Where each parameter is in its flat one; None for one that FSDP does not manage.
        flats: Every flat parameter with its virtual stage and its pieces by the parameters' index.
    """

    keeps_parameters = False
    framework = "fsdp1"
    counts_writes = False
    holds_replicas = False
    reduces = True
    communicates = ("dp",)
    wrappers: Sequence[Any]
    pieces: Sequence[FlatPiece | None]

    def replayable(self) -> Replayable:
        """Return how all ranks replay a step together, through the outermost wrapper."""
        flats = [piece.flat for piece in self.pieces if piece is not None]
        offloads = any(wrapper.cpu_offload.offload_params for wrapper in self.wrappers)
        refusal = "FullyShardedDataParallel keeps its gradients in one place on the host" if offloads else ""
        if len(self.roots) > 1:
            refusal = "several models in FullyShardedDataParallel"
        replayable = FsdpReplayable(self, flats=list(dict.fromkeys(flats)), refusal=refusal)
        replayable.entries = (self.model,)
        return replayable

    # ------------------------------------------------------------------ gradients

    def watch_accumulation(self, guard: FaultGuard, reached: Callable[[int], None]) -> list[TapHandle]:
        """Call `reached(stage)` whenever a parameter's gradient has been added to; return the hooks.

        They are on the flat parameters and on those that FSDP does not manage.
        """
        return [
            hook_accumulated(leaf, guard.wrap(_call, reached, self.parameters[indices[0]].stage))
            for leaf, indices in self._leaves()
        ]

    def watch_unreduced(self, guard: FaultGuard, see: Callable[[int, Tensor], None]) -> list[TapHandle]:
        """Call `see(index, gradient)` with a parameter's part of a gradient before FSDP reduces it; return the hooks.

        These are post-accumulate hooks, which run inside the node that FSDP's reduction hangs behind.
        """
        return [
            hook_accumulated(leaf, guard.wrap(lambda held, parameter: self._cut(held, parameter.grad, see), indices))
            for leaf, indices in self._leaves()
        ]

    def watch_micro_gradients(self, guard: FaultGuard, see: Callable[[int, Tensor], None]) -> list[TapHandle]:
        """Call `see(index, gradient)` with each parameter's part of what a single backward adds; return the hooks."""
        return [
            hook_leaf(leaf, guard.wrap(lambda indices, gradient: self._cut(indices, gradient, see), indices))
            for leaf, indices in self._leaves()
        ]

    def is_reduced_now(self) -> bool:
        """Return, at the end of a backward, whether FSDP reduced its gradients: it was outside of `no_sync()`."""
        return any(wrapper._sync_gradients for wrapper in self.wrappers)

    def gradient_sharers(self) -> list[int]:
        """Return by parameter how many gradients are views of the same flat one; 1 where the optimizer has that one."""
        parts: Counter[int] = Counter()
        flats = [0 if piece is None or piece.original is None else id(piece.flat) for piece in self.pieces]
        for flat, parameter in zip(flats, self.parameters, strict=True):
            parts[flat] += parameter.tensor.grad is not None
        return [parts[flat] if flat else 1 for flat in flats]

    def gradients_are_gone(self) -> bool:
        """Return whether the script has dropped all gradients: no parameter has one, sharded or not."""
        return all(leaf.grad is None and getattr(leaf, "_saved_grad_shard", None) is None for leaf, _ in self._leaves())

    def reduced_gradients(self) -> list[Tensor | None]:
        """Return by parameter this rank's part of its gradient; None where there is none."""
        return [self._own(index, p.tensor.grad) for index, p in enumerate(self.parameters)]

    # ------------------------------------------------------------------ optimizer

    def values(self) -> list[Tensor | None]:
        """Return, by parameter, this rank's part of its values; None where it has none."""
        return [self._own(index, p.tensor.detach()) for index, p in enumerate(self.parameters)]

    def states(self) -> list[OptimizerState | None]:
        """Return by parameter this rank's part of its optimizer state, cut out of the flat parameter's; else None."""
        return [
            None if found is None or value is None else self._state(index, value, found)
            for index, (value, found) in enumerate(zip(self.values(), super().states(), strict=True))
        ]

    # ------------------------------------------------------------------ parts

    def _state(self, index: int, value: Tensor, found: OptimizerState) -> OptimizerState:
        piece, flat = self.pieces[index], self.parameters[index].tensor
        if piece is None or piece.original is not None:
            return found._replace(value=value)
        tensors = {
            name: state[piece.own] if isinstance(state, Tensor) and state.shape == flat.shape else state
            for name, state in found.state.items()
        }
        return OptimizerState(value, tensors, found.group)

    def _own(self, index: int, held: Tensor | None) -> Tensor | None:
        """Return this rank's part in what the optimizer's parameter holds; None where that is not its shard now."""
        piece, parameter = self.pieces[index], self.parameters[index]
        if held is None or parameter.owned.length == 0 or piece is None:
            return held if piece is None else None
        if piece.original is None:
            return held[piece.own] if held.numel() == _sharded_size(piece.flat) else None
        return held if held.numel() == piece.own.stop - piece.own.start else None

    def _cut(self, indices: Sequence[int], gradient: Tensor | None, see: Callable[[int, Tensor], None]) -> None:
        """Report the gradient of a leaf parameter by parameter."""
        if gradient is None:
            return
        for index in indices:
            piece = self.pieces[index]
            see(index, gradient if piece is None else gradient[piece.whole])

    def _leaves(self) -> list[tuple[nn.Parameter, list[int]]]:
        """Return what gradients arrive at, with the indices of the parameters that it holds."""
        leaves: dict[int, tuple[nn.Parameter, list[int]]] = {}
        for index, (piece, parameter) in enumerate(zip(self.pieces, self.parameters, strict=True)):
            leaf = parameter.tensor if piece is None else piece.flat
            leaves.setdefault(id(leaf), (leaf, []))[1].append(index)
        return list(leaves.values())


def recognises(chunks: Sequence[nn.Module], optimizer: object) -> bool:
    """Return whether a module of the model is a FullyShardedDataParallel."""
    return isinstance(optimizer, torch.optim.Optimizer) and holds(chunks)


def holds(chunks: Sequence[nn.Module]) -> bool:
    """Return whether a module of the model is a FullyShardedDataParallel, whatever the optimizer."""
    return any(_is_fsdp(m) for chunk in chunks for m in chunk.modules())


def describe(
    chunks: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None, coordinates: Coordinates
) -> Fsdp1Training:
    """Return how the training of models in FullyShardedDataParallel is watched; without an optimizer, its weights.

    Raises:
        AttachError: torch's own records are not what they were, the model holds tensor-parallel parameters, or the
            optimizer steps none of its parameters.
    """
    found = [item for stage, chunk in enumerate(chunks) for item in _parameters(chunk, stage, coordinates)]
    training = Fsdp1Training(
        model=chunks[0],
        roots=[_root(chunk) for chunk in chunks],
        modules=plain.modules_of(chunks),
        parameters=[parameter for parameter, _ in found],
        optimizer=optimizer,
    )
    training.wrappers = [module for chunk in chunks for module in chunk.modules() if _is_fsdp(module)]
    training.pieces = [piece for _, piece in found]
    if optimizer is not None and training.parameters:
        plain.require_stepped(training)
    return training


def _parameters(
    chunk: nn.Module, stage: int, coordinates: Coordinates
) -> Iterator[tuple[HeldParameter, FlatPiece | None]]:
    seen: set[int] = set()
    for path, module in chunk.named_modules():
        if _is_fsdp(module) and module._handle is not None:
            for name, placement, piece in _pieces(path, module, coordinates):
                held = piece.flat if piece.original is None else piece.original
                seen.add(id(held))
                if held.requires_grad:
                    yield HeldParameter(plain_name(name), held, placement[0], stage, placement[1]), piece
    for name, tensor in chunk.named_parameters():
        if id(tensor) not in seen and tensor.requires_grad:
            whole = Placement(
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                replicated_over=("dp",),
                in_global_norm=coordinates.dp == 0 and coordinates.tp == 0,
            )
            yield HeldParameter(plain_name(name), tensor, whole, stage), None


def _pieces(
    path: str, wrapper: Any, coordinates: Coordinates
) -> Iterator[tuple[str, tuple[Placement, Placement], FlatPiece]]:
    """Yield name, placements (of the gradient of one backward, and of the shard) and place of each parameter."""
    handle, flat = _checked(wrapper._handle), wrapper._handle.flat_param
    offsets = [
        offset
        for offset, is_padding in zip(handle._get_flat_param_offsets(), flat._is_padding_mask, strict=True)
        if not is_padding
    ]
    copies = _copies(wrapper, handle)
    originals = flat._params if handle._use_orig_params else [None] * len(flat._fqns)
    for i, fqn in enumerate(flat._fqns):
        name, shape, in_shard = f"{path}.{fqn}" if path else fqn, tuple(flat._shapes[i]), flat._shard_param_infos[i]
        own = (in_shard.offset_in_shard, in_shard.numel_in_shard) if in_shard.in_shard else (0, 0)
        counts = is_first_copy(name, num_ranks=copies.num_ranks, coordinates=coordinates) and copies.place == 0
        unsharded_dtype = wrapper.mixed_precision.param_dtype or flat.dtype
        whole = Placement(
            dtype=dtype_name(unsharded_dtype),
            shape=shape,
            replicated_over=("dp",) if copies.num_ranks > 1 else (),
            in_global_norm=counts and copies.shard == 0,
        )
        shard = Placement(
            dtype=dtype_name(flat.dtype),
            shape=shape,
            offset=in_shard.intra_param_start_idx or 0,
            length=own[1],
            partitioned_over=("dp",) if copies.num_shards > 1 else (),
            replicated_over=("dp",) if copies.num_ranks > copies.num_shards else (),
            in_global_norm=counts,
        )
        begin = offsets[i][0]
        piece = FlatPiece(flat, slice(begin, begin + flat._numels[i]), slice(own[0], sum(own)), originals[i])
        yield name, (whole, shard), piece


class _FlatCopies(NamedTuple):
    """How many ranks hold a flat parameter, in how many shards, which shard this rank has, and which copy of it."""

    num_ranks: int
    num_shards: int
    shard: int
    place: int


def _copies(wrapper: Any, handle: Any) -> _FlatCopies:
    group = wrapper.process_group
    if not handle.uses_sharded_strategy:
        return _FlatCopies(group.size(), 1, 0, group.rank())
    between = getattr(wrapper, "_inter_node_pg", None)
    if between is None:
        return _FlatCopies(group.size(), group.size(), group.rank(), 0)
    return _FlatCopies(group.size() * between.size(), group.size(), group.rank(), between.rank())


def _checked(handle: Any) -> Any:
    """Return `handle`, unless it is not as it was in the versions of torch that this was written for."""
    missing = [name for name in HANDLE_ATTRIBUTES if not hasattr(handle, name)]
    missing += [name for name in FLAT_ATTRIBUTES if not missing and not hasattr(handle.flat_param, name)]
    if missing:
        raise AttachError(
            f"torch {torch.__version__}: its FullyShardedDataParallel has no {', '.join(missing)}, which this version "
            "of trainermon reads; use a version of torch that the documentation names"
        )
    if any(extension is not None for extension in handle.flat_param._param_extensions):
        raise AttachError(
            "model: FullyShardedDataParallel holds tensor-parallel parameters, whose rows could not be merged; "
            "fully_shard (FSDP2) with the same mesh can be watched"
        )
    return handle


def _sharded_size(flat: Any) -> int:
    size: int = flat._sharded_size.numel()
    return size


def _is_fsdp(module: nn.Module) -> bool:
    return any(
        cls.__name__ == "FullyShardedDataParallel" and cls.__module__.startswith("torch.")
        for cls in type(module).__mro__
    )


def _root(chunk: nn.Module) -> nn.Module:
    """Return the module below the outermost FSDP, which may itself be compiled."""
    inner: Any = getattr(chunk, "_orig_mod", chunk)
    root: nn.Module = inner.module if _is_fsdp(inner) else chunk
    return root


def _call(reached: Callable[[int], None], stage: int, _parameter: Tensor) -> None:
    reached(stage)
