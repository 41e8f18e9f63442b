"""The state of Megatron's optimizers in a folder for each rank, which numbers parameters or lays them end to end.

Which parameter is which follows from the order of the model in the same rank's file. It is taken only if every size
agrees. Source: megatron/core, 0.16.1: distributed/param_and_grad_buffer.py, distributed/distributed_data_parallel.py,
optimizer/__init__.py (`_get_param_groups`), optimizer/distrib_optimizer.py (`get_parameter_state_dp_zero`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainermon.analysis.checkpoint.formats.arrays import viewed
from trainermon.analysis.checkpoint.formats.inert import leaves
from trainermon.analysis.checkpoint.formats.safetensors_file import contiguous
from trainermon.analysis.checkpoint.pieces import MAIN, StoredArray

_ALIGNMENT = 64  # elements at which a parameter may begin in a bucket
_EXPERTS = re.compile(r"(?:.*\.)?experts\..*")
_NO_PARAMETER = re.compile(r".*(_extra_state|expert_bias|local_tokens_per_expert|inv_freq)")
_SHARED = re.compile(r"(?:.*\.)?(?:word_embeddings|output_layer|word_embeddings_for_head)\.weight")
_HALF = ("bfloat16", "float16")


class LocalParameter(NamedTuple):
    """A parameter that a rank has: in which of its parts of the model, by what name, and its weights."""

    chunk: int
    name: str
    stored: StoredArray


class StateOf(NamedTuple):
    """Of one kind of state, what a rank has of a parameter, in the shape of its weights."""

    kind: str
    parameter: LocalParameter
    stored: StoredArray


class UnknownOrderError(ValueError):
    """The sizes in an optimizer's state are not those of the model beside it: what was found, what expected."""


def local_parameters(chunks: Sequence[Any]) -> list[LocalParameter]:
    """Return the parameters of a rank's parts of the model, in the model's order, tied ones once."""
    found: dict[StoredArray, LocalParameter] = {}
    for number, chunk in enumerate(chunks):
        for name, stored in leaves(chunk, StoredArray):
            if not _NO_PARAMETER.fullmatch(name):
                found.setdefault(stored, LocalParameter(number, name, stored))
    return list(found.values())


def states_of(
    parameters: Sequence[LocalParameter], optimizer: Any, flat: Any, args: Mapping[str, Any], *, is_first_stage: bool
) -> Iterator[StateOf]:
    """Yield the state of a rank's parameters.

    `optimizer` is what `model_optim_rng.pt` has of it, `flat` what `distrib_optim.pt` holds; None: there is none.

    Raises:
        UnknownOrderError: sizes do not agree, as where a parameter is frozen or has a learning rate of its own.
    """
    is_distributed = flat is not None
    states = flat if is_distributed else optimizer
    states = states if isinstance(states, list) else [states]
    apart = (args.get("expert_model_parallel_size") or 1) > 1
    dense = [parameter for parameter in parameters if not (apart and _EXPERTS.fullmatch(parameter.name))]
    of_experts = [parameter for parameter in parameters if parameter not in dense]
    own = [dense, of_experts][: len(states)] if len(states) < 3 else []
    if sum(map(len, own)) < len(parameters):
        raise UnknownOrderError(f"{len(states)} optimizers, expected one for {len(parameters)} parameters and the like")
    for state, parts in zip(states, own, strict=True):
        if not isinstance(state, dict):  # another rank has it
            continue
        if is_distributed:
            yield from _of_buffers(parts, state, args, is_first_stage=is_first_stage)
        else:
            yield from _of_numbers(parts, state, args)


# ---------------------------------------------------------------------- by number


def _of_numbers(
    parameters: Sequence[LocalParameter], state: Mapping[str, Any], args: Mapping[str, Any]
) -> Iterator[StateOf]:
    """Yield the state of parameters that are numbered group by group, decaying ones apart."""
    inner = state["optimizer"] if isinstance(state.get("optimizer"), dict) else state
    mains = state.get("fp32_from_fp16_params")
    for index, group in enumerate(inner["param_groups"]):
        numbers, decays = group["params"], group.get("wd_mult", 1.0) != 0.0
        own = [parameter for parameter in parameters if _decays(parameter, args) == decays]
        if len(numbers) != len(own):
            raise UnknownOrderError(
                f"group {index} has {len(numbers)} parameters {'with' if decays else 'without'} weight decay, and the"
                f" model {len(own)}"
            )
        for number, parameter in zip(numbers, own, strict=True):
            found = inner["state"].get(number, {})
            for kind, stored in found.items():
                if isinstance(stored, StoredArray) and stored.num_elements > 1:
                    yield _checked(str(kind), parameter, stored)
        if isinstance(mains, list):
            halves = [parameter for parameter in own if parameter.stored.dtype in _HALF]
            if len(halves) != len(mains[index]):
                raise UnknownOrderError(f"group {index} has {len(mains[index])} float32 weights for {len(halves)}")
            for parameter, stored in zip(halves, mains[index], strict=True):
                yield _checked(MAIN, parameter, stored)


