"""Where this process stands in the job, and what the run is called.

Nothing here is a collective. Ranks agree on run id and attempt through the default process group's key-value store (a
request to one server that no other rank has to answer), once, before `set_monitor` returns.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import os
import re
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainermon.core.errors import AttachError, ConfigError
from trainermon.core.private_files import check_private, open_private
from trainermon.core.values import Coordinates

OUTPUT_ROOT = "trainermon_output"
"""Folder of all runs, in the working directory, where nothing else is said."""

STORE_TIMEOUT = datetime.timedelta(seconds=60)
SCHEDULER_RUN_IDS = ("SLURM_JOB_ID", "JOBSET_UID", "PBS_JOBID", "LSB_JOBID")

SCRIPT_NAME_LENGTH = 40
"""Characters of the script's name in that of a run."""

_monitors_of_this_process = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Which run a rank belongs to.

    Attributes:
        run_id: The run's name.
        attempt: Which start of it this is, from 1.
        directory: The run directory, absolute.
    """

    run_id: str
    attempt: int
    directory: Path


def find_coordinates(environ: Mapping[str, str] = os.environ, groups: Mapping[str, Any] | None = None) -> Coordinates:
    """Return this rank's position in the job, from torch.distributed if initialised, else the launcher's variables.

    `groups` maps an axis (`tp`, `dp`, `pp`) to this rank's process group of it, or None. Without a data-parallel group
    the whole world is one.
    """
    dist = _initialised_distributed()
    rank = dist.get_rank() if dist else int(environ.get("RANK", "0"))
    world_size = dist.get_world_size() if dist else int(environ.get("WORLD_SIZE", "1"))
    axes: dict[str, int] = {"dp": rank, "dp_size": world_size}
    for axis, group in (groups or {}).items():
        if group is not None and dist:
            axes |= {axis: dist.get_rank(group), f"{axis}_size": dist.get_world_size(group)}
    return Coordinates(
        rank=rank,
        world_size=world_size,
        local_rank=int(environ.get("LOCAL_RANK", rank)),
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", world_size)),
        **axes,
    )


def name_run(
    coordinates: Coordinates,
    *,
    run_id: str | None = None,
    output_dir: str | None = None,
    has_store: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> RunIdentity:
    """Return the run that this rank belongs to; every rank of the job gets the same.

    The id is the configured one, TRAINERMON_RUN_ID, the scheduler's job id, or one that rank 0 makes; the second
    monitor that a process makes adds `-2` to a name that it has from its surroundings, and so on. The attempt is one
    more than the newest that the run's directory knows of. Without a store (`has_store`, that of torch's process group)
    several ranks need TRAINERMON_RUN_ID or a scheduler's id.

    Raises:
        AttachError: Several ranks, but nothing through which they could agree.
    """
    root = output_root(output_dir, environ)
    number = next(_monitors_of_this_process)
    given = run_id or _numbered(environ.get("TRAINERMON_RUN_ID") or _scheduler_run_id(environ), number)
    if coordinates.world_size == 1:
        return _new_attempt(root, given or _fresh_run_id())
    dist = _initialised_distributed() if has_store else None
    if dist is None:
        return _run_from_environment(root, given, environ, has_store=has_store)
    # the store of the default group: public as an argument of init_process_group, private to read back
    store = dist.distributed_c10d._get_default_store()
    key = f"trainermon/run/{number}"
    if coordinates.rank == 0:
        run = _new_attempt(root, given or _fresh_run_id())
        store.set(key, json.dumps([run.run_id, run.attempt, str(run.directory)]))
        return run
    try:
        store.wait([key], STORE_TIMEOUT)
    except RuntimeError as error:
        raise AttachError(
            f"rank {coordinates.rank} waited {STORE_TIMEOUT.seconds} s for rank 0 to name the run: "
            "call set_monitor on every rank (module_ranks chooses which ones collect), or set TRAINERMON_RUN_ID"
        ) from error
    name, attempt, directory = json.loads(store.get(key))
    return RunIdentity(run_id=name, attempt=attempt, directory=Path(directory))


def _initialised_distributed() -> Any:
    import torch.distributed as dist  # loads torch, which only a rank has

    return dist if dist.is_available() and dist.is_initialized() else None


def output_root(output_dir: str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of all runs: as configured, TRAINERMON_OUTPUT, MONITOR_OUTPUT_DIR or `trainermon_output`."""
    given = output_dir or environ.get("TRAINERMON_OUTPUT") or environ.get("MONITOR_OUTPUT_DIR")
    return Path(given or OUTPUT_ROOT).absolute()


def _scheduler_run_id(environ: Mapping[str, str]) -> str | None:
    found = next((environ[name] for name in SCHEDULER_RUN_IDS if environ.get(name)), None)
    if found is None:
        elastic = environ.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's own word for "not given"
        return None if elastic == "none" else f"run-{elastic[:8]}"  # by default a long random one
    return f"job-{found}"


def _numbered(job: str | None, number: int) -> str | None:
    """Tell the monitors of one process apart, which all find the same name of their job."""
    return job if job is None or number == 0 else f"{job}-{number + 1}"


def _fresh_run_id() -> str:
    now = datetime.datetime.now(datetime.timezone.utc)
    return "-".join(filter(None, (f"{now:%Y%m%d-%H%M%S}", script_name(sys.argv[0]), secrets.token_hex(2))))


def script_name(path: str) -> str:
    """Return what a run is called after its script: the file's name, or for a package its folder's; "" if unknown.

    >>> script_name("/work/train_gpt.py"), script_name("pkg/__main__.py"), script_name("-c")
    ('train_gpt', 'pkg', '')
    """
    script = Path(path)
    name = script.parent.name if script.stem == "__main__" else script.stem
    if script.suffix != ".py" or name == "ipykernel_launcher":
        return ""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:SCRIPT_NAME_LENGTH]


def _new_attempt(root: Path, run_id: str) -> RunIdentity:
    directory = root / run_id
    return RunIdentity(run_id=run_id, attempt=_known_attempts(directory) + 1, directory=directory)


def _known_attempts(directory: Path) -> int:
    try:
        check_private(directory)
    except OSError:
        return 0  # nothing in it is believed; that it is missing, or not ours, is found out by writing
    path = directory / "run.json"
    try:
        with os.fdopen(open_private(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe would be waited for
            return int(json.loads(file.read())["attempt"])
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): remove the folder or choose another run_id") from error


def _run_from_environment(root: Path, given: str | None, environ: Mapping[str, str], *, has_store: bool) -> RunIdentity:
    if given is None:
        why = "torch.distributed is not initialised" if has_store else "no store for them to meet in"
        advice = "call init_process_group before set_monitor, or set" if has_store else "set"
        raise AttachError(
            f"several ranks, but {why}, so they cannot agree on a run id: {advice} TRAINERMON_RUN_ID, the same on all"
        )
    attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1
    return RunIdentity(run_id=given, attempt=attempt, directory=root / given)
