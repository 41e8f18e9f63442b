"""A joint replay is refused where a rank might run out of memory in its middle."""

import types

import pytest
import torch

from trainermon.replay.room import MIB, lack_of_memory


@pytest.fixture
def device(monkeypatch):
    """Stand in for an accelerator with 1000 MiB, 300 of them free; 500 allocated of 600 reserved, 580 at the peak."""
    memory = types.SimpleNamespace(
        memory_allocated=lambda _: 500 * MIB,
        max_memory_allocated=lambda _: 580 * MIB,
        memory_reserved=lambda _: 600 * MIB,
        mem_get_info=lambda _: (300 * MIB, 1000 * MIB),
    )
    monkeypatch.setattr(torch, "cuda", memory)
    return torch.device("cuda", 0)


def test_there_is_room_for_what_the_step_took_and_what_is_kept(device):
    assert lack_of_memory([device], 200 * MIB) == ""


def test_what_is_missing_is_said(device):
    assert lack_of_memory([device], 300 * MIB) == "cuda:0 has 400 MiB left, a replay may need 444 MiB"


def test_no_device_of_its_own_needs_no_room():
    assert lack_of_memory([], 1 << 50) == ""
