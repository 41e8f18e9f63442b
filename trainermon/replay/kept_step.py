"""A kept step on disk: what is needed to run it again later, in another process, with the model built anew.

The file is read with `weights_only=True`: it holds tensors, numbers, texts and plain containers, and no code. The model
itself is not in it; whoever replays it builds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainermon.core.environment.secrets import REDACTED, clean_argument
from trainermon.core.errors import DumpError
from trainermon.core.private_files import replacing
from trainermon.hooks.replayable import nothing
from trainermon.replay.keep import KeptForward, versions_of
from trainermon.replay.state import AutocastState, KeptBuffer, NotCoveredError, RandomState

KEPT_FILE = "kept_step.pt"
VERSION = 1
MIB = 1 << 20
# Exactly these: `weights_only` refuses subclasses, and what they mean is not in the file.
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.Size, torch.device)


@dataclasses.dataclass(frozen=True, slots=True)
class KeptStep:
    """A step that was kept on disk, read back to be replayed on a model.

    Attributes:
        forwards: Its forwards, on the given model.
        dropped: How many before them were not kept.
        notes: Sentences on what the reader should know, as another device.
    """

    forwards: list[KeptForward]
    dropped: int
    notes: tuple[str, ...]


def save_step(path: Path, model: nn.Module, forwards: Sequence[KeptForward], *, dropped: int, max_bytes: int) -> int:
    """Write all that is needed to replay a step (forwards, and the parameters of `model`) to the file `path`.

    By rename, 0600. `dropped` is how many forwards are missing. Returns the number of bytes.

    Raises:
        NotCoveredError: An argument is of a class that cannot be stored safely, the model is on several devices, or
            there is more than `max_bytes`.
    """
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1:
        raise NotCoveredError(f"the model is on {len(devices)} devices: only one on a single device is kept on disk")
    modules = {id(module): name for name, module in model.named_modules()}
    saved = {
        "version": VERSION,
        "torch": str(torch.__version__),
        "device": devices.pop(),
        "modules": _classes(model),
        "parameters": dict(model.named_parameters()),
        "requires_grad": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "dropped": dropped,
        "forwards": [_plain_forward(kept, modules) for kept in forwards],
    }
    stored = _stored(saved, {})
    size = sum(storage.nbytes() for storage in _storages(stored))
    if size > max_bytes:
        raise NotCoveredError(f"the step takes {size / MIB:.1f} MiB on disk, replay.keep_mb is {max_bytes / MIB:g}")
    with replacing(path) as file:
        torch.save(stored, file)
        return file.tell()


def load_step(path: Path, model: nn.Module, device: str | None = None) -> KeptStep:
    """Read a kept step, and put its parameters and buffers into `model`, which must be built as that of the run was.

    `device` is where it runs; by default where it ran, if this machine has that, else the CPU.

    Raises:
        DumpError: The file is not a kept step, or the model is another one; the text says what differs first.
    """
    saved = _read(path, "cpu")
    was = saved["device"]
    where = torch.device(device) if device else _available(was)
    if where.type != "cpu":
        saved = _read(path, {was: str(where)})
    _check_same(saved["modules"], _classes(model), "module")
    own = dict(model.named_parameters())
    _check_same(_shapes(saved["parameters"]), _shapes(own), "parameter")
    model.to(where)
    for name, parameter in own.items():
        parameter.data = saved["parameters"][name]
        parameter.requires_grad_(saved["requires_grad"][name])
    modules = dict(model.named_modules())
    live: dict[tuple[str, str], Tensor] = {}
    forwards = [_forward(plain, modules, live, where) for plain in saved["forwards"]]
    return KeptStep(forwards, saved["dropped"], tuple(_differences(saved, where)))


def _plain_forward(kept: KeptForward, modules: dict[int, str]) -> dict[str, Any]:
    kept.check()
    if kept.handed or kept.stage:
        raise NotCoveredError("the model is a stage of a pipeline: a replay takes what the other stages did")
    args, kwargs = pytree.tree_unflatten(kept.leaves, kept.tree)
    numpy = kept.random.numpy
    return {
        "args": _plain(args, "args"),
        "kwargs": _plain(kwargs, "kwargs"),
        "random": {
            "python": kept.random.python,
            "numpy": None if numpy is None else [numpy[0], numpy[1].tolist(), *map(_number, numpy[2:])],
            "cpu": kept.random.cpu,
            "devices": [(str(device), state) for device, state in kept.random.devices],
        },
        "autocast": [list(kept.autocast.types), kept.autocast.cache],
        "training": list(kept.training),
        "buffers": [
            (modules[id(buffer.module)], buffer.name, buffer.tensor if buffer.clone is None else buffer.clone)
            for buffer in kept.buffers
        ],
        "gradients": list(kept.gradients),
        "outputs": kept.original_outputs(),
    }


def _number(value: Any) -> float | int:
    return float(value) if isinstance(value, float) else int(value)


def _plain(value: Any, place: str, name: str = "") -> Any:
    """Return `value` if it can be read back with `weights_only=True`; texts, which go by `name`, without secrets."""
    if isinstance(value, str):
        return clean_argument(name, value)
    if type(value) in (list, tuple):
        return type(value)(_plain(item, f"{place}[{number}]", name) for number, item in enumerate(value))
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {_plain(key, place): _plain(item, f"{place}[{key!r}]", f"{name}.{key}") for key, item in value.items()}
    if type(value) in _PLAIN or (isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter, nn.Buffer)):
        return value
    raise NotCoveredError(f"{place} is a {type(value).__name__}, which cannot be stored safely")


def _stored(value: Any, known: dict[int, Tensor]) -> Any:
    """Return containers with tensors that own their memory: of a view only its elements, one tensor once."""
    if isinstance(value, Tensor):
        if id(value) not in known:
            plain = value.detach()
            is_part = plain.untyped_storage().nbytes() > plain.numel() * plain.element_size()
            known[id(value)] = plain.clone() if is_part else plain
        return known[id(value)]
    if type(value) is dict:
        return {key: _stored(item, known) for key, item in value.items()}
    return type(value)(_stored(item, known) for item in value) if type(value) in (list, tuple) else value


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield each piece of memory once."""
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    yield from {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values()


def _read(path: Path, devices: str | dict[str, str]) -> dict[str, Any]:
    try:
        saved = torch.load(path, weights_only=True, map_location=devices)
    except Exception as error:  # torch.load raises anything on a damaged file: there is no common type
        raise DumpError(f"{path} cannot be read ({error}): expected a step that a replay has kept") from error
    if not isinstance(saved, dict) or saved.get("version") != VERSION:
        raise DumpError(f"{path} is no kept step of version {VERSION}: replay it with the trainermon that wrote it")
    return saved


def _available(device: str) -> torch.device:
    kind = torch.device(device)
    module = getattr(torch, kind.type, None)
    return kind if kind.type == "cpu" or (module is not None and module.is_available()) else torch.device("cpu")


def _classes(model: nn.Module) -> dict[str, str]:
    return {name: type(module).__name__ for name, module in model.named_modules()}


def _shapes(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: str(list(parameter.shape)) for name, parameter in parameters.items()}


def _check_same(saved: Mapping[str, str], own: Mapping[str, str], what: str) -> None:
    for name in [*saved, *own]:
        if saved.get(name) != own.get(name):
            raise DumpError(
                f"--model builds another model than that of the run: {what} {name or '(the model itself)'} is"
                f" {own.get(name, 'missing')}, expected {saved.get(name, 'none of that name')}"
            )


def _differences(saved: Mapping[str, Any], where: torch.device) -> Iterator[str]:
    if any(_has_lost_secret(plain[taken]) for plain in saved["forwards"] for taken in ("args", "kwargs")):
        yield "a text among the model's arguments was not kept, as it looked like a secret"
    if str(where) != saved["device"]:
        yield f"run on {where}, the step ran on {saved['device']}: bits and random numbers may differ"
    if saved["torch"] != str(torch.__version__):
        yield f"run with torch {torch.__version__}, the step with {saved['torch']}: bits may differ"


def _has_lost_secret(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_lost_secret, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_lost_secret, value))
    return isinstance(value, str) and REDACTED in value


