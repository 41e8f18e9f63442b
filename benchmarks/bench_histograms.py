"""What histograms cost: the counting beside a plain read of the same bytes, and a GPT's step with and without them.

    python -m benchmarks.bench_histograms

The model is that of bench_step: 29.8 M parameters in 148 tensors. Two copies that are both watched train in turn in one
process; of one, every step has histograms of gradients, parameters and activations. CPU time, one thread, median of
rounds or of back-to-back pairs. The last lines say how many elements lie outside the bins for powers of two.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.bench_statistics import c_reader
from benchmarks.bench_step import make_step
from benchmarks.measure import cpu_ms, interleaved
from trainermon import TrainerMon
from trainermon.core.journal import BlockRecord, JournalReader
from trainermon.core.values import HIGHEST_BIN, NUM_BINS, STATISTICS, ZERO_BIN
from trainermon.statistics import moments
from trainermon.statistics.histograms import count, torch_counts

ROUNDS, PAIRS = 15, 12
KINDS = {
    "grad_reduced": ["grad_reduced"],
    "grad_reduced, param_updated, actv, actv_grad": ["grad_reduced", "param_updated", "actv", "actv_grad"],
}
COLLECTED = {"wg_distribution": True, "param_distribution": True, "xy_distribution": True, "all_xy": True}


def print_kernels(tensors: Sequence[Tensor]) -> None:
    """Print what moments and histograms take beside a loop in C that reads the same bytes."""
    rows = torch.empty((len(tensors), len(STATISTICS)), dtype=torch.float64)
    counts = torch.empty((len(tensors), NUM_BINS), dtype=torch.int64)
    read = c_reader()
    methods = {
        "moments": lambda: moments(tensors, rows),
        "histograms": lambda: count(tensors, counts),
        "histograms by torch calls": lambda: [
            torch_counts.count_on_cpu(tensor.view(-1), row) for tensor, row in zip(tensors, counts.zero_(), strict=True)
        ],
    }
    if read is not None:
        methods = {"C read": lambda: read(tensors), **methods}
    spent = {name: [] for name in methods}
    for _ in range(ROUNDS):
        for name, method in methods.items():
            spent[name].append(cpu_ms(method))
    for name, times in spent.items():
        print(f"  {name:26s} {statistics.median(times):7.2f} ms [{min(times):.2f}, {max(times):.2f}]")


def watch(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, kinds: Sequence[str]) -> TrainerMon:
    config = {**COLLECTED, "output_dir": str(folder), "spool_dir": str(folder / "spool"), "agent": {"start": False}}
    monitor = TrainerMon({**config, "histograms": {"kinds": list(kinds), "step_interval": 1}})
    monitor.set_monitor(model, optimizer)
    return monitor


def print_steps(kinds: Sequence[str]) -> None:
    """Print what histograms of these kinds add to a step, and to the journal."""
    with tempfile.TemporaryDirectory() as folder:
        steps, monitors = [], []
        for name, wanted in (("without", ()), ("with", kinds)):
            model, optimizer, step = make_step(torch.float32)
            monitors.append(watch(model, optimizer, Path(folder, name), wanted))
            steps.append(step)
        print("  step:", interleaved(*steps, pairs=PAIRS, warm_up=3).text())
        for monitor in monitors:
            monitor.close()
        (spool,) = [path for path in Path(folder, "with", "spool").iterdir() if path.is_dir()]
        blocks = [record.block for record in JournalReader(spool, 0).poll(1 << 30) if isinstance(record, BlockRecord)]
        block = blocks[-1]
        taken = block.histograms
        print(
            f"  journal: {len(taken.places)} histograms, {taken.counts.nbytes:,} bytes, beside {block.values.nbytes:,}"
        )
        for kind in kinds:
            chosen = [place for place, at in enumerate(taken.places) if series_of(spool)[block.series[at]] == kind]
            counts = taken.counts[chosen].sum(axis=0).astype(float)
            low = (counts[ZERO_BIN - 1] + counts[ZERO_BIN + 1]) / counts.sum()
            high = (counts[0] + counts[HIGHEST_BIN]) / counts.sum()
            print(f"  {kind}: {low:.2e} of the elements below the least power of two, {high:.2e} above the largest")


def series_of(spool: Path) -> list[str]:
    records = JournalReader(spool, 0).poll(1 << 30)
    return [key.kind.value for record in records for key in getattr(record, "keys", ())]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, _, _ = make_step(torch.float32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        print(f"{dtype}: the 148 tensors of the model, once")
        print_kernels([1e-4 * torch.randn_like(parameter).to(dtype) for parameter in model.parameters()])
    for name, kinds in KINDS.items():
        print(f"histograms of {name} on every step")
        print_steps(kinds)


if __name__ == "__main__":
    main()
