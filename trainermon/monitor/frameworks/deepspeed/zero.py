"""What the partitioned optimizers hold: `BF16_Optimizer`, and ZeRO stages 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.patch import Patch
from trainermon.monitor.frameworks.deepspeed.holders import (
    FlatHolder,
    HeldPiece,
    OverflowVerdict,
    See,
    Tell,
    chained,
    with_starts,
)
from trainermon.monitor.taps.training import TapHandle


class Bf16Holder(FlatHolder):
    """Reads from DeepSpeed's `BF16_Optimizer`: whole gradients on every rank; each rank steps its part.

    Gradients have the accumulation dtype.
    """

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are accumulated."""
        dtype: torch.dtype = self.optimizer.fp32_groups_gradients_flat[0].dtype
        return dtype

    @property
    def flats(self) -> Sequence[Tensor]:
        """This rank's part of each parameter group's flat fp32 copy."""
        found: Sequence[Tensor] = self.optimizer.fp32_groups_flat_partition
        return found

    def _find_pieces(self) -> Iterator[tuple[nn.Parameter, HeldPiece]]:
        for group, parameters in enumerate(self.optimizer.bf16_groups):
            size = self.flats[group].numel()
            first = size * torch.distributed.get_rank(self.optimizer.real_dp_process_group[group])
            for index, (parameter, start) in enumerate(with_starts(parameters)):
                low, high = max(start, first), min(start + parameter.numel(), first + size)
                if low < high:
                    yield parameter, HeldPiece(group, index, low - first, low - start, high - low)

    def gradients(self) -> Mapping[int, Tensor]:
        """Return this rank's part of each reduced gradient, a view, by `id` of its parameter."""
        held, groups = self.optimizer.fp32_groups_gradients, self.optimizer.bf16_groups
        return {
            id(parameter): held[piece.group][piece.number].view(-1).narrow(0, piece.offset, piece.length)
            for parameter in chained(groups)
            if (piece := self.pieces.get(id(parameter)))
        }

    def watch_verdict(self, guard: FaultGuard, tell: Tell) -> list[TapHandle]:
        """Call `tell(verdict)` before the inner optimizer's step, or before gradients are cleared; return the patches.

        The latter comes first where the step is skipped.
        """

        def at_step(*_: Any) -> None:
            norm = self.optimizer._global_grad_norm
            is_finite = bool(torch.isfinite(torch.as_tensor(norm)))
            tell(OverflowVerdict.FINITE if is_finite else OverflowVerdict.OVERFLOW)

        return [
            Patch(self.optimizer.optimizer, "step", before=guard.wrap(at_step)),
            Patch(self.optimizer, "clear_hp_grads", before=guard.wrap(lambda *_: tell(OverflowVerdict.OVERFLOW))),
        ]

    def watch_unreduced(self, guard: FaultGuard, see: See) -> list[TapHandle]:
        """Call `see(parameter, gradient)` when the engine asks for the gradients to reduce; return the patch."""

        def look(*_: Any) -> None:
            held = chained(self.optimizer.fp32_groups_gradients)
            for parameter, gradient in zip(chained(self.optimizer.bf16_groups), held, strict=True):
                see(parameter, gradient)

        return [Patch(self.optimizer, "get_grads_for_reduction", before=guard.wrap(look))]


class ZeroHolder(FlatHolder):
    """Reads from the optimizers of ZeRO stages 1 to 3: what they have in common.

    Attributes:
        norm_method: Name of the optimizer's method that has computed the norms of all groups when it returns.
    """

    norm_method: ClassVar[str]

    @property
    def norm_is_of_gradients(self) -> bool:
        """Whether the optimizer is not Muon, whose update takes the place of the gradient before the norm."""
        return "Muon" not in type(self.engine.basic_optimizer).__name__

    def watch_verdict(self, guard: FaultGuard, tell: Tell) -> list[TapHandle]:
        """Call `tell(verdict)` when the overflow check found something, else with the norms; return the patches."""
        overflow = guard.wrap(lambda found: tell(OverflowVerdict.OVERFLOW) if found else None)
        known = guard.wrap(lambda _norm: tell(OverflowVerdict.BY_NORM))
        return [
            Patch(self.optimizer, "has_overflow", after=overflow),
            Patch(self.optimizer, self.norm_method, after=known),
        ]


