"""Records every call of a model's cells between `attach` and `detach`, and the gradients of what they take and give.

Decides what each call is called: `Cell.<name>.<Class>.forward.<n>`, msprobe's words. The model's own call, which has no
name there, goes to the info file.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspore import Parameter, Tensor, nn

from trainermon.dump.facts.stacks import call_stack
from trainermon.dump.files.records import BACKWARD, EXTRA, FORWARD, PARAMETERS_GRAD
from trainermon.dump.forms import TensorLeaf
from trainermon.dump.mindspore.encoding import encode_output, taken, tensor_form
from trainermon.dump.mindspore.gradients import BackwardOfCall, CallGradients
from trainermon.dump.mindspore.writer import CellWriter
from trainermon.hooks.containment import PlainContainedCall
from trainermon.hooks.mindspore.functions import is_in_backward
from trainermon.hooks.mindspore.hooks import before_with_kwargs, behind, on_gradient
from trainermon.hooks.names import chosen

ROOT_NAME = "model"


@dataclasses.dataclass(slots=True, eq=False)
class _CellCall:
    """One call of a cell that runs.

    Attributes:
        stem: `Cell.h.0.Dense`, the key without direction and number.
        number: How often the cell was called before.
        parent: The call around it; None: there is none.
        is_root: The cell is the model.
        value: What stands in its forward entry.
        stack: The lines of the script that made the call.
        backward: Where its gradients go.
    """

    stem: str
    number: int
    parent: _CellCall | None
    is_root: bool
    value: dict[str, Any]
    stack: Sequence[str]
    backward: BackwardOfCall

    def key(self, direction: str) -> str:
        """Return the key of its entry in the dump."""
        return f"{self.stem}.{direction}.{self.number}"

    def known_key(self, direction: str) -> str | None:
        """Return the key by which calls inside name it; None for the model's, which the files have elsewhere."""
        return None if self.is_root else self.key(direction)


