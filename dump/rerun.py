"""Runs one kept forward and its backward again such that the training does not notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from trainermon.dump.attributes import Attributes
from trainermon.dump.capture import ModuleCapture
from trainermon.dump.gradients import is_foreign
from trainermon.dump.keep import KeptForward, differentiable
from trainermon.dump.state import NotCoveredError, RandomState, accelerators, clone_buffers, same_bits


class CommunicationError(Exception):
    """The model's forward or backward wanted to talk to other ranks, which are not replaying with it."""


class _NoCommunication(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops the first collective before it is sent."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in str(getattr(func, "namespace", "")):
            raise CommunicationError(f"the model communicates in its forward or backward ({func})")
        return func(*args, **(kwargs or {}))


class Fidelity(NamedTuple):
    """Whether a replayed forward returned what the step itself had, bit for bit; None where that was not kept.

    `lost_nonfinite`: the step's output was not finite, the replay's is. The fault did not come back.
    """

    same: bool | None
    lost_nonfinite: bool


def rerun(model: nn.Module, kept: KeptForward, capture: ModuleCapture, shadows: list[nn.Parameter]) -> Fidelity:
    """Run `model` on kept arguments under the kept state, and a backward from the kept gradients.

    Call it inside `undisturbed` and `shadow_parameters`, which give `shadows`.

    Raises:
        NotCoveredError: something that is needed was not kept or is gone.
        CommunicationError: the model wanted to talk to other ranks; nothing was sent.
    """
    if kept.changed_input():
        raise NotCoveredError("an input of the model was overwritten after the forward")
    for module, training in zip(model.modules(), kept.training, strict=True):
        module.training = training
    for buffer in kept.buffers:
        buffer.put_back()
    kept.random.put_back()
    args, kwargs = pytree.tree_map(_fresh_leaf, (kept.args, kept.kwargs))
    with _silent(), torch.inference_mode(mode=False), torch.enable_grad():
        with kept.autocast.active():
            output = model(*args, **kwargs)
        returned = differentiable(output)
        if len(returned) != len(kept.gradients):
            raise NotCoveredError(f"the model returned {len(returned)} tensors, not {len(kept.gradients)} as before")
        fidelity = _compare(kept.original_outputs(), returned)
        with capture.paused():
            pairs = _external_gradients(returned, kept.gradients)
        del output, returned
        _backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs], shadows)
    return fidelity


def _compare(originals: list[Tensor], returned: list[Tensor]) -> Fidelity:
    if not originals:
        return Fidelity(None, lost_nonfinite=False)
    pairs = list(zip(originals, returned, strict=True))
    lost = any(bool(new.isfinite().all()) and not bool(old.isfinite().all()) for old, new in pairs)
    return Fidelity(all(same_bits(old, new) for old, new in pairs), lost_nonfinite=lost)


def _external_gradients(returned: list[Tensor], totals: list[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """Return what the outside gave each returned tensor.

    The kept gradient of `logits` in a returned `(loss, logits)` is the sum over all uses, the model's own computation
    of the loss among them; starting a backward from it as well would count that part twice.
    """
    kept = [(tensor, total) for tensor, total in zip(returned, totals, strict=True) if total is not None]
    kept.sort(key=lambda pair: pair[0].grad_fn._sequence_nr(), reverse=True)  # type: ignore[union-attr]
    pairs: list[tuple[Tensor, Tensor]] = []
    for tensor, total in kept:
        internal = None
        if pairs:
            (internal,) = torch.autograd.grad(
                [later for later, _ in pairs],
                [tensor],
                [gradient for _, gradient in pairs],
                retain_graph=True,
                allow_unused=True,
            )
        if internal is None:
            pairs.append((tensor, total))
        elif not same_bits(internal, total):
            pairs.append((tensor, total - internal))
    return pairs


def _backward(tensors: list[Tensor], gradients: list[Tensor], shadows: list[nn.Parameter]) -> None:
    """Run the backward into the shadows only.

    Reentrant checkpointing refuses to be told where to stop. There every leaf in the graph is a shadow or a fresh copy
    of an argument, unless the model holds a parameter that is not registered.
    """
    if _has_reentrant_checkpoint(tensors):
        torch.autograd.backward(tensors, gradients)
    else:
        torch.autograd.backward(tensors, gradients, inputs=shadows)


def _has_reentrant_checkpoint(tensors: list[Tensor]) -> bool:
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
    return False


@contextmanager
def shadow_parameters(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Let the model hold leaves of our own that share the parameters' storage; yield those that require a gradient."""
    owned = [(module, name, parameter) for module in model.modules() for name, parameter in module._parameters.items()]
    shadows: dict[int, nn.Parameter] = {}
    gradients = [(parameter, parameter.grad) for _, _, parameter in owned if parameter is not None]
    for _, _, parameter in owned:
        if parameter is not None and id(parameter) not in shadows:
            shadow = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            shadow.__dict__.update(parameter.__dict__)
            if shadow.requires_grad:
                _take_over_hooks(parameter, shadow)
                shadow.register_post_accumulate_grad_hook(_forget_gradient)  # type: ignore[no-untyped-call]
            shadows[id(parameter)] = shadow
    try:
        for module, name, parameter in owned:
            if parameter is not None:
                _hold(module, name, shadows[id(parameter)])
        yield [shadow for shadow in shadows.values() if shadow.requires_grad]
    finally:
        for module, name, parameter in owned:
            if parameter is not None:
                _hold(module, name, parameter)
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient


def _take_over_hooks(parameter: nn.Parameter, shadow: nn.Parameter) -> None:
    """Let the script's own gradient hooks act on the shadow, so that its gradient is what the script's would be."""
    for hook in (parameter._backward_hooks or {}).values():
        if is_foreign(hook):
            shadow.register_hook(hook)  # type: ignore[no-untyped-call]


def _hold(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module._parameters[name] = parameter
    if type(module).__setattr__ is not nn.Module.__setattr__:  # recurrent modules keep a second list of their weights
        setattr(module, name, parameter)


def _forget_gradient(shadow: Tensor) -> None:
    """Free a gradient that has been recorded, so that the replay needs no second set of them."""
    shadow.grad = None


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put generators, buffers, training flags and other attributes back afterwards, bit for bit.

    Attributes are not kept with each forward: inside, they start from what they are now.
    """
    with ExitStack() as undo:
        undo.callback(Attributes(model).put_back)
        for buffer in clone_buffers(model):
            undo.callback(buffer.put_back)
        undo.callback(RandomState.take(accelerators(model)).put_back)
        yield


@contextmanager
def eager(*, compiled: bool) -> Iterator[None]:
    """Run compiled parts of the model in eager mode, where their modules' hooks fire."""
    with ExitStack() as stack:
        if compiled and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _silent() -> AbstractContextManager[Any]:
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return _NoCommunication() if several else nullcontext()  # type: ignore[no-untyped-call]


def _fresh_leaf(value: Any) -> Any:
    """Cut an argument that requires a gradient from the graph that it came from."""
    if isinstance(value, Tensor) and value.requires_grad:
        return value.detach().requires_grad_()
    return value
