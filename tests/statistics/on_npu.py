"""Statistics on a stand-in for an Ascend NPU; `test_devices.py` runs this in a process of its own."""

import dataclasses
import logging
import sys
import types
from typing import Any

import pytest
import torch

from tests import npu_stand_in as npu
from tests.journal_rows import RankJournal, only_spool
from tests.statistics.numpy_moments import assert_moments, elements_of
from trainermon import TrainerMon
from trainermon.core.values import Kind
from trainermon.statistics import SlabRing, kernel_name
from trainermon.statistics.npu import overflow_flag
from trainermon.statistics.slabs import capture_check

NPU = torch.device("npu", 0)


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    """Let every name of torch.cuda fail that a stream, an event or a capture would be asked for by."""

    def fail(*_, **__):
        raise AssertionError("asked CUDA for something on an NPU")

    for name in ("Stream", "Event", "stream", "current_stream", "current_device", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, fail)
    npu.calls.clear()
    npu.events.clear()


def test_torch_calls_serve_and_triton_is_not_loaded():
    assert kernel_name(NPU) == "torch"
    assert "trainermon.statistics.launches" not in sys.modules


def test_rows_travel_by_streams_and_events_of_the_device(caplog):
    caplog.set_level(logging.WARNING, logger="trainermon")
    ring = SlabRing(NPU, capacity=1)
    tensors = [
        torch.randn(3000),
        torch.tensor([1.0, torch.nan, -torch.inf, 0.0]),
        torch.randn(40, 60).bfloat16(),
        torch.arange(9),
        torch.randn(6).half().expand(4, 6),
        torch.empty(0),
    ]

    slab = ring.begin(0)
    slab.take([tensor.to(NPU) for tensor in tensors])
    assert slab.put_rows(slab.copy_rows(0, 1)) == len(tensors)
    ring.seal(slab)

    side = npu.events[-1].stream
    assert npu.calls == [
        f"{side} waits for {npu.DEFAULT.stream_id}",
        f"used in {side}",
        f"event in {side}",
    ]
    assert ring.ready() == []
    npu.events[-1].has_passed = True
    [ready] = ring.ready()
    for row, tensor in zip(ready.rows(), [*tensors, tensors[0]], strict=True):
        assert_moments(row, elements_of(tensor))
    assert "no pinned host memory" in caplog.text  # the stand-in has none


def test_rows_written_in_another_stream_are_waited_for_on_the_device():
    ring = SlabRing(NPU)
    slab = ring.begin(0)
    other = npu.Stream()
    slab.take([torch.ones(3).to(NPU)])
    with npu.stream(other):
        slab.take([torch.ones(4).to(NPU)])
    npu.calls.clear()

    slab.copy_rows(0, 2)
    ring.seal(slab)

    side = npu.events[-1].stream
    assert npu.calls[:3] == [
        f"{npu.DEFAULT.stream_id} waits for {other.stream_id}",
        f"{side} waits for {npu.DEFAULT.stream_id}",
        f"{side} waits for {other.stream_id}",
    ]


def test_a_tensor_of_the_host_gets_its_row_on_the_device():
    slab = SlabRing(NPU).begin(0)

    slab.take([torch.ones(3).to(NPU), torch.full((2,), 5.0)])

    assert [slab._table[row].cpu()[3].item() for row in (0, 1)] == [3.0, 10.0]


def test_a_device_without_graphs_is_never_capturing():
    assert capture_check(NPU) is None


@pytest.mark.parametrize(
    ("has_infinities", "flag", "expected"), [(False, True, True), (False, False, False), (True, True, None)]
)
def test_the_overflow_flag_is_read_where_the_hardware_has_one(monkeypatch, has_infinities, flag, expected):
    assert overflow_flag(torch.device("cpu")) is None
    assert "torch_npu" not in sys.modules
    utils: Any = types.ModuleType("torch_npu.npu.utils")
    utils.is_support_inf_nan = lambda: has_infinities
    utils.get_npu_overflow_flag = lambda: flag
    for name, module in (
        ("torch_npu", types.ModuleType("torch_npu")),
        ("torch_npu.npu", types.ModuleType("torch_npu.npu")),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "torch_npu.npu.utils", utils)

    assert overflow_flag(NPU) is expected


def test_a_whole_training_is_watched_as_on_a_cpu(tmp_path, monkeypatch):
    def train(device, spool):
        monkeypatch.setenv("TRAINERMON_SPOOL", str(spool))
        monkeypatch.setenv("TRAINERMON_OUTPUT", str(tmp_path / "output"))
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        monitor = TrainerMon(
            {"param_distribution": True, "xy_distribution": True, "all_xy": True, "agent": {"start": False}}
        )
        monitor.set_monitor(model, optimizer)
        batch = torch.arange(15.0).reshape(5, 3).to(device)
        for _ in range(3):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for event in npu.events:
                event.has_passed = True
        monitor.close()
        return RankJournal(only_spool(spool))

    expected, found = train("cpu", tmp_path / "cpu"), train("npu", tmp_path / "npu")

    assert not found.events
    for step in range(3):
        assert found.rows[step].keys() == expected.rows[step].keys()
        for key, row in found.rows[step].items():
            if key.kind is not Kind.STEP:
                assert dataclasses.astuple(row) == pytest.approx(
                    dataclasses.astuple(expected.rows[step][key]),
                    rel=1e-6,
                    abs=1e-7,  # one rounding of float32 at 1
                ), key
    kinds = {key.kind for key in found.rows[2]}
    assert {Kind.GRAD_REDUCED, Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED, Kind.ACTV, Kind.ACTV_GRAD} <= kinds