def _forward(
    plain: Mapping[str, Any],
    modules: Mapping[str, nn.Module],
    live: dict[tuple[str, str], Tensor],
    where: torch.device,
) -> KeptForward:
    """Return one forward; `live` are the tensors that hold the buffers of `modules` in all of them."""
    given = (plain["args"], plain["kwargs"])
    leaves, tree = pytree.tree_flatten(given)
    buffers = []
    for path, name, value in plain["buffers"]:
        tensor = live.setdefault((path, name), value.clone())
        modules[path]._buffers[name] = tensor
        buffers.append(KeptBuffer(modules[path], name, tensor, tensor._version, value))
    return KeptForward(
        stage=0,
        leaves=leaves,
        tree=tree,
        handed=[],
        generators=nothing,
        versions=versions_of((*given, [])),
        random=_random_state(plain["random"], where),
        autocast=_autocast(plain["autocast"], where),
        training=tuple(plain["training"]),
        buffers=buffers,
        parameter_versions=0,
        gradients=plain["gradients"],
        outputs=[(tensor, tensor._version) for tensor in plain["outputs"]],
    )


def _random_state(plain: Mapping[str, Any], where: torch.device) -> RandomState:
    numpy = plain["numpy"]
    return RandomState(
        python=plain["python"],
        numpy=None if numpy is None else (numpy[0], np.array(numpy[1], np.uint32), *numpy[2:]),
        cpu=plain["cpu"].cpu(),
        devices=tuple((torch.device(name), state.cpu()) for name, state in plain["devices"] if name == str(where)),
    )


def _autocast(plain: Sequence[Any], where: torch.device) -> AutocastState:
    types, cache = plain
    here = {"cpu", where.type}
    moved = {name if name in here else where.type: (enabled, dtype) for name, enabled, dtype in types}
    return AutocastState(tuple((name, enabled, dtype) for name, (enabled, dtype) in moved.items()), cache)
