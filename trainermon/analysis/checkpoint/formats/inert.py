"""Unpickles without running anything of the file: what is not known becomes an inert stand-in.

A pickle names functions and classes, and has them called. Here only a few names have a meaning (`builders` of the
caller, plain containers); every other name becomes an `InertObject` that keeps what it was given.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import io
import pickle
import pickletools
import re
import reprlib
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

from trainermon.analysis.checkpoint.formats.slim import PickleCounts, slimmed
from trainermon.core.errors import CheckpointError

MAX_PICKLE_BYTES = 1 << 29
"""Of one pickle; that of a checkpoint of 100,000 pieces has some 20 MB."""
_MAX_NAMES = 10_000  # different functions and classes
_MAX_DEPTH = 64
_MAX_PARTS = 2_000_000
_STACK_BYTES = 256  # what hashing a nested tuple takes of C's stack, at most, for each level
_SAFE_TUPLES = 10_000  # these fit any thread's stack, however nested
_MAX_CODE_BYTES = 1 << 26  # of codes, texts left out: each may take 12 times as much; 100,000 pieces have 13 MB
_MAX_OBJECTS = 1 << 23  # containers and results of calls; 100,000 pieces have 1.7 million
_MAX_PLACES = 1 << 24  # in the memo, which takes 16 bytes for each
_MAX_SETS = 1 << 20  # which take 216 bytes each, empty
_MAX_COPIED = 1 << 26  # bytes that builders may copy, beyond the size of the pickle: a few codes can ask for any number
_FEW = 64  # arguments
_TUPLES = (b"t", b"\x85", b"\x86", b"\x87")
_SETS = (b"\x8f", b"\x91")
_OBJECTS = (*_TUPLES, *(bytes([code]) for code in b"]}ld\x8f\x91Rio\x81\x92"))
_FAULTS = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(MemoryError, RecursionError, struct.error, ImportError, OSError),
)


class _Sealed(type):
    """Keeps a pickle from changing the class that it was handed."""

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError("the pickle changes a class")


class _Copies(threading.local):
    """How many more bytes may be copied for the pickle that a thread loads."""

    left = 0


_copies = _Copies()


def charge(size_bytes: int) -> None:
    """Count what is copied because a pickle asks for it.

    Raises:
        UnpicklingError: it is far more than the pickle has.
    """
    _copies.left -= size_bytes
    if _copies.left < 0:
        raise pickle.UnpicklingError("the pickle has things copied that are far larger than it is")


class InertObject(metaclass=_Sealed):
    """What stands for an object of an unknown class, or for the result of an unknown function.

    Attributes:
        name: The class or function, as `argparse.Namespace`; "" if another stand-in was called.
        arguments: What it was called with.
        state: What was to be set on it, mostly a mapping of attributes; None if nothing was.
        entries: What was appended to it; pairs of what was set in it.
    """

    __slots__ = ("arguments", "entries", "state")
    name = ""
    arguments: tuple[Any, ...]
    state: Any
    entries: tuple[Any, ...] | list[Any]

    def __new__(cls, *arguments: Any, **options: Any) -> InertObject:
        """Keep the arguments, whatever they are."""
        if len(arguments) > _FEW:
            charge(8 * len(arguments))
        made: InertObject = object.__new__(cls)
        made.arguments = (*arguments, options) if options else arguments
        made.state, made.entries = None, ()
        return made

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *arguments: Any) -> InertObject:
        """Keep what it was called with in a stand-in for the result."""
        return InertObject(self, *arguments)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.append((key, value))

    def append(self, value: Any) -> None:
        """Keep what a list would get."""
        self.extend((value,))

    def extend(self, values: Any) -> None:
        """Keep what a list would get."""
        if isinstance(self.entries, tuple):
            self.entries = []
        self.entries.extend(values)

    add = append

    def attributes(self) -> Mapping[str, Any]:
        """Return its state by name, empty where that is none."""
        return attributes_in(self.state)

    def __repr__(self) -> str:
        return f"<{self.name or 'called'}>"


def brief(value: Any) -> str:
    """Return a value out of a pickle as at most 60 characters: written out, a few nested tuples may have any length."""
    return reprlib.repr(value)[:60]


def attributes_in(state: Any) -> Mapping[str, Any]:
    """Return what a pickle sets on an object, by name, empty where that is nothing: a mapping, and one of slots."""
    if type(state) is dict:
        return state
    parts = state[:2] if isinstance(state, tuple) else (state,)
    return {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}


class Record(metaclass=_Sealed):
    """What objects of a known class become that there are many of: a subclass keeps what is needed, in slots."""

    __slots__ = ()


class Builder:
    """A function of ours that a pickle may call, and cannot change."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function does."""
        if len(arguments) > _FEW:
            charge(8 * len(arguments))
        return self._function(*arguments)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError("the pickle changes a function")


