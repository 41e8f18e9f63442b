"""Devices of which there is one per process at most: their tests run in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def test_an_npu_needs_nothing_that_only_cuda_has():
    if not hasattr(torch._C, "_acc"):
        pytest.skip("this torch cannot register a device in Python")
    inner = Path(__file__).with_name("on_npu.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(inner)]

    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-4000:]
