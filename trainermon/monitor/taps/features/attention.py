"""How sharp attention is, from the query and key that the module really uses.

They are those of the calls of `scaled_dot_product_attention` below the module, with their mask and scale; where there
is none, the module's own arguments, as Megatron's and Transformer Engine's attention cores have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.taps.features import formulas
from trainermon.monitor.taps.features.feature import Feature
from trainermon.monitor.taps.features.formulas import AttentionInputs
from trainermon.monitor.taps.training import TapHandle

ENTROPY, LARGEST_PROBABILITY, LARGEST_LOGIT = "attention_entropy", "attention_max_probability", "attention_max_logit"
BATCH_FIRST, SEQUENCE_FIRST = "b,s,h,d", "s,b,h,d"
QKV_FORMATS = {"sbhd": SEQUENCE_FIRST, "bshd": BATCH_FIRST}
SDPA_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class AttentionFeature(Feature):
    """Records, of a module's attention, entropy, largest probability and largest logit per row of the attention matrix.

    See `formulas.attention_rows`.

    Args:
        args: As of `Feature`.
        order: Dimensions of query and key as the module is given them: `s,b,h,d` or `b,s,h,d`.
    """

    def __init__(self, *args: Any, order: str) -> None:
        super().__init__(*args)
        self._order = order
        self._watch: _AttentionWatch | None = None

    def attach(self, guard: FaultGuard) -> list[TapHandle]:
        """Hook the module's forwards; return the hooks, none (and log why) if attention of its kind is not computed."""
        module = self.module.module
        reason = why_not(module)
        if reason:
            self._give_up(reason)
            return []
        before = guard.wrap(self._before, guard)
        behind = guard.wrap(self._behind)
        return [
            module.register_forward_pre_hook(before),
            # non-reentrant checkpointing leaves a recomputed forward by an exception
            module.register_forward_hook(behind, with_kwargs=True, always_call=True),
        ]

    def detach(self) -> None:
        """Drop what was seen of the forward that runs now."""
        if self._watch is not None:
            self._watch.leave()
            self._watch = None

    def _before(self, guard: FaultGuard, _module: nn.Module, _args: tuple[Any, ...]) -> None:
        if self._is_due and self._watch is None:
            self._watch = _AttentionWatch(guard.wrap(self._see))
            self._watch.enter()

    def _see(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._is_due:
            self._is_taken = True
            given = {**dict(zip(SDPA_PARAMETERS, args, strict=False)), **kwargs}
            self._look(lambda query: self._compute(of_torch(query, given)), given["query"])

    def _behind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        if self._watch is None:
            return
        self.detach()
        if not self._is_due:
            return
        self._is_taken = True
        query, key, mask = _core_arguments(args, kwargs)
        if not (_is_heads(query) and _is_heads(key) and query.shape[-1] == key.shape[-1]):
            self._give_up(
                "it was not called with query and key as tensors of four dimensions, and nothing below it called "
                "torch.nn.functional.scaled_dot_product_attention"
            )
            return
        self._look(lambda q: self._compute(of_core(module, (q, key, mask), kwargs, order=self._order)), query)

    def _compute(self, call: AttentionInputs) -> None:
        rows = formulas.attention_rows(call)
        for name, row in zip((ENTROPY, LARGEST_PROBABILITY, LARGEST_LOGIT), rows, strict=True):
            self._take(name, row)


def of_torch(query: Tensor, given: Mapping[str, Any]) -> AttentionInputs:
    """Return the inputs of a call of `scaled_dot_product_attention`.

    A causal mask is aligned with the first key, as there. `given` are its other arguments by name. Tensors of three
    dimensions have one head, as there.
    """
    key, mask = given["key"].detach(), given.get("attn_mask")
    if query.dim() == 3:
        query, key = query[:, None], key[:, None]
        mask = mask[:, None] if mask is not None and mask.dim() == 3 else mask
    return AttentionInputs(
        query=query,
        key=key,
        scale=query.shape[-1] ** -0.5 if given.get("scale") is None else given["scale"],
        last=0 if given.get("is_causal") else None,
        mask=None if mask is None else mask.detach(),
    )


def of_core(
    module: nn.Module, tensors: tuple[Tensor, Tensor, Tensor | None], kwargs: Mapping[str, Any], *, order: str
) -> AttentionInputs:
    """Return the inputs of a call of an attention core in the manner of Megatron's, where true in a mask hides a key.

    `order` names the dimensions, `s,b,h,d` or `b,s,h,d`. Scale: `softmax_scale`, times what `scale_mask_softmax`
    multiplies by later (layer scaling), else 1 over the root of the depth. Causal: the name of `attn_mask_type`, else
    `is_causal` or `causal`, else it is not; aligned with the first key unless the name says `bottom_right`. Window:
    `(left, right)`, -1 for no bound.
    """
    query, key, mask = tensors
    order = QKV_FORMATS.get(str(kwargs.get("qkv_format", getattr(module, "qkv_format", ""))), order)
    dims = (0, 2, 1, 3) if order == BATCH_FIRST else (1, 2, 0, 3)
    query, key = query.permute(dims), key.detach().permute(dims)
    softmax = getattr(module, "scale_mask_softmax", None)
    scale = getattr(module, "softmax_scale", None) or query.shape[-1] ** -0.5
    aligned_end = key.shape[2] - query.shape[2]
    first, last = _window(kwargs.get("window_size") or getattr(softmax or module, "window_size", None), aligned_end)
    kind = _mask_type(module, kwargs)
    if "causal" in kind:
        last = min(aligned_end if "bottom_right" in kind else 0, aligned_end if last is None else last)
    return AttentionInputs(
        query=query,
        key=key,
        scale=scale * (getattr(softmax, "scale", None) or 1.0),
        first=first,
        last=last,
        mask=~mask if isinstance(mask, Tensor) and mask.dtype is torch.bool else mask,
    )


def why_not(module: nn.Module) -> str:
    """Return why the attention of this module cannot be seen; empty if it can."""
    if getattr(getattr(module, "config", None), "context_parallel_size", 1) > 1:
        return "under context parallelism no rank has all keys"
    if getattr(module, "softmax_offset", None) is not None:
        return "its softmax has a learnt offset"
    if any(getattr(inner, "_compiled_call_impl", None) or hasattr(inner, "_orig_mod") for inner in module.modules()):
        return "it is compiled, and watching it would compile it again"
    return ""


def _window(window: Sequence[int] | None, aligned_end: int) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    left, right = window
    return (None if left < 0 else aligned_end - left), (None if right < 0 else aligned_end + right)


def _mask_type(module: nn.Module, kwargs: Mapping[str, Any]) -> str:
    given = kwargs.get("attn_mask_type") or getattr(module, "attn_mask_type", None)
    if given is not None:
        return str(getattr(given, "name", given))
    return "causal" if getattr(module, "is_causal", getattr(module, "causal", False)) else ""


def _core_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    query = args[0] if args else kwargs.get("query", kwargs.get("query_layer"))
    key = args[1] if len(args) > 1 else kwargs.get("key", kwargs.get("key_layer"))
    return query, key, args[3] if len(args) > 3 else kwargs.get("attention_mask")


def _is_heads(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4


class _AttentionWatch(TorchFunctionMode):
    """Sees calls of `scaled_dot_product_attention` between `enter` and `leave`; costs 1 us per torch call there."""

    def __init__(self, see: Callable[..., Any]) -> None:
        super().__init__()
        self._see: Callable[..., Any] | None = see

    def enter(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Leave, or, where somebody else has entered a mode since, only fall silent."""
        self._see = None
        entered: list[Any] = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if entered and entered[-1] is self:
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and self._see is not None:
            self._see(args, kwargs or {})
        return func(*args, **(kwargs or {}))