def _mapping(*arguments: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = collections.OrderedDict()
    for argument in arguments:
        if isinstance(argument, dict | list | tuple):
            charge(_SIZES[dict] * len(argument))
            found.update(argument)
    return found


def _encoded(text: Any, encoding: Any = "") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"the pickle encodes by {brief(encoding)}")
    charge(len(text))
    return text.encode("latin1")


_SIZES: dict[type, int] = {
    list: 8,
    tuple: 8,
    bytes: 1,
    set: 64,
    frozenset: 64,
    dict: 128,
}  # bytes that an element takes, about


def plain(kind: type) -> Builder:
    """Return what makes a plain container of another one."""

    def made(values: Any = ()) -> Any:
        if not isinstance(values, bytes if kind is bytes else list | tuple | set | frozenset):
            raise pickle.UnpicklingError(f"the pickle makes a {kind.__name__} of a {type(values).__name__}")
        if type(values) is kind and kind in (tuple, bytes, frozenset):
            return values
        charge(_SIZES[kind] * len(values))
        return kind(values)

    return Builder(made)


def _reconstructed(kind: Any, *_: Any) -> InertObject:
    return InertObject.__new__(kind if isinstance(kind, type) and issubclass(kind, InertObject) else InertObject)


def _attribute(owner: Any, name: Any) -> InertObject:
    """Return the stand-in of an enumeration's member, which Python 3.11.0 to 3.11.3 pickle by its name."""
    is_member = isinstance(owner, type) and issubclass(owner, InertObject)
    found: InertObject = owner(name) if is_member else inert_class("builtins.getattr")(owner, name)
    return found


