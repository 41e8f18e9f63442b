"""Two FSDP ranks of which one cannot, or will not, replay: neither may wait for the other for ever. See `job`."""

import contextlib
import functools

import torch.distributed as dist

from tests.frameworks.replay.fsdp_worker import FAULTS, build, fsdp2
from tests.frameworks.replay.job import FAULT_STEP, Case, Fault, main
from trainermon.monitor.taps.collector import Collector
from trainermon.replay import keep, replay


def planted(*_args, **_kwargs):
    raise RuntimeError("planted fault")


@contextlib.contextmanager
def on_rank_1(owner, name, value, _monitor=None):
    """Replace something on one of the ranks."""
    before = getattr(owner, name)
    if dist.get_rank() == 1:
        setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def tripped(self, *_args, **_kwargs):
    """Let the monitor's own fault detach it on the rank, in the very step."""
    raise RuntimeError("planted fault")


def small_memory(self):
    """Have room for the last micro step only."""
    while len(self.forwards) > 1:
        self.dropped[self.forwards.pop(0).stage] += 1


def at_fault_step(self, _series):
    return self._taken.step == FAULT_STEP


NONE = Fault(kind="none")
IN_A_SHARD = Fault(kind="reduced", module="blocks.1.down", rank=1)


def case(name, around, *, fault=FAULTS["transient"], clip=True, **options):
    return Case(name=name, build=functools.partial(build, fsdp2, clip=clip), fault=fault, around=around, **options)


CASES = [
    case("no-writer", functools.partial(on_rank_1, replay, "DumpWriter", planted)),
    case("no-capture", functools.partial(on_rank_1, replay, "ModuleCapture", planted)),
    case("late-fault", functools.partial(on_rank_1, replay.StepKeeper, "replay", tripped)),
    case("fewer-kept", functools.partial(on_rank_1, keep.ForwardKeeper, "_hold_budget", small_memory)),
    case("chosen-ranks", contextlib.nullcontext, config={"module_ranks": [0]}),
    case("not-joint", contextlib.nullcontext, config={"replay": {"joint": False}}),
    # what only one rank knows
    case(
        "seen-by-one", functools.partial(on_rank_1, Collector, "any_nonfinite", at_fault_step), fault=NONE, clip=False
    ),
    case("clipped-by-infinity", contextlib.nullcontext, fault=IN_A_SHARD),
]

if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(CASES, wait_s=3.0)
