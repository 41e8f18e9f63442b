"""Records what every call of a function of MindSpore takes and returns, and the gradients of both."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from mindspore import nn, ops

from trainermon.dump.facts.stacks import call_stack
from trainermon.dump.files.records import BACKWARD, EXTRA, FORWARD
from trainermon.dump.forms import TensorLeaf
from trainermon.dump.mindspore.capture import CellCapture
from trainermon.dump.mindspore.encoding import encode_output, taken
from trainermon.dump.mindspore.function_names import recorded_functions, recorded_primitives
from trainermon.dump.mindspore.gradients import BackwardOfCall, CallGradients
from trainermon.dump.mindspore.writer import CellWriter
from trainermon.hooks.containment import PlainContainedCall
from trainermon.hooks.mindspore.functions import ReplacedFunctions, is_in_backward

_WRITES = "Tensor.__setitem__"  # it changes its first argument and returns nothing


@dataclasses.dataclass(slots=True, eq=False)
class _CallThatRuns:
    """One call that runs.

    Attributes:
        shown: `Functional.relu`, the key without number and direction.
        stem: The key without direction; "" until it is known that the call takes or gives a tensor.
        is_chosen: Whether the forward is recorded.
        value: What stands in its forward entry.
        how: What it takes to make the call again, beside its name and arguments.
        backward: Where its gradients go; None: nobody wants them.
        written: The tensor that a call changes which returns nothing.
    """

    shown: str
    value: dict[str, Any]
    how: dict[str, Any]
    stem: str = ""
    is_chosen: bool = True
    backward: BackwardOfCall | None = None
    written: Any = None


class OperationCapture:
    """Records the calls that the attaching thread makes of functions, methods of tensors and the models' primitives.

    Only the outermost call is recorded, none inside of a backward, and none that neither takes nor gives a tensor.
    Functions are found where they are looked up by name (`ops.relu`, `x.sum`): one that a script has imported by itself
    (`from mindspore.ops import relu`) is not seen. Gradients are those of the tensors, summed over all that use them.

    Args:
        models: The models whose cells' primitives are recorded, too.
        writer: Where entries go.
        cells: The capture of cells in the same dump, whose running call is the parent of a call; None: there is none.
    """

    def __init__(self, models: Mapping[str, nn.Cell], writer: CellWriter, cells: CellCapture | None) -> None:
        self.tripped = False
        self._writer = writer
        self._cells = cells
        self._numbers = Counter[str]()
        self._gradients = CallGradients(writer, self._contained)
        self._replaced = ReplacedFunctions(
            tuple(recorded_functions()),
            recorded_primitives(models),
            self._contained(self._begins),
            self._contained(self._ends),
        )

    @property
    def num_calls(self) -> int:
        """How many calls were seen."""
        return sum(self._numbers.values())

    def go_on_from(self, earlier: OperationCapture) -> None:
        """Continue the numbers of calls from where `earlier` ended, which wrote into the same dump."""
        self._numbers = earlier._numbers

    def attach(self) -> None:
        """Start to record."""
        self._replaced.attach()

    def detach(self) -> None:
        """Stop recording, and write the entries whose gradients did not all arrive."""
        self._replaced.detach()
        self._gradients.close()
        self.tripped = True

    def stop_in_child(self) -> None:
        """Stop recording in a forked child process, and write nothing there: the files belong to the parent."""
        self.tripped = True

    def trip(self, error: BaseException) -> None:
        """Note in the dump that an entry was lost to `error`; called in place of raising into training."""
        self._writer.count_error(error)

    def _contained(self, function: Callable[..., Any], *bound: Any) -> PlainContainedCall:
        return PlainContainedCall(self, function, bound)

    def _begins(self, shown: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _CallThatRuns | None:
        if is_in_backward():
            return None
        value, leaves = taken(args, kwargs)
        call = _CallThatRuns(shown, value, _how(function), written=args[0] if shown == _WRITES else None)
        if leaves:
            self._open(call, leaves)
        return call

    def _ends(self, call: _CallThatRuns, result: Any) -> None:
        leaves: list[TensorLeaf] = []
        given = result if call.written is None else call.written
        outputs = encode_output(tuple(given) if isinstance(given, list) else given, leaves)
        if not call.stem:
            if not leaves:
                return
            self._open(call, [])
        if call.is_chosen:
            key = f"{call.stem}.{FORWARD}"
            self._writer.record(key, leaves)
            value = {**call.value, "output": outputs, EXTRA: {"order": self._writer.next_order(), **call.how}}
            self._writer.add(key, value, parent=self._parent(FORWARD), stack=call_stack())
        if call.backward is not None:
            self._gradients.watch_outputs(call.backward, leaves)

    def _open(self, call: _CallThatRuns, leaves: list[TensorLeaf]) -> None:
        call.stem = f"{call.shown}.{self._numbers[call.shown]}"
        self._numbers[call.shown] += 1
        forward, backward = f"{call.stem}.{FORWARD}", f"{call.stem}.{BACKWARD}"
        call.is_chosen = self._writer.wants(forward)
        if call.is_chosen:
            self._writer.record(forward, leaves)
        else:
            self._writer.leave_out(forward, parent=self._parent(FORWARD))
        if self._writer.could_want(backward):
            call.backward = BackwardOfCall(backward, parent=self._parent(BACKWARD))
            self._gradients.watch_inputs(call.backward, leaves)

    def _parent(self, direction: str) -> str | None:
        return None if self._cells is None else self._cells.running(direction)


def _how(function: Any) -> dict[str, Any]:
    """Return what a reader needs to make the call again: a primitive's attributes, as far as they are plain."""
    if not isinstance(function, ops.Primitive):
        return {}
    plain = {
        name: value
        for name, value in function.init_attrs.items()
        if isinstance(value, bool | int | float | str | list | tuple)
    }
    return {"attributes": plain}