_PLAIN = {
    "builtins.getattr": Builder(_attribute),
    "collections.OrderedDict": Builder(_mapping),
    "collections.defaultdict": Builder(_mapping),
    "collections.Counter": Builder(_mapping),
    "_codecs.encode": Builder(_encoded),
    "copyreg._reconstructor": Builder(_reconstructed),
    **{f"builtins.{kind.__name__}": plain(kind) for kind in (set, frozenset, list, tuple, dict)},
    "builtins.bytearray": plain(bytes),
    "builtins.complex": Builder(lambda real, imag=0.0: complex(float(real), float(imag))),
}
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class _InertUnpickler(pickle.Unpickler):
    """Finds the builders, and stand-ins for all else."""

    def __init__(self, file: io.BufferedIOBase, builders: Mapping[str, Any], persistent: Callable[[Any], Any]) -> None:
        super().__init__(file, fix_imports=False, encoding="latin1")
        self._builders, self._persistent = builders, persistent
        self._stand_ins: dict[str, Any] = {}

    def load_counted(self, most_copied: int) -> Any:
        """Return what the pickle holds; it may have so many bytes copied."""
        _copies.left = most_copied
        return self.load()

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name means here, and import nothing."""
        full = f"{_RENAMED.get(module, module)}.{name}"
        known = self._stand_ins.get(full)
        if known is None:
            if len(self._stand_ins) >= _MAX_NAMES:
                raise pickle.UnpicklingError(f"the pickle names more than {_MAX_NAMES:,} classes")
            known = self._builders.get(full) or _PLAIN.get(full)
            known = known or inert_class(full)
            self._stand_ins[full] = known
        return known

    def persistent_load(self, pid: Any) -> Any:
        """Return what the caller makes of a reference out of the pickle."""
        return self._persistent(pid)


def inert_class(name: str) -> Any:
    """Return a class of `InertObject`s that have this name."""
    return _Sealed("InertObject", (InertObject,), {"__slots__": (), "name": name})


def _nothing_outside(_: Any) -> NoReturn:
    raise pickle.UnpicklingError("the pickle refers to something outside it")


def unpickle(
    data: bytes, path: Path, builders: Mapping[str, Any], persistent: Callable[[Any], Any] = _nothing_outside
) -> Any:
    """Return what a pickle holds: plain values, what `builders` make, and `InertObject`s; nothing of it is run.

    Args:
        data: The pickle.
        path: The file, for errors.
        builders: What names mean: a `Builder`, or a value.
        persistent: What a reference out of the pickle means.

    Raises:
        CheckpointError: it is no pickle, is cut off, or asks for more than a checkpoint needs.
    """
    try:
        most_copied = len(data) + _MAX_COPIED
        file, has = _checked(data)
        del data  # all of it is in what is read
        unpickler = _InertUnpickler(file, builders, persistent)
        load = partial(unpickler.load_counted, most_copied)
        with _no_collection():
            return load() if has.tuples <= _SAFE_TUPLES else _with_stack(load, has.tuples * _STACK_BYTES)
    except _FAULTS as error:
        cause = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{path} has a damaged pickle ({cause}): copy or save the checkpoint again") from error


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Have no garbage looked for while many objects are made, all of which stay: that takes half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _with_stack(load: Callable[[], Any], stack_bytes: int) -> Any:
    """Run it in a thread with a large stack: C hashes nested tuples by recursion, and does not count how deep."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((load(), None))
        except _FAULTS as error:
            outcome.append((None, error))

    before = threading.stack_size((stack_bytes >> 16 << 16) + (1 << 20))
    try:
        thread = threading.Thread(target=run, name="trainermon-unpickle")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


@cache
def _lengths() -> dict[int, int]:
    """Return the codes of pickle, and how many bytes of argument each has; < 0: see `pickletools`."""
    return {ord(code.code): code.arg.n if code.arg else 0 for code in pickletools.opcodes}


@cache
def _run_pattern(largest_kib64: int) -> re.Pattern[bytes]:
    """Return what matches codes of a fixed length, with places in the memo up to a multiple of 64 KiB.

    The places matter: the memo is a list as long as the largest one, so four bytes could ask for 64 GB.
    """
    refused = {ord(code) for code in "r\x82\x83\x84."}  # places, extensions of copyreg, the end
    choices = []
    for length in (0, 1, 2, 4, 8):
        codes = bytes(code for code, size in _lengths().items() if size == length and code not in refused)
        choices.append(b"[" + re.escape(codes) + b"]" + b"." * length)
    high, middle = largest_kib64 >> 8, largest_kib64 & 255
    place = b"r..(?:." + _up_to(high - 1) if high else b"r..(?:(?!)"
    choices.append(place + b"|" + _up_to(middle) + _up_to(high, high) + b")")
    return re.compile(b"(?:" + b"|".join(choices) + b"){1,20000}", re.DOTALL)


def _up_to(last: int, first: int = 0) -> bytes:
    return b"[" + re.escape(bytes([first])) + b"-" + re.escape(bytes([last])) + b"]"


