"""Orders to ranks: checked, remembered by id, merged with what is outstanding, and handed to the ranks concerned.

The same order may arrive twice: a client repeats a request, an agent that was killed sees the same alert again. An id
is therefore carried out once per run; the same id with another content is an error. Nothing here waits for a rank.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainermon.core.config import parse_config
from trainermon.core.control import MAX_COMMAND_BYTES
from trainermon.core.errors import ConfigError
from trainermon.core.ledger import Ledger
from trainermon.core.values import Action, Command, DumpTask, as_plain, well_formed

BOOK_FILE = "agent.commands.jsonl"
MAX_REMEMBERED = 1000
FRAME_BYTES = 100  # of a rank's command file, around the commands
MAX_STEPS = 1000
MAX_SCOPE = 1000
MAX_TEXT = 1000
MAX_CONFIG = 100_000
MAX_AHEAD = 10**6
MAX_OUTSTANDING = MAX_REMEMBERED // 2
"""So many orders may wait for their step; the book remembers more, so that none of them is forgotten."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # it becomes the name of a folder

Sender = Callable[[int, Sequence[Command]], None]


class ConflictError(ConfigError):
    """Raised for a command that is well formed but cannot be carried out as things stand."""


class DuplicateError(ConflictError):
    """Raised for a command whose id was used before for another command."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """A command that was given to ranks.

    Attributes:
        command: What they do: collect, dump or take a new configuration, and from which step.
        ranks: The ranks that carry it out.
        attempt: The start of the job in which it was given.
    """

    command: Command
    ranks: tuple[int, ...]
    attempt: int


def parse_command(body: Any, *, next_step: int) -> Command:
    """Parse the JSON `body` with which a client orders something from ranks.

    `first_step` may be left out: then it is `next_step`. Everything is checked, because it came over a network.

    Raises:
        ConfigError: A key is unknown, missing, of the wrong type or out of range.
    """
    _require(isinstance(body, Mapping), "the body", body, "a JSON object")
    known = {field.name for field in dataclasses.fields(Command)}
    for key in body:
        _require(key in known, "the body", key, f"only the keys {', '.join(sorted(known))}")
    identity, action = body.get("id"), body.get("action")
    _require(
        isinstance(identity, str) and _ID.fullmatch(identity) is not None, "id", identity, "a name of A-Za-z0-9._-"
    )
    actions = [item.value for item in Action]
    _require(action in actions, "action", action, " or ".join(actions))
    scope = body.get("scope", [])
    good = isinstance(scope, list) and len(scope) <= MAX_SCOPE and all(_is_text(item) for item in scope)
    _require(good, "scope", scope, f"a list of at most {MAX_SCOPE} module names")
    _require(body.get("level", "L0") == "L0", "level", body.get("level"), "'L0'")
    task = body.get("task", DumpTask.STATISTICS)
    tasks = [item.value for item in DumpTask]
    _require(task in tasks, "task", task, " or ".join(map(repr, tasks)))
    reason = body.get("reason", "")
    _require(_is_text(reason), "reason", reason, f"a text of at most {MAX_TEXT} characters")
    config = body.get("config", "")
    _check_config(config, wanted=action == Action.CONFIGURE)
    return Command(
        id=str(identity),
        action=Action(action),
        first_step=_whole(body, "first_step", next_step, 0, 1 << 62),
        num_steps=_whole(body, "num_steps", 1, 1, MAX_STEPS),
        max_bytes=_whole(body, "max_bytes", 1 << 30, 0, 1 << 62),
        task=DumpTask(task),
        scope=tuple(map(well_formed, scope)),
        reason=well_formed(reason),
        config=config,
    )


def require_possible(command: Command, ranks: Collection[int], steps: Mapping[int, int]) -> None:
    """Raise an error unless every one of `ranks` can carry out the command; `steps` says, by rank, which step it is on.

    Raises:
        ConflictError: A rank is past the first step, or more than `MAX_AHEAD` before it.
    """
    for rank in ranks:
        if command.first_step > steps[rank] + MAX_AHEAD:
            raise ConflictError(
                f"step {command.first_step} is too far: rank {rank} is at step {steps[rank]}, and an order may be at "
                f"most {MAX_AHEAD} steps ahead"
            )
        if steps[rank] > command.first_step:
            raise ConflictError(
                f"step {command.first_step} is past: rank {rank} is at step {steps[rank]}; "
                "leave first_step out for the next possible one"
            )


class CommandBook:
    """Keeps the run's commands to ranks in the spool (`agent.commands.jsonl`), and sends them to ranks.

    Args:
        spool: Folder of the book's file, which survives the agent.
        send: Gives a set of commands to a rank; replaces the rank's former set.
    """

    def __init__(self, spool: Path, send: Sender) -> None:
        self._ledger = Ledger(spool / BOOK_FILE)
        self._send = send
        self._orders: dict[str, RankOrder] = {}
        for order in self._ledger.read(_parse_order):
            self._remember(order)

    def submit(self, command: Command, ranks: Collection[int], *, attempt: int, steps: Mapping[int, int]) -> bool:
        """Write `command` down and send it to `ranks`; return False if it was given before.

        `steps` holds the step each rank is on: what lies wholly before it has expired and is not sent again. What is
        accepted will be read by every rank: together with what it has yet to do it fits what a rank reads.

        Raises:
            DuplicateError: The id was used for another command.
            ConflictError: The ranks have too much to do already.
            OSError: The book cannot be written; then nothing was sent.
        """
        known = self._orders.get(command.id)
        if known is not None:
            if known.command != command:
                raise DuplicateError(f"command id {command.id!r} was used before for another command; choose a new id")
            return False
        order = RankOrder(command=command, ranks=tuple(sorted(set(ranks))), attempt=attempt)
        for rank in order.ranks:
            waiting = self.outstanding(rank, attempt=attempt, step=steps.get(rank, 0))
            _require_room(rank, waiting, command)
        self._ledger.append(as_plain(order))
        self._remember(order)
        for rank in order.ranks:
            self._send(rank, self.outstanding(rank, attempt=attempt, step=steps.get(rank, 0)))
        return True

    def first_step(self, identity: str) -> int | None:
        """Return the first step of the command with this id, or None if there is none."""
        order = self._orders.get(identity)
        return None if order is None else order.command.first_step

    def resend(self, rank: int, *, attempt: int, step: int) -> None:
        """Send `rank` its outstanding commands again: a killed agent may have only written them down.

        The steps that an earlier attempt's command names are other steps now.
        """
        if self._orders:
            self._send(rank, self.outstanding(rank, attempt=attempt, step=step))

    def outstanding(self, rank: int, *, attempt: int, step: int) -> list[Command]:
        """Return the commands that `rank`, on `step`, has yet to carry out or finish in this attempt."""
        return [
            order.command
            for order in self._orders.values()
            if rank in order.ranks
            and order.attempt == attempt
            and order.command.first_step + order.command.num_steps > step
        ]

    def _remember(self, order: RankOrder) -> None:
        self._orders[order.command.id] = order
        while len(self._orders) > MAX_REMEMBERED:
            del self._orders[next(iter(self._orders))]


def _require_room(rank: int, waiting: Sequence[Command], command: Command) -> None:
    if len(waiting) >= MAX_OUTSTANDING:
        raise ConflictError(
            f"rank {rank} has {len(waiting)} orders to carry out, and takes at most {MAX_OUTSTANDING}; try again when "
            f"it has passed step {min(other.first_step + other.num_steps for other in waiting)}"
        )
    size_bytes = FRAME_BYTES + sum(len(json.dumps(as_plain(one))) + 2 for one in (*waiting, command))
    if size_bytes > MAX_COMMAND_BYTES:
        raise ConflictError(
            f"with this order rank {rank} would have {size_bytes} bytes of orders to read, and reads at most "
            f"{MAX_COMMAND_BYTES}; try again when it has carried out some of its {len(waiting)}, or name fewer modules "
            "in scope"
        )


def _parse_order(plain: Any) -> RankOrder:
    command = parse_command(plain["command"], next_step=0)
    return RankOrder(command=command, ranks=tuple(plain["ranks"]), attempt=int(plain["attempt"]))


def _whole(body: Mapping[str, Any], key: str, default: int, low: int, high: int) -> int:
    value = body.get(key, default)
    good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    _require(good, key, value, f"a whole number from {low} to {high}")
    return int(value)


def _check_config(text: Any, *, wanted: bool) -> None:
    good = isinstance(text, str) and len(text) <= MAX_CONFIG and bool(text) is wanted
    expected = "the text of a JSON object" if wanted else "no configuration"
    _require(good, "config", text, f"{expected} for this action")
    if wanted:
        try:
            mapping = json.loads(text)
        except ValueError:
            mapping = None
        _require(isinstance(mapping, Mapping), "config", text, expected)
        parse_config(mapping)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _require(condition: bool, path: str, found: Any, expected: str) -> None:  # noqa: FBT001 - an assertion's shape
    if not condition:
        shown = repr(found)
        raise ConfigError(f"{path}: found {shown[:100]}, expected {expected}")
