"""What the reading process tells of NVIDIA's GPUs: the real pynvml on a library that stands in for the driver."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from tests.agent.accelerators.stand_in import environment, gpu
from trainermon.agent.accelerators.readings import AcceleratorReading, AcceleratorSample, decode, encode
from trainermon.agent.accelerators.watch import MODULE

pytestmark = pytest.mark.extras
MIB = 1 << 20


def samples(reader, number, env):
    """Return the first samples of a reading process; its standard input is ended after them."""
    command = [sys.executable, "-m", MODULE, reader, "--every", "0.01"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
    ) as child:
        lines = [child.stdout.readline() for _ in range(number)]
        child.stdin.close()
        child.stdout.read()
    assert child.returncode == 0
    return [decode(line) for line in lines if line]


def test_every_gpu_is_told_in_base_units(tmp_path):
    told = tmp_path / "told"
    told.write_text(gpu("GPU-a", pid=17) + gpu("GPU-b", utilization=0, reasons=0x4, ecc=3))

    (sample,) = samples("nvml", 1, environment(told))

    one, other = sample.readings
    assert (one.uuid, one.index, one.model, one.pids) == ("GPU-a", 0, "H100", (17,))
    assert (one.utilization, one.memory_used_bytes, one.memory_size_bytes) == (0.9, 40_000 * MIB, 81_920 * MIB)
    assert (one.power_watts, one.temperature_celsius, one.clock_hertz) == (512.5, 61, 1.755e9)
    assert (one.throttled, one.uncorrected_errors) == (0, 0)
    assert math.isnan(one.xid)
    assert (other.index, other.pids, other.utilization, other.uncorrected_errors) == (1, (), 0, 3)
    assert other.throttled == 0  # its own power limit is no fault


@pytest.mark.parametrize(("reasons", "is_throttled"), [(0x1, 0), (0x8, 1), (0x20, 1), (0x40, 1), (0x80, 1), (0x100, 0)])
def test_heat_and_power_supply_throttle(tmp_path, reasons, is_throttled):
    told = tmp_path / "told"
    told.write_text(gpu("GPU-a", reasons=reasons))
    (sample,) = samples("nvml", 1, environment(told))
    assert sample.readings[0].throttled == is_throttled


def test_what_a_driver_does_not_tell_is_unknown(tmp_path):
    told = tmp_path / "told"
    told.write_text(gpu("GPU-a", utilization=-1, watt=-0.001, celsius=-1, mhz=-1, reasons=-1, ecc=-1))
    (sample,) = samples("nvml", 1, environment(told))
    (reading,) = sample.readings
    unknown = ("utilization", "power_watts", "temperature_celsius", "clock_hertz", "throttled", "uncorrected_errors")
    assert all(math.isnan(getattr(reading, name)) for name in unknown)
    assert reading.memory_ratio == pytest.approx(40_000 / 81_920)


def test_slices_of_a_gpu_are_told_one_by_one(tmp_path):
    told = tmp_path / "told"
    told.write_text(gpu("GPU-a") + "mig 0 MIG-1 1000 20000 21\nmig 0 MIG-2 2000 20000 22\n" + gpu("GPU-b"))

    (sample,) = samples("nvml", 1, environment(told))

    found = [(reading.uuid, reading.index, reading.pids, reading.memory_used_bytes) for reading in sample.readings]
    assert found == [
        ("MIG-1", -1, (21,), 1000 * MIB),
        ("MIG-2", -1, (22,), 2000 * MIB),
        ("GPU-b", 1, (), 40_000 * MIB),
    ]
    assert math.isnan(sample.readings[0].utilization)
    assert sample.readings[0].power_watts == 512.5  # the whole GPU's


def test_errors_of_the_driver_are_told_by_gpu(tmp_path):
    told = tmp_path / "told"
    told.write_text(gpu("GPU-a") + gpu("GPU-b") + "xid 1 63\nxid 1 79\n")
    *_, last = samples("nvml", 3, environment(told))
    assert math.isnan(last.readings[0].xid)
    assert last.readings[1].xid == 79


def test_without_a_driver_it_says_why_and_ends(tmp_path):
    (sample,) = samples("nvml", 2, {"LD_LIBRARY_PATH": str(tmp_path)})
    assert sample.readings == ()
    assert "NVML Shared Library Not Found" in sample.problem


def test_a_sample_comes_back_as_it_was():
    reading = AcceleratorReading(uuid="GPU-a", index=0, pids=(1, 2), power_watts=1.5)
    sample = AcceleratorSample(time_s=12.5, readings=(reading,))
    again = decode(encode(sample))
    assert repr(again) == repr(sample)  # NaN is not equal to itself
    with pytest.raises(ValueError, match="no sample"):
        decode('{"time_s": 1}')
