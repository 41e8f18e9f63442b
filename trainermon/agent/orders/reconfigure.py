"""An edited configuration file, brought to all ranks for the same step.

The ranks never look at the file: it may lie on a cluster file system, and two ranks that look at different times would
apply it at different steps. The agent of rank 0 looks, checks what it finds, chooses a step that every rank can still
reach, and writes the order into the run directory; the agents of other nodes find it there. Each agent hands it to its
own ranks. What is invalid changes nothing, and is logged and counted.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from trainermon.agent.watch import RankWatch
from trainermon.core.config import load_config
from trainermon.core.config.reading import read_mapping
from trainermon.core.errors import TrainermonError
from trainermon.core.private_files import replace_file
from trainermon.core.values import Action, Command, as_plain

ORDERS_FOLDER = "configurations"
LOOK_S = 1.0
REACH_S = 0.5
"""From a decision until every rank of this node has read it."""

REACH_OTHER_NODES_S = 10.0
"""The same with agents of other nodes, which have to find the order in the run directory."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _ConfigurationLook:
    """What one look at the file and the folder brought: an edit, orders of others, or what was wrong."""

    mtime_ns: int
    edited: Mapping[str, Any] | None = None
    problem: str = ""
    orders: tuple[Command, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """The configuration file that is watched for edits.

    Attributes:
        path: The file; None if edits are not asked for.
        mtime_ns: Its time of modification when the ranks read it.
        run_dir: Where orders are shared between nodes.
    """

    path: Path | None
    mtime_ns: int
    run_dir: Path

    @property
    def orders(self) -> Path:
        """Folder of the orders that agents share."""
        return self.run_dir / ORDERS_FOLDER


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Chooses the step from which an edit applies on every rank.

    Attributes:
        watch: The ranks of this node and how fast they step.
        world_size: Ranks of the job.
        margin_steps: Smallest number of steps between a decision and its step.
    """

    watch: RankWatch
    world_size: int
    margin_steps: int

    @property
    def is_leader(self) -> bool:
        """Whether this node has rank 0, whose agent decides for all."""
        return 0 in self.watch.ranks

    def first_step(self) -> int | None:
        """Return a step that is far enough ahead for every rank to still reach it; None where no rank lives here."""
        steps = self.watch.steps
        if not steps:
            return None
        everyone_is_here = len(self.watch.ranks) >= self.world_size
        reach_s = REACH_S if everyone_is_here else REACH_OTHER_NODES_S
        return max(steps.values()) + self.watch.margin(reach_s, at_least=self.margin_steps)


class ConfigWatch:
    """Checks a configuration file for edits in the worker's thread, and sends them to the ranks.

    Args:
        file: The file.
        plan: Chooses the step.
        executor: Does what touches file systems.
        submit: Hands a command to all living ranks of this node.
        count_problem: Called for an edit that is refused.
    """

    def __init__(
        self,
        file: ConfigFile,
        plan: StepPlan,
        *,
        executor: Executor,
        submit: Callable[[Command], None],
        count_problem: Callable[[], None],
    ) -> None:
        self._path = file.path
        self._folder = file.orders
        self._plan = plan
        self._executor = executor
        self._submit = submit
        self._count_problem = count_problem
        self._mtime_ns = file.mtime_ns
        self._given: set[str] = set()
        self._job: Future[_ConfigurationLook] | None = None
        self._next_s = 0.0
        self._attempt = 0

    def poll(self, now_s: float, attempt: int) -> None:
        """Start to look for an edit of the file when that is due, and send the edit found last to the ranks.

        Never waits. `now_s` is monotonic, `attempt` the number of the job's start.
        """
        if self._path is None or not attempt:
            return
        if attempt != self._attempt:
            self._attempt, self._given = attempt, set()
        if self._job is not None and self._job.done():
            job, self._job = self._job, None
            self._act(job.result())
        if self._job is None and now_s >= self._next_s:
            self._next_s = now_s + LOOK_S
            prefix = f"{attempt}-"
            leads = self._plan.is_leader
            self._job = self._executor.submit(_look, self._path, self._mtime_ns, self._folder, prefix, leads)

    def _act(self, found: _ConfigurationLook) -> None:
        for command in found.orders:
            self._give(command)
        if found.mtime_ns == self._mtime_ns:
            return
        self._mtime_ns = found.mtime_ns
        if found.problem:
            self._count_problem()
            _log.warning("the edited configuration %s is refused, the old one stays: %s", self._path, found.problem)
        elif found.edited is not None:
            self._order(found.edited)

    def _order(self, edited: Mapping[str, Any]) -> None:
        first_step = self._plan.first_step()
        if first_step is None:
            return
        command = Command(
            id=f"configuration-{self._attempt}-{self._mtime_ns}",
            action=Action.CONFIGURE,
            first_step=first_step,
            config=json.dumps(edited),
            reason=f"{self._path} was edited",
        )
        path = self._folder / f"{self._attempt}-{self._mtime_ns}.json"
        self._executor.submit(_share, path, command)
        _log.info("the edited configuration %s applies from step %d on", self._path, first_step)
        self._give(command)

    def _give(self, command: Command) -> None:
        if command.id not in self._given:
            self._given.add(command.id)
            self._submit(command)


def _look(path: Path, known_mtime_ns: int, folder: Path, prefix: str, leads: bool) -> _ConfigurationLook:  # noqa: FBT001  # a job
    """Look at the file (rank 0's agent) or at the orders of rank 0's agent; runs in the worker's thread."""
    try:
        if not leads:
            return _ConfigurationLook(mtime_ns=known_mtime_ns, orders=_read_orders(folder, prefix))
        mtime_ns = os.stat(path).st_mtime_ns
        if mtime_ns == known_mtime_ns:
            return _ConfigurationLook(mtime_ns=mtime_ns)
        load_config(path)
        return _ConfigurationLook(mtime_ns=mtime_ns, edited=read_mapping(path))
    except TrainermonError as error:
        return _ConfigurationLook(mtime_ns=mtime_ns, problem=str(error))
    except OSError as error:  # between two saves of an editor there may be no file
        _log.debug("%s: %s", path, error)
        return _ConfigurationLook(mtime_ns=known_mtime_ns)


def _read_orders(folder: Path, prefix: str) -> tuple[Command, ...]:
    found = []
    for path in sorted(folder.glob(f"{prefix}*.json")):
        plain = json.loads(path.read_text(encoding="utf-8"))
        found.append(
            Command(
                id=str(plain["id"]),
                action=Action(plain["action"]),
                first_step=int(plain["first_step"]),
                config=str(plain["config"]),
                reason=str(plain["reason"]),
            )
        )
    return tuple(found)


def _share(path: Path, command: Command) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps(as_plain(command)).encode())
    except OSError as error:
        _log.error("agents of other nodes cannot learn of the edited configuration: %s", error)
