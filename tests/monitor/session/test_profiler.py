"""What a user's torch.profiler shows of the monitor, and that it changes nothing."""

import json

import torch
from torch.profiler import ProfilerActivity, profile

from trainermon import TrainerMon

QUIET = {"agent": {"start": False}, "targets": {}, "wg_distribution": True}
STEPS = 4
MARK = "trainermon.step"


def train(*, monitored, profiler=None):
    """Train for some steps, all but the first under `profiler`; return the parameters."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = TrainerMon(QUIET) if monitored else None
    if monitor:
        monitor.set_monitor(model, optimizer=optimizer)
    for step in range(STEPS):
        if profiler and step == 1:
            profiler.start()
        optimizer.zero_grad()
        model(torch.ones(2, 8) * step).square().mean().backward()
        optimizer.step()
    if profiler:
        profiler.stop()
    if monitor:
        monitor.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_trace_shows_each_step_and_what_the_monitor_costs(tmp_path):
    with_both = profile(activities=[ProfilerActivity.CPU])
    found = train(monitored=True, profiler=with_both)
    with_both.export_chrome_trace(str(tmp_path / "trace.json"))

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    marks = [event for event in events if event.get("name") == MARK]
    assert len(marks) == 2 * (STEPS - 1)  # before and after the optimizer's step
    assert all(event["dur"] > 0 for event in marks)
    assert {row.key: row.count for row in with_both.key_averages()}[MARK] == len(marks)
    for ours, truth in zip(found, train(monitored=False), strict=True):
        assert torch.equal(ours, truth)


def test_a_trace_without_the_monitor_has_no_marks():
    alone = profile(activities=[ProfilerActivity.CPU])
    train(monitored=False, profiler=alone)
    assert MARK not in {row.key for row in alone.key_averages()}
