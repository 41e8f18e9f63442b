"""Lets all ranks answer one question alike: whether they replay a step together. A hang would be the worst answer.

Nothing is a collective: each rank reads and writes a few keys of the default process group's store. One key holds the
answer, and only the first attempt to write it succeeds, so that no two ranks can differ, whoever comes late, gives up,
or never comes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

WAIT_S = 10.0
# A waiting rank asks at first after one millisecond, then less and less often, so that a thousand of them are no load.
POLL_S, MAX_POLL_S = 0.001, 0.1


class DisagreedError(Exception):
    """Raised if the ranks do not replay together; the text says why."""


class ReplayAnswer(NamedTuple):
    """The common decision of all ranks on a replay.

    Attributes:
        micro_steps: How many of the last micro steps of each root to replay; 0: none.
        reason: Why not.
    """

    micro_steps: int
    reason: str = ""


class ReplayAgreement:
    """Lets the ranks of the default process group decide together on a replay, through `store`.

    A rank that does not ask within `wait_s` of the first one makes the answer no. So does one with a reason against it.
    """

    def __init__(self, store: Any, *, rank: int, num_ranks: int, wait_s: float) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._wait_s = wait_s

    @classmethod
    def of_all_ranks(cls) -> ReplayAgreement:
        """Return the agreement between all ranks of the default process group, which must be initialised."""
        store = dist.distributed_c10d._get_default_store()
        return cls(store, rank=dist.get_rank(), num_ranks=dist.get_world_size(), wait_s=WAIT_S)

    def reach(self, question: str, *, kept: Sequence[tuple[int, int]], reason: str = "") -> ReplayAnswer:
        """Return the common answer of all ranks to `question`, a name that they all give to the same step.

        `kept` is, for each root, how many micro steps the step had and how many of the last ones can be replayed;
        `reason` says why this rank cannot take part. Costs about six requests to the store, and waits for the ranks.
        """
        try:
            return self._reach(f"trainermon/replay/{question}", kept, reason)
        except RuntimeError as error:  # the store is gone, and with it the job
            return ReplayAnswer(0, f"the ranks could not agree: {error}")

    def _reach(self, key: str, kept: Sequence[tuple[int, int]], reason: str) -> ReplayAnswer:
        totals = json.dumps([total for total, _ in kept])
        agreed = self._store.compare_set(f"{key}/totals", "", totals).decode()
        if agreed != totals and not reason:
            reason = f"the step had {totals} micro steps, that of another rank {agreed}"
        if reason:
            return self._decide(key, ReplayAnswer(0, f"rank {self._rank}: {reason}"))
        self._lower(f"{key}/kept", min(count for _, count in kept))
        if self._store.add(f"{key}/ready", 1) == self._num_ranks:
            return self._decide(key, ReplayAnswer(int(self._store.get(f"{key}/kept"))))
        if self._comes(f"{key}/answer"):
            return self._answer(self._store.get(f"{key}/answer"))
        missing = self._num_ranks - self._store.add(f"{key}/ready", 0)
        return self._decide(
            key,
            ReplayAnswer(0, f"{missing} of {self._num_ranks} ranks did not ask for it within {self._wait_s:g} s"),
        )

    def _comes(self, key: str) -> bool:
        """Wait for `key`; the store stays free for other threads meanwhile."""
        deadline, pause_s = time.monotonic() + self._wait_s, POLL_S
        while not self._store.check([key]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_POLL_S)
        return True

    def _decide(self, key: str, answer: ReplayAnswer) -> ReplayAnswer:
        """Give `answer` unless there is one, and return the one that holds."""
        return self._answer(self._store.compare_set(f"{key}/answer", "", json.dumps(answer)))

    def _answer(self, text: bytes) -> ReplayAnswer:
        return ReplayAnswer(*json.loads(text))

    def _lower(self, key: str, count: int) -> None:
        """Make the number at `key` at most `count`."""
        known = int(self._store.compare_set(key, "", str(count)))
        while known > count:
            known = int(self._store.compare_set(key, str(known), str(count)))


class ReplayVote:
    """One rank's part in the ranks' common decision to replay a step; without an agreement it decides alone.

    Args:
        agreement: The agreement between the ranks; None: the model does not communicate.
        question: A name that all ranks give to the same step.
        counts: For each root: (micro steps of the step, how many of the last ones can be replayed).
    """

    def __init__(self, agreement: ReplayAgreement | None, question: str, counts: Sequence[tuple[int, int]]) -> None:
        self._agreement = agreement
        self._question = question
        self._counts = counts

    def cast(self) -> int:
        """Wait for the other ranks, and return how many of the last micro steps to replay.

        Raises:
            DisagreedError: The answer is not to.
        """
        agreement, self._agreement = self._agreement, None
        if agreement is None:
            return max(kept for _, kept in self._counts)
        answer = agreement.reach(self._question, kept=self._counts)
        if not answer.micro_steps:
            raise DisagreedError(answer.reason)
        return answer.micro_steps

    def against(self, reason: str) -> None:
        """Vote against the replay, so that the others need not wait, unless the vote was cast."""
        if self._agreement is not None:
            self._agreement.reach(self._question, kept=self._counts, reason=reason)
