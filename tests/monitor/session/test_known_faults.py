"""What monitors of training are known to get wrong in one process; the truth of each is computed in the loop itself."""

import ctypes
import dataclasses
import gc
import inspect
import json
import math
import os
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.hooks import BackwardHook

from tests.journal_rows import RankJournal, only_spool
from tests.monitor.session.test_containment import EVERYTHING
from tests.reference import assert_equal
from trainermon import TrainerMon
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.config import AnomalyRuleConfig
from trainermon.core.journal import HeaderRecord
from trainermon.core.values import Kind
from trainermon.exporters.export import ExportSettings
from trainermon.exporters.views import RunHistory
from trainermon.msprobe.anomalies import AnomalyScanner
from trainermon.msprobe.csv_files import CsvExporter
from trainermon.statistics.kernel import kernel_name

QUIET = {"agent": {"start": False}}
NAN, INF = math.nan, math.inf


class Journal(RankJournal):
    """A rank's journal, with what an exporter is handed: a header that knows every series, and the blocks."""

    def __init__(self, spool):
        self.header, self.blocks, self._placements = None, [], []
        super().__init__(spool)
        self.header = dataclasses.replace(self.header, series=tuple(self.keys), placements=tuple(self._placements))

    def _add(self, record):
        super()._add(record)
        if isinstance(record, HeaderRecord):
            self.header = record.header
        self._placements += getattr(getattr(record, "header", record), "placements", ())
        if hasattr(record, "block"):
            self.blocks.append(record.block)

    def csv(self, folder, kind):
        """Return the rows of a file of that kind as csv files have them, by name and step."""
        exporter = CsvExporter(ExportSettings(run_dir=folder, ops=("norm", "min", "max", "nans", "infs"), ndigits=6))
        for block in self.blocks:
            exporter.write(self.header, block)
        exporter.close()
        found = {}
        for path in folder.glob(f"csv/*/{kind}_*.csv"):
            names, *lines = [line.split(",") for line in path.read_text().replace('"', "").splitlines()]
            found |= {(line[1], int(line[2])): dict(zip(names, line, strict=False)) for line in lines}
        return found

    def heat(self, kind, statistic):
        """Return the cells of a heat map of the page, by name and step."""
        history = RunHistory()
        for block in self.blocks:
            history.add(self.header, self.header.series, block)
        answer = history.heatmap(kind, statistic, 100)
        length = int.from_bytes(answer[:4], "little")
        head = json.loads(answer[4 : 4 + length])
        cells = np.frombuffer(answer[4 + length :], "<f4").reshape(len(head["rows"]), head["columns"])
        return {
            (name, head["first_step"] + step): float(cells[row, step])
            for row, name in enumerate(head["rows"])
            for step in range(head["columns"])
        }


# ---------------------------------------------------------------------- rows are those of their own step


class Routed(nn.Module):
    """Two branches, of which each step uses the one that it is told."""

    def __init__(self):
        super().__init__()
        self.always, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, branch):
        return getattr(self, branch)(torch.tanh(self.always(x)))


def test_what_takes_no_part_in_a_step_has_no_row_of_it(places):
    torch.manual_seed(0)
    model, branches, truth, handed = Routed(), ("left", "right", "left"), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with TrainerMon(EVERYTHING | {"mg_direction": True, "format": "api"}) as monitor:
        monitor.set_monitor(model, optimizer)
        for branch in branches:
            model(torch.randn(3, 4), branch).square().sum().backward()
            truth.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
            handed.append([*monitor.generate_wgrad_metrics(), *monitor.generate_xy_metrics()])

    journal = RankJournal(only_spool(places[0]))
    per_step = {Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED, Kind.EXP_AVG, Kind.EXP_AVG_SQ}  # these go on being what they are
    for step, (branch, other) in enumerate(zip(branches, ("right", "left", "right"), strict=True)):
        stale = {key for key in journal.rows[step] if key.name.startswith(other) and key.kind not in per_step}
        assert not stale
        assert not [tag for metrics in handed[step] for tag in metrics if f":{other}." in tag]
        assert all(any(f":{branch}." in tag for tag in metrics) for metrics in handed[step])
        for kind in (Kind.GRAD_REDUCED, Kind.GRAD_UNREDUCED):
            assert journal.of(step, kind).keys() >= truth[step].keys()
            for name, gradient in truth[step].items():
                assert_equal(journal.of(step, kind)[name], gradient)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return {"hidden": y, "pair": (torch.tanh(y), y * 2)}


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = Shared()

    def forward(self, x, kept):
        first = self.shared(x)
        second = self.shared(first["pair"][0])
        for call, found in enumerate((first, second)):
            kept |= {("hidden", call): found["hidden"], ("pair.1", call): found["pair"][1]}
        for tensor in kept.values():
            tensor.retain_grad()
        return first["pair"][1].square().sum() + second["hidden"].sum() + second["pair"][1].square().sum()


