"""Names that a model, a script or a path may have, and that nothing behind the rank could hold."""

import json

import torch
from torch import nn

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon

NAMES = [
    "half\ud800",
    "half\udfff",
    "line\nbreak",
    'quo"te',
    "null\0",
    "x" * 100_000,
    "😀",
    "'; DROP TABLE rows; --",
    "{}",
]
WATCHED = {
    "xy_distribution": True,
    "param_distribution": True,
    "print_struct": True,
    "stack_info": True,
    "agent": {"start": False},
}


def train(monitor=None, steps=3):
    torch.manual_seed(0)
    model = nn.Sequential()
    for name in NAMES:
        model.add_module(name, nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if monitor is not None:
        monitor.set_monitor(model, optimizer)
    for step in range(steps):
        loss = model(torch.full((2, 3), torch.nan if step == steps - 1 else 0.5)).sum()
        loss.backward()
        if monitor is not None:
            monitor.record(**dict.fromkeys(NAMES, loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_no_name_stops_the_monitor_and_none_leaves_the_rank_that_utf_8_cannot_hold(places, caplog):
    with TrainerMon(WATCHED) as monitor:
        weights = train(monitor)

    assert all(torch.equal(found, bare) or found.isnan().all() for found, bare in zip(weights, train(), strict=True))
    assert "detached" not in caplog.text
    journal = RankJournal(only_spool(places[0]))
    assert sorted(journal.rows) == [0, 1, 2]
    names = {key.name for key in journal.keys}
    assert {"half\\ud800.weight", "half\\udfff.weight", "line\nbreak.weight", "null\0.weight"} <= names
    assert {"half\\ud800", "half\\udfff", "x" * 100_000, "😀"} <= names
    json.dumps(journal.events, ensure_ascii=False).encode()
    assert not [event for event in journal.events if event["type"] == "detached"]
    assert [event["status"] for event in journal.events if event["type"] == "replay"] == ["nonfinite"]
    for path in (places[1]).rglob("*.json"):
        json.dumps(json.loads(path.read_text()))
    assert list(places[1].rglob("module_struct.json"))
    assert list(places[1].rglob("stack_info.csv"))


def test_an_output_that_is_no_utf_8_is_as_good_as_any(places, monkeypatch, tmp_path):
    monkeypatch.setenv("TRAINERMON_OUTPUT", str(tmp_path / "out\udcff"))

    with TrainerMon(WATCHED) as monitor:
        train(monitor)

    assert list((tmp_path / "out\udcff").rglob("dump.json"))
    journal = RankJournal(only_spool(places[0]))
    json.dumps(journal.events, ensure_ascii=False).encode()
