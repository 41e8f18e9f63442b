"""Collectives: how many, how far, what is in flight, without a hook; and, when asked, what goes in and comes out.

Rows are `Kind.COMM`. Every step has, for each group of this rank, from its sequence number and from torch's flight
recorder, rows whose name is the purpose of the group (`tp`, `dp`, `world`) and whose slot says what they are:

    count         collectives that this rank has begun in this step, as the group's backend numbers them
    sequence      number of the last one: the rank that is behind the others of its group has not entered it
    in_flight     those that the recorder does not know complete yet, at the end of the step

With `cc_distribution` each call that Python makes has rows of its own. The name is purpose and operation
(`tp.all_reduce`), `call` its number in the step among the calls of that name:

    pre.0, …      tensors that the call reads on this rank, before it (`cc_pre_hook`)
    post.0, …     tensors that it writes on this rank, once it has been waited for; of a list the first 16
    wait_seconds  how long the host waited for it; with an accelerator's backend that is the queueing, not the transfer

and these join the rows of the group:

    bytes         size of the watched calls, of each the larger one of what it reads and what it writes
    unseen        `count` less what the watched calls account for: what C++ callers (DDP's reducer), compiled graphs,
                  other threads and aliases of functional forms have issued
    unfinished    watched calls whose result was not taken: nobody had waited for it by the end of the step

gloo numbers sends, receives and the parts of some collectives too, NCCL a coalesced block once; `unseen` is exact all
the same, because a watched call accounts for what it has moved the number by. A group over several backends is counted
by its default one; a backend without sequence numbers has no `count`, `sequence` and `unseen`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainermon.core.config import CollectivesConfig
from trainermon.core.flight_recorder import FlightRecorder, RecordedCall
from trainermon.core.values import Kind, SeriesKey
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.patch import CallPatch
from trainermon.monitor.taps.call_rows import CallRows
from trainermon.monitor.taps.collective_calls import MethodTaps
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.functional_calls import FunctionTaps
from trainermon.monitor.taps.process_groups import GroupPurposes, WatchedGroup, WatchedGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("trainermon")


class CollectiveTaps:
    """Records statistics, sizes and waiting times of collectives, and counts them for each process group.

    Never communicates, waits, or writes to a tensor. Only calls of the thread that attached are watched, and those
    inside a backward. A step without watched calls costs 10 to 60 µs in all.

    Args:
        collector: Takes the rows.
        guard: Contains errors in what torch calls.
        purposes: What groups are for, by group or by torch's name of it; see `purposes_of`.
        config: Which calls are watched, and what is taken of them.

    Raises:
        ConfigError: `cc_codeline` holds what is no regular expression.
        AttachError: This version of torch has other classes than those that are wrapped.
    """

    def __init__(
        self,
        collector: Collector,
        guard: FaultGuard,
        *,
        purposes: Mapping[ProcessGroup | str, str],
        config: CollectivesConfig,
    ) -> None:
        self._collector = collector
        self._groups = WatchedGroups(GroupPurposes(purposes))
        self._recorder = FlightRecorder()
        self._watches = config.enable
        self._series: dict[tuple[str, str], int] = {}
        self._rows = CallRows(collector, self._groups, config)
        self._taps = (
            MethodTaps(self._rows, self._groups, guard),
            FunctionTaps(self._rows, guard),
        )
        self._patches = self._make_patches() if config.enable else []
        if config.enable and config.cc_log_only:
            logger.info(
                "cc_log_only: the lines that call collectives are logged, no operands are taken; training goes on"
            )
        if self._recorder.reason:
            logger.info("what is in flight is not known: %s", self._recorder.reason)

    def attach(self) -> None:
        """Replace torch's functions for collectives, if they are to be watched, and begin a step."""
        if self._watches:
            self._rows.attach()
            if not all(patch.fits for patch in self._patches):
                self._patches = self._make_patches()
            for patch in self._patches:
                patch.attach()
        self.new_step()

    def detach(self) -> None:
        """Undo every patch, and release every tensor, handle and group."""
        for patch in self._patches:
            patch.detach()
        for tap in self._taps:
            tap.new_step()
        self._rows.detach()
        self._groups.reset()

    def new_step(self) -> None:
        """Reset the counts, and release calls that were never waited for."""
        for tap in self._taps:
            tap.new_step()
        self._rows.new_step()
        for group in self._groups.all():
            group.begin()

    def step_ended(self) -> None:
        """Record, for each process group, the numbers of this step (calls, bytes, sequence number).

        Groups that have never communicated have none.
        """
        for tap in self._taps:
            tap.step_ended()
        self._rows.step_ended()
        progress = self._recorder.progress()
        for group in self._groups.all():
            sequence = group.sequence()
            at = progress.get(group.torch_name)
            if group.is_numbered and sequence:
                self._put(group, "count", sequence - group.first)
                self._put(group, "sequence", sequence)
                if self._watches:
                    self._put(group, "unseen", sequence - group.first - group.accounted)
            if at is not None:
                self._put(group, "in_flight", at.in_flight)
            if self._watches and (sequence or group.size_bytes):
                self._put(group, "bytes", group.size_bytes)
                self._put(group, "unfinished", group.unfinished)

    def entries(self) -> tuple[RecordedCall, ...]:
        """Return every call that the flight recorder still holds; about 25 ms for 2 000: not for every step."""
        return self._recorder.entries()

    def _make_patches(self) -> list[CallPatch]:
        return [patch for tap in self._taps for patch in tap.patches()]

    def _put(self, group: WatchedGroup, slot: str, value: float) -> None:
        series = self._series.get((group.name, slot))
        if series is None:
            key = SeriesKey(Kind.COMM, group.name, slot)
            series = self._series[group.name, slot] = self._collector.table.id_of(key)
        self._collector.put(series, float(value))
