"""Which calls of torch.distributed are collectives, what each reads and writes, and in which of its arguments.

Values are worth reading only where the call gives them a meaning: a buffer that is about to be received into holds
whatever was in memory.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

# Tensors of one side of one call that are looked at; a gather over a thousand ranks fills a list of a thousand.
MAX_TENSORS = 16


class OperandRanks(enum.Enum):
    """On which ranks a collective reads or writes its in-place operand.

    `EVERYWHERE`: on all. `READ_AT_ROOT`: it is read at the root alone. `WRITTEN_AT_ROOT`: it is written there alone.
    """

    EVERYWHERE = 0
    READ_AT_ROOT = 1
    WRITTEN_AT_ROOT = 2


class CollectiveOp(NamedTuple):
    """Which arguments of a collective it reads and writes.

    Attributes:
        name: `all_reduce` …
        reads: Position of the argument that it reads (`self` is 0); None: none.
        writes: Position of the one that it writes; None: none.
        only: On which ranks.
        is_in_place: What is read is what is written, on every rank.
    """

    name: str
    reads: int | None
    writes: int | None
    only: OperandRanks = OperandRanks.EVERYWHERE
    is_in_place: bool = False


def _gathers(name: str) -> CollectiveOp:
    return CollectiveOp(name, reads=2, writes=1)


# Methods of ProcessGroup. Several spellings of one operation, from several versions of torch, have one name.
METHODS: Mapping[str, CollectiveOp] = MappingProxyType(
    {
        "allreduce": CollectiveOp("all_reduce", 1, 1, is_in_place=True),
        "allreduce_coalesced": CollectiveOp("all_reduce_coalesced", 1, 1, is_in_place=True),
        "broadcast": CollectiveOp("broadcast", 1, 1, OperandRanks.READ_AT_ROOT),
        "reduce": CollectiveOp("reduce", 1, 1, OperandRanks.WRITTEN_AT_ROOT),
        "allgather": _gathers("all_gather"),
        "allgather_coalesced": _gathers("all_gather_coalesced"),
        "_allgather_base": _gathers("all_gather_into_tensor"),
        "all_gather_single": _gathers("all_gather_into_tensor"),
        "allgather_into_tensor_coalesced": _gathers("all_gather_into_tensor_coalesced"),
        "all_gather_single_coalesced": _gathers("all_gather_into_tensor_coalesced"),
        "gather": _gathers("gather"),
        "scatter": _gathers("scatter"),
        "reduce_scatter": _gathers("reduce_scatter"),
        "_reduce_scatter_base": _gathers("reduce_scatter_tensor"),
        "reduce_scatter_single": _gathers("reduce_scatter_tensor"),
        "reduce_scatter_tensor_coalesced": _gathers("reduce_scatter_tensor_coalesced"),
        "reduce_scatter_single_coalesced": _gathers("reduce_scatter_tensor_coalesced"),
        "alltoall_base": _gathers("all_to_all_single"),
        "all_to_all_single": _gathers("all_to_all_single"),
        "alltoall": _gathers("all_to_all"),
        "send": CollectiveOp("send", 1, None),
        "recv": CollectiveOp("recv", None, 1),
        "recv_anysource": CollectiveOp("recv", None, 1),
        "barrier": CollectiveOp("barrier", None, None),
        "monitored_barrier": CollectiveOp("barrier", None, None),
    }
)


def _functional(name: str) -> CollectiveOp:
    return CollectiveOp(name, reads=0, writes=None)


# Functions of torch.distributed._functional_collectives that call the dispatcher, past the methods above. Each entry is
# one operation in its spellings, the newest first: the first that exists is the one that calls.
FUNCTIONS: tuple[tuple[tuple[str, ...], CollectiveOp], ...] = (
    (("broadcast",), _functional("broadcast")),
    (("all_reduce",), _functional("all_reduce")),
    (("all_reduce_coalesced",), _functional("all_reduce_coalesced")),
    (("all_gather_single", "all_gather_tensor"), _functional("all_gather_into_tensor")),
    (("reduce_scatter_single", "reduce_scatter_tensor"), _functional("reduce_scatter_tensor")),
    (
        ("all_gather_single_coalesced", "all_gather_into_tensor_coalesced"),
        _functional("all_gather_into_tensor_coalesced"),
    ),
    (
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        _functional("reduce_scatter_tensor_coalesced"),
    ),
    (("all_to_all_single",), _functional("all_to_all_single")),
)


def read_by(op: CollectiveOp, args: tuple[Any, ...], kwargs: Mapping[str, Any], rank: int) -> list[Tensor]:
    """Return the tensors that the call reads on the rank with number `rank` in its group; at most 16."""
    if op.reads is None or (op.only is OperandRanks.READ_AT_ROOT and _root(args, kwargs) != rank):
        return []
    return tensors_in(args[op.reads] if op.reads < len(args) else _named(kwargs, op.reads - len(args)))


def written_by(op: CollectiveOp, args: tuple[Any, ...], kwargs: Mapping[str, Any], rank: int) -> list[Tensor]:
    """Return the tensors that the call writes on the rank with number `rank` in its group; at most 16."""
    if op.writes is None or (op.only is OperandRanks.WRITTEN_AT_ROOT and _root(args, kwargs) != rank):
        return []
    return tensors_in(args[op.writes] if op.writes < len(args) else _named(kwargs, op.writes - len(args)))


def keeps(options: Any, read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    """Return whether a call leaves in each of `written` the very values that are in its one of `read` as it begins.

    For a call in a group of one rank, or a broadcast: elsewhere this is not so. False where the caller may write to the
    tensors before the call is waited for, and where the operation also scales.

    Args:
        options: Last argument of the call.
        read: What it reads on this rank.
        written: What it writes there.
    """
    if getattr(options, "asyncOp", True) is not False or len(read) != len(written):
        return False
    if getattr(options, "reduceOp", None) == dist.ReduceOp.PREMUL_SUM:
        return False
    return all(
        before is after or (before.dtype is after.dtype and before.numel() == after.numel())
        for before, after in zip(read, written, strict=True)
    )


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a tensor or in nested lists of them; at most 16."""
    if type(value) is list and len(value) == 1 and isinstance(value[0], Tensor):  # what torch.distributed makes
        return [value[0]]
    if isinstance(value, Tensor):
        return [value]
    return [tensor for tensor, _ in zip(_walk(value), range(MAX_TENSORS), strict=False)]


def _walk(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _walk(item)


def _named(kwargs: Mapping[str, Any], index: int) -> Any:
    """Return one of the operands given by name, outputs before inputs, as they stand in every signature."""
    named = sorted(
        name for name in kwargs if "tensor" in name.lower() or name in ("output", "outputs", "input", "inputs", "self")
    )
    named.sort(key=lambda name: "out" not in name)
    return kwargs[named[index]] if index < len(named) else None


def _root(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the root's number in the group: of the options, or the number itself in the short form of the call."""
    given = args[2] if len(args) > 2 else kwargs.get("opts", kwargs.get("root", 0))
    return int(getattr(given, "rootRank", given))
