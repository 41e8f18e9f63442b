"""What a watched step costs beside the least that it could cost: reading the bytes that it must, and its hooks.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_step_limit                # a GPT of 29.8 M parameters, 256 tokens
    OMP_NUM_THREADS=1 python -m benchmarks.bench_step_limit --tokens 2048
    OMP_NUM_THREADS=1 python -m benchmarks.bench_step_limit --model small  # two small layers: what any step costs

The limit is the bytes that no monitor of this level can do without, each read once by the best plain reader of the same
run, and 4 us for each hook that has to fire: one for each parameter, whose gradient arrives, and for activations two
for each module, its output and the gradient of that. A pair of steps is measured until the extra CPU time is known to
0.3 % of the bare step, or as long as `--max-pairs` allows; both ends of that interval (95 %) are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.bench_statistics import readers
from benchmarks.bench_step import CONTEXT, LEVELS, make_step, watch
from benchmarks.measure import Ratio, cpu_ms, interleaved
from trainermon.hooks.tree import tensors_of

HOOK_MS = 0.004
UNCERTAINTY = 0.003
SMALL_BLOCK = 10  # steps of the small model that are timed together: the clock counts microseconds

Made = tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]


@dataclasses.dataclass(frozen=True, slots=True)
class StepLimit:
    """What a level cannot do without: bytes to read in a step, and hooks that fire."""

    bytes: int
    hooks: int

    def ms(self, bytes_per_ms: float) -> float:
        """Return the least CPU time in milliseconds."""
        return self.bytes / bytes_per_ms + self.hooks * HOOK_MS


def limits(made: Made) -> dict[str, StepLimit]:
    """Return what each level cannot do without; takes a step of the bare model."""
    model, optimizer, step = made
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    activations = activation_bytes(model, step)
    weights = sum(parameter.nbytes for parameter in parameters)
    moments = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    )
    state = weights + 2 * weights + moments  # gradients, parameters before and after, moments
    num_modules = sum(1 for _ in model.modules()) - 1
    return {
        "gradients": StepLimit(weights, len(parameters)),
        "state": StepLimit(state, len(parameters)),
        "activations": StepLimit(state + 2 * activations, len(parameters) + 2 * num_modules),
    }


def activation_bytes(model: nn.Module, step: Callable[[], object]) -> int:
    """Return the bytes of all distinct tensors that modules take and return in a step."""
    seen: list[Tensor] = []  # kept until the end: an address must not come twice

    def look(_module: nn.Module, given: object, returned: object) -> None:
        seen.extend(tensor.detach() for _, tensor in tensors_of((given, returned)))

    handles = [module.register_forward_hook(look) for module in model.modules() if module is not model]
    step()
    for handle in handles:
        handle.remove()
    return sum({(tensor.data_ptr(), tensor.numel()): tensor.nbytes for tensor in seen}.values())


def reading_rate() -> float:
    """Return how many bytes the best plain reader reads in a millisecond of CPU time, from memory, not the cache."""
    model, _, _ = make_step(torch.float32)
    tensors = [parameter.detach() for parameter in model.parameters()]
    methods = dict(readers(tensors))
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(11):
        for name, method in methods.items():
            times[name].append(cpu_ms(method))
    return sum(tensor.nbytes for tensor in tensors) / min(map(statistics.median, times.values()))


def make_small() -> Made:
    """Return a model of two small layers: what its step costs beside the bare one is what any step costs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given, wanted = torch.randn(4, 8), torch.randn(4, 4)

    def step() -> None:
        nn.functional.mse_loss(model(given), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def measure(make: Callable[[], Made], level: str, interval: int, *, block: int, pairs: int, max_pairs: int) -> Ratio:
    """Return what a watched step costs against a bare one; both are called `block` times in turn."""
    _, _, bare = make()
    model, optimizer, watched = make()

    def repeated(step: Callable[[], object]) -> Callable[[], object]:
        return lambda: [step() for _ in range(block)]

    repeated(bare)(), repeated(watched)()
    with tempfile.TemporaryDirectory() as folder:
        watcher = watch("trainermon", level, interval, Path(folder), model, optimizer)
        ratio = interleaved(
            repeated(bare),
            repeated(watched),
            pairs=pairs,
            warm_up=2,
            uncertainty=UNCERTAINTY,
            max_pairs=max_pairs,
        )
        getattr(watcher, "close", lambda: None)()
    return ratio


def row(name: str, ratio: Ratio, block: int, limit_ms: float) -> str:
    """Return a line of the table: all times of one step."""
    low, extra, high, base = (
        value / block for value in (ratio.extra_low_ms, ratio.extra_ms, ratio.extra_high_ms, ratio.base_ms)
    )
    limit = f"{limit_ms:.3f} ms, {extra / limit_ms:.2f} x" if limit_ms else "none"
    return (
        f"| {name} | {ratio.median:.4f} x | {extra:+.3f} ms [{low:+.3f}, {high:+.3f}] on {base:.2f} ms | {limit} "
        f"| {ratio.pairs} pairs, ±{ratio.uncertainty:.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt", "small"], default="gpt")
    parser.add_argument("--tokens", type=int, default=256, help="of a step of the GPT")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--max-pairs", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    is_small = arguments.model == "small"
    block = SMALL_BLOCK if is_small else 1

    def make() -> Made:
        return make_small() if is_small else make_step(torch.float32, arguments.tokens // CONTEXT)

    made = make()
    made[2]()  # the optimizer has its state after a step
    least, bytes_per_ms = limits(made), reading_rate()
    print(f"the best plain reader: {bytes_per_ms / 1e6:.1f} GB per CPU-second\n")
    print(
        "| level | ratio | extra CPU time of a step [95 %] | limit, and times of it | measured |\n|---|---|---|---|---|"
    )
    counts = {"pairs": arguments.pairs, "max_pairs": arguments.max_pairs}
    for level in arguments.levels:
        ratio = measure(make, level, 1, block=block, **counts)
        print(row(level, ratio, block, least[level].ms(bytes_per_ms)), flush=True)
    print(row("nothing due", measure(make, "gradients", 1_000_000, block=block, **counts), block, 0.0))


if __name__ == "__main__":
    main()
