"""What this rank's optimizers hold of each parameter: which range, in which tensor, stepped by whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainermon.core.errors import AttachError

Pair = tuple[nn.Parameter, Tensor]


class ParameterRange(NamedTuple):
    """The part of a parameter that this rank's optimizer steps.

    Attributes:
        start: First element, in the flattened parameter.
        end: Behind the last.
        stepped: The tensor in which it is stepped.
        optimizer: The Megatron optimizer that does.
    """

    start: int
    end: int
    stepped: Tensor
    optimizer: Any


def class_names(thing: object) -> frozenset[str]:
    """Return the names of those of `thing`'s classes that come from Megatron-Core."""
    return frozenset(c.__name__ for c in type(thing).__mro__ if c.__module__.startswith("megatron.core"))


def single_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that a chain runs one after the other, or the one that stands alone."""
    if hasattr(optimizer, "chained_optimizers"):
        return [single for one in optimizer.chained_optimizers for single in single_optimizers(one)]
    return [optimizer]


def holdings_of(
    chunks: Sequence[nn.Module], optimizer: Any
) -> tuple[dict[nn.Parameter, ParameterRange], set[nn.Parameter]]:
    """Return which part of each parameter this rank's optimizer steps, and which parameters are split over their ranks.

    The latter are dealt out over data parallel ranks: this rank may step only a part, or nothing.

    Raises:
        AttachError: An optimizer that is not known, one that leaves a parameter of the model out, or one whose shards
            are not those that the gradient buffers say.
    """
    ranges = owned_ranges(chunks)
    found: dict[nn.Parameter, ParameterRange] = {}
    dealt_out = _dealt_out_whole(optimizer)
    for single in single_optimizers(optimizer):
        is_sharded = "DistributedOptimizer" in class_names(single)
        for parameter, stepped in _pairs(single):
            start, end = ranges[parameter] if is_sharded else (0, parameter.numel())
            if stepped.numel() != end - start:
                raise AttachError(
                    f"{type(single).__name__}: found a shard of {stepped.numel()} elements, expected elements {start} "
                    f"to {end} of a parameter of shape {tuple(parameter.shape)}; this version of Megatron-Core lays "
                    "out its buffers differently"
                )
            found[parameter] = ParameterRange(start, end, stepped, single)
        if is_sharded:
            dealt_out.update(*(buffer.param_index_map for buffer in getattr(single, "buffers", ())))
    _check_complete(chunks, dealt_out.union(found), optimizer)
    return found, dealt_out


def owned_ranges(chunks: Sequence[nn.Module]) -> dict[nn.Parameter, tuple[int, int]]:
    """Return the range of each flattened parameter that a distributed optimizer gives this rank; (0, 0) if none.

    Every bucket is cut into equal parts, one per rank of the group it is reduced over. Only a buffer's own index map
    says where a parameter lies in it: parameters are aligned and buckets padded.
    """
    ranges = {}
    for buffer in (buffer for chunk in chunks for buffer in buffers_of(chunk)):
        group = buffer.data_parallel_group
        for parameter, (start, end, number, *_) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            length = bucket.grad_data.numel() // group.size()
            low = bucket.offset + group.rank() * length
            first, last = max(start, low), min(end, low + length)
            ranges[parameter] = (first - start, last - start) if first < last else (0, 0)
    return ranges


def buffers_of(chunk: nn.Module) -> list[Any]:
    """Return the gradient buffers of a chunk, those of expert parameters last."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]  # type: ignore[misc]  # not Module.buffers: a list here


def state_of(holding: ParameterRange) -> Mapping[str, Any]:
    """Return the inner optimizer's state for a parameter, by name (`exp_avg` …); empty before its first step.

    A main copy that the inner optimizer keeps among its state is the value, not a state, and is left out.
    """
    state = holding.optimizer.optimizer.state.get(holding.stepped, {})
    return {name: kept for name, kept in state.items() if name != "master_param"} if state else {}


def value_of(holding: ParameterRange) -> Tensor:
    """Return the parameter in the best precision that there is: the main copy or shard, where one is kept.

    The inner optimizer may hold that copy itself: on the CPU, when it is offloaded; else among its state.
    """
    inner, stepped = holding.optimizer.optimizer, holding.stepped
    offloaded = getattr(inner, "param_to_inner_param", None)
    if offloaded is not None:
        return offloaded.get(stepped, stepped)  # type: ignore[no-any-return]
    kept = inner.state.get(stepped, {}).get("master_param")
    is_readable = isinstance(kept, Tensor) and kept.is_floating_point() and kept.shape == stepped.shape
    return kept if is_readable else stepped


def _pairs(optimizer: Any) -> Iterator[Pair]:
    """Yield each model parameter that `optimizer` steps (a part of) here, with the tensor that it steps."""
    names = class_names(optimizer)
    if getattr(optimizer, "is_stub_optimizer", False):
        return
    if "DistributedOptimizer" in names:
        mains = zip(optimizer.shard_fp32_from_float16_groups, optimizer.shard_float16_groups, strict=True)
        # a precision-aware optimizer keeps no main shards here: it steps those of the model
        halves = [[main if main is not None else half for main, half in zip(*both, strict=True)] for both in mains]
        yield from _zip_groups(optimizer.model_float16_groups, halves)
        yield from _zip_groups(optimizer.model_fp32_groups, optimizer.shard_fp32_groups)
    elif "Float16OptimizerWithFloat16Params" in names:
        yield from _zip_groups(optimizer.float16_groups, optimizer.fp32_from_float16_groups)
        yield from _zip_groups(optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups)
    elif "FP32Optimizer" in names:
        groups = [group["params"] for group in optimizer.optimizer.param_groups]
        yield from _zip_groups(groups, groups)
    else:
        raise AttachError(
            f"found the Megatron optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__}, expected one "
            "of FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer, or a chain of these"
        )


def _zip_groups(parameters: Sequence[Sequence[Any]], stepped: Sequence[Sequence[Any]]) -> Iterator[Pair]:
    for group, tensors in zip(parameters, stepped, strict=True):
        yield from zip(group, tensors, strict=True)


def _dealt_out_whole(optimizer: Any) -> set[nn.Parameter]:
    """Return the parameters that a layer-wise optimizer has dealt out over the ranks, each whole to one of them."""
    dealt = (getattr(optimizer, name, None) or [] for name in ("dp_cp_params_list", "expt_dp_params_list"))
    return {parameter for lists in dealt for parameters in lists for parameter in parameters}


def _check_complete(chunks: Sequence[nn.Module], known: set[nn.Parameter], optimizer: Any) -> None:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad and parameter not in known:
                raise AttachError(
                    f"{type(optimizer).__name__} does not step {name}, which requires a gradient: pass set_monitor the "
                    "optimizer that get_megatron_optimizer returned, and all chunks of the model; freeze a parameter "
                    "before Megatron's DistributedDataParallel is made"
                )
