"""One step of one rank, being recorded: the writer, and what captures for it between `begin` and `end`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from trainermon.dump.capture import ModuleCapture
from trainermon.dump.collector import RareCollections
from trainermon.dump.debugger_config import DebuggerConfig
from trainermon.dump.files.records import DumpInfo
from trainermon.dump.function_calls import FunctionCapture
from trainermon.dump.overflow_writer import OverflowWriter
from trainermon.dump.selecting_writer import SelectingWriter
from trainermon.dump.variables import VariableWriter

EAGER_NOTE = "compiled code ran eagerly while this was recorded: not bit-identical with the compiled step"
# Classes of torch, Megatron and DeepSpeed that do nothing but call the `module` in them.
WRAPPERS = frozenset(
    ["DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "Float16Module"]
)
Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module] | None


class CustomFunction(NamedTuple):
    """A function that the user registered, to be recorded like torch's own.

    Attributes:
        owner: The module or class that has it as an attribute.
        name: The attribute.
        prefix: The first part of its name in a dump, `<prefix>.<name>`.
    """

    owner: Any
    name: str
    prefix: str


class DumpRecording:
    """Records one rank's step into the folder `directory`; between `end` and the next `begin` nothing is hooked.

    `config` says what is recorded, `info` what is noted about the dump.

    Raises:
        DumpError: The directory cannot be written.
    """

    def __init__(self, directory: Path, config: DebuggerConfig, info: DumpInfo) -> None:
        writer = OverflowWriter if config.task == "overflow_check" else SelectingWriter
        self.writer = writer(directory, info, config)
        self._variables = VariableWriter(self.writer)
        self._config = config
        self._modules: ModuleCapture | None = None
        self._functions: FunctionCapture | None = None
        self._stance: Any = None
        self._is_on = False
        self._collections = RareCollections()
        self._notes: tuple[str, ...] = info.notes

    @property
    def num_overflows(self) -> int:
        """How many calls gave NaN or Inf, with task overflow_check."""
        return self.writer.num_overflows if isinstance(self.writer, OverflowWriter) else 0

    @property
    def is_on(self) -> bool:
        """Whether something is recorded now."""
        return self._is_on

    def begin(self, models: Models, custom: Sequence[CustomFunction] = (), *, only_inside: bool = False) -> None:
        """Attach the hooks and start to record `models`; calls are numbered on from the last `end`.

        Args:
            models: A module, or several in a list or a dict.
            custom: Functions of the user that are recorded too.
            only_inside: Record the models like any other module, and functions only while one of them runs.
        """
        if self._is_on or self._config.level == "debug":
            return
        names = named_models(models)
        self._is_on = True
        self._collections.begin()
        self._run_eagerly(names.values())
        if self._config.collects_modules or only_inside:
            self._begin_modules(names, as_entries=only_inside)
        if self._config.collects_functions:
            self._begin_functions(custom, only_inside=only_inside)

    def end(self) -> None:
        """Remove the hooks, and write the dump's final files (dump.json and others)."""
        if self._is_on:
            self._is_on = False
            try:
                self._detach()
                self.writer.publish()
            finally:
                self._collections.end()  # no earlier: the collector would look through all that waits to be written

    def close(self) -> None:
        """Stop recording, and close the files."""
        self._variables.close()
        self.end()
        self.writer.close()
        for capture in (self._modules, self._functions):
            if capture is not None:
                capture.release()

    def stop_in_child(self) -> None:
        """Stop recording in a forked child, and write nothing: the files belong to another process."""
        self._collections.end()
        for capture in (self._modules, self._functions):
            if capture is not None:
                capture.stop_in_child()

    def save(self, variable: Any, name: str, with_gradient: bool) -> None:  # noqa: FBT001  # called through a guard
        """Record `variable` as it is now in debug.json, and with `with_gradient` its gradient when it arrives.

        It may be a tensor, a number, or containers of them; its key is `name` and the number of earlier saves with that
        name.
        """
        self._variables.save(variable, name, with_gradient=with_gradient)

    def _detach(self) -> None:
        self.writer.take_notes(self._notes)
        if self._modules is not None:
            self._modules.detach()
        if self._functions is not None:
            self._functions.detach()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def _begin_modules(self, names: Mapping[str, nn.Module], *, as_entries: bool) -> None:
        earlier, roots = self._modules, [bare(model) for model in names.values()]
        of_module = {
            module: f"{prefix}.{path}" if path else prefix
            for (prefix, _), root in zip(names.items(), roots, strict=True)
            if prefix
            for path, module in root.named_modules()
        }
        self._modules = ModuleCapture(
            roots,
            self.writer,
            names=of_module,
            gathered=any(map(is_gathered, names.values())),
        )
        if as_entries:
            self._modules.name_roots(of_module)
        if not as_entries:
            self._modules.count_micro_steps()
        self._modules.quiet = self._config.collects_functions
        if earlier is not None:
            self._modules.go_on_from(earlier)
        self._modules.attach()

    def _begin_functions(self, custom: Sequence[CustomFunction], *, only_inside: bool) -> None:
        earlier = self._functions
        modules = self._modules if self._config.collects_modules or only_inside else None
        self._functions = FunctionCapture(self.writer, modules, self._config.custom_op_namespaces)
        self._functions.only_inside = only_inside
        for function in custom:
            self._functions.follow(*function)
        if earlier is not None:
            self._functions.go_on_from(earlier)
        self._functions.attach()

    def _run_eagerly(self, models: Any) -> None:
        """Let code that torch.compile has made run eagerly: hooks and modes are not seen in it."""
        if "torch._dynamo" not in sys.modules:
            return
        models = list(models)
        compiled = any(map(is_compiled, models)) or (not models and has_compiled())
        if compiled and EAGER_NOTE not in self._notes:
            self._notes = (*self._notes, EAGER_NOTE)
        self._stance = torch.compiler.set_stance("force_eager")


def named_models(models: Models) -> dict[str, nn.Module]:
    """Return the models in a dict by the first part of their modules' names: "" for one, else key or number."""
    if models is None:
        return {}
    if isinstance(models, nn.Module):
        return {"": models}
    if isinstance(models, Mapping):
        return dict(models)
    return {str(number): model for number, model in enumerate(models)}


def bare(model: nn.Module) -> nn.Module:
    """Return the module to record: the one inside DDP, torch.compile, a DeepSpeed engine and the like."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and not WRAPPERS.isdisjoint(kind.__name__ for kind in type(model).__mro__):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_compiled(model: nn.Module) -> bool:
    """Return whether a part of `model` is run by torch.compile."""
    return any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def has_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process."""
    return bool(sys.modules["torch._dynamo.utils"].counters["frames"])


def is_gathered(model: nn.Module) -> bool:
    """Return whether the model's parameters are sharded, and gathered for each forward (FSDP, ZeRO stage 3)."""
    return any(
        type(module).__name__.startswith(("FullyShardedDataParallel", "FSDP"))
        or any(map(_is_sharded, module._parameters.values()))
        for module in model.modules()
    )


def _is_sharded(parameter: nn.Parameter | None) -> bool:
    return hasattr(parameter, "ds_id") or hasattr(parameter, "placements")
