"""Megatron-Core: gradients in buffers of Megatron's own, main copies or shards in the optimizer, stages in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainermon.core.errors import AttachError
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.patch import Patch
from trainermon.hooks.replayable import Replayable
from trainermon.monitor.frameworks.megatron import holdings
from trainermon.monitor.frameworks.megatron.groups import process_groups_of
from trainermon.monitor.frameworks.megatron.holdings import ParameterRange
from trainermon.monitor.frameworks.megatron.replay import MegatronReplayable
from trainermon.monitor.taps.training import HookMaker, OptimizerState, StepOutcome, TapHandle, Training


class MegatronTraining(Training):
    """How a Megatron training is watched: chunks in its DistributedDataParallel, and Megatron's optimizer.

    Gradients are accumulated in `main_grad`, also where a weight gradient is added to it inside the GEMM and `.grad`
    holds nothing. Outside of what this rank's optimizer holds of it, `main_grad` is not reduced.

    Attributes:
        chunks: The wrappers, one per virtual pipeline stage.
        held: What this rank's optimizer holds of each of `parameters`.
    """

    framework = "megatron"
    reads_at_entry = True
    reduces = True
    unreduced_once = True
    is_pipelined = True

    def __init__(self, *, chunks: Sequence[nn.Module], held: Sequence[ParameterRange | None], **parts: Any) -> None:
        super().__init__(**parts)
        self.chunks = tuple(chunks)
        self.held = tuple(held)
        self._slices: list[tuple[Tensor, Tensor] | None] = [None] * len(held)
        self._singles = holdings.single_optimizers(self.optimizer)
        self._loss_scale: Tensor | None = None

    def process_groups(self) -> Mapping[str, Any]:
        """Return Megatron's process groups by purpose.

        Dense gradients are reduced over `dp_cp`, experts' over `edp`.
        """
        return process_groups_of(self.chunks[0])

    # ------------------------------------------------------------------ the step

    def watch_step(
        self,
        guard: FaultGuard,
        *,
        entry: Callable[[], None],
        exit: Callable[[StepOutcome], None],
        hooks: HookMaker | None = None,
    ) -> list[TapHandle]:
        """Call `entry` and `exit(outcome)` around `step` of the outer optimizer, which is replaced; return the patch.

        At its entry gradients are final, not clipped and not unscaled.
        """

        def begins(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            self._enter(entry)

        def ends(result: tuple[bool, float | None, Any]) -> None:
            exit(self._outcome(result))

        before = guard.wrap(begins) if hooks is None else hooks.entry(guard, begins)
        after = guard.wrap(ends) if hooks is None else hooks.exit(guard, ends)
        return [Patch(self.optimizer, "step", before=before, after=after)]

    def watch_decision(self, guard: FaultGuard, decide: Callable[[bool], None]) -> list[TapHandle]:
        """Call `decide(nonfinite)` by what Megatron reduced: found-inf under a loss scale, else the global norm.

        A single optimizer that clips nothing computes no norm: then found-inf alone decides, or, without a loss scale,
        nothing does. Returns the patches.
        """
        is_chain = hasattr(self.optimizer, "chained_optimizers")
        found_inf = guard.wrap(lambda found: decide(found) if found else None)
        no_inf = guard.wrap(lambda found: decide(bool(found)))
        normed = guard.wrap(lambda norm: decide(not math.isfinite(norm)))
        if is_chain or self._max_norm is not None:
            norm_method = "get_grad_norm" if is_chain else "clip_grad_norm"
            return [
                Patch(self.optimizer, "prepare_grads", after=found_inf),
                Patch(self.optimizer, norm_method, after=normed),
            ]
        return [Patch(self.optimizer, "prepare_grads", after=no_inf)] if self._scaler is not None else []

    def replayable(self) -> Replayable:
        """Return how a step is replayed: each pipeline stage by itself, with the ranks of the other axes."""
        return MegatronReplayable(self.roots, self.communicates, self._scaler)

    def _enter(self, entry: Callable[[], None]) -> None:
        # the step itself moves a dynamic scale; the tensor is replaced then, not written to
        self._loss_scale = None if self._scaler is None else self._scaler.scale
        entry()

    def _outcome(self, result: tuple[bool, float | None, Any]) -> StepOutcome:
        successful, norm, *_ = result
        is_chain = hasattr(self.optimizer, "chained_optimizers")
        return StepOutcome(
            skipped=not successful,
            grad_norm=norm if is_chain or self._max_norm is not None else None,
            max_norm=self._max_norm,
            loss_scale=self._loss_scale,
        )

    @property
    def _max_norm(self) -> float | None:
        limit = float(self._singles[0].config.clip_grad)
        return limit if limit > 0.0 else None

    @property
    def _scaler(self) -> Any:
        return getattr(self._singles[0], "grad_scaler", None)

    # ------------------------------------------------------------------ gradients

    def watch_unreduced(self, guard: FaultGuard, see: Callable[[int, Tensor], None]) -> list[TapHandle]:
        """Call `see(index, gradient)` with each parameter's `main_grad` before it is reduced; return the patches.

        `index` is the parameter's position in `parameters`. The factor 1/dp is not in it yet.
        """
        index_of = {parameter.tensor: index for index, parameter in enumerate(self.parameters)}
        handles: list[TapHandle] = []
        for chunk in self.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):  # type: ignore[misc]
                members = [(index_of[p], p) for bucket in group.buckets for p in bucket.params_list if p in index_of]
                before = guard.wrap(_before_reduction, group, members, see)
                handles.append(Patch(group, "start_grad_sync", before=before))
        return handles

    def watch_micro_gradients(self, guard: FaultGuard, see: Callable[[int, Tensor], None]) -> list[TapHandle]:
        """Call `see(index, gradient)` with what each single backward adds to a gradient; return the hooks.

        Raises:
            AttachError: Weight gradients are added to `main_grad` inside the GEMM, so that of a single backward there
                is none.
        """
        if any(getattr(_config_of(chunk), "gradient_accumulation_fusion", False) for chunk in self.chunks):
            raise AttachError(
                "Megatron: found gradient_accumulation_fusion, with which the gradient of a single micro batch never "
                "exists; set gradient_accumulation_fusion=False (--no-gradient-accumulation-fusion), or "
                "monitor_mbs_grad to false"
            )
        return super().watch_micro_gradients(guard, see)

    def reduced_gradients(self) -> list[Tensor | None]:
        """Return by parameter this rank's slice of its `main_grad` (a view, no copy); None where it steps nothing."""
        return [None if held is None else self._slice(i, held) for i, held in enumerate(self.held)]

    def _slice(self, index: int, held: ParameterRange) -> Tensor:
        whole: Tensor = self.parameters[index].tensor.main_grad  # type: ignore[attr-defined]
        kept = self._slices[index]
        if kept is None or kept[0] is not whole:
            kept = self._slices[index] = (whole, whole.view(-1)[held.start : held.end])
        return kept[1]

    # ------------------------------------------------------------------ optimizer

    def values(self) -> list[Tensor | None]:
        """Return, by parameter, what the optimizer steps: fp32 main copy or shard where there is one; None for nothing.

        Never the model's own parameters after the step: with `overlap_param_gather` they are not gathered yet.
        """
        return [None if held is None else holdings.value_of(held) for held in self.held]

    def states(self) -> list[OptimizerState | None]:
        """Return, by parameter, the inner optimizer's state of the part that this rank steps.

        None where that is nothing.
        """
        inner = [single.optimizer for single in self._singles if single.optimizer is not None]
        group_of = {id(p): group for one in inner for group in one.param_groups for p in group["params"]}
        return [None if held is None else _state_of(held, group_of) for held in self.held]

    # ------------------------------------------------------------------ what is recorded without being asked

    def loss_of(self, output: Any) -> Tensor | None:
        """Return the loss in what a root returned: a scalar, or the per-token losses of a language model's last stage.

        The latter has no loss mask yet: the script applies it outside of the model. None if it is neither.
        """
        root: Any = self.roots[-1]
        model = getattr(root, "module", root)  # below a Float16Module
        is_last = hasattr(model, "compute_language_model_loss") and model.post_process
        if is_last and isinstance(output, Tensor) and output.dim() == 2 and output.is_floating_point():
            return output
        return super().loss_of(output)


def _before_reduction(
    group: Any,
    members: Sequence[tuple[int, nn.Parameter]],
    see: Callable[[int, Tensor], None],
    _args: tuple[Any, ...],
    _kwargs: Mapping[str, Any],
) -> None:
    if getattr(group, "is_first_batch", False) and group.grad_reduce_handle is not None:
        return  # under way already: Megatron ignores this call
    for index, parameter in members:
        see(index, parameter.main_grad)  # type: ignore[attr-defined]


def _state_of(held: ParameterRange, group_of: Mapping[int, Mapping[str, Any]]) -> OptimizerState | None:
    state = holdings.state_of(held)
    return OptimizerState(holdings.value_of(held), state, group_of[id(held.stepped)]) if state else None


def _config_of(chunk: nn.Module) -> Any:
    return getattr(chunk, "config", None)
