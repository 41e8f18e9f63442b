"""What is read from the table of `npu-smi info`, in the forms in which its versions print it."""

from __future__ import annotations

import math

import pytest

from trainermon.agent.accelerators.npu_smi import NpuSmiReader, parse_table
from trainermon.agent.accelerators.readings import ReaderError

MIB = 1 << 20

# One line on the card, one on the chip, without the chip's number in the system.
CARDS = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0                   Version: 24.1.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 2     910B3               | OK            | 93.6        40                0    / 0             |
| 0                         | 0000:C1:00.0  | 87          0    / 0          61440/ 65536         |
+===========================+===============+====================================================+
| 5     910B3               | Warning       | 101.2       52                0    / 0             |
| 0                         | 0000:81:00.0  | 0           0    / 0          3161 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 2       0                 | 4711          | python                   | 58211                   |
+===========================+===============+====================================================+
| No running processes found in NPU 5                                                            |
+===========================+===============+====================================================+
"""

# Two chips on a card, which have numbers in the system; one memory, beside the chip; a power that is not known.
CHIPS = """\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 23.0.0                                   Version: 23.0.0                                       |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 6       310P3                 | OK              | NA           50                0     / 0             |
| 0       0                     | 0000:84:00.0    | 0            1839 / 21525                            |
+-------------------------------+-----------------+------------------------------------------------------+
| 6       310P3                 | OK              | NA           51                0     / 0             |
| 1       1                     | 0000:84:00.0    | 12           1840 / 21525                            |
+===============================+=================+======================================================+
| NPU     Chip                  | Process id      | Process name             | Process memory(MB)        |
+===============================+=================+======================================================+
| 6       1                     | 99              | python                   | 900                       |
+===============================+=================+======================================================+
"""


def test_cards_with_one_chip():
    one, other = parse_table(CARDS)
    assert (one.index, one.model, one.uuid, one.pids) == (0, "Ascend 910B3", "0000:C1:00.0", (4711,))
    assert (one.utilization, one.power_watts, one.temperature_celsius) == (0.87, 93.6, 40)
    assert (one.memory_used_bytes, one.memory_size_bytes) == (61440 * MIB, 65536 * MIB)
    assert (other.index, other.pids, other.utilization, other.temperature_celsius) == (1, (), 0, 52)
    assert math.isnan(one.clock_hertz)
    assert math.isnan(one.throttled)


def test_cards_with_several_chips():
    one, other = parse_table(CHIPS)
    assert (one.index, one.pids, one.memory_used_bytes) == (0, (), 1839 * MIB)
    assert (other.index, other.pids, other.utilization) == (1, (99,), 0.12)
    assert math.isnan(one.power_watts)


@pytest.mark.parametrize("text", ["", "dcmi module initialize failed. ret is -8005\n", "| a | b | c |\n" * 4, "|\n"])
def test_what_is_no_table_has_no_chip(text):
    assert parse_table(text) == []


@pytest.mark.parametrize("printed", [CARDS, ""])
def test_the_program_is_run(tmp_path, monkeypatch, printed):
    program = tmp_path / "npu-smi"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = info ] || exit 9\ncat <<'END'\n{printed}END\n[ '{printed[:1]}' ]\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if printed:
        assert [reading.pids for reading in NpuSmiReader().read()] == [(4711,), ()]
    else:
        with pytest.raises(ReaderError, match="ended with status 1 and no chip"):
            NpuSmiReader().read()


def test_without_the_program_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ReaderError, match="no npu-smi on the path"):
        NpuSmiReader()
