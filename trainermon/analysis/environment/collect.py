"""Collects an environment without a job: nothing of what is read is run, and torch is not imported."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainermon.analysis.environment.files import JSON, LOGS, TOML, YAML, read_configuration
from trainermon.analysis.environment.launchers import hyperparameters_of
from trainermon.analysis.environment.shell.script import read_script
from trainermon.core.environment.code import collect_code
from trainermon.core.environment.pack import EnvironmentPack
from trainermon.core.environment.packages import collect_packages
from trainermon.core.environment.secrets import Redactor
from trainermon.core.environment.system import collect_system
from trainermon.core.environment.variables import all_variables
from trainermon.core.errors import PackError

SHELL = (".sh", ".bash", ".slurm", ".sbatch")
_IN_VERSION_FILE = re.compile(r"^(\w+)(?:\s*:[^=\n]+)?\s*=\s*(?:'([^']*)'|\"([^\"]*)\"|(\w+))", re.MULTILINE)
_OF_LAYOUT = (
    "world_size",
    "nnodes",
    "nproc_per_node",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
    "micro_batch_size",
    "global_batch_size",
    "gradient_accumulation_steps",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization.stage",
)


def collect_environment(
    files: Sequence[Path], environ: Mapping[str, str], redactor: Redactor, folder: Path
) -> EnvironmentPack:
    """Return what can be known of a training that is started in `folder` with these launch scripts and configurations.

    Raises:
        PackError: A file cannot be read.
    """
    redactor.learn(environ)
    hyperparameters, of_script, notes = collect_hyperparameters(files, environ, redactor)
    variables = all_variables({**environ, **of_script}, redactor)
    sections = {
        "system": collect_system(),
        "torch": _torch_without_import(),
        "variables": variables,
        "packages": {name: found._asdict() for name, found in collect_packages(redactor).items()},
        "code": collect_code(folder, files, redactor),
    }
    if files:
        sections["hyperparameters"] = hyperparameters
        layout = layout_of(hyperparameters)
        sections |= {"layout": layout} if layout else {}
    return EnvironmentPack(sections=sections, notes=notes)


def collect_hyperparameters(
    files: Sequence[Path], environ: Mapping[str, str], redactor: Redactor
) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """Return the hyperparameters in launch scripts and configurations, without secrets, and what is not known.

    Between them stand the variables that launch scripts set for the training, as they are there.

    A name that two files give different values is kept twice, the second time behind the name of its file.

    Raises:
        PackError: A file cannot be read.
    """
    found: dict[str, Any] = {}
    variables: dict[str, str] = {}
    notes: list[str] = []
    for path in files:
        values, of_script, unclear = _read(path, {**environ, **variables})
        variables |= of_script
        redactor.learn(of_script)
        notes += [redactor.text(f"{path.name}: {note}") for note in unclear]
        for name, value in values.items():
            clean = redactor.value(name, value)
            key = redactor.text(name)
            if key in found and found[key] != clean:
                key = f"{redactor.text(path.name)}:{key}"
            found[key] = clean
    return found, variables, tuple(notes)


def _read(path: Path, environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    if path.suffix in (*YAML, *JSON, *TOML):
        return read_configuration(path), {}, []
    if path.suffix in SHELL or _is_shell(path):
        return hyperparameters_of(read_script(path, environ), environ)
    log = "; of a log give the configuration that its job was started with" if path.suffix in LOGS else ""
    raise PackError(f"{path}: expected a launch script (.sh) or a configuration (.yaml, .json, .toml){log}")


def _is_shell(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return bool(re.match(rb"#!.*\b(ba|z|k|da)?sh\b", file.readline(200)))
    except OSError as error:
        raise PackError(f"{path}: cannot be read ({error.strerror})") from error


def layout_of(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return those hyperparameters that say how a job is split, by their plain names."""
    plain = {
        name.rpartition(":")[2].replace("-", "_").removeprefix("launcher."): value
        for name, value in hyperparameters.items()
    }
    return {name: plain[name] for name in _OF_LAYOUT if name in plain}


def _torch_without_import() -> dict[str, Any]:
    """Return what torch's own file of its version says; {} without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return {}
    named = {match[1]: match[2] or match[3] or match[4] for match in _IN_VERSION_FILE.finditer(text)}
    wanted = {"__version__": "version", "git_version": "git_version", "cuda": "cuda", "hip": "hip", "debug": "debug"}
    return {new: named[old] for old, new in wanted.items() if old in named}
