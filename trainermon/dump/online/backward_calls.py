"""The backward of chosen calls as an operation of its own: what it takes are the call's inputs and gradients.

So everything that can be tried with a call can be tried with its backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall
from trainermon.dump.files.records import BACKWARD, FORWARD
from trainermon.dump.online.generators import GeneratorStates
from trainermon.dump.online.observed_calls import ObservedCall

EXACT = 0.5  # no whole number: those are taken for sizes, and not moved


@dataclasses.dataclass(frozen=True, slots=True)
class GradientFunction:
    """Gives, for the inputs of `function` and the gradients of what it returns, the gradients of those inputs."""

    function: Callable[..., Any]

    def __call__(
        self, args: Sequence[Any], kwargs: dict[str, Any], gradients: Sequence[Tensor | None], exactness: float = EXACT
    ) -> list[Tensor]:
        """Return the gradients of all floating inputs that have one, in order; nothing given is written to.

        A backward reads what the forward has kept, and rounded. Who probes the call by moving its numbers moves
        `exactness` too, and then what is kept is moved as much.
        """
        kept = _moved_tensors(abs(exactness / EXACT - 1)) if exactness != EXACT else contextlib.nullcontext()
        with torch.enable_grad(), kept:
            leaves, form = pytree.tree_flatten((tuple(args), dict(kwargs)))
            fresh = [_watched(leaf) for leaf in leaves]
            given_args, given_kwargs = pytree.tree_unflatten(fresh, form)
            made = outputs_of(self.function(*given_args, **given_kwargs))
            pairs = [(one, gradient) for one, gradient in zip(made, gradients, strict=True) if gradient is not None]
            inputs = [leaf for leaf in fresh if isinstance(leaf, Tensor) and leaf.requires_grad]
            outputs, given = [one for one, _ in pairs], [gradient.to(one.dtype) for one, gradient in pairs]
            found: tuple[Tensor | None, ...] = torch.autograd.grad(outputs, inputs, given, allow_unused=True)
        return [gradient for gradient in found if gradient is not None]


def outputs_of(result: Any) -> list[Tensor]:
    """Return the tensors of a call's result that have gradients."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]


def follow(observed: ObservedCall, result: Any, then: Callable[[ObservedCall], object]) -> bool:
    """Call `then` with the backward of a call, as a call, when all gradients of `result` have arrived.

    Return whether there will be one. `then` must be contained.
    """
    outputs = outputs_of(result)
    if not outputs or torch._C._is_any_autocast_enabled():
        return False

    def arrived(gradients: Sequence[Tensor | None]) -> None:
        then(gradient_call(observed, gradients))

    for output in outputs:
        _ = output.grad_fn  # before a hook is registered: torch 2.13 does not survive the other order on some views
    if len(outputs) == 1:  # a hook for several is not called at the result where a backward starts: a loss
        outputs[0].register_hook(lambda gradient: arrived([gradient]))  # type: ignore[no-untyped-call]
    else:
        torch.autograd.graph.register_multi_grad_hook(outputs, arrived)
    return True


def gradient_call(observed: ObservedCall, gradients: Sequence[Tensor | None]) -> ObservedCall:
    """Return the backward of a call as a call."""
    call = OperationCall(
        GradientFunction(observed.call.function),
        (tuple(observed.call.args), dict(observed.call.kwargs), [_bare(one) for one in gradients], EXACT),
        {},
    )
    return ObservedCall(
        observed.key.replace(f".{FORWARD}", f".{BACKWARD}"),
        f"{observed.name}_backward",
        call,
        GeneratorStates.current(pytree.tree_leaves(call.args)),
        observed.versions,
    )


def _moved_tensors(size: float) -> Any:
    """Have a block keep what its backward needs with every number moved by `size`, relatively, up or down."""

    def pack(kept: Tensor) -> Tensor:
        if not kept.is_floating_point():
            return kept
        signs = 2 * torch.randint(0, 2, kept.shape, dtype=torch.int8).to(kept.device) - 1
        return torch.add(kept.detach(), kept.detach() * signs, alpha=size)

    return torch.autograd.graph.saved_tensors_hooks(pack, _same)


def _same(kept: Tensor) -> Tensor:
    return kept


def _watched(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point() or value.is_complex())


def _bare(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach()
