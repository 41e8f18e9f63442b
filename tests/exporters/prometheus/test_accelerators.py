"""What `/metrics` shows of ranks' accelerators, read by the vendor's parser."""

from __future__ import annotations

import math

import numpy as np

from tests.exporters.expositions import read
from tests.exporters.runs import block_of, header_of
from trainermon.core.values import Kind, SeriesKey
from trainermon.exporters.prometheus.exposition import Exposition


def test_what_is_known_of_an_accelerator_is_shown_while_it_is_known():
    exposition = Exposition("run")
    tensors = {SeriesKey(Kind.GRAD_REDUCED, "a"): np.array([3.0, 4.0])}

    def shown(values: dict[str, float], *, goes_on: bool = True):
        exposition.set_accelerator(0, values, uuid="GPU-a", model="H100")
        if goes_on:
            exposition.update(header_of(), list(tensors), block_of(tensors, list(tensors)))
        return {key: value for key, value in read(exposition).items() if "accelerator" in key[0]}

    info = ("trainermon_accelerator_info", "rank=0", "uuid=GPU-a", "model=H100")
    power, clock = (f"trainermon_accelerator_{name}" for name in ("power_watts", "clock_hertz"))
    assert shown({power: 500.0, clock: math.nan}) == {info: 1.0, (power, "rank=0"): 500.0}
    assert shown({power: 80.0}, goes_on=False) == {info: 1.0, (power, "rank=0"): 80.0}  # of a rank that stands still
    assert shown({}, goes_on=False) == {}
    assert shown({power: 90.0, clock: 1e9}) == {info: 1.0, (power, "rank=0"): 90.0, (clock, "rank=0"): 1e9}
    exposition.remove_rank(0)
    assert not [key for key in read(exposition) if "accelerator" in key[0]]
