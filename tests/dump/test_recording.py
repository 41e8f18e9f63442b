"""What recording leaves as it was: the garbage collector, and the list of what the script has called."""

import gc
import json
import weakref

import pytest
import torch
from torch import nn

from tests.dump.test_debugger import Small
from trainermon import PrecisionDebugger
from trainermon.dump.collector import OBJECTS
from trainermon.dump.writer import DumpWriter


@pytest.fixture(autouse=True)
def no_debugger_is_left():
    yield
    PrecisionDebugger.close()


def write_config(tmp_path, **config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dump_path": str(tmp_path / "dump"), **config}))
    return path


def strange_disk():
    raise OSError("the disk is gone")


def test_what_the_dump_calls_itself_is_not_recorded(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x)
            return y, y * 2  # nobody uses the second: its gradient does not arrive before the end

    model = nn.Sequential(Two())
    debugger = PrecisionDebugger(write_config(tmp_path, flush_s=1e9), level="mix")
    debugger.start(model)
    model(torch.ones(2, 4))[0].sum().backward()
    PrecisionDebugger._instance._recording.writer._lines._max_wait_s = 0  # what is written at the end is flushed
    debugger.stop()

    info = json.loads((tmp_path / "dump/step0/rank0/dump_info.json").read_text())
    tree = json.loads((tmp_path / "dump/step0/rank0/construct.json").read_text())
    assert (info["errors"], info["first_error"]) == (0, "")
    assert not [key for key in tree if "__getitem__" in key]


@pytest.mark.parametrize("fails", [False, True])
def test_the_garbage_collector_runs_as_before_after_a_dump_and_finds_nothing_of_it(tmp_path, monkeypatch, fails):
    usual, during = gc.get_threshold(), []
    model = Small()
    model.fc.register_forward_hook(lambda *_: during.append(gc.get_threshold()))
    if fails:
        monkeypatch.setattr(DumpWriter, "publish", lambda _self: strange_disk())
    debugger = PrecisionDebugger(write_config(tmp_path), level="mix")
    debugger.start(model)
    model(torch.ones(2, 4)).backward()
    seen = weakref.ref(PrecisionDebugger._instance._recording._modules)
    gc.disable()
    try:
        debugger.stop()
        assert gc.get_threshold() == usual
        debugger.step()
        assert fails or seen() is None or not vars(seen())
    finally:
        gc.enable()
    assert during == [(OBJECTS, *usual[1:])]


def test_a_threshold_that_the_script_sets_meanwhile_stays(tmp_path):
    usual = gc.get_threshold()
    debugger = PrecisionDebugger(write_config(tmp_path), level="L0")
    debugger.start(Small())
    gc.set_threshold(800, 5, 5)
    try:
        debugger.stop()
        assert gc.get_threshold() == (800, 5, 5)
    finally:
        gc.set_threshold(*usual)
