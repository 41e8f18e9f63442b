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
    """Writes at the first forward of a model that is trained, and what its optimizer says at its first step."""

    def __init__(self, pack: Path) -> None:
        self._pack = pack
        self._handle: Any = None
        self._draws: Any = None
        self._shown: dict[str, Any] = {}
        self._redactor = Redactor()
        self._redactor.learn(os.environ)

    def torch_is_there(self) -> None:
        """List draws from now on, and have the first forward of a model that is trained seen."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._handle = register_module_forward_pre_hook(self._see)
        try:
            from trainermon.analysis.environment.recorder import DrawLog

            self._draws = DrawLog()
        except Exception as error:  # noqa: BLE001  # the border to training: whatever it is, training goes on
            _complain(error)

    def _see(self, module: Any, args: tuple[Any, ...]) -> None:
        try:
            if not module.training or not any(parameter.requires_grad for parameter in module.parameters()):
                return
            self._let_go()
            draws = self._draws.finished(self._redactor) if self._draws is not None else None
            kwargs = sys._getframe(1).f_locals.get("kwargs", {})
            self._write(module, args, kwargs if isinstance(kwargs, dict) else {}, draws)
            self._wait_for_step(module)
        except Exception as error:  # noqa: BLE001  # the border to training: whatever it is, training goes on
            self._let_go()
            _complain(error)

    def _let_go(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _write(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], draws: Any) -> None:
        from trainermon.analysis.environment.members import members_of_rank
        from trainermon.analysis.environment.recorder import first_sight, inputs_of
        from trainermon.monitor.environment.model_sources import model_sources

        shown = {**first_sight([module], None, self._redactor), "code": model_sources([module])}
        if draws is not None:
            shown["random"]["draws"] = draws
        shown["data"] = {"0": inputs_of(args, kwargs)}
        self._shown = {**shown, "options": self._options()}
        update_pack(self._pack, members_of_rank(_rank(), self._shown))

    def _wait_for_step(self, module: Any) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def see(optimizer: Any, *_: Any) -> None:
            self._let_go()
            try:
                self._add_optimizer(module, optimizer)
            except Exception as error:  # noqa: BLE001  # the border to training: whatever it is, training goes on
                _complain(error)

        self._handle = register_optimizer_step_pre_hook(see)

    def _add_optimizer(self, module: Any, optimizer: Any) -> None:
        from trainermon.analysis.environment.members import members_of_rank
        from trainermon.analysis.environment.shown_settings import hyperparameters_in, layout_in
        from trainermon.monitor.environment.weights import training_of

        found = hyperparameters_in([module], optimizer)
        self._shown["hyperparameters"] |= {name: self._redactor.value(name, value) for name, value in found.items()}
        self._shown["layout"] |= layout_in(training_of([module], optimizer))
        update_pack(self._pack, members_of_rank(_rank(), self._shown))

    def _options(self) -> dict[str, Any]:
        from trainermon.analysis.environment.launchers import options_of

        return {name: self._redactor.value(name, value) for name, value in options_of(sys.argv[1:]).items()}

    def end(self) -> None:
        """Write what is known of a process that never trained, unless another one of its rank did."""
        if self._draws is not None:
            self._draws.close()
        if self._shown or "torch" not in sys.modules:
            return
        try:
            with zipfile.ZipFile(self._pack) as archive:
                if RANK_FILE.format(_rank()) in archive.namelist():
                    return
            from trainermon.analysis.environment.members import members_of_rank
            from trainermon.monitor.environment.torch_settings import torch_settings

            update_pack(self._pack, members_of_rank(_rank(), {"torch": torch_settings(), "options": self._options()}))
        except Exception as error:  # noqa: BLE001  # the end of somebody else's process
            _complain(error)


def _complain(error: Exception) -> None:
    sys.stderr.write(f"trainermon env: rank {_rank()} could not be recorded: {error}\n")


def _rank() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0
