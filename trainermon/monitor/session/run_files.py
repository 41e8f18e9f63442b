"""What a rank writes beside its journal: who it is, what the run is, what the agent is told.

Of the environment it keeps what the allow-list names, see `core/environment/variables.py`, the arguments of the script
without secrets, and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import trainermon
from trainermon.core.config import MonitorConfig, OutputConfig, RunSettings
from trainermon.core.errors import AttachError
from trainermon.core.private_files import make_private_directory, open_private, replace_file
from trainermon.core.spool import OUTBOX_FOLDER, list_ranks, unusable
from trainermon.core.topology import RunIdentity
from trainermon.core.values import Coordinates, Placement, as_plain
from trainermon.hooks.names import chosen


class DescribedParameter(Protocol):
    """Interface of a parameter: its tensor, of any framework, and what of it this rank's optimizer holds."""

    @property
    def name(self) -> str:
        """Its name in the whole model."""

    @property
    def tensor(self) -> Any:
        """The parameter that the model holds."""

    @property
    def stage(self) -> int:
        """Its virtual pipeline stage."""

    @property
    def owned(self) -> Placement:
        """How what this rank's optimizer holds of it relates to the whole."""


class NamedModule(Protocol):
    """Interface of a module with the name that it has in the whole model."""

    @property
    def name(self) -> str:
        """Its name."""


class DescribedTraining(Protocol):
    """Interface of a training, as far as files tell of it."""

    @property
    def framework(self) -> str:
        """Its name, for people."""

    @property
    def parameters(self) -> Sequence[DescribedParameter]:
        """Every parameter that requires a gradient."""

    @property
    def modules(self) -> Sequence[NamedModule]:
        """Every module."""