def _decays(parameter: LocalParameter, args: Mapping[str, Any]) -> bool:
    """Return whether Megatron has the weights of a parameter decay."""
    if args.get("apply_wd_to_qk_layernorm") and re.search(r"[qk]_layernorm\.", parameter.name):
        return True
    return len(parameter.stored.shape) != 1 and not parameter.name.endswith(".bias")


def _checked(kind: str, parameter: LocalParameter, stored: Any) -> StateOf:
    shape = parameter.stored.shape
    if not isinstance(stored, StoredArray) or stored.shape != shape:
        found = list(stored.shape) if isinstance(stored, StoredArray) else type(stored).__name__
        raise UnknownOrderError(f"{kind} is {found} where {parameter.name!r} is {list(shape)}")
    return StateOf(kind, parameter, stored)


# ---------------------------------------------------------------------- end to end


def _of_buffers(
    parameters: Sequence[LocalParameter], state: Mapping[Any, Any], args: Mapping[str, Any], *, is_first_stage: bool
) -> Iterator[StateOf]:
    """Yield the state of parameters that lie end to end in buffers: one for each part of the model and type."""
    own: dict[tuple[int, str], list[LocalParameter]] = {}
    for parameter in parameters:
        own.setdefault((parameter.chunk, parameter.stored.dtype), []).append(parameter)
    for index, ((chunk, _), parts) in enumerate(own.items()):
        (arrays,) = state[index].values()
        bucket_size = bucket_size_of(args) if is_first_stage and chunk == 0 else None
        length = arrays["param"].num_elements
        starts = _starts_of(parts, length, bucket_size, args)
        for kind, stored in arrays.items():
            if not isinstance(stored, StoredArray):
                continue
            if stored.shape != (length,) or stored.strides != (1,):
                raise UnknownOrderError(f"{kind} of buffer {index} is {list(stored.shape)}, expected [{length}]")
            for parameter, start in zip(parts, starts, strict=True):
                shape = parameter.stored.shape
                part = viewed(stored, start, shape, contiguous(shape))
                yield StateOf(MAIN if kind == "param" else str(kind), parameter, part)
    if len(own) != sum(isinstance(key, int) for key in state):
        raise UnknownOrderError(f"{sum(isinstance(key, int) for key in state)} buffers, expected {len(own)}")


def bucket_size_of(args: Mapping[str, Any]) -> int | None:
    """Return how many elements fill a bucket, None if there is one for all."""
    if not args.get("overlap_grad_reduce"):
        return None
    replicas = (args.get("data_parallel_size") or 1) * (args.get("context_parallel_size") or 1)
    return args.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * replicas)


def is_shared(name: str, args: Mapping[str, Any]) -> bool:
    """Return whether a parameter is an embedding that two stages have, which has a bucket of its own."""
    stages = args.get("pipeline_model_parallel_size") or 1
    return stages > 1 and not args.get("untie_embeddings_and_output_weights") and bool(_SHARED.fullmatch(name))


def _starts_of(
    parameters: Sequence[LocalParameter], length: int, bucket_size: int | None, args: Mapping[str, Any]
) -> list[int]:
    sizes = [parameter.stored.num_elements for parameter in parameters]
    shared = [is_shared(parameter.name, args) for parameter in parameters]
    for buckets in (buckets_of(sizes, shared, bucket_size), buckets_of(sizes, shared, bucket_size, alignment=1)):
        begins = [0, *(bucket.length for bucket in buckets)]
        if sum(begins) != length:
            continue
        starts = {
            index: sum(begins[: number + 1]) + start
            for number, bucket in enumerate(buckets)
            for index, start in bucket.starts.items()
        }
        return [starts[index] for index in range(len(sizes))]
    raise UnknownOrderError(f"a buffer has {length:,} elements, and {len(sizes)} parameters have {sum(sizes):,}")


class Bucket(NamedTuple):
    """A part of a buffer: where each parameter begins in it, by the parameter's index, and where the last one ends."""

    starts: dict[int, int]
    length: int


def buckets_of(
    sizes: Sequence[int], shared: Sequence[bool], bucket_size: int | None, alignment: int = _ALIGNMENT
) -> list[Bucket]:
    """Return how parameters, given by size in the model's order, lie in the buckets of a buffer.

    The last one lies first. Each begins at a multiple of 64 elements. A bucket ends when it has `bucket_size` elements;
    an embedding that two stages share has one of its own.
    """
    buckets: list[Bucket] = []
    starts: dict[int, int] = {}
    end = 0
    for index in reversed(range(len(sizes))):
        start = _padded(end, alignment)
        if shared[index] and starts:
            buckets.append(Bucket(starts, start))
            starts, start = {}, 0
        starts[index] = start
        end = start + sizes[index]
        if shared[index] or (bucket_size is not None and end >= bucket_size):
            buckets.append(Bucket(starts, end))
            starts, end = {}, 0
    return [*buckets, Bucket(starts, end)] if starts else buckets


def _padded(size: int, divisor: int) -> int:
    return math.ceil(size / divisor) * divisor
