"""What a rank says of the device that it trains on; on a device that stands in for an NPU, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from trainermon.monitor.environment.accelerator import describe_accelerator

CODE = """
import json
from tests import npu_stand_in as npu
import torch
from trainermon.monitor.environment.accelerator import describe_accelerator
host, device = torch.ones(2), torch.ones(2).to("npu:0")
print(json.dumps([describe_accelerator([host, device]), describe_accelerator([host])]))
"""


def test_a_rank_says_which_device_it_uses_also_where_its_parameters_are_offloaded():
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "ASCEND_RT_VISIBLE_DEVICES": "5,3"},
        capture_output=True,
        text=True,
        check=True,
    )
    on_device, offloaded = json.loads(done.stdout)
    assert on_device == offloaded == {"type": "npu", "index": 0, "visible": "5,3", "uuid": ""}


def test_without_a_device_nothing_is_said():
    assert describe_accelerator([torch.ones(1), torch.ones(1, device="meta")]) is None
    assert describe_accelerator([]) is None