def write_run_files(  # noqa: PLR0913  # what the files say
    run: RunIdentity,
    coordinates: Coordinates,
    config: MonitorConfig,
    training: DescribedTraining,
    *,
    bytes_per_step: int,
    environment: Mapping[str, Any] | None = None,
    accelerator: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Write `ranks/rank00000.json`, on rank 0 `run.json`, and on local rank 0 this node's token; return nothing.

    `environment` is what is kept of the rank's surroundings, if anything; `accelerator` says on which one it trains;
    `notes` is what there is to say of keys of the configuration that have no effect, and of the model.

    Raises:
        AttachError: The run directory cannot be written, or others could write to it, too.
    """
    try:
        rank_file = run.directory / "ranks" / f"rank{coordinates.rank:05d}.json"
        about_rank = _about_rank(run, coordinates, training, bytes_per_step=bytes_per_step)
        about_rank["accelerator"] = accelerator
        about_rank["gradients"] = _about_gradients(config, training)
        if environment is not None:
            about_rank["environment"] = environment
        _write(rank_file, about_rank, run.directory)
        if coordinates.rank == 0:
            about_run = _about_run(run, config, world_size=coordinates.world_size, notes=notes)
            _write(run.directory / "run.json", about_run, run.directory)
        if coordinates.local_rank == 0:
            _write_token(run.directory / "nodes" / socket.gethostname() / "token", run.directory)
    except OSError as error:
        raise AttachError(
            f"the run directory {run.directory} cannot be written ({error}): set output_dir or TRAINERMON_OUTPUT to a "
            "folder that every node can write to"
        ) from error


class MadePlaces:
    """Knows which files and folders of a rank were not there when this was created.

    Args:
        run_directory: Where the run will be.
        spool: Where its spool will be.
        coordinates: The rank's position in the job.
    """

    def __init__(self, run_directory: Path, spool: Path, coordinates: Coordinates) -> None:
        self._spool = spool
        rank = coordinates.rank
        node = run_directory / "nodes" / socket.gethostname()
        self._patterns = [] if rank in list_ranks(spool) else [f"rank{rank:05d}.*"]
        if coordinates.local_rank == 0 and not (spool / "agent.json").exists():
            self._patterns.append("agent.*")
        files = [run_directory / "ranks" / f"rank{rank:05d}.json"]
        files += [run_directory / "run.json"] if rank == 0 else []
        self._files = [path for path in files if not path.exists()]
        folders = [run_directory / "ranks", node, spool / OUTBOX_FOLDER]
        folders = [path for folder in folders for path in (folder, *folder.parents)]
        self._folders = sorted({path for path in folders if not path.exists()}, key=lambda path: -len(path.parts))
        self._node = node if coordinates.local_rank == 0 and node in self._folders else None

    def remove(self) -> None:
        """Remove what has come since, as far as no other rank has put anything there; raises nothing."""
        with contextlib.suppress(OSError):
            for pattern in self._patterns:
                for path in self._spool.glob(pattern):
                    path.unlink(missing_ok=True)
            for path in self._files:
                path.unlink(missing_ok=True)
        if self._node is not None:
            shutil.rmtree(self._node, ignore_errors=True)
        for folder in self._folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _about_rank(
    run: RunIdentity, coordinates: Coordinates, training: DescribedTraining, *, bytes_per_step: int
) -> dict[str, Any]:
    return {
        "rank": coordinates.rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "attempt": run.attempt,
        "coordinates": coordinates,
        "framework": training.framework,
        "parameters": sum(_num_counted(p) for p in training.parameters),
        "modules": [module.name for module in training.modules],
        "buffers": _num_buffers(training.modules),
        "parameter_names": [parameter.name for parameter in training.parameters],
        "bytes_per_step": bytes_per_step,
    }


def _num_buffers(modules: Iterable[NamedModule]) -> int | None:
    """Return how many buffers torch's modules hold; None where they are not torch's."""
    held: list[Any] = [getattr(getattr(named, "module", None), "_buffers", None) for named in modules]
    return None if None in held else sum(map(len, held))


def _about_gradients(config: MonitorConfig, training: DescribedTraining) -> list[tuple[str, int, Placement, Placement]]:
    """Return name, stage and placements, before and after the reduction, of parameters whose gradients have a series.

    It may be that no row of it ever comes, so the store does not tell.
    """
    unstepped: frozenset[int] = getattr(training, "unstepped", frozenset())
    return [
        (parameter.name, parameter.stage, getattr(parameter, "placement", parameter.owned), parameter.owned)
        for place, parameter in enumerate(training.parameters)
        if config.wg_distribution
        and place not in unstepped
        and chosen(parameter.name, config.targets, parameter.stage, config.exclude)
    ]


def _about_run(run: RunIdentity, config: MonitorConfig, *, world_size: int, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "attempt": run.attempt,
        "started_s": time.time(),
        "world_size": world_size,
        "version": trainermon.__version__,
        "config": config,
        "config_notes": notes,
    }


def write_agent_settings(
    spool: Path, run: RunIdentity, config: MonitorConfig, coordinates: Coordinates, *, edits: Path | None = None
) -> None:
    """Write `agent.json`, the settings of this run's node agent.

    `edits` is the configuration file that the agent follows, if any.

    Raises:
        SpoolError: It cannot be written.
    """
    influxdb = config.influxdb
    token_file, ca_file = _absolute(influxdb.token_file), _absolute(influxdb.ca_file)
    influxdb = dataclasses.replace(influxdb, token_file=token_file, ca_file=ca_file)
    gateway = dataclasses.replace(config.pushgateway, password_file=_absolute(config.pushgateway.password_file))
    settings = RunSettings(
        run_id=run.run_id,
        output=str(run.directory),
        rules=_absolute(config.rules),
        agent=config.agent,
        escalation=config.escalation,
        outputs=OutputConfig(**{**config.output_fields(), "influxdb": influxdb, "pushgateway": gateway}),
        alert=config.alert,
        hang=config.hang,
        watches_all_parameters=not (config.targets or config.exclude),
        world_size=coordinates.world_size,
        config_file=str(edits.absolute()) if edits else None,
        config_mtime_ns=edits.stat().st_mtime_ns if edits else 0,
    )
    path = spool / "agent.json"
    try:
        _write(path, settings, spool)
    except OSError as error:
        raise unusable(path, error) from error


def _absolute(path: str | None) -> str | None:
    """Return `path` for a process with another working directory."""
    return str(Path(path).absolute()) if path else None


def _num_counted(parameter: DescribedParameter) -> int:
    """Return how many elements of the whole model this rank accounts for: over all ranks they add up to its size."""
    placement = parameter.owned
    if not placement.in_global_norm:
        return 0
    return int(parameter.tensor.numel()) if placement.length is None else placement.length


def _write(path: Path, content: Any, top: Path) -> None:
    """Write `path` below the private directory `top`."""
    make_private_directory(path.parent, top)
    replace_file(path, json.dumps(as_plain(content), indent=1).encode())


def _write_token(path: Path, top: Path) -> None:
    make_private_directory(path.parent, top)
    try:
        descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_urlsafe(32))
