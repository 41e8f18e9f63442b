"""Whether the copies of parameters on different nodes are equal: digests of all ranks of a run, compared by rows.

Equal copies have equal digests, so that usually a few bytes per rank and checked step are all that is asked for. Where
digests are not equal the agents concerned are asked for the single parameters, the ranks that differ from most are
named, and they dump.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from trainermon.agent.controller.client import AgentClient
from trainermon.agent.controller.fleet import AgentFleet, AgentHandle
from trainermon.agent.controller.steps import StepInquiry
from trainermon.agent.hang.evidence import spans
from trainermon.agent.orders.webhook import DumpRequest
from trainermon.core.values import DumpTask

LOOK_S = 10.0
MAX_RANKS = 16
"""So many of the ranks that are named dump."""
MAX_NAMES = 5

Key = TypeVar("Key")
_Told = dict[str, dict[int, int]]  # digests by group and rank
_Digests = dict[str, dict[int, tuple[int, AgentHandle]]]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyDivergence(Generic[Key]):
    """Copies of the same elements, on several ranks, that are not equal.

    Attributes:
        copies: Of which parameter or group.
        ranks: The ranks whose copy differs from that of most; all of them if there is no majority.
        others: The ranks that hold the value of most; none if there is no majority.
    """

    copies: Key
    ranks: tuple[int, ...]
    others: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceFinding:
    """Copies of parameters, held by one group of ranks, that were not equal when they were last compared.

    Attributes:
        attempt: The start of the run.
        step: The checked step on which it was found first.
        ranks: The ranks whose copies differ from those of most; all if nobody can tell.
        others: The ranks that hold what most do; none if nobody can tell.
        names: The parameters concerned; none if the agents do not tell any more.
    """

    attempt: int
    step: int
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        """One sentence that says which ranks' copies differ, for a page, a log and a dump."""
        what = "1 parameter" if len(self.names) == 1 else f"{len(self.names) or ''} parameters".strip()
        differ = "differs" if len(self.names) == 1 else "differ"
        named = ": " + ", ".join(self.names[:MAX_NAMES]) if self.names else ""
        found = f"found at step {self.step}{named}"
        if not self.others:
            return f"the copies of {what} on {spans(self.ranks)} differ, and nobody can tell which is right, {found}"
        return f"{what} of {spans(self.ranks)} {differ} from the copies on {spans(self.others)}, {found}"


class ReplicaWatch:
    """Compares the copies that a run has on several nodes, on every checked step. Make it inside the event loop.

    Args:
        fleet: The agents.
        client: Speaks to them.
        escalate: Has ranks dump.

    Attributes:
        findings: By run and group, the copies that are not equal; gone when they are equal again.
        num_comparisons: Comparisons of one group on one step.
        num_mismatches: Those in which copies were not equal.
    """

    def __init__(
        self, fleet: AgentFleet, client: AgentClient, escalate: Callable[[DumpRequest], Awaitable[object]]
    ) -> None:
        self.findings: dict[str, dict[str, DivergenceFinding]] = {}
        self.num_comparisons = self.num_mismatches = 0
        self._escalate = escalate
        self._inquiry = StepInquiry(fleet, client, "api/v1/checksums", _told)

    async def look(self) -> None:
        """Compare the checksums that are new since the last call; skips runs that one agent sees completely."""
        told = await self._inquiry.look()
        attempts = {each.run: each.attempt for each in told}
        self.findings = {
            run: {group: found for group, found in of_run.items() if found.attempt == attempts[run]}
            for run, of_run in self.findings.items()
            if run in attempts
        }
        for run, attempt, steps in told:
            for step, answers in steps:
                await self._compare(run, attempt, step, _by_group(answers))

    async def _compare(self, run: str, attempt: int, step: int, digests: _Digests) -> None:
        new = []
        for group, held in digests.items():
            if len({agent.target.url for _, agent in held.values()}) < 2:
                continue  # its agent's own rules have compared them
            self.num_comparisons += 1
            before = self.findings.get(run, {}).pop(group, None)
            if len({digest for digest, _ in held.values()}) == 1:
                continue
            self.num_mismatches += 1
            found = await self._judge(attempt, step, group, held)
            if before is not None:
                found = dataclasses.replace(found, step=before.step)
            self.findings.setdefault(run, {})[group] = found
            if before is None or before.ranks != found.ranks:
                _log.error("run %s: %s", run, found.text)
                new.append(found)
        if new:
            await self._escalate(_request(run, step, new))

    async def _judge(
        self, attempt: int, step: int, group: str, held: Mapping[int, tuple[int, AgentHandle]]
    ) -> DivergenceFinding:
        agents = list({agent.target.url: agent for _, agent in held.values()}.values())
        path = f"api/v1/copies?step={step}&group={quote(group)}"
        answers = await asyncio.gather(*(self._inquiry.ask(agent, path, _copies) for agent in agents))
        reports: dict[int, dict[str, int]] = {}
        for answer in answers:
            reports |= answer or {}
        single = divergences(reports)
        whole = divergences({rank: {"": digest} for rank, (digest, _) in held.items()})
        found = single or whole
        ranks = {rank for each in found for rank in each.ranks}
        return DivergenceFinding(
            attempt=attempt,
            step=step,
            ranks=tuple(sorted(ranks)),
            others=tuple(sorted({rank for each in found for rank in each.others} - ranks)),
            names=tuple(each.copies for each in single),
        )