def test_every_call_of_a_module_and_every_entry_of_a_dictionary_has_a_row(places, caplog):
    torch.manual_seed(0)
    model, kept = CalledTwice(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon(QUIET | {"xy_distribution": True}) as monitor:
        monitor.set_monitor(model, optimizer)
        model(torch.randn(3, 4), kept).backward()
        optimizer.step()

    journal = RankJournal(only_spool(places[0]))
    for (entry, call), tensor in kept.items():
        label = f"shared.output.{entry}" + (f"#{call}" if call else "")
        assert_equal(journal.of(0, Kind.ACTV)[label], tensor)
        if entry != "hidden" or call:  # the first one's gradient comes by two ways
            assert_equal(journal.of(0, Kind.ACTV_GRAD)[label], tensor.grad)
    assert "tensor(" not in caplog.text


# ---------------------------------------------------------------------- values


class Given(nn.Module):
    """The gradient of the weight is what the module was called with."""

    def __init__(self, size, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


def train_with(gradients, config=QUIET, optimizer=torch.optim.SGD):
    model = Given(gradients[0].shape, gradients[0].dtype)
    optimizer = optimizer(model.parameters(), lr=0.01)
    with TrainerMon(config) as monitor:
        monitor.set_monitor(model, optimizer)
        for gradient in gradients:
            model(gradient).backward()
            optimizer.step()
            optimizer.zero_grad()
    return optimizer.state[model.weight]


@pytest.mark.parametrize(
    ("size", "dtype"), [(3e-7, torch.float32), (1.234567e-30, torch.float32), (1.234567e-30, torch.float64)], ids=str
)
def test_a_small_gradient_keeps_its_value_in_rows_files_and_page(places, tmp_path, size, dtype):
    gradients = [torch.tensor([1.0, -2.0, 2.0], dtype=dtype) * size * (step + 1) for step in range(2)]
    state = train_with(gradients, QUIET | {"mv_distribution": True}, torch.optim.Adam)

    journal = Journal(only_spool(places[0]))
    written, shown = journal.csv(tmp_path, Kind.GRAD_REDUCED), journal.heat("grad_reduced", "rms")
    for step in range(2):
        expected = 3 * size * (step + 1)
        assert_equal(journal.of(step, Kind.GRAD_REDUCED)["weight"], gradients[step])
        assert float(written["weight", step]["norm"]) == pytest.approx(expected, rel=1e-5)
        assert float(written["weight", step]["min"]) == pytest.approx(-2 * expected / 3, rel=1e-5)
        assert shown["weight", step] == pytest.approx(expected / math.sqrt(3), rel=1e-6)
    norm = float(state["exp_avg_sq"].double().norm())
    assert float(journal.csv(tmp_path / "again", Kind.EXP_AVG_SQ)["weight", 1]["norm"]) == pytest.approx(norm, rel=1e-5)


def test_infinities_are_counted_and_the_finite_part_keeps_its_statistics(places, tmp_path):
    odd = {1: [1.0, INF, -INF, -2.0, 0.0], 2: [1.0, INF, 3.0, -2.0, 0.0], 3: [NAN, 5.0, -INF, NAN, 0.0]}
    gradients = [torch.tensor(odd.get(step, [1.0, 2.0, 3.0, 4.0, 5.0])) for step in range(4)]
    train_with(gradients, QUIET | {"replay": {"enabled": False}})

    journal = Journal(only_spool(places[0]))
    written = journal.csv(tmp_path, Kind.GRAD_REDUCED)
    for step, gradient in enumerate(gradients):
        row = journal.of(step, Kind.GRAD_REDUCED)["weight"]
        assert_equal(row, gradient)
        assert (row.infs, row.nans) == (gradient.isinf().sum(), gradient.isnan().sum())
        finite = gradient[gradient.isfinite()]
        assert row.mean == pytest.approx(float(finite.mean()), rel=1e-6)
        line = written["weight", step]
        assert (int(line["infs"]), float(line["max"])) == (row.infs, float(finite.max()))


def test_an_infinity_alone_raises_every_rule_about_numbers(places):
    train_with([torch.ones(4), torch.tensor([1.0, INF, 1.0, 1.0])], QUIET | {"replay": {"enabled": False}})

    journal = Journal(only_spool(places[0]))
    rules = (AnomalyRuleConfig(rule_name="AnomalyNan"),)
    scanner = AnomalyScanner(rules, ("norm",), journal.header.coordinates)
    engine = RuleEngine(load_rules())
    anomalies, alerts = [], []
    for block in journal.blocks:
        anomalies += [(found.step, found.tag_name) for found in scanner.scan(journal.header, block)]
        alerts += engine.evaluate(journal.header, journal.keys, block)
    assert (1, "0:weight/rank0/post_grad") in anomalies
    assert "gradient-nonfinite" in {alert.rule for alert in alerts}


# ---------------------------------------------------------------------- optimizers and schedulers

SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0 / (step + 1)),
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
        milestones=[2],
    ),
}


