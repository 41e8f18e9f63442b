"""What calls are judged against: compositions of fused operators, functions of a user's file, another device.

And which part of their results counts: rows behind a given length are padding.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.fused import COMPOSITIONS
from trainermon.core.errors import ConfigError, DumpError
from trainermon.replay.dumped_calls import DumpedCall

CPU, DEVICE = "cpu", "device"
_LENGTH = re.compile(r"(\w+)=(sum\()?(\w+)\)?")


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceChoice:
    """What calls are judged against, as options name it; it can be sent to another process.

    Attributes:
        source: `cpu`, `device`, or the path of a Python file with functions named like operations.
        lengths: `API=ARG` each: of the results of the operation, rows behind the last number of that argument are
            padding; `API=sum(ARG)`: behind the sum of its numbers.
    """

    source: str = CPU
    lengths: tuple[str, ...] = ()

    def opened(self, device: str) -> OpenedReferences:
        """Return the references.

        Raises:
            ConfigError: The file cannot be read or run, or a length is written otherwise.
        """
        functions = dict(COMPOSITIONS)
        if self.source not in (CPU, DEVICE):
            functions |= functions_of(Path(self.source))
        return OpenedReferences(functions, _lengths(self.lengths), device if self.source == DEVICE else "")


DEFAULT_REFERENCE = ReferenceChoice()


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedReferences:
    """What calls are judged against.

    Attributes:
        functions: By name of the operation, what takes its place.
        lengths: By name of the operation, the argument that says how many rows count, and whether its sum does.
        device: Where float64 is computed; "": on the CPU.
    """

    functions: Mapping[str, Callable[..., Any]]
    lengths: Mapping[str, tuple[str, bool]] = dataclasses.field(default_factory=dict)
    device: str = ""

    def judged(self, dumped: DumpedCall) -> DumpedCall:
        """Return the call as it is judged: with what takes the place of its function, and without padding.

        Raises:
            DumpError: The call has no such argument.
        """
        function = self.functions.get(dumped.name, dumped.call.function)
        result = dumped.result
        if dumped.name in self.lengths:
            rows = _rows(dumped.name, dumped.call, *self.lengths[dumped.name])
            function, result = _WithoutPadding(function, rows), _cut(result, rows)
        if self.device:
            function = _OnDevice(function, self.device)
        if function is dumped.call.function and result is dumped.result:
            return dumped
        return dataclasses.replace(dumped, call=dumped.call._replace(function=function), result=result)

    def differentiated(self, dumped: DumpedCall) -> DumpedCall:
        """Return the call as its backward is judged: with what takes the place of its function, and its padding."""
        function = self.functions.get(dumped.name, dumped.call.function)
        if self.device:
            function = _OnDevice(function, self.device)
        return dataclasses.replace(dumped, call=dumped.call._replace(function=function))


def functions_of(path: Path) -> dict[str, Callable[..., Any]]:
    """Return the functions of a Python file, which is run.

    Raises:
        ConfigError: It cannot be read or run, or has none.
    """
    spec = importlib.util.spec_from_file_location("trainermon_references", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--reference: found {path}, expected cpu, device or a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"--reference {path}: {type(error).__name__}: {error}") from error
    own = {name: value for name, value in vars(module).items() if not name.startswith("_") and callable(value)}
    found = {name: value for name, value in own.items() if getattr(value, "__module__", "") == module.__name__}
    if not found:
        raise ConfigError(f"--reference {path}: expected functions named like operations, found none")
    return found


def add_reference_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--reference",
        default=CPU,
        metavar="cpu|device|FILE.py",
        help="judge against float64 on the CPU (default), on the --device, or against functions of this file",
    )
    parser.add_argument(
        "--valid-length",
        action="append",
        default=[],
        metavar="API=ARG",
        help="rows of its results behind the last number of this argument are padding; API=sum(ARG): behind their sum",
    )


def chosen_reference(args: argparse.Namespace, devices: Sequence[str]) -> ReferenceChoice:
    """Return what calls are judged against.

    Raises:
        ConfigError: The file cannot be run, a length is written otherwise, or there is no device.
    """
    found = ReferenceChoice(args.reference, tuple(args.valid_length))
    if found.source == DEVICE and not devices:
        raise ConfigError("--reference device: expected --device as well")
    found.opened("")
    return found


class _WithoutPadding:
    """Gives the first rows of what a function gives."""

    def __init__(self, function: Callable[..., Any], rows: int) -> None:
        self._function, self._rows = function, rows
        self.__name__ = getattr(function, "__name__", "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _cut(self._function(*args, **kwargs), self._rows)


class _OnDevice:
    """Runs a function on a device, for tensors of the CPU."""

    def __init__(self, function: Callable[..., Any], device: str) -> None:
        self._function, self._device = function, device
        self.__name__ = getattr(function, "__name__", "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given_args, given_kwargs = pytree.tree_map_only(Tensor, lambda one: one.to(self._device), (args, kwargs))
        with torch.device(self._device):
            result = self._function(*given_args, **given_kwargs)
        return pytree.tree_map_only(Tensor, Tensor.cpu, result)


def _lengths(texts: Sequence[str]) -> dict[str, tuple[str, bool]]:
    found = {}
    for text in texts:
        parts = _LENGTH.fullmatch(text)
        if parts is None:
            raise ConfigError(f"--valid-length: found {text}, expected API=ARG or API=sum(ARG)")
        found[parts[1]] = parts[3], parts[2] is not None
    return found


def _rows(name: str, call: OperationCall, argument: str, is_sum: bool) -> int:  # noqa: FBT001  # one of the lengths
    """Return how many rows count, by a tensor, list or number among the arguments, by name or place."""
    place = int(argument) if argument.isdecimal() else None
    value = call.kwargs.get(argument) if place is None else call.args[place] if place < len(call.args) else None
    if value is None:
        raise DumpError(f"{name} has no argument {argument}, which --valid-length names")
    numbers = torch.as_tensor(value).flatten()
    return int(numbers.sum() if is_sum else numbers[-1])


def _cut(result: Any, rows: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda one: one[:rows] if one.dim() else one, result)