def _told(groups: Any) -> _Told:
    return {
        str(group): {int(rank): int(digest, 16) for rank, digest in digests.items()}
        for group, digests in groups.items()
    }


def _by_group(told: Sequence[tuple[AgentHandle, _Told]]) -> _Digests:
    held: _Digests = {}
    for agent, groups in told:
        for group, digests in groups.items():
            held.setdefault(group, {}).update({rank: (digest, agent) for rank, digest in digests.items()})
    return held


def divergences(reports: Mapping[int, Mapping[Key, int]]) -> list[CopyDivergence[Key]]:
    """Return which copies of the same elements are not equal, in the order of the model.

    The value that most ranks have is taken for the right one. Where two values are equally frequent nobody can tell,
    and all ranks are named.

    Args:
        reports: By rank, then by what was copied: its checksum on one step and attempt.
    """
    holders: dict[Key, dict[int, int]] = {}
    for rank in sorted(reports):
        for copies, checksum in reports[rank].items():
            holders.setdefault(copies, {})[rank] = checksum
    return [_divergence(copies, held) for copies, held in holders.items() if len(set(held.values())) > 1]


def _divergence(copies: Key, held: Mapping[int, int]) -> CopyDivergence[Key]:
    (usual, most), (_, second), *_ = Counter(held.values()).most_common()
    if most == second:
        return CopyDivergence(copies=copies, ranks=tuple(held))
    return CopyDivergence(
        copies=copies,
        ranks=tuple(rank for rank, checksum in held.items() if checksum != usual),
        others=tuple(rank for rank, checksum in held.items() if checksum == usual),
    )


def _request(run: str, step: int, found: Sequence[DivergenceFinding]) -> DumpRequest:
    ranks = sorted({rank for each in found for rank in each.ranks})[:MAX_RANKS]
    identity = hashlib.blake2b(f"{run} {found[0].attempt} {step}".encode(), digest_size=6).hexdigest()
    return DumpRequest(
        id=f"replica-divergence-{identity}",
        run=run,
        ranks=tuple(ranks),
        task=DumpTask.STATISTICS,
        num_steps=1,
        reason=f"replica-divergence: {found[0].text}",
        alerts=(),
    )


def _copies(answer: Any) -> dict[int, dict[str, int]]:
    return {
        int(rank): {str(name): int(checksum, 16) for name, checksum in held.items()}
        for rank, held in answer["ranks"].items()
    }
