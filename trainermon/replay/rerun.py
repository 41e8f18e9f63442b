"""Runs one kept forward and its backward again such that the training does not notice."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from trainermon.dump.gradients import is_foreign
from trainermon.dump.torch_tensors import checksum
from trainermon.hooks.replayable import Replayable
from trainermon.hooks.tree import tensors_of
from trainermon.replay.attributes import ModuleAttributes
from trainermon.replay.graph import has_reentrant_checkpoint, nodes_behind
from trainermon.replay.keep import KeptForward, differentiable
from trainermon.replay.state import NotCoveredError, RandomState, accelerators, clone_buffers, same_bits
from trainermon.replay.suitability import ModelStage


class CommunicationError(Exception):
    """Raised if a replayed model communicates with ranks that are not replaying with it."""


class _NoCommunication(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops the first collective before it is sent."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in str(getattr(func, "namespace", "")) and not _is_alone(args):
            raise CommunicationError(f"the model communicates in its forward or backward ({func})")
        return func(*args, **(kwargs or {}))


def _is_alone(args: tuple[Any, ...]) -> bool:
    """Return whether a collective is among one rank, as Megatron's over axes that are not split are."""
    groups = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
    return bool(groups) and all(dist.ProcessGroup.unbox(group).size() == 1 for group in groups)


class ReplayFidelity(NamedTuple):
    """How the result of a replayed forward compares with what the step itself had.

    Attributes:
        same: Whether they are equal bit for bit; None: the step's was not kept.
        lost_nonfinite: The step's output was not finite, the replay's is: the fault did not come back.
        finite: Whether all that the replay returned is finite.
        marks: Checksums of that, to compare two replays; empty where it is the same as the step's.
    """

    same: bool | None
    lost_nonfinite: bool
    finite: bool = True
    marks: tuple[str, ...] = ()


class ReplayWatcher(Protocol):
    """Interface of what hooks the modules during a replay.

    It is told the micro step and stage that run, and what the root is handed by the framework.
    """

    micro_step: int | None
    stage: int | None
    handed: Mapping[str, Any]

    def attach(self) -> None:
        """Put hooks on the modules."""

    def detach(self) -> None:
        """Remove the hooks."""


class StepRerun(NamedTuple):
    """The settings under which the micro steps of a step are run again.

    Attributes:
        stages: The roots.
        replayable: What the framework requires.
        watcher: Hooks the modules.
        leaves: Stand-ins for the parameters that gradients go to; None: the parameters are the true ones, and
            `replayable` says how far a backward may go.
        mode: A context for the model's forwards and backwards; None: none.
    """

    stages: Sequence[ModelStage]
    replayable: Replayable
    watcher: ReplayWatcher
    leaves: list[nn.Parameter] | None
    mode: AbstractContextManager[Any] | None = None

    def watched(self) -> AbstractContextManager[Any]:
        """Return the context for one forward or backward of the model: `mode`, or one that does nothing."""
        return self.mode or nullcontext()


def rerun(kept: KeptForward, using: StepRerun) -> ReplayFidelity:
    """Run one kept forward again under the kept state, and a backward from the kept gradients.

    Returns how the results compare with those of the step. Call it inside `undisturbed`, and inside `shadow_parameters`
    where the parameters are shadowed.

    Raises:
        NotCoveredError: something that is needed was not kept or is gone.
        CommunicationError: the model wanted to talk to other ranks, alone; nothing was sent.
    """
    stage = using.stages[kept.stage]
    kept.check()
    _put_back_state(stage.model, kept)
    args, kwargs, handed = pytree.tree_map(_fresh_leaf, kept.given())
    fresh = [tensor for _, tensor in tensors_of((args, kwargs, handed)) if tensor.requires_grad]
    for place, value in zip(kept.handed, handed, strict=True):
        setattr(place.module, place.name, value)
    with _silent(joint=using.replayable.joint), torch.inference_mode(mode=False), torch.enable_grad():
        using.watcher.handed = {place.name: value for place, value in zip(kept.handed, handed, strict=True)}
        with kept.autocast.active(), using.watched():
            output = stage.called(*args, **kwargs)
        returned = differentiable(output)
        if len(returned) != len(kept.gradients):
            raise NotCoveredError(f"the model returned {len(returned)} tensors, not {len(kept.gradients)} as before")
        fidelity = _compare(kept.original_outputs(), returned)
        pairs = _beginnings(returned, kept.gradients)
        del output, returned
        with using.watched():
            _backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs], using, fresh)
    return fidelity


def _put_back_state(model: nn.Module, kept: KeptForward) -> None:
    for module, training in zip(model.modules(), kept.training, strict=True):
        module.training = training
    for buffer in kept.buffers:
        buffer.put_back()
    kept.random.put_back()
    kept.generators()


