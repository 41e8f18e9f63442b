"""What DeepSpeed's optimizers hold of a parameter on this rank, found by their own index maps: stage 0, and the frame.

All of this is local: no accessor that gathers (`safe_get_full_*`) and none that waits (`safe_get_local_*`). The padding
of DeepSpeed's flat partitions belongs to no piece. Checked against 0.16.9, 0.17.6, 0.18.9 and 0.19.8.
"""

from __future__ import annotations

import abc
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.patch import Patch
from trainermon.monitor.taps.training import OptimizerState, TapHandle

See = Callable[[nn.Parameter, Tensor], None]


class OverflowVerdict(enum.Enum):
    """What DeepSpeed itself says about the gradients of a step, the same on all ranks.

    `OVERFLOW`: some are not finite. `FINITE`: all are. `BY_NORM`: it does not say; the gradient norm tells.
    """

    OVERFLOW = enum.auto()
    FINITE = enum.auto()
    BY_NORM = enum.auto()  # whatever the norms of the groups say


Tell = Callable[[OverflowVerdict], None]


class HeldPiece(NamedTuple):
    """The part of a parameter that this rank's DeepSpeed optimizer steps, with its place in a flat tensor.

    Attributes:
        group: Which of the optimizer's flat main tensors it is in.
        number: Which of that tensor's parameters it is of.
        at: Where it begins in the flat main tensor.
        offset: Where it begins in the flattened parameter.
        length: Number of elements, at least one.
    """

    group: int
    number: int
    at: int
    offset: int
    length: int


