"""What watching a training of MindSpore costs: gradients read, steps on which nothing is due, memory, a long run.

Run with `make bench-mindspore`. CPU time of this process, pairs back to back, median [smallest to largest].
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn

from trainermon import TrainerMon

NUM_TENSORS = 148
NUM_ELEMENTS = 29_800_000


class Holder(nn.Cell):
    """Parameters of the sizes of a small GPT: matrices, and as many vectors."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        count = NUM_TENSORS // 2
        width = int((num_elements / count) ** 0.5)
        shapes = [(width, width), (width,)] * count
        self.held = ms.ParameterTuple(
            ms.Parameter(ms.Tensor(np.random.default_rng(n).normal(size=shape).astype(np.float32)), name=f"p{n}")
            for n, shape in enumerate(shapes)
        )

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return x


def watched(net: nn.Cell, optimizer: nn.Cell, folder: Path, **config: object) -> TrainerMon:
    settings = {"agent": {"start": False}, "output_dir": str(folder), "spool_dir": str(folder / "spool"), **config}
    monitor = TrainerMon(settings)
    monitor.set_monitor(net, optimizer=optimizer)
    return monitor


def cpu_ms(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return 1e3 * (time.process_time() - start)


def hooks_of_a_step(monitor: TrainerMon, net: nn.Cell, gradients: tuple) -> Callable[[], None]:
    """Return what the hooks do in a step, each through its guard, without model and optimizer."""
    loop = monitor._attached._loop
    guard, steps = loop._parts.guard, loop.steps
    before, behind, backward = (
        guard.wrap(steps._begins),
        guard.wrap(steps._ends, 0),
        guard.wrap(steps._backward_reached),
    )
    entry, exit_ = guard.wrap(loop._entry), guard.wrap(loop._exit)

    def step() -> None:
        before(net, ())
        behind(net, (), None)
        backward(None)
        entry(None, (gradients,))
        exit_(None, (gradients,), None)

    return step


def shown(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):.3g} {unit} [{min(values):.3g}–{max(values):.3g}]"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--steps", type=int, default=3000, help="steps of the long run")
    arguments.add_argument("--long-run", action="store_true", help="the long run alone")
    arguments.add_argument("--bare", action="store_true", help="the long run alone, without a monitor")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if chosen.long_run or chosen.bare:
            long_run(folder, chosen.steps, is_watched=not chosen.bare)
            return
        net = Holder(NUM_ELEMENTS)
        optimizer = nn.SGD(net.trainable_params(), 1e-3)
        gradients = tuple(ms.Tensor(parameter.asnumpy().copy()) for parameter in optimizer.parameters)
        arrays = [gradient.asnumpy() for gradient in gradients]
        num_bytes = sum(array.nbytes for array in arrays)
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        due = hooks_of_a_step(watched(net, optimizer, folder / "due"), net, gradients)
        idle = hooks_of_a_step(watched(net, optimizer, folder / "idle", start_step=10**9), net, gradients)
        due()
        pairs = [(cpu_ms(lambda: [array.max() for array in arrays]), cpu_ms(due)) for _ in range(chosen.rounds)]
        after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"{len(arrays)} float32 tensors, {num_bytes / 4e6:.1f} M elements")
        print("numpy reads them (max):", shown([read for read, _ in pairs], "ms"))
        print("a step that collects gradients:", shown([step for _, step in pairs], "ms"))
        print("ratio:", shown([step / read for read, step in pairs], "×"))
        print(
            "nothing due:", shown([cpu_ms(lambda: [idle() for _ in range(1000)]) for _ in range(chosen.rounds)], "µs")
        )
        print(f"memory: {(after_kib - before_kib) / 1024:.1f} MiB")
        long_run(folder / "long", chosen.steps)


def long_run(folder: Path, num_steps: int, *, is_watched: bool = True) -> None:
    """Print step times and memory of the quarters of a long run with activations and their gradients."""
    net = nn.SequentialCell(nn.Dense(32, 32), nn.ReLU(), nn.Dense(32, 8))
    optimizer = nn.AdamWeightDecay(net.trainable_params(), 1e-3)
    compute = ms.value_and_grad(lambda x: net(x).mean(), None, optimizer.parameters)
    x = ms.Tensor(np.ones((16, 32), np.float32))
    everything = {"xy_distribution": True, "mv_distribution": True, "param_distribution": True}
    monitor = watched(net, optimizer, folder, **everything) if is_watched else None
    for quarter in range(4):
        start = time.process_time()
        for _ in range(num_steps // 4):
            loss, gradients = compute(x)
            optimizer(gradients)
            if monitor is not None:
                monitor.record(loss=loss)
        each_ms = 1e3 * (time.process_time() - start) / (num_steps // 4)
        memory_mib = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
        print(f"steps up to {(quarter + 1) * num_steps // 4}: {each_ms:.2f} ms a step, {memory_mib:.1f} MiB resident")
    if monitor is not None:
        monitor.close()


if __name__ == "__main__":
    main()