def _compare(originals: list[Tensor], returned: list[Tensor]) -> ReplayFidelity:
    finite = all(bool(tensor.isfinite().all()) for tensor in returned)
    if not originals:
        return ReplayFidelity(None, lost_nonfinite=False, finite=finite, marks=tuple(map(checksum, returned)))
    pairs = list(zip(originals, returned, strict=True))
    if all(same_bits(old, new) for old, new in pairs):
        return ReplayFidelity(same=True, lost_nonfinite=False, finite=finite)
    lost = any(bool(new.isfinite().all()) and not bool(old.isfinite().all()) for old, new in pairs)
    return ReplayFidelity(same=False, lost_nonfinite=lost, finite=finite, marks=tuple(map(checksum, returned)))


def _beginnings(returned: list[Tensor], totals: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """Return from which tensors a backward begins with which gradients.

    The kept gradient of `logits` in a returned `(loss, logits)` is the sum over all uses, the model's own computation
    of the loss among them. So the backward begins at the loss, and where it comes to the logits goes on with that sum.
    """
    kept = [(tensor, total) for tensor, total in zip(returned, totals, strict=True) if total is not None]
    kept.sort(key=lambda pair: pair[0].grad_fn._sequence_nr(), reverse=True)  # type: ignore[union-attr]
    pairs: list[tuple[Tensor, Tensor]] = []
    behind: set[Any] = set()
    for tensor, total in kept:
        if tensor.grad_fn in behind:
            handle = tensor.register_hook(functools.partial(_instead, total))  # type: ignore[no-untyped-call]
            tensor._backward_hooks.move_to_end(handle.id, last=False)  # type: ignore[union-attr]
        else:
            pairs.append((tensor, total))
            behind.update(node for node in nodes_behind([tensor]) if node is not tensor.grad_fn)
    return pairs


def _instead(total: Tensor, _gradient: Tensor) -> Tensor:
    return total


def _backward(tensors: list[Tensor], gradients: list[Tensor], using: StepRerun, fresh: list[Tensor]) -> None:
    """Run the backward into leaves of ours, or into what the framework has put aside.

    Reentrant checkpointing refuses to be told where to stop. There every leaf in the graph is a shadow or a fresh copy
    of what was given, unless the model holds a parameter that is not registered.
    """
    if using.leaves is None and not using.replayable.accumulates:
        _ask_for_gradients(tensors, gradients)
    elif using.leaves is None or has_reentrant_checkpoint(tensors):
        torch.autograd.backward(tensors, gradients)
    else:
        torch.autograd.backward(tensors, gradients, inputs=[*using.leaves, *fresh])


def _ask_for_gradients(tensors: list[Tensor], gradients: list[Tensor]) -> None:
    """Let gradients flow to all leaves, and nothing be done with them there.

    Each is let go of when all hooks have seen it: what is asked for becomes a scalar that claims to be as large.
    """
    leaves = [node.variable for node in nodes_behind(tensors) if hasattr(node, "variable")]
    handles = [leaf.register_hook(_without_memory) for leaf in leaves]
    try:
        torch.autograd.grad(tensors, leaves, gradients, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


def _without_memory(gradient: Tensor) -> Tensor:
    return gradient.new_zeros(()).expand_as(gradient)


@contextmanager
def shadow_parameters(models: Sequence[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """Return a context in which the models' parameters are replaced by stand-ins that share their storage.

    So gradients of a replay do not reach the true ones. It yields those stand-ins that require a gradient.
    """
    modules = [module for model in models for module in model.modules()]
    owned = [(module, name, parameter) for module in modules for name, parameter in module._parameters.items()]
    shadows: dict[int, nn.Parameter] = {}
    gradients = [(parameter, parameter.grad) for _, _, parameter in owned if parameter is not None]
    for _, _, parameter in owned:
        if parameter is not None and id(parameter) not in shadows:
            shadow = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            shadow.__dict__.update(parameter.__dict__)
            shadow.__dict__.pop("main_grad", None)  # Megatron's gradient: nobody shall add to it now
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
def undisturbed(models: Sequence[nn.Module], replayable: Replayable, given: Sequence[Any] = ()) -> Iterator[None]:
    """Return a context after which generators, buffers, training flags and other attributes are restored bit for bit.

    Attributes are not kept with each forward: inside, they start from what they are now.
    """
    with ExitStack() as undo:
        for number, model in enumerate(models):
            undo.callback(ModuleAttributes(model, () if number else given).put_back)
            for buffer in clone_buffers(model):
                undo.callback(buffer.put_back)
            undo.callback(RandomState.current(accelerators(model), anew=True).put_back)
        undo.callback(replayable.generators())
        undo.enter_context(replayable.set_aside())
        yield


@contextmanager
def eager(*, compiled: bool) -> Iterator[None]:
    """Return a context in which compiled parts of the model run uncompiled, so that their modules' hooks are called.

    With `compiled` false it does nothing.
    """
    with ExitStack() as stack:
        if compiled and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _silent(*, joint: bool) -> AbstractContextManager[Any]:
    several = not joint and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return _NoCommunication() if several else nullcontext()  # type: ignore[no-untyped-call]


def _fresh_leaf(value: Any) -> Any:
    """Cut an argument that requires a gradient from the graph that it came from."""
    if isinstance(value, Tensor) and value.requires_grad:
        return value.detach().requires_grad_()
    return value
