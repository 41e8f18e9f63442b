"""What runs inside the processes of a job that `trainermon env collect --run` started; loads no torch by itself."""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.util
import multiprocessing
import os
import sys
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainermon.core.environment.pack import RANK_FILE, update_pack
from trainermon.core.environment.secrets import Redactor

VARIABLE = "TRAINERMON_ENVIRONMENT_PACK"
"""Names the pack; it is set for the processes of the job alone."""


def begin() -> None:
    """Have this process write what it shows: at its first training forward, or at its end if there is none."""
    path = os.environ.get(VARIABLE)
    if path and multiprocessing.parent_process() is None:
        observer = _JobObserver(Path(path))
        sys.meta_path.insert(0, _TorchWatcher(observer))
        atexit.register(observer.end)


class _TorchWatcher(importlib.abc.MetaPathFinder):
    """Tells when torch has been imported; it is gone then."""

    def __init__(self, observer: _JobObserver) -> None:
        self._observer = observer

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> Any:
        del path, target
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute, observer = spec.loader.exec_module, self._observer

            def execute_and_tell(module: types.ModuleType) -> None:
                execute(module)
                observer.torch_is_there()

            spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


class _JobObserver:
    def __init__(self, pack: Path) -> None:
        self._pack = pack
        self._handle: Any = None
        self._has_shown = False
        self._redactor = Redactor()
        self._redactor.learn(os.environ)

    def torch_is_there(self) -> None:
        """Have the first forward of a model that is trained seen."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._handle = register_module_forward_pre_hook(self._see)

    def _see(self, module: Any, args: tuple[Any, ...]) -> None:
        try:
            if not module.training or not any(parameter.requires_grad for parameter in module.parameters()):
                return
            self._let_go()
            kwargs = sys._getframe(1).f_locals.get("kwargs", {})
            self._write(module, args, kwargs if isinstance(kwargs, dict) else {})
        except Exception as error:  # noqa: BLE001  # the border to training: whatever it is, training goes on
            self._let_go()
            sys.stderr.write(f"trainermon env: rank {_rank()} could not be recorded: {error}\n")

    def _let_go(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _write(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from trainermon.analysis.environment.recorder import first_sight, inputs_of, members_of_rank

        shown = first_sight([module], None, self._redactor)
        shown["data"] = {"0": inputs_of(args, kwargs)}
        update_pack(self._pack, members_of_rank(_rank(), {**shown, "options": self._options()}))
        self._has_shown = True

    def _options(self) -> dict[str, Any]:
        from trainermon.analysis.environment.launchers import options_of

        return {name: self._redactor.value(name, value) for name, value in options_of(sys.argv[1:]).items()}

    def end(self) -> None:
        """Write what is known of a process that never trained, unless another one of its rank did."""
        if self._has_shown or "torch" not in sys.modules:
            return
        try:
            with zipfile.ZipFile(self._pack) as archive:
                if RANK_FILE.format(_rank()) in archive.namelist():
                    return
            from trainermon.analysis.environment.recorder import members_of_rank
            from trainermon.monitor.environment.torch_settings import torch_settings

            update_pack(self._pack, members_of_rank(_rank(), {"torch": torch_settings(), "options": self._options()}))
        except Exception as error:  # noqa: BLE001  # the end of somebody else's process
            sys.stderr.write(f"trainermon env: rank {_rank()} could not be recorded: {error}\n")


def _rank() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0
