"""The collector of rows for torch: slabs on the device of the model, and no row while a CUDA graph is captured."""

from __future__ import annotations

import torch

from trainermon.core.journal import JournalWriter
from trainermon.monitor.taps.row_collector import RowCollector
from trainermon.statistics.slabs import SlabRing, capture_check


class Collector(RowCollector):
    """Collects the statistics of torch's tensors, on their device, step by step; see `RowCollector`."""

    def __init__(self, device: torch.device, journal: JournalWriter) -> None:
        super().__init__(SlabRing(device), journal, capture_check(device))
