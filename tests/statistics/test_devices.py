"""Devices of which there is one per process at most: their tests run in a process of their own."""

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.fork_server import start_script


def test_an_npu_needs_nothing_that_only_cuda_has(tmp_path):
    if not hasattr(torch._C, "_acc"):
        pytest.skip("this torch cannot register a device in Python")
    inner = Path(__file__).with_name("on_npu.py")
    pytest_program, output = Path(sys.executable).with_name("pytest"), tmp_path / "output.txt"

    tests = start_script(
        pytest_program, "-q", "-p", "no:cacheprovider", str(inner), output=output, environment=os.environ
    )

    assert tests.wait(900) == 0, output.read_text()[-4000:]
