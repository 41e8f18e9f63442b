"""Variables that a script hands over by name (level debug), and their gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from trainermon.dump.encode import encode, tensor_form
from trainermon.dump.forms import TensorForm, TensorLeaf
from trainermon.dump.writer import DumpWriter
from trainermon.hooks.guard import ContainedCall


class VariableWriter:
    """Writes the variables that a script saves (`PrecisionDebugger.save`), and their gradients, into debug.json.

    The entry of a variable has the key `<name>.<count>.debug`, that of its gradients `<name>_grad.<count>.debug`, where
    count is the number of earlier saves with this name. Both have the same structure. `close` writes the gradients'
    entry even if no gradient arrived: null stands where one is missing.
    """

    def __init__(self, writer: DumpWriter) -> None:
        self.tripped = False
        self._writer = writer
        self._counts: Counter[str] = Counter()
        self._open: dict[str, Any] = {}
        self._handles: list[Any] = []

    def save(self, variable: Any, name: str, *, with_gradient: bool) -> None:
        """Record `variable` as it is now, and with `with_gradient` its gradients when they arrive.

        It may be a tensor, a number, or nested containers of them; without a tensor that needs a gradient there is no
        entry of gradients.
        """
        count = self._counts[name]
        self._counts[name] += 1
        leaves: list[TensorLeaf] = []
        value = encode(variable, "", leaves)
        key = f"{name}.{count}.debug"
        self._writer.record(key, [_placed(leaf) for leaf in leaves])
        self._writer.add_gradients(key, value)
        if with_gradient and any(leaf.tensor.requires_grad for leaf in leaves):
            self._watch(f"{name}_grad.{count}.debug", value, leaves)

    def close(self) -> None:
        """Remove the gradient hooks, and write the entries of gradients, with null for each that did not arrive."""
        for handle in self._handles:
            handle.remove()
        for key, value in self._open.items():
            self._writer.add_gradients(key, value)
        self._open.clear()
        self.tripped = True

    def trip(self, error: BaseException) -> None:
        """Note in the dump that an entry was lost to `error`; called in place of raising into training."""
        self._writer.count_error(error)

    def _watch(self, key: str, value: Any, leaves: list[TensorLeaf]) -> None:
        self._open[key] = _emptied(value)
        for leaf in leaves:
            if leaf.tensor.requires_grad:
                is_leaf = leaf.tensor.grad_fn is None
                hook = ContainedCall(self, self._gradient, (key, leaf.slot))
                handle = leaf.tensor.register_hook(hook)
                if is_leaf:
                    self._handles.append(handle)

    def _gradient(self, key: str, slot: str, gradient: Tensor) -> None:
        form = tensor_form(gradient)
        self._writer.record(key, [_placed(TensorLeaf(slot, gradient, form))])
        self._open[key] = _put(self._open[key], slot.split(".")[1:], form)


def _placed(leaf: TensorLeaf) -> TensorLeaf:
    return leaf._replace(slot=leaf.slot.removeprefix("."))


def _emptied(value: Any) -> Any:
    """Return the containers of `value` with None in the place of everything else."""
    if isinstance(value, dict) and not isinstance(value.get("type"), str):
        return {name: _emptied(item) for name, item in value.items()}
    return [_emptied(item) for item in value] if isinstance(value, list) else None


def _put(container: Any, path: list[str], form: TensorForm) -> Any:
    if not path:
        return form
    key: Any = int(path[0]) if isinstance(container, list) else path[0]
    container[key] = _put(container[key], path[1:], form)
    return container
