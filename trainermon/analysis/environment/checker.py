"""`ConfigChecker`: msprobe's two calls, for scripts that have them already."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainermon.analysis.environment.collect import collect_environment
from trainermon.core.environment.pack import write_pack
from trainermon.core.environment.secrets import Redactor
from trainermon.core.errors import ConfigError

if TYPE_CHECKING:
    from mindspore.nn import Cell
    from torch import nn

    from trainermon.analysis.environment.mindspore import CellEnvironmentRecorder
    from trainermon.analysis.environment.recorder import DrawLog, EnvironmentRecorder

FRAMEWORKS = ("pytorch", "mindspore")


class ConfigChecker:
    """Collects what a training runs on and with into one zip file, as msprobe's class of that name does.

    The inputs of the first forward and the weights before it are recorded, once; msprobe records those of all. Draws
    of random numbers are listed with torch alone.

    Args:
        model: The model, or a list of its stages; None: only what is known without one.
        shell_path: Launch scripts and configurations.
        output_zip_path: The pack, which `trainermon env compare` and msprobe read.
        fmk: `pytorch` or `mindspore`: what the model is of.

    Raises:
        ConfigError: An argument is wrong.
        PackError: The pack cannot be written, or a script not be read.
    """

    _draws: DrawLog | None = None

    def __init__(
        self,
        model: nn.Module | Cell | Sequence[nn.Module | Cell] | None = None,
        shell_path: str | Sequence[str] | None = None,
        output_zip_path: str = "./config_check_pack.zip",
        fmk: str = "pytorch",
    ) -> None:
        _require_framework(fmk)
        files = [Path(path) for path in ([shell_path] if isinstance(shell_path, str) else shell_path or ())]
        if not str(output_zip_path).endswith(".zip"):
            raise ConfigError(f"output_zip_path: found {output_zip_path!r}, expected a name that ends with .zip")
        self._recorder: EnvironmentRecorder | CellEnvironmentRecorder | None = None
        if model is not None:
            record = self._record if fmk == "pytorch" else self._record_cells
            record(model, files, Path(output_zip_path))
        elif _rank(fmk) == 0:
            redactor = Redactor()
            write_pack(Path(output_zip_path), collect_environment(files, os.environ, redactor, Path.cwd()))

    def _record(self, model: Any, files: Sequence[Path], output: Path) -> None:
        from torch import nn

        from trainermon.analysis.environment.recorder import EnvironmentRecorder

        models = [model] if isinstance(model, nn.Module) else list(model)
        if not models or not all(isinstance(each, nn.Module) for each in models):
            raise ConfigError(f"model: found {type(model).__name__}, expected a torch.nn.Module or a list of them")
        draws, ConfigChecker._draws = ConfigChecker._draws, None
        self._recorder = EnvironmentRecorder(models, output=output, files=files, draws=False)
        self._recorder.use_draws(draws)
        self._recorder.start()

    def _record_cells(self, model: Any, files: Sequence[Path], output: Path) -> None:
        from trainermon.analysis.environment.mindspore import CellEnvironmentRecorder

        self._recorder = CellEnvironmentRecorder(model, output=output, files=files)
        self._recorder.start()

    @staticmethod
    def apply_patches(fmk: str = "pytorch") -> None:
        """Start listing draws of random numbers; the checker that is made next takes them at the first forward.

        Raises:
            ConfigError: There is no such framework.
        """
        _require_framework(fmk)
        if fmk == "pytorch" and ConfigChecker._draws is None:
            from trainermon.analysis.environment.recorder import DrawLog

            ConfigChecker._draws = DrawLog()


def _rank(fmk: str) -> int:
    if fmk == "mindspore":
        from trainermon.analysis.environment.mindspore import rank_here as of_mindspore

        return of_mindspore()
    from trainermon.dump.seeds import rank

    return rank()


def _require_framework(fmk: str) -> None:
    if fmk not in FRAMEWORKS:
        raise ConfigError(f"fmk: found {fmk!r}, expected {' or '.join(FRAMEWORKS)}")
