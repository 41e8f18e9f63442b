"""Run on each of two gloo ranks by `test_collectives_ranks.py`: what the taps say against what is known to happen."""

import math
import os
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed._functional_collectives import all_reduce as early_functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.profiler import profile

from tests.monitor.taps.collective_forms import Forms, functional_gather, values
from tests.monitor.taps.collective_rows import EVERYTHING, Steps, close, moments
from trainermon.core.config import CollectivesConfig
from trainermon.core.flight_recorder import FlightRecorder
from trainermon.monitor.taps.process_groups import purposes_of


class Worker:
    def __init__(self):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.other = 1 - self.rank
        self.group = dist.new_group([0, 1])
        self.mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu", mesh_dim_names=("tp",))
        purposes = purposes_of({"pp": self.group, "absent": None}, [self.mesh])
        self.watched = Steps(EVERYTHING, purposes)
        self.purposes = purposes

    # ------------------------------------------------------------------ every form, against values computed here

    def check_every_form(self):
        for form in Forms(self.rank, self.group, self.mesh).all():
            rows = self.watched.rows(form.call)
            assert len(rows.names()) == 1, (form, rows)
            (name,) = rows.names()
            group, _, op = name.partition(".")
            assert op == form.op
            assert group in ("pp", "tp"), name
            before, after = ({f"{side}.{i}" for i in range(len(tensors))} for side, tensors in sides(form))
            assert rows.slots(name) - {"wait_seconds"} == before | after, (form, rows.slots(name))
            for side, tensors in sides(form):
                for index, tensor in enumerate(tensors):
                    assert close(rows.of(name, f"{side}.{index}"), moments(tensor)), (form, side, index)
            size = max(sum(4 * tensor.numel() for tensor in tensors) for _, tensors in sides(form))
            assert rows.value(group, "bytes") == size, form
            assert rows.value(group, "unseen") == rows.value(group, "unfinished") == 0, form
            assert rows.value(group, "count") >= 1, form

    def check_monitored_barrier_is_accounted_for(self):
        rows = self.watched.rows(lambda: dist.monitored_barrier(group=self.group))
        assert rows.names() == set()
        assert rows.value("pp", "unseen") == 0

    def check_calls_are_told_apart(self):
        def step():
            for factor in (1.0, 2.0, 3.0):
                dist.all_reduce(torch.full((4,), factor), group=self.group)
            dist.all_reduce(torch.full((4,), 5.0))

        for _ in range(2):
            rows = self.watched.rows(step)
            assert [rows.of("pp.all_reduce", "post.0", call).max for call in range(3)] == [2.0, 4.0, 6.0]
            assert rows.of("world.all_reduce", "post.0").max == 10.0
            assert rows.value("pp", "count") == 3
            assert rows.value("world", "count") == 1

    # ------------------------------------------------------------------ point to point, asynchronous, never waited for

    def check_point_to_point(self):
        received = torch.zeros(5)

        def step():
            ops = [dist.P2POp(dist.isend, values(self.rank, 5), self.other)]
            ops.append(dist.P2POp(dist.irecv, received, self.other))
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        rows = self.watched.rows(step)
        assert rows.slots("world.send") == {"pre.0", "wait_seconds"}
        assert rows.slots("world.recv") == {"post.0", "wait_seconds"}
        assert close(rows.of("world.send", "pre.0"), moments(values(self.rank, 5)))
        assert close(rows.of("world.recv", "post.0"), moments(values(self.other, 5)))
        assert rows.value("world", "unseen") == 0

    def check_result_is_taken_at_the_wait(self):
        x = torch.full((3,), 1.0 + self.rank)
        taps, collector = self.watched.taps, self.watched.collector
        collector.begin(0)
        taps.attach()
        work = dist.all_reduce(x, async_op=True)
        kept, handle = weakref.ref(x), weakref.ref(work)
        assert work.wait() is True
        assert work.wait() is True
        x.fill_(77.0)
        taps.step_ended()
        del x, work
        assert handle() is None
        until(lambda: kept() is None)  # gloo's thread lets go a moment after the wait
        taps.detach()
        rows = self.watched.sealed()
        assert rows.of("world.all_reduce", "post.0").max == 3.0
        assert rows.of("world.all_reduce", "pre.0").max == 1.0 + self.rank
        assert 0 < rows.value("world.all_reduce", "wait_seconds") < 60

    def check_nobody_waits(self):
        def step():
            dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()

        rows = self.watched.rows(step)
        assert rows.slots("world.all_reduce") == {"pre.0"}
        assert rows.value("world", "unfinished") == 1
        assert self.watched.rows(lambda: None).value("world", "unfinished") == 0

    def check_nothing_is_held_after_the_step(self):
        x = torch.ones(3)
        self.watched.collector.begin(0)
        self.watched.taps.attach()
        work = dist.all_reduce(x, async_op=True)
        kept = weakref.ref(x)
        self.watched.taps.step_ended()
        work.wait()
        del x, work
        until(lambda: kept() is None)
        self.watched.taps.detach()
        self.watched.sealed()

    # ------------------------------------------------------------------ what is not seen is counted

    def check_ddp_reducer_is_counted_as_unseen(self):
        torch.manual_seed(3)
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
        for _ in range(3):  # after its first backward the reducer rebuilds its buckets, and talks about it
            model(values(self.rank, 4, 8)).sum().backward()

        def step():
            for _ in range(2):
                model(values(self.rank, 4, 8)).sum().backward()
            dist.all_reduce(torch.ones(2))

        with profile() as profiler:
            rows = self.watched.rows(step)
        told = [event for event in profiler.events() if event.name.startswith("gloo:")]
        assert rows.value("world", "count") == len(told) == 3  # one bucket, twice, and ours
        assert rows.value("world", "unseen") == 2
        assert rows.slots("world.all_reduce") == {"pre.0", "post.0", "wait_seconds"}

    def check_fully_sharded(self):
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        for layer in model:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)

        def step():
            model(values(self.rank, 4, 8)).sum().backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm.full_tensor()

        with profile() as profiler:
            rows = self.watched.rows(step)
        told = [event for event in profiler.events() if event.name.startswith("gloo:")]
        assert rows.value("tp", "count") == len(told)
        assert rows.value("tp", "unseen") == 0
        assert rows.names() == {"tp.all_gather_into_tensor", "tp.reduce_scatter_tensor", "tp.all_reduce"}
        # each layer is gathered once for the forward and once for the backward, and reduced once
        whole = sum(p.numel() for p in model[0].parameters()), sum(p.numel() for p in model[1].parameters())
        gathered = [
            m.count for key, m in rows.items() if key.name == "tp.all_gather_into_tensor" and "post" in key.slot
        ]
        reduced = [m.count for key, m in rows.items() if key.name == "tp.reduce_scatter_tensor" and "pre" in key.slot]
        assert sorted(set(gathered)) == sorted(set(reduced)) == sorted(whole)
        assert sorted(reduced) == sorted(whole)

    def check_dtensor(self):
        sharded = DTensor.from_local(values(self.rank, 2, 3), self.mesh, [Shard(0)])
        rows = self.watched.rows(lambda: sharded.redistribute(placements=[Replicate()]).to_local().sum())
        assert close(rows.of("tp.all_gather_into_tensor", "pre.0"), moments(values(self.rank, 2, 3)))
        whole = torch.cat([values(0, 2, 3), values(1, 2, 3)])
        assert close(rows.of("tp.all_gather_into_tensor", "post.0"), moments(whole))
        assert rows.value("tp", "unseen") == 0

    def check_parallel_layer(self):
        """What its collective returns is looked at through views, and waited for through one of them."""
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 3)
        inputs = torch.cat([values(0, 2, 2), values(1, 2, 2)], 1)
        expected = torch.nn.functional.linear(inputs, layer.weight, layer.bias).detach()
        parallelize_module(layer, self.mesh, RowwiseParallel())
        rows = self.watched.rows(lambda: (layer(values(self.rank, 2, 2)) + 1).sum().backward())
        found = rows.of("tp.all_reduce", "post.0")
        assert found.count == 6
        assert math.isclose(found.max, expected.max(), rel_tol=1e-5)
        assert math.isclose(found.sum_sq, expected.square().sum(), rel_tol=1e-5)
        assert (rows.value("tp", "unfinished"), rows.value("tp", "unseen")) == (0, 0)

    def check_functional_gradient(self):
        """The forward is seen with its operands; its backward calls the operator itself, and is counted as unseen."""
        x = values(self.rank, 4).requires_grad_()
        rows = self.watched.rows(lambda: getattr(functional, functional_gather)(x, 0, self.group).sum().backward())
        assert close(rows.of("pp.all_gather_into_tensor", "pre.0"), moments(x.detach()))
        assert rows.value("pp", "count") == 2 + rows.value("pp", "unseen") - 1
        assert rows.value("pp", "unseen") >= 1
        assert x.grad.tolist() == [2.0] * 4

    def check_early_alias_of_a_functional_form_is_unseen(self):
        rows = self.watched.rows(lambda: early_functional(torch.ones(3), "sum", self.group) * 1)
        assert rows.names() == set()
        assert rows.value("pp", "unseen") == rows.value("pp", "count") == 1

    def check_other_thread_is_unseen(self):
        def step():
            thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(3), group=self.group))
            thread.start()
            thread.join()

        rows = self.watched.rows(step)
        assert rows.names() == set()
        assert rows.value("pp", "unseen") == rows.value("pp", "count") == 1

    def check_muted(self):
        self.watched.collector.muted = True
        rows = self.watched.rows(lambda: dist.all_reduce(torch.ones(3), group=self.group))
        self.watched.collector.muted = False
        assert rows.names() == set()
        assert rows.value("pp", "unseen") == 0

    def check_compiled_graph(self):
        """Not looked at and not broken: one graph, no recompilation when the taps come and go."""
        import torch._dynamo.utils as dynamo

        group = self.group

        @torch.compile(backend="eager", fullgraph=True)
        def compiled(x):
            return functional.all_reduce(x, "sum", group) * 2

        dynamo.counters.clear()
        compiled(torch.ones(3))
        for _ in range(12):  # more than torch recompiles before it gives up
            rows = self.watched.rows(lambda: compiled(torch.ones(3)))
            assert rows.names() == set()
            assert rows.value("pp", "unseen") == rows.value("pp", "count") == 1
            assert compiled(torch.ones(3)).tolist() == [4.0] * 3
        assert not dynamo.counters["graph_break"]
        assert dynamo.counters["stats"]["unique_graphs"] <= 2

    # ------------------------------------------------------------------ what is asked for

    def check_nothing_is_wrapped_unless_asked(self):
        steps = Steps(CollectivesConfig(), self.purposes)
        original = vars(dist.ProcessGroup)["allreduce"]

        def step():
            assert vars(dist.ProcessGroup)["allreduce"] is original
            dist.all_reduce(torch.ones(2), group=self.group)

        rows = steps.rows(step)
        assert rows.names() == set()
        assert rows.slots("pp") == {"count", "sequence", "in_flight"}
        assert rows.value("pp", "count") == 1
        assert rows.value("pp", "sequence") == self.group._get_sequence_number_for_group()

    def check_no_operands_before_unless_asked(self):
        steps = Steps(CollectivesConfig(enable=True), self.purposes)
        rows = steps.rows(lambda: dist.all_reduce(torch.ones(2), group=self.group))
        assert rows.slots("pp.all_reduce") == {"post.0", "wait_seconds"}

    def check_call_lines(self):
        steps = Steps(CollectivesConfig(enable=True, cc_codeline=("wanted_place",)), self.purposes)

        def wanted_place():
            dist.all_reduce(torch.full((2,), 4.0), group=self.group)

        def step():
            dist.all_reduce(torch.ones(2), group=self.group)
            wanted_place()

        rows = steps.rows(step)
        assert rows.slots("pp.all_reduce", 0) == set()
        assert rows.of("pp.all_reduce", "post.0", 1).max == 8.0
        assert rows.value("pp", "unseen") == 0

    def check_call_lines_that_are_nowhere(self):
        steps = Steps(CollectivesConfig(enable=True, cc_codeline=("no_such_place",)), self.purposes)

        with log_lines() as lines:
            rows = [steps.rows(lambda: dist.all_reduce(torch.ones(2), group=self.group)) for _ in range(2)]
        assert [found.names() for found in rows] == [set(), set()]
        assert len(lines) == 1, lines
        assert "cc_codeline is found in no line that calls a collective" in lines[0]
        assert "collectives_worker.py" in lines[0]

    def check_log_only(self):
        steps = Steps(CollectivesConfig(enable=True, cc_log_only=True), self.purposes)

        def step():
            for _ in range(3):
                dist.all_reduce(torch.ones(2), group=self.group)

        with log_lines() as lines:
            rows = [steps.rows(step) for _ in range(2)]
        assert [found.names() for found in rows] == [set(), set()]
        assert len(lines) == 1, lines
        assert lines[0].startswith("pp.all_reduce is called at ")
        assert "collectives_worker.py[" in lines[0].partition(", stack ")[0]

    # ------------------------------------------------------------------ nothing is changed, nothing is left

    def check_training_is_the_same_to_the_bit(self):
        def train(steps):
            torch.manual_seed(5)
            model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            losses = []

            def one(step):
                loss = model(values(self.rank, 8, 6, seed=step)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                shared = loss.detach().clone()
                work = dist.all_reduce(shared, async_op=True, group=self.group)
                weight = functional.all_reduce(next(model.parameters()).detach(), "avg", self.group)
                optimizer.step()
                work.wait()
                losses.append((shared + weight.sum()).item())

            for step in range(4):
                steps.rows(lambda step=step: one(step)) if steps else one(step)
            return losses, [p.detach().clone() for p in model.parameters()]

        losses, weights = train(None)
        for config in (EVERYTHING, CollectivesConfig(enable=True, cc_codeline=("one",)), CollectivesConfig()):
            found_losses, found_weights = train(Steps(config, self.purposes))
            assert found_losses == losses
            assert all(torch.equal(a, b) for a, b in zip(found_weights, weights, strict=True))

    def check_everything_is_put_back(self):
        owners = (dist.ProcessGroup, dist.Work, *dist.Work.__subclasses__(), functional)
        before = [dict(vars(owner)) for owner in owners]
        during = []
        self.watched.rows(lambda: during.extend(dict(vars(owner)) for owner in owners))
        after = [dict(vars(owner)) for owner in owners]
        changed = [{name for name in a if a[name] is not b[name]} for a, b in zip(before, during, strict=True)]
        assert all(changed[:2])
        assert changed[-1]
        for left, right in zip(before, after, strict=True):
            assert left.keys() == right.keys()
            assert all(left[name] is right[name] for name in left)

    # ------------------------------------------------------------------ the recorder

    def check_recorder(self):
        group = dist.new_group([0, 1], group_desc="EXPERT_MODEL_PARALLEL_GROUP")
        rows = self.watched.rows(lambda: dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3), group=group))
        assert rows.value("ep", "count") == 1
        recorder = FlightRecorder()
        entry = recorder.entries()[-1]
        assert (entry.group, entry.description, entry.op) == (group.group_name, group.group_desc, "all_gather")
        assert (entry.input_shapes, entry.output_shapes, entry.size_bytes) == (((3,),), ((2, 3),), 24)
        assert recorder.progress()[group.group_name].enqueued == 1

    def check_rank_that_has_not_entered(self):
        """The rank that waits has begun one more than the one that is late, and knows it is in flight."""
        group = dist.new_group([0, 1], group_desc="mesh_late")
        store = dist.distributed_c10d._get_default_store()
        dist.all_reduce(torch.ones(1), group=group)
        if self.rank == 0:
            works = []
            rows = self.watched.rows(lambda: works.append(dist.all_reduce(torch.ones(1), group=group, async_op=True)))
            assert rows.value("late", "in_flight") >= 1
            assert rows.value("late", "unfinished") == 1
            assert rows.slots("late.all_reduce") == {"pre.0"}
            store.set("looked", "1")
            works[0].wait()
        else:
            store.wait(["looked"])
            rows = self.watched.rows(lambda: None)
            assert rows.value("late", "count") == 0
            dist.all_reduce(torch.ones(1), group=group)
            assert rows.value("late", "sequence") == 1


def sides(form):
    return (("pre", form.read), ("post", form.written))


def until(condition):
    """Wait for what another thread is about to do."""
    deadline_s = time.monotonic() + 900
    while not condition():
        assert time.monotonic() < deadline_s


@contextmanager
def log_lines():
    import logging

    lines = []

    class Handler(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("trainermon")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def main():
    worker = Worker()
    for name in [name for name in vars(Worker) if name.startswith("check_")]:
        print(name, flush=True)
        getattr(worker, name)()
        dist.barrier()
    print("done", flush=True)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
