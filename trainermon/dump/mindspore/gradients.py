"""The gradients of what calls take and give: seen by hooks on the tensors, one entry for each call.

A tensor of a graph goes with it, and its hook too; one of the script's own may be given again, so its hook is removed.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence

from mindspore import Tensor

from trainermon.dump.files.records import EXTRA
from trainermon.dump.forms import TensorForm, TensorLeaf
from trainermon.dump.mindspore.encoding import is_followed, tensor_form
from trainermon.dump.mindspore.writer import CellWriter
from trainermon.hooks.containment import PlainContainedCall
from trainermon.hooks.mindspore.hooks import HookHandle, on_gradient


@dataclasses.dataclass(slots=True, eq=False)
class BackwardOfCall:
    """The backward entry of a call, as far as its gradients have arrived.

    Attributes:
        key: Its key in the dump.
        parent: The key of the backward of the call around it; None: at the top.
        is_root: It is the model's, which goes to the info file.
        inputs: By place, the gradients of what the call gave.
        outputs: By place, the gradients of what it took.
        num_missing: Hooks of tensors that have not been called.
    """

    key: str
    parent: str | None
    is_root: bool = False
    inputs: list[TensorForm | None] = dataclasses.field(default_factory=list)
    outputs: list[TensorForm | None] = dataclasses.field(default_factory=list)
    num_missing: int = 0


class CallGradients:
    """Writes the backward entry of each call when all its gradients have arrived, or at `close` what has.

    Args:
        writer: Where entries go.
        contained: Makes of a function and its first arguments one that never raises.
    """

    def __init__(self, writer: CellWriter, contained: Callable[..., PlainContainedCall]) -> None:
        self._writer = writer
        self._contained = contained
        self._waiting = dict[int, BackwardOfCall]()
        self._handles = list[_WeakHandle]()

    def watch_inputs(self, backward: BackwardOfCall, leaves: Sequence[TensorLeaf]) -> None:
        """Record the gradients of what a call takes."""
        backward.outputs = self._watch(backward, "output", leaves)

    def watch_outputs(self, backward: BackwardOfCall, leaves: Sequence[TensorLeaf]) -> None:
        """Record the gradients of what a call has given; after this its entry may be complete."""
        backward.inputs = self._watch(backward, "input", leaves)
        if backward.num_missing:
            self._waiting[id(backward)] = backward

    def close(self) -> None:
        """Remove every hook, and write the entries of which not all gradients arrived."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for backward in self._waiting.values():
            self._contained(self._write, backward)()
        self._waiting.clear()

    def _watch(self, backward: BackwardOfCall, side: str, leaves: Sequence[TensorLeaf]) -> list[TensorForm | None]:
        watched = [(place, leaf.tensor) for place, leaf in enumerate(leaves) if is_followed(leaf.tensor)]
        for place, tensor in watched:
            hook = self._contained(self._arrived, backward, side, place)
            self._handles.append(_WeakHandle(tensor, on_gradient(tensor, hook)))
            backward.num_missing += 1
        return [None] * len(leaves) if watched else []

    def _arrived(self, backward: BackwardOfCall, side: str, place: int, gradient: Tensor | None) -> None:
        if gradient is not None:  # of indices there is none
            form = tensor_form(gradient)
            self._writer.record(backward.key, [TensorLeaf(f"{side}.{place}", gradient, form)])
            (backward.inputs if side == "input" else backward.outputs)[place] = form
        backward.num_missing -= 1
        if backward.num_missing == 0 and self._waiting.pop(id(backward), None) is not None:
            self._write(backward)

    def _write(self, backward: BackwardOfCall) -> None:
        orders = [form.order for form in (*backward.inputs, *backward.outputs) if form is not None]
        if not orders:
            return
        value = {"input": backward.inputs, "output": backward.outputs, EXTRA: {"order": max(orders)}}
        if backward.is_root:
            self._writer.add_root(backward.key, value)
        else:
            self._writer.add(backward.key, value, parent=backward.parent)


class _WeakHandle:
    """Removes the hook of a tensor that is still there."""

    def __init__(self, tensor: Tensor, handle: HookHandle) -> None:
        self._tensor, self._handle = weakref.ref(tensor), handle

    def remove(self) -> None:
        if self._tensor() is not None:
            self._handle.remove()
