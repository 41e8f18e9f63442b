"""The checksum of a buffer is that of zlib, whoever computes it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from trainermon.core.native import checksum
from trainermon.core.native.checksum import crc32

SIZES = (0, 1, 8191, 8192, 8193, 100_003)


@pytest.fixture(params=["c", "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TRAINERMON_KERNEL", request.param)
    checksum._compiled.cache_clear()
    yield request.param
    checksum._compiled.cache_clear()


@pytest.mark.parametrize("size", SIZES)
def test_it_is_that_of_zlib_for_every_kind_of_buffer_and_goes_on(kernel: str, size: int) -> None:
    assert (checksum._compiled() is not None) == (kernel == "c")
    data = random.Random(size).randbytes(size)
    table = np.frombuffer(bytearray(data), np.uint8)
    for buffer in (data, bytearray(data), memoryview(data), table, np.frombuffer(data, np.uint8)):
        assert crc32(buffer) == zlib.crc32(data)
        assert crc32(buffer, 4711) == zlib.crc32(data, 4711)


def test_a_table_of_numbers_counts_by_its_bytes(kernel: str) -> None:
    table = np.random.default_rng(0).normal(size=(8, 3000))

    assert crc32(table) == zlib.crc32(table.tobytes())


def test_a_kernel_that_is_not_known_is_for_others_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINERMON_KERNEL", "fast")
    checksum._compiled.cache_clear()

    assert crc32(bytes(10_000)) == zlib.crc32(bytes(10_000))

    checksum._compiled.cache_clear()


def test_a_kernel_that_is_not_known_stops_no_import_of_what_reads_no_tensor() -> None:
    code = "import trainermon.dump.facts.stacks, trainermon.statistics.rows.host_rows"
    ended = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TRAINERMON_KERNEL": "fast"}, check=False)

    assert ended.returncode == 0
