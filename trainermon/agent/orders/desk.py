"""Takes a client's commands for local ranks."""

from __future__ import annotations

from typing import Any

from trainermon.agent.orders.answers import OrderAnswer, OrderStatus
from trainermon.agent.orders.commands import CommandBook, ConflictError, parse_command, require_possible
from trainermon.agent.orders.reconfigure import REACH_S
from trainermon.agent.reactions import Reactions
from trainermon.agent.watch import RankWatch
from trainermon.core.errors import ConfigError


class OrderDesk:
    """Checks the commands that clients send by HTTP and gives them to local ranks.

    Args:
        commands: The commands given before.
        watch: Which ranks live, and on which step.
        reactions: Know the number of the attempt.
        margin_steps: How many steps ahead a command without a first step begins; more for steps that are so fast that
            ranks could not have read it by then.
    """

    def __init__(self, commands: CommandBook, watch: RankWatch, reactions: Reactions, *, margin_steps: int) -> None:
        self._commands = commands
        self._watch = watch
        self._reactions = reactions
        self._margin_steps = margin_steps

    def order(self, body: Any) -> OrderAnswer:
        """Send a client's command to the ranks that it names in `ranks`, or to all living ones.

        Returns {"status": "accepted", "command", "ranks"}, or {"status": "duplicate"}: an id that was accepted before
        is only acknowledged, whatever has become of the run since.

        Raises:
            ConfigError: The body is wrong.
            ConflictError: No rank could carry it out.
            OSError: It cannot be written down; nothing was ordered.
        """
        book = self._commands
        body = dict(body) if isinstance(body, dict) else body
        ranks = body.pop("ranks", None) if isinstance(body, dict) else None
        steps = self._watch.steps
        known = book.first_step(str(body.get("id"))) if isinstance(body, dict) else None
        soon = max(steps.values(), default=0) + self._watch.margin(REACH_S, at_least=self._margin_steps)
        command = parse_command(body, next_step=soon if known is None else known)
        chosen: list[int] = []
        if known is None:
            if not steps:
                has_ended = bool(self._watch.ranks)
                raise ConflictError("the run has ended" if has_ended else "no rank has begun yet: try again then")
            chosen = _checked_ranks(ranks, steps)
            require_possible(command, chosen, steps)
        if not book.submit(command, chosen, attempt=self._reactions.attempt, steps=steps):
            return OrderAnswer(status=OrderStatus.DUPLICATE)
        return OrderAnswer(status=OrderStatus.ACCEPTED, command=command, ranks=tuple(chosen))


def _checked_ranks(ranks: Any, steps: dict[int, int]) -> list[int]:
    if ranks is None:
        return sorted(steps)
    if not isinstance(ranks, list) or not all(type(rank) is int and rank in steps for rank in ranks):
        raise ConfigError(f"ranks: found {str(ranks)[:100]}, expected some of the living ranks {sorted(steps)}")
    return sorted(set(ranks))
