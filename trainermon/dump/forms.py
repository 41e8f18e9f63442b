"""What stands for a tensor in the files, and the JSON text of it.

A dump is mostly tensors' forms. As texts that are put together from what is known beforehand they cost a tenth of what
dicts and the JSON encoder do.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set, ValuesView
from itertools import islice
from json.encoder import encode_basestring_ascii
from types import MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

from trainermon.core.environment.secrets import clean_argument
from trainermon.dump.files.numbers import NO_NUMBERS
from trainermon.dump.files.records import IN_GRAD, IN_VMAP, TRANSFORMED, UNSEEN

_GIVEN = "input", "kwargs"  # the first words of the places of what a call is given

# The JSON of a string, by the encoder's own function: 0.1 µs.
quoted = encode_basestring_ascii
_COUNTS = re.compile(r'"nans": (\d+), "infs": (\d+)')
_SHAPE = re.compile(r'"shape": \[[^]]*\]')
_CONSTANTS = {None: "null", True: "true", False: "false"}
# A longer container is cut: a module that takes a whole corpus as a list must not fill the disk with numbers.
MAX_ITEMS = 1024
MAX_DEPTH = 16


class LaterText:
    """A value, as in `json_text`, that stands in several entries: its text is made once, when the first is written."""

    __slots__ = ("_known", "_value")

    def __init__(self, value: dict[str, Any]) -> None:
        self._value = value
        self._known = ""

    def text(self) -> str:
        """Return the JSON text of the value."""
        self._known = self._known or json_text(self._value)
        return self._known


@dataclasses.dataclass(slots=True, eq=False)
class TensorReading:
    """The statistics of a tensor at one moment; one reading is shared by all places of a dump that have this value.

    Attributes:
        order: Position in the sequence in which values became known, from 1.
        numbers: The statistics as JSON items: `"Max": 1.5, "Min": …`.
        file_name: The file in which the tensor was saved; None: it was not.
        checksum: CRC-32 of its bytes in hexadecimal; None: it was not computed.
    """

    order: int
    numbers: str = NO_NUMBERS
    file_name: str | None = None
    checksum: str | None = None

    @property
    def nonfinite(self) -> tuple[int, int]:
        """The number of NaNs and the number of Infs among the elements.

        (0, 0) while the statistics are not there yet.
        """
        counted = _COUNTS.search(self.numbers)
        return (int(counted[1]), int(counted[2])) if counted else (0, 0)


@dataclasses.dataclass(slots=True, eq=False)
class TensorForm:
    """What stands in dump.json for a tensor in one place of a call.

    Attributes:
        head: JSON items of its type and shape: `"type": "torch.Tensor", "dtype": …`.
        reading: Its statistics; None: it was not to be read.
        more: Further JSON items, as a DTensor's placements; each begins with a comma. See `add`.
    """

    head: str
    reading: TensorReading | None = None
    more: str = ""

    @property
    def order(self) -> int:
        """The position of its reading in the sequence in which values became known; 0 without a reading."""
        return 0 if self.reading is None else self.reading.order

    def add(self, name: str, value: Any) -> None:
        """Add a JSON item to those that stand behind the statistics; `value` is as in `json_text`."""
        self.more += f", {quoted(name)}: {json_text(value)}"

    def show_batch(self, shape: Sequence[int]) -> None:
        """Say that the tensor is one inside torch.func's vmap or grad, and has `shape` with all that is batched."""
        whole = _SHAPE.sub(f'"shape": {list(shape)}', self.head, count=1)
        self.add(TRANSFORMED, IN_GRAD if whole == self.head else IN_VMAP)
        self.head = whole

    def text(self) -> str:
        """Return the tensor's JSON object as text: type, shape, statistics, order and what was added."""
        reading = self.reading
        if reading is None:
            return f"{{{self.head}, {NO_NUMBERS}{self.more}}}"
        return f'{{{self.head}, {reading.numbers}, "order": {reading.order}{self.more}}}'


class TensorLeaf(NamedTuple):
    """A tensor found among the arguments or results of a call.

    Attributes:
        slot: Its place there: `input.0.mask`, `output.1`.
        tensor: The tensor itself.
        form: The object that stands for it in dump.json.
    """

    slot: str
    tensor: Any
    form: TensorForm


