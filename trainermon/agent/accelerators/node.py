"""The accelerators of a node's ranks: when they are read, which rank each is of, and where the readings go."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping

from trainermon.agent.accelerators.matching import RankAccelerator, find_accelerator
from trainermon.agent.accelerators.readings import AcceleratorReading, AcceleratorSample
from trainermon.agent.accelerators.rows import AcceleratorRows
from trainermon.agent.accelerators.watch import AcceleratorWatch
from trainermon.exporters.prometheus.exposition import Exposition

READERS = {"cuda": "nvml", "npu": "npu-smi"}
LEAST_S = {"npu-smi": 10.0}
"""A program that takes a second to answer is not asked more often."""


def validity_s(every_s: float) -> float:
    """Return for how many seconds a reading counts, where there is to be a new one every `every_s` seconds."""
    return 2 * max(every_s, *LEAST_S.values())


_log = logging.getLogger(__name__)


class NodeAccelerators:
    """Reads the accelerators of the ranks of this node; without any rank on one nothing is started.

    Args:
        every_s: Seconds between two readings; 0: none are taken.
        rows: Adds the readings to the steps.
        metrics: `/metrics`, which shows the newest ones: also of a rank that stands still.
    """

    def __init__(self, every_s: float, *, rows: AcceleratorRows, metrics: Exposition) -> None:
        self._every_s = every_s
        self._rows = rows
        self._metrics = metrics
        self._watches: dict[str, AcceleratorWatch] = {}
        self._shown: dict[int, float] = {}  # by rank, when it was read last, monotonic
        self._told: set[int] = set()
        self._xids: dict[int, float] = {}

    def look(self, now_s: float, devices: Mapping[int, RankAccelerator]) -> None:
        """Take what was read since the last look; `devices` are those of the living ranks. `now_s` is monotonic."""
        if self._every_s <= 0:
            return
        for name in {READERS[device.type] for device in devices.values() if device.type in READERS}:
            every_s = max(self._every_s, LEAST_S.get(name, 0.0))
            self._watches.setdefault(name, AcceleratorWatch(name, every_s))
        for name, watch in self._watches.items():
            of_reader = {rank: device for rank, device in devices.items() if READERS.get(device.type) == name}
            for sample in watch.poll(now_s):
                self._take(sample, of_reader, now_s)
        self._forget_old(now_s, devices)

    def close(self) -> None:
        """Have the reading processes end; waits a second for each at most."""
        for watch in self._watches.values():
            watch.close()

    def _take(self, sample: AcceleratorSample, devices: Mapping[int, RankAccelerator], now_s: float) -> None:
        for rank, device in devices.items():
            reading = find_accelerator(device, sample.readings)
            if reading is None:
                self._tell_once(rank, device, sample)
                continue
            self._note_error(rank, reading)
            self._rows.note(rank, sample.time_s, reading)
            self._metrics.set_accelerator(rank, dict(_metrics_of(reading)), uuid=reading.uuid, model=reading.model)
            self._shown[rank] = now_s

    def _note_error(self, rank: int, reading: AcceleratorReading) -> None:
        if math.isfinite(reading.xid) and self._xids.get(rank) != reading.xid:
            self._xids[rank] = reading.xid
            message = "the driver reports error %.0f (Xid) of the accelerator of rank %d, %s"
            _log.warning(message, reading.xid, rank, reading.uuid)

    def _tell_once(self, rank: int, device: RankAccelerator, sample: AcceleratorSample) -> None:
        if rank not in self._told:
            self._told.add(rank)
            names = ", ".join(reading.uuid for reading in sample.readings) or "none"
            message = "which accelerator rank %d is on is not known: it is %s %s of its own, the driver has %s"
            _log.warning(message, rank, device.type, device.name, names)

    def _forget_old(self, now_s: float, devices: Mapping[int, RankAccelerator]) -> None:
        """No longer show what is not read any more: a hung driver's last words are no state."""
        for rank, shown_s in list(self._shown.items()):
            if rank not in devices or now_s - shown_s > validity_s(self._every_s):
                del self._shown[rank]
                if rank in devices:
                    self._metrics.set_accelerator(rank, {})


def _metrics_of(reading: AcceleratorReading) -> Iterator[tuple[str, float]]:
    prefix = "trainermon_accelerator_"
    yield f"{prefix}utilization_ratio", reading.utilization
    yield f"{prefix}memory_used_bytes", reading.memory_used_bytes
    yield f"{prefix}memory_size_bytes", reading.memory_size_bytes
    yield f"{prefix}power_watts", reading.power_watts
    yield f"{prefix}temperature_celsius", reading.temperature_celsius
    yield f"{prefix}clock_hertz", reading.clock_hertz
    yield f"{prefix}throttled", reading.throttled
    yield f"{prefix}uncorrected_errors", reading.uncorrected_errors
    yield f"{prefix}xid", reading.xid