def _checked(data: bytes) -> tuple[io.BufferedIOBase, PickleCounts]:
    """Return a pickle of the same value to be read, and what it has at most, if that does not take too much memory."""
    if len(data) > MAX_PICKLE_BYTES:
        raise pickle.UnpicklingError(f"{len(data):,} bytes, more than {MAX_PICKLE_BYTES:,}")
    file, has = slimmed(data) or (io.BytesIO(data), None)
    if (sum(end - start for start, end in _code_runs(data)) if has is None else has.codes) > _MAX_CODE_BYTES:
        raise pickle.UnpicklingError(f"it has more than {_MAX_CODE_BYTES:,} bytes of codes")
    has = has or PickleCounts(0, *(_count(data, codes) for codes in (_OBJECTS, _SETS, _TUPLES)))
    if has.objects > _MAX_OBJECTS:
        raise pickle.UnpicklingError(f"it makes more than {_MAX_OBJECTS:,} objects")
    if has.sets > _MAX_SETS:
        raise pickle.UnpicklingError(f"it makes more than {_MAX_SETS:,} sets")
    return file, has


def _code_runs(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield where codes of a fixed length stand, with their arguments; what is between them are texts and bytes."""
    run = _run_pattern(min(len(data), _MAX_PLACES) >> 16).match
    place = 0
    while place < len(data):
        found = run(data, place)
        if found is not None:
            yield found.span()
            place = found.end()
            continue
        if data[place] == pickle.STOP[0]:
            return
        place = _after(data, place)
    raise EOFError("it has no end")


def _count(data: bytes, codes: tuple[bytes, ...]) -> int:
    """Return how often some codes stand in a pickle at most; texts are looked into only while that does no harm."""
    everywhere = sum(map(data.count, codes))
    if everywhere <= _MAX_SETS:
        return everywhere
    wanted = b"".join(codes)
    spans = _code_runs(data)
    return sum(end - start - len(data[start:end].translate(None, wanted)) for start, end in spans)


def _after(data: bytes, place: int) -> int:
    """Return the place after a code whose argument tells its own length, or that is refused."""
    code = data[place]
    if code == pickle.BINUNICODE[0]:
        end = place + 5 + int.from_bytes(data[place + 1 : place + 5], "little")
        if end > len(data):
            raise EOFError(f"it ends within the text at byte {place:,}")
        return end
    length = _lengths().get(code)
    if length is None or length >= 0:
        raise pickle.UnpicklingError(f"code {data[place]:#04x} at byte {place:,}")
    if length == pickletools.UP_TO_NEWLINE:
        return _after_lines(data, place)
    width = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT8U: 8}.get(length, 4)
    end = place + 1 + width + int.from_bytes(data[place + 1 : place + 1 + width], "little")
    if end > len(data):
        raise EOFError(f"it ends within the value at byte {place:,}")
    return end


def _after_lines(data: bytes, place: int) -> int:
    end = place
    for _ in range(2 if data[place] in b"ci" else 1):  # a module and a name
        end = data.find(b"\n", end + 1)
        if end < 0:
            raise EOFError(f"it ends within the line at byte {place:,}")
    if data[place] == pickle.PUT[0] and not 0 <= int(data[place + 1 : end]) <= min(len(data), _MAX_PLACES):
        raise pickle.UnpicklingError(f"a place beyond its end, at byte {place:,}")
    return end + 1


def leaves(value: Any, kind: type | tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """Yield every value of a kind in nested mappings and lists, in order, with its keys joined by dots.

    Raises:
        CheckpointError: they are nested deeper, or have more parts, than a checkpoint has.
    """
    todo: list[tuple[str, Any, int]] = [("", value, 0)]
    num_seen = 0
    while todo:
        name, item, depth = todo.pop()
        num_seen += 1
        if isinstance(item, kind):
            yield name, item
        elif isinstance(item, dict | list | tuple):
            if depth > _MAX_DEPTH or num_seen + len(todo) + len(item) > _MAX_PARTS:
                raise CheckpointError(f"{name[:60]!r} is nested too deep or wide: expected the layout of a checkpoint")
            pairs = list(item.items() if isinstance(item, dict) else enumerate(item))
            todo.extend((f"{name}.{key}" if name else str(key), part, depth + 1) for key, part in reversed(pairs))