class OptimizerHolder(abc.ABC):
    """Reads gradients, values and states of parameters out of a DeepSpeed optimizer, without copying.

    One subclass per kind.

    Attributes:
        is_partitioned: The ranks of a data-parallel group hold a part of each parameter, not a copy.
        norm_carries_scale: The norm that DeepSpeed reports is not divided by the loss scale.
    """

    is_partitioned = True
    norm_carries_scale = False

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer

    @property
    @abc.abstractmethod
    def grad_dtype(self) -> torch.dtype | None:
        """Return the dtype of reduced gradients; None if it is the parameter's own."""

    @abc.abstractmethod
    def span(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return which part of a parameter this rank's optimizer steps: (offset, length) in the flattened parameter.

        Length 0: nothing.
        """

    @abc.abstractmethod
    def gradients(self) -> Mapping[int, Tensor]:
        """Return the reduced gradients that the optimizer is about to use, by `id` of their parameter."""

    @abc.abstractmethod
    def value(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the tensor of a parameter that the optimizer steps; None if this rank steps no part of it."""

    @abc.abstractmethod
    def state(self, parameter: nn.Parameter) -> OptimizerState | None:
        """Return this rank's part of a parameter's optimizer state, with the stepped tensor and its group.

        None before its first step, or if the rank steps no part of it.
        """

    @property
    def norm_is_of_gradients(self) -> bool:
        """Whether the norm that DeepSpeed reports is that of all gradients, as they are at entry of the step."""
        return True

    def watch_verdict(self, guard: FaultGuard, tell: Tell) -> list[TapHandle]:
        """Call `tell(verdict)` once overflow or norm are known and no parameter is written yet; return the patches.

        It may be called more than once in a step; its first call counts. Nothing is watched in float32 at stage 0,
        where DeepSpeed looks at no gradient.
        """
        if not hasattr(self.optimizer, "overflow_checker"):
            return []
        overflow = guard.wrap(lambda *_: tell(OverflowVerdict.OVERFLOW))
        finite = guard.wrap(lambda *_: tell(OverflowVerdict.FINITE))
        checked = guard.wrap(lambda found: tell(OverflowVerdict.OVERFLOW) if found else None)
        handles: list[TapHandle] = [
            Patch(self.optimizer.overflow_checker, "has_overflow", after=checked),
            Patch(self.optimizer, "unscale_and_clip_grads", before=finite),
        ]
        if hasattr(self.optimizer, "_skip_invalid_grad_norm"):
            handles.append(Patch(self.optimizer, "_skip_invalid_grad_norm", before=overflow))
        return handles

    def watch_unreduced(self, guard: FaultGuard, see: See) -> list[TapHandle]:
        """Call `see(parameter, gradient)` with what this rank accumulated, before it is reduced; return the patches."""

        def look(*_: Any) -> None:
            for parameter in self.engine.module.parameters():
                if parameter.grad is not None:
                    see(parameter, parameter.grad)

        return [Patch(self.engine, "buffered_allreduce_fallback", before=guard.wrap(look))]


class WholeHolder(OptimizerHolder):
    """Reads from a DeepSpeed optimizer without ZeRO (stage 0): each rank steps every parameter.

    In float32 it steps the parameter itself, in bfloat16 and float16 an fp32 copy of it.
    """

    is_partitioned = False
    grad_dtype = None

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.norm_carries_scale = hasattr(self.optimizer, "fp32_groups")
        self._copies: dict[int, nn.Parameter] = {}
        if hasattr(self.optimizer, "fp32_groups"):
            pairs = zip(chained(self.optimizer.fp16_groups), chained(self.optimizer.fp32_groups), strict=True)
            self._copies = {id(parameter): copy for parameter, copy in pairs}

    @property
    def norm_is_of_gradients(self) -> bool:
        """Whether there are no experts: FP16_UnfusedOptimizer leaves them out of its norm."""
        return not self.engine.has_moe_layers

    def span(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return (0, number of elements): this rank steps the whole parameter."""
        return 0, parameter.numel()

    def gradients(self) -> Mapping[int, Tensor]:
        """Return each parameter's `.grad`, which the all-reduce has written to, by the parameter's `id`."""
        return {id(p): p.grad for p in self.engine.module.parameters() if p.grad is not None}

    def value(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the fp32 copy of a parameter that is stepped, or the parameter where there is none."""
        return self._copies.get(id(parameter), parameter)

    def state(self, parameter: nn.Parameter) -> OptimizerState | None:
        """Return the optimizer state of a parameter's fp32 copy, or of itself without one.

        None before its first step.
        """
        stepped = self._copies.get(id(parameter), parameter)
        found = self.optimizer.state.get(stepped)
        groups = self.optimizer.param_groups
        group = next((group for group in groups if any(p is stepped for p in group["params"])), None)
        return OptimizerState(stepped, found, group) if found and group is not None else None


class FlatHolder(OptimizerHolder):
    """Reads from a DeepSpeed optimizer that steps flat tensors, each of which holds the pieces of many parameters."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.pieces = {id(parameter): piece for parameter, piece in self._find_pieces()}

    @abc.abstractmethod
    def _find_pieces(self) -> Iterator[tuple[nn.Parameter, HeldPiece]]:
        """Yield each parameter of which this rank steps a piece, with the piece, by DeepSpeed's own index map."""

    @property
    @abc.abstractmethod
    def flats(self) -> Sequence[Tensor]:
        """The flat main tensors that the inner optimizer steps; not kept, since reloading replaces them."""

    def _group_of(self, piece: HeldPiece) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.optimizer.param_groups[piece.group]
        return found

    def _cut(self, flat: Tensor, piece: HeldPiece) -> Tensor:
        return flat.detach().view(-1).narrow(0, piece.at, piece.length)

    def span(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return (offset, length) of this rank's piece in the flattened parameter; (0, 0) without one."""
        piece = self.pieces.get(id(parameter))
        return (piece.offset, piece.length) if piece else (0, 0)

    def value(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the parameter's piece of the flat main tensor, a view; None if this rank has none."""
        piece = self.pieces.get(id(parameter))
        return None if piece is None else self._cut(self.flats[piece.group], piece)

    def state(self, parameter: nn.Parameter) -> OptimizerState | None:
        """Return the state of a parameter's piece, with the piece and its group.

        None before its first step, or without a piece. Of state tensors that are as large as the flat tensor it has
        their pieces, and scalars as they are. Others cannot be told apart by parameter and are left out.
        """
        piece = self.pieces.get(id(parameter))
        if piece is None:
            return None
        flat = self.flats[piece.group]
        found = self.optimizer.state.get(flat)
        if not found:
            return None
        state = {name: self._state_of(value, flat, piece) for name, value in found.items()}
        kept = {name: value for name, value in state.items() if value is not None}
        return OptimizerState(self._cut(flat, piece), kept, self._group_of(piece))

    def _state_of(self, value: Any, flat: Tensor, piece: HeldPiece) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return self._cut(value, piece) if value.numel() == flat.numel() else None


class FusedHolder(FlatHolder):
    """Stage 0 with DeepSpeed's FusedAdam in 16 bits: each rank steps a flat fp32 copy of all parameters of a group."""

    is_partitioned = False
    grad_dtype = None

    @property
    def flats(self) -> Sequence[Tensor]:
        """The flat fp32 copy of each parameter group."""
        found: Sequence[Tensor] = self.optimizer.fp32_groups_flat
        return found

    def _find_pieces(self) -> Iterator[tuple[nn.Parameter, HeldPiece]]:
        for group, parameters in enumerate(self.optimizer.fp16_groups):
            for index, (parameter, at) in enumerate(with_starts(parameters)):
                yield parameter, HeldPiece(group, index, at, 0, parameter.numel())

    def gradients(self) -> Mapping[int, Tensor]:
        """Return each parameter's `.grad`, which the all-reduce has written to, by the parameter's `id`."""
        parameters = chained(self.optimizer.fp16_groups)
        return {id(p): p.grad for p in parameters if p.grad is not None}


def chained(groups: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the elements of all groups in one list, in order."""
    return list(itertools.chain.from_iterable(groups))


def with_starts(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield each parameter with its offset in the flat tensor in which they follow one another."""
    start = 0
    for parameter in parameters:
        yield parameter, start
        start += parameter.numel()