class Stage12Holder(ZeroHolder):
    """Reads from the optimizer of ZeRO stages 1 and 2, also on the CPU, also with `round_robin_gradients`.

    `_hp_mapping`, which DeepSpeed's accessors use, is not read: with `round_robin_gradients` its order is not that of
    the partitions.
    """

    norm_method = "scaled_global_norm"

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        parameters = [] if self.norm_is_of_gradients else chained(self.optimizer.params_in_partition)
        self._updates = {id(parameter) for parameter in parameters if getattr(parameter, "use_muon", False)}

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are accumulated; with the optimizer on the CPU that of the main copy."""
        offloaded = self.optimizer.cpu_offload
        dtype: torch.dtype = self.flats[0].dtype if offloaded else self.optimizer.gradient_accumulation_dtype
        return dtype

    @property
    def flats(self) -> Sequence[Tensor]:
        """This rank's partition of each parameter group."""
        found: Sequence[Tensor] = self.optimizer.single_partition_of_fp32_groups
        return found

    def _find_pieces(self) -> Iterator[tuple[nn.Parameter, HeldPiece]]:
        optimizer = self.optimizer
        for group, parameters in enumerate(optimizer.params_in_partition):
            rank = torch.distributed.get_rank(optimizer.real_dp_process_group[group])
            size = int(optimizer.partition_size[group])
            for index, parameter in enumerate(p for p in parameters if p.numel()):
                number = optimizer.get_param_id(parameter)
                at = int(optimizer.grad_partition_insertion_offset[group][rank][number])
                offset = int(optimizer.grad_start_offset[group][rank][number])
                yield parameter, HeldPiece(group, index, at, offset, min(parameter.numel() - offset, size - at))

    def gradients(self) -> Mapping[int, Tensor]:
        """Return this rank's part of each averaged gradient, by `id` of its parameter.

        With the optimizer on the CPU they are on their way there: this waits for the copies, which the step that is
        being entered does next anyway. Where Muon's update has taken the place of a gradient, there is none.
        """
        if self.optimizer.cpu_offload:
            self._wait_for_copies()
            return {
                number: self._cut(self.flats[piece.group].grad, piece)  # type: ignore[arg-type]  # made with the flat
                for number, piece in self.pieces.items()
            }
        held = {
            group: [t for t in tensors if t.numel() and not getattr(t, "_zero_padding", False)]
            for group, tensors in self.optimizer.averaged_gradients.items()
            if tensors is not None
        }
        return {
            number: _of_length(held[piece.group][piece.number], piece.length)
            for number, piece in self.pieces.items()
            if piece.group in held and number not in self._updates
        }

    def _wait_for_copies(self) -> None:
        wait = getattr(self.optimizer, "_wait_for_offload_copies", None)
        if wait is not None:
            wait()
        elif torch.accelerator.is_available():
            torch.accelerator.current_stream().synchronize()

    def watch_unreduced(self, guard: FaultGuard, see: See) -> list[TapHandle]:
        """Call `see(parameter, gradient)` when a gradient of stage 1 enters its bucket, before it is reduced.

        Return the patch. Stage 2 reduces in every micro step: there is no patch.
        """
        if self.optimizer.partition_gradients:
            return []

        def look(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            gradient = self.optimizer.get_gradient_for_reduction(args[0])
            if gradient is not None:
                see(args[0], gradient)

        return [Patch(self.optimizer, "reduce_independent_p_g_buckets_and_remove_grads", before=guard.wrap(look))]


class Stage3Holder(ZeroHolder):
    """Reads from the optimizer of ZeRO stage 3: each rank holds the same share of every parameter.

    The last rank's is shorter, and padded.
    """

    norm_method = "_get_norm_groups"

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are accumulated; with the optimizer on the CPU that of the main copy."""
        offloaded = self.optimizer.offload_optimizer
        dtype: torch.dtype = self.flats[0].dtype if offloaded else self.optimizer.gradient_accumulation_dtype
        return dtype

    @property
    def flats(self) -> Sequence[Tensor]:
        """This rank's partition of each sub-group."""
        found: Sequence[Tensor] = self.optimizer.fp32_partitioned_groups_flat
        return found

    def _group_of(self, piece: HeldPiece) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.optimizer.param_groups[self.optimizer.sub_group_to_group_id[piece.group]]
        return found

    def _find_pieces(self) -> Iterator[tuple[nn.Parameter, HeldPiece]]:
        for group, parameters in enumerate(self.optimizer.fp16_groups):
            for index, parameter in enumerate(parameters):
                at = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)][1]
                share = parameter.partition_numel()
                offset = share * torch.distributed.get_rank(parameter.ds_process_group)
                length = min(share, parameter.ds_numel - offset)
                if length > 0:
                    yield parameter, HeldPiece(group, index, at, offset, length)

    def gradients(self) -> Mapping[int, Tensor]:
        """Return this rank's part of each averaged gradient, by `id` of its parameter."""
        if self.optimizer.offload_optimizer:
            return {
                number: self._cut(self.flats[piece.group].grad, piece)  # type: ignore[arg-type]  # made with the flat
                for number, piece in self.pieces.items()
            }
        held = self.optimizer.averaged_gradients
        return {
            number: held[piece.group][piece.number].view(-1).narrow(0, 0, piece.length)
            for number, piece in self.pieces.items()
            if held.get(piece.group) is not None
        }

    def watch_unreduced(self, guard: FaultGuard, see: See) -> list[TapHandle]:
        """Return no hooks: unreduced gradients of a whole step do not exist, since every micro step reduces them."""
        del guard, see
        return []


def _of_length(gradient: Tensor, length: int) -> Tensor:
    """Return the gradient; raise RuntimeError if it is not as long as its piece, as in a layout that is not known."""
    if gradient.numel() != length:
        raise RuntimeError(f"DeepSpeed's averaged gradient has {gradient.numel()} elements, expected {length}")
    return gradient