class CellCapture:
    """Records the calls of the cells of `models` into `writer`; never raises into training.

    Args:
        models: By the first part of their cells' names, "" for the only one.
        writer: Where entries go.
        scope: Names or patterns of cells; (): all. The models themselves always are recorded.
    """

    def __init__(self, models: Mapping[str, nn.Cell], writer: CellWriter, scope: Sequence[str] = ()) -> None:
        self.tripped = False
        self._writer = writer
        self._stems = dict[int, str]()
        self._roots = set[int]()
        self._cells = list[nn.Cell]()
        for prefix, model in models.items():
            for path, cell in model.cells_and_names():
                if path and not chosen(path, scope):
                    continue
                name = ".".join(part for part in (prefix, path) if part)
                self._stems[id(cell)] = f"Cell.{name or ROOT_NAME}.{type(cell).__name__}"
                self._cells.append(cell)
                if not name:
                    self._roots.add(id(cell))
        self._numbers = Counter[str]()
        self._running = list[tuple[nn.Cell, _CellCall]]()
        self._handles = list[Any]()
        self._gradients = CallGradients(writer, self._contained)
        self._of_parameters = _ParameterGradients(writer)
        writer.take_classes({type(cell) for cell in self._cells})

    @property
    def num_calls(self) -> int:
        """How many calls were seen."""
        return sum(self._numbers.values())

    def running(self, direction: str) -> str | None:
        """Return the key of the call of a cell that runs innermost; None: there is none, or it is the model's."""
        return self._running[-1][1].known_key(direction) if self._running else None

    def go_on_from(self, earlier: CellCapture) -> None:
        """Continue the numbers of calls from where `earlier` ended, which wrote into the same dump."""
        self._numbers = earlier._numbers
        self._of_parameters.go_on_from(earlier._of_parameters)

    def attach(self) -> None:
        """Attach the hooks, after all hooks that the script has registered so far."""
        for cell in self._cells:
            self._handles.append(before_with_kwargs(cell, self._contained(self._before)))
            self._handles.append(behind(cell, self._contained(self._behind)))
        for cell in self._cells:
            for parameter in cell._params.values():
                if parameter is not None and parameter.requires_grad:
                    self._of_parameters.own(parameter, self._stems[id(cell)])
        self._handles += self._of_parameters.attach(self._contained)

    def detach(self) -> None:
        """Remove every hook, and write the entries whose gradients did not all arrive."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()
        self._gradients.close()
        self._contained(self._of_parameters.close)()
        self.tripped = True

    def stop_in_child(self) -> None:
        """Stop recording in a forked child process, and write nothing there: the files belong to the parent."""
        self.tripped = True

    def trip(self, error: BaseException) -> None:
        """Note in the dump that an entry was lost to `error`; called in place of raising into training."""
        self._writer.count_error(error)

    def _contained(self, function: Callable[..., Any], *bound: Any) -> PlainContainedCall:
        return PlainContainedCall(self, function, bound)

    def _before(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if is_in_backward():
            return  # a forward that is made again has an entry already
        stem, is_root = self._stems[id(cell)], id(cell) in self._roots
        number, parent = self._numbers[stem], self._running[-1][1] if self._running else None
        self._numbers[stem] += 1
        value, leaves = taken(args, kwargs)
        above = parent.known_key(BACKWARD) if parent is not None else None
        backward = BackwardOfCall(f"{stem}.{BACKWARD}.{number}", parent=above, is_root=is_root)
        call = _CellCall(stem, number, parent, is_root, value, () if is_root else call_stack(), backward)
        self._running.append((cell, call))
        self._writer.record(call.key(FORWARD), leaves)
        self._gradients.watch_inputs(backward, [leaf for leaf in leaves if leaf.slot.startswith("input")])

    def _behind(self, cell: nn.Cell, _args: tuple[Any, ...], output: Any) -> None:
        call = self._left(cell)
        if call is None:
            return
        leaves: list[TensorLeaf] = []
        call.value["output"] = encode_output(output, leaves)
        given = list(leaves)
        call.value["parameters"] = _parameters(cell, leaves)
        self._writer.record(call.key(FORWARD), leaves)
        value = {**call.value, EXTRA: {"order": self._writer.next_order()}}
        if call.is_root:
            self._writer.add_root(call.key(FORWARD), value)
        else:
            parent = None if call.parent is None else call.parent.known_key(FORWARD)
            self._writer.add(call.key(FORWARD), value, parent=parent, stack=call.stack)
        self._gradients.watch_outputs(call.backward, given)

    def _left(self, cell: nn.Cell) -> _CellCall | None:
        """Return the call of a cell that ends; an exception may have left those above it without their end."""
        for position in range(len(self._running) - 1, -1, -1):
            if self._running[position][0] is cell:
                call = self._running[position][1]
                del self._running[position:]
                return call
        return None


class _ParameterGradients:
    """Records the gradients of parameters, one entry for each cell that owns some and each backward."""

    def __init__(self, writer: CellWriter) -> None:
        self._writer = writer
        self._owners = dict[int, tuple[Parameter, list[tuple[str, str]]]]()
        self._num_parameters = Counter[str]()
        self._calls = Counter[int]()
        self._open = dict[str, dict[str, Any]]()

    def own(self, parameter: Parameter, stem: str) -> None:
        """Note that the cell `stem` owns a parameter; a tied one has several owners."""
        name = parameter.name.rpartition(".")[2]
        self._owners.setdefault(id(parameter), (parameter, []))[1].append((stem, name))
        self._num_parameters[stem] += 1

    def attach(self, contained: Callable[..., PlainContainedCall]) -> list[Any]:
        """Hook all parameters that are owned; return what removes the hooks."""
        return [on_gradient(parameter, contained(self._gradient, parameter)) for parameter, _ in self._owners.values()]

    def go_on_from(self, earlier: _ParameterGradients) -> None:
        """Continue the numbers of gradients from where `earlier` ended."""
        self._calls = earlier._calls

    def close(self) -> None:
        """Write the entries of cells of which not all gradients arrived."""
        for key, value in self._open.items():
            self._writer.add_gradients(key, value)
        self._open.clear()

    def _gradient(self, parameter: Parameter, gradient: Tensor) -> None:
        call = self._calls[id(parameter)]
        self._calls[id(parameter)] += 1
        for stem, name in self._owners[id(parameter)][1]:
            key = f"{stem}.{PARAMETERS_GRAD}.{call}"
            form = tensor_form(gradient)
            self._writer.record(key, [TensorLeaf(name, gradient, form)])
            forms = self._open.setdefault(key, {})
            forms[name] = [form]
            if len(forms) == self._num_parameters[stem]:
                self._writer.add_gradients(key, self._open.pop(key))


def _parameters(cell: nn.Cell, leaves: list[TensorLeaf]) -> dict[str, Any]:
    """Return, by name, the forms of a cell's own parameters, which join `leaves`."""
    forms = {}
    for parameter in cell._params.values():
        if parameter is not None:
            name = parameter.name.rpartition(".")[2]
            forms[name] = tensor_form(parameter)
            leaves.append(TensorLeaf(f"parameters.{name}", parameter, forms[name]))
    return forms