def scheduled(make, place):
    """Return learning rates and weights of a training; with a `place`, of a watched one."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer, rates = torch.optim.AdamW(model.parameters(), lr=0.1), []
    scheduler = make(optimizer) if place != "after" else None
    monitor = TrainerMon(EVERYTHING) if place else None
    if monitor:
        monitor.set_monitor(model, optimizer)
    scheduler = scheduler or make(optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The epoch parameter")  # of SequentialLR's own calls
        for _ in range(4):
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            scheduler.step()
    if monitor:
        monitor.close()
    return rates, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_can_be_made_before_and_after_set_monitor(places, name, place):
    expected, weights = scheduled(SCHEDULERS[name], None)
    found, watched = scheduled(SCHEDULERS[name], place)

    assert found == expected
    assert len(set(found)) > 1
    assert all(torch.equal(a, b) for a, b in zip(weights, watched, strict=True))
    journal = RankJournal(only_spool(places[0]))
    rows = [journal.of(step, Kind.STEP)["learning_rate.0"].sum for step in range(4)]
    assert rows == found
    assert all("weight" in journal.of(step, Kind.EXP_AVG) for step in range(4))


CLOSURES = {
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
    "lbfgs_search": lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


@pytest.mark.parametrize("name", CLOSURES)
def test_an_optimizer_with_a_closure_has_rows_of_every_step(places, caplog, name):
    torch.manual_seed(0)
    model, seen = nn.Linear(4, 2), []
    optimizer, x = CLOSURES[name](model.parameters()), torch.randn(5, 4)
    monitor = TrainerMon(QUIET | {"param_distribution": True, "mv_distribution": True}, None, True)
    monitor.set_monitor(model, optimizer)
    for _ in range(3):
        calls = []

        def closure(calls=calls):
            optimizer.zero_grad()
            loss = (model(x) - 1).square().sum()
            loss.backward()
            values = {n: p.detach().clone() for n, p in model.named_parameters()}
            calls.append((values, {n: p.grad.clone() for n, p in model.named_parameters()}))
            return loss

        optimizer.step(closure)
        seen.append((calls, {n: p.detach().clone() for n, p in model.named_parameters()}))
    monitor.close()

    journal = RankJournal(only_spool(places[0]))
    for step, (calls, after) in enumerate(seen):
        before, gradients = calls[0]
        held = {Kind.PARAM_ORIGIN: before, Kind.GRAD_REDUCED: gradients, Kind.PARAM_UPDATED: after}
        for kind, tensors in held.items():
            assert journal.of(step, kind).keys() == tensors.keys()
            for label, tensor in tensors.items():
                assert_equal(journal.of(step, kind)[label], tensor)
        assert bool(journal.of(step, Kind.EXP_AVG)) == (name == "adam")
    assert not [event for event in journal.events if event["type"] == "detached"]


# ---------------------------------------------------------------------- files


def test_an_output_directory_that_does_not_exist_is_made_with_its_parents(places, tmp_path):
    output = tmp_path / "not" / "yet" / "there"
    train_with([torch.ones(3)], QUIET | {"output_dir": str(output)})

    assert len(list(output.glob("*/run.json"))) == 1


# ---------------------------------------------------------------------- what a monitor leaves behind and costs

OWNERS = (
    BackwardHook,
    nn.Module,
    torch.Tensor,
    torch.optim.Optimizer,
    torch.optim.AdamW,
    torch.autograd.Function,
    torch.distributed,
    torch.distributed.distributed_c10d,
    torch.distributed.ProcessGroup,
    torch.distributed.Work,
    torch.utils.checkpoint,
)
ALL_TAPS = EVERYTHING | {
    "mg_direction": True,
    "print_struct": True,
    "stack_info": True,
    "cc_distribution": {"enable": True, "cc_pre_hook": True},
    "recording_l2_features": True,
    "l2_targets": {"linear_hook": []},
}


class Deep(nn.Module):
    """Tells how deep the stack is when it is called."""

    def __init__(self):
        super().__init__()
        self.linear, self.depths = nn.Linear(4, 4), []

    def forward(self, x):
        self.depths.append(len(inspect.stack(0)))
        return self.linear(x)


def test_thirteen_monitors_one_after_the_other_leave_no_wrapper(places):
    model: Any = nn.Sequential(Deep(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    objects = (*model.modules(), *model.parameters(), optimizer)
    classes, left, files = [dict(vars(owner)) for owner in OWNERS], [], []
    for number in range(13):
        with TrainerMon(ALL_TAPS | {"run_id": f"run{number}"}) as monitor:
            monitor.set_monitor(model, optimizer)
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        depth, living = max(model[0].depths), weakref.ref(monitor)
        model[0].depths.clear()
        del monitor
        gc.collect()
        assert living() is None
        sizes = [len(held) for thing in objects for held in vars(thing).values() if hasattr(held, "__len__")]
        hooks = [hooks for p in model.parameters() for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)]
        left.append((depth, sizes, hooks))
        files.append(len(os.listdir("/proc/self/fd")))

    for after in left[2:]:
        assert after == left[1]
    assert files[-1] - files[1] < len(files[2:])  # what other tests left running opens one now and then
    assert "step" not in vars(optimizer)
    for owner, held in zip(OWNERS, classes, strict=True):
        assert [name for name in held if vars(owner).get(name) is not held[name]] == []


WIDTH, BATCH = 256, 128


def large():
    """Return a model, its optimizer and a function that trains a step; parameters and activations of 128 to 512 kB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(BATCH, WIDTH)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def allocated(step):
    """Return how many bytes torch allocated during a step, freed or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
    events = profiler.profiler.kineto_results.events()
    return sum(max(event.nbytes(), 0) for event in events if event.name() == "[memory]")


@pytest.mark.skipif(kernel_name() == "torch", reason="without the compiled kernel, torch calls need temporaries")
def test_nothing_of_the_model_is_copied(places):
    model, optimizer, step = large()
    for _ in range(3):
        step()
    bare = allocated(step)
    config = EVERYTHING | {"ur_distribution": False, "replay": {"enabled": False}}
    with TrainerMon(config) as monitor:
        monitor.set_monitor(model, optimizer)
        for _ in range(3):
            step()
        watched = allocated(step)

    assert bare > 1_000_000
    assert 0 <= watched - bare < 64 * 1024


MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "top")


class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]


def heap():
    """Return bytes of the heap in use, and bytes that it has from the system."""
    function = ctypes.CDLL(None).mallinfo2
    function.restype = Mallinfo
    gc.collect()
    found = function()
    return found.used + found.hblkhd, found.arena + found.hblkhd


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or newer")
def test_the_heap_stays_flat(places):
    model, optimizer, step = large()
    with TrainerMon(ALL_TAPS) as monitor:
        monitor.set_monitor(model, optimizer)
        for _ in range(10):
            step()
        used, held = heap()
        for _ in range(60):
            step()
        used_now, held_now = heap()

    assert used_now - used < 64 * 1024
    assert held_now - held < 1024 * 1024