def named_items(value: Any) -> Sequence[tuple[Any, Any]] | None:
    """Return names, without secrets, and items of a mapping, a named tuple or a dataclass; None of anything else."""
    if isinstance(value, Mapping):
        return [(clean_argument("", name) if type(name) is str else name, item) for name, item in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return None


def ordered_items(value: Any) -> list[Any] | None:
    """Return the items, at most 1 024, of a list, a tuple or what else has them in an order; None of anything else."""
    return list(islice(value, MAX_ITEMS)) if isinstance(value, list | tuple | deque | ValuesView) else None


def unseen(value: Any) -> dict[str, Any]:
    """Return the form of a value that may hold tensors, which the dump does not look at."""
    return {"type": type(value).__name__, "value": UNSEEN}


def object_form(value: Any, slot: str, entered: set[int], encode: Callable[[str, Any], Any]) -> Any:
    """Return the form of an object of any other class: its attributes that hold tensors; None if none does.

    None, too, of one that a call is given: a cache of keys and values goes through all layers, and would be written as
    often, with what each of them has added. `slot` is the place of `value` (`output.0`).

    `encode(name, item)` returns the form of an attribute. What cannot be looked at is `unseen`: a set, whose order is
    chance, an iterator, which would be used up, and objects beyond the 1 024th. Each object is entered once, by the
    ids in `entered`: they may hold one another.
    """
    if slot.startswith(_GIVEN):
        return None
    if isinstance(value, Set | Iterator):
        return unseen(value)
    attributes = _attributes(value)
    if not attributes or id(value) in entered:
        return None
    if len(entered) == MAX_ITEMS:
        return unseen(value)
    entered.add(id(value))
    forms = {name: encode(name, item) for name, item in attributes}
    return {name: form for name, form in forms.items() if _tells(form)} or None


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return what an object keeps, by name, without running code of its class; of a class or a module nothing."""
    if isinstance(value, type | ModuleType):
        return []
    slotted = (vars(base) for base in type(value).__mro__ if "__slots__" in vars(base))
    slots = [name for own in slotted for name, kind in own.items() if isinstance(kind, MemberDescriptorType)]
    kept = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
    return [*kept, *getattr(value, "__dict__", {}).items()]


def _tells(form: Any) -> bool:
    """Return whether a form has a tensor in it, or something that was not looked at."""
    if isinstance(form, dict):
        return form.get("value") == UNSEEN or any(map(_tells, form.values()))
    return isinstance(form, TensorForm) or (isinstance(form, list) and any(map(_tells, form)))


def json_text(value: Any) -> str:
    """Return the JSON text of an entry: of dicts, lists, scalars, `TensorForm`s, `LaterText`s."""
    return _text_of(type(value), _other_text)(value)


def _other_text(value: Any) -> str:
    """Return the text of what is rare; of what JSON does not know, as a symbolic size, the name of its class."""
    return json.dumps(value, default=_class_name)


def _class_name(value: Any) -> str:
    return value.text() if isinstance(value, TensorForm | LaterText) else f"<{type(value).__name__}>"


def _dict_text(value: dict[str, Any]) -> str:
    if not value:
        return "{}"
    items = [f"{quoted(name)}: {_text_of(type(item), _other_text)(item)}" for name, item in value.items()]
    return f"{{{', '.join(items)}}}"


def _list_text(value: list[Any]) -> str:
    return f"[{', '.join([_text_of(type(item), _other_text)(item) for item in value])}]"


def _number_text(value: float) -> str:
    return float.__repr__(value) if math.isfinite(value) else json.dumps(value)


# By the very type; subclasses are left to the encoder, which takes ten times as long: they are rare.
_TEXTS: Mapping[type, Callable[[Any], str]] = {
    TensorForm: TensorForm.text,
    LaterText: LaterText.text,
    dict: _dict_text,
    list: _list_text,
    str: quoted,
    int: int.__repr__,
    float: _number_text,
    bool: _CONSTANTS.__getitem__,
    type(None): _CONSTANTS.__getitem__,
}
_text_of = _TEXTS.get


@functools.lru_cache(maxsize=8192)
def form_head(kind: str, dtype: object, shape: tuple[int, ...], requires_grad: bool) -> str:  # noqa: FBT001  # cached
    """Return the JSON items of a tensor's type and shape; `dtype` is whatever says its own name as text."""
    items = {"type": kind, "dtype": str(dtype), "shape": list(shape), "requires_grad": requires_grad}
    return json.dumps(items)[1:-1]
