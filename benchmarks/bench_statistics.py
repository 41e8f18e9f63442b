"""The statistics kernels against the best plain reader of the same bytes, side by side in one run.

    OMP_NUM_THREADS=1 python benchmarks/bench_statistics.py            # the 148 tensors of a GPT, 29.8 M elements
    OMP_NUM_THREADS=1 python benchmarks/bench_statistics.py --json     # and a RESULT line for benchmarks/report.py
    python benchmarks/bench_statistics.py --device cuda                # 1.3 B elements in 300 tensors, and launches

Every round runs every method once. A ratio is that of the two times in one round; the table gives median and range over
the rounds. CPU time on a CPU, events on a GPU. The limit is the plain reader with the smallest median: torch's sum, its
norm, numpy's sum, and a loop in C that only reads; on a GPU also a copy, which moves two bytes for each that it reads:
"of copy bandwidth" is bytes per second of a kernel against those of the copy. Unusual data is compared with ordinary
data under the same kernel.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.bench_step import GPT
from benchmarks.measure import cpu_ms
from trainermon.core.journal import JournalWriter
from trainermon.monitor.taps.collector import Collector
from trainermon.statistics import compiled, fallback, kernel_name
from trainermon.statistics.kernel import moments

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
READER = """
#include <stdint.h>
typedef uint64_t word __attribute__((vector_size(64), aligned(1), may_alias));
uint64_t read_all(const char *data, long size)
{
    word a = {0}, b = {0}, c = {0}, d = {0};
    for (long i = 0; i + 256 <= size; i += 256) {
        for (int line = 0; line < 256; line += 64)
            __builtin_prefetch(data + i + line + 8192, 0, 2);
        a ^= *(const word *)(data + i);
        b ^= *(const word *)(data + i + 64);
        c ^= *(const word *)(data + i + 128);
        d ^= *(const word *)(data + i + 192);
    }
    a ^= b ^ c ^ d;
    return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}
"""
UNUSUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "all NaN": lambda tensor: torch.full_like(tensor, torch.nan),
    "all Inf": lambda tensor: torch.full_like(tensor, torch.inf),
    "1e-25": lambda tensor: tensor * 1e-25,
    "1e25": lambda tensor: tensor * 1e25,
    "1e-40": lambda tensor: tensor * 1e-40,
    "all zero": torch.zeros_like,
    "a NaN in 10 000": lambda tensor: torch.where(torch.rand_like(tensor) < 1e-4, torch.nan, tensor),
}

Method = Callable[[], object]


def c_reader() -> Callable[[Sequence[Tensor]], None] | None:
    """Return a function that reads every byte of tensors and does nothing else; None without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "reader.c"), Path(folder, "reader.so")
        source.write_text(READER)
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
        read = ctypes.CDLL(str(library)).read_all
    read.argtypes = (ctypes.c_void_p, ctypes.c_long)

    def run(tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            read(tensor.data_ptr(), tensor.nbytes)

    return run


def readers(tensors: Sequence[Tensor]) -> Iterator[tuple[str, Method]]:
    yield "torch sum", lambda: [tensor.sum() for tensor in tensors]
    yield "torch _foreach_norm", lambda: torch._foreach_norm(list(tensors))
    if tensors[0].dtype is torch.float32 and tensors[0].is_cpu:
        yield "numpy sum", lambda: [tensor.numpy().sum() for tensor in tensors]
    read = c_reader() if tensors[0].is_cpu else None
    if read is not None:
        yield "C read", lambda: read(tensors)
    if tensors[0].is_cuda:
        copies = [torch.empty_like(tensor) for tensor in tensors]
        yield "copy", lambda: torch._foreach_copy_(copies, list(tensors))


def kernels(tensors: Sequence[Tensor]) -> Iterator[tuple[str, Method]]:
    out = torch.empty((len(tensors), 8), dtype=torch.float64, device=tensors[0].device)
    compute = compiled.load() if tensors[0].is_cpu else None
    if compute is not None:
        yield "c", lambda: compute(tensors, out, 0)
    if kernel_name(tensors[0].device) == "triton":
        yield "triton", lambda: moments(tensors, out)
    yield "torch", lambda: fallback.moments(tensors, out)


def device_ms(method: Method) -> float:
    """Return the milliseconds between two events around `method`: launches that the host is late with count."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    method()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def launches_of(method: Method) -> int:
    """Return how many kernels `method` launches, copies and fills not counted."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
        method()
        torch.cuda.synchronize()
    kernels = [event.name for event in record.events() if event.device_type is torch.autograd.DeviceType.CUDA]
    return sum(not name.lower().startswith("mem") for name in kernels)


def print_launches(device: str) -> None:
    for dtype in DTYPES.values():
        for count in (500, 5000):
            tensors = [torch.ones(1 + index % 3000, dtype=dtype, device=device) for index in range(count)]
            out = torch.empty((count, 8), dtype=torch.float64, device=device)
            moments(tensors, out)
            host_us = (
                min(timeit.repeat(lambda tensors=tensors, out=out: moments(tensors, out), number=10, repeat=5)) * 1e5
            )
            launches = launches_of(lambda tensors=tensors, out=out: moments(tensors, out))
            print(f"  {count} tensors of {dtype}: {launches} launches, {host_us:.0f} us on the host")


def print_copy_bandwidth(tensors: Sequence[Tensor], times: dict[str, list[float]]) -> None:
    size = sum(tensor.nbytes for tensor in tensors)
    copied = [2 * size / spent for spent in times["copy"]]
    for name, spent in times.items():
        if name != "copy":
            shares = sorted(size / ms / rate for ms, rate in zip(spent, copied, strict=True))
            rate = size / statistics.median(spent) / 1e6
            print(f"  {name:22}{rate:8.0f} GB/s  {100 * statistics.median(shares):4.0f} % of copy bandwidth")


def rounds(methods: dict[str, Method], count: int, clock: Callable[[Method], float]) -> dict[str, list[float]]:
    """Return the milliseconds of every method in every round, after one round that is not counted."""
    for method in methods.values():
        method()
    return {
        name: list(column)
        for name, column in zip(
            methods, zip(*([clock(m) for m in methods.values()] for _ in range(count)), strict=True), strict=True
        )
    }


def ratios(times: dict[str, list[float]], name: str, base: str) -> list[float]:
    return [a / b for a, b in zip(times[name], times[base], strict=True)]


def print_row(name: str, times: list[float], ratio: list[float]) -> None:
    spread = f"[{min(times):.2f}-{max(times):.2f}]"
    ratio_spread = f"[{min(ratio):.2f}-{max(ratio):.2f}]"
    print(f"  {name:22}{statistics.median(times):8.2f} ms {spread:18}{statistics.median(ratio):6.2f} x {ratio_spread}")


def compare(tensors: Sequence[Tensor], count: int, clock: Callable[[Method], float]) -> dict[str, float]:
    """Print the table of one dtype and return each kernel's median ratio to the best reader."""
    plain = dict(readers(tensors))
    times = rounds(plain | dict(kernels(tensors)), count, clock)
    best = min(plain, key=lambda name: statistics.median(times[name]))
    print(f"  (ratios to the best reader, {best})")
    if "copy" in times:
        print_copy_bandwidth(tensors, times)
    found = {}
    for name, spent in times.items():
        ratio = ratios(times, name, best)
        print_row(name, spent, ratio)
        if name not in plain:
            found[name] = statistics.median(ratio)
    return found


def compare_unusual(tensors: Sequence[Tensor], count: int, clock: Callable[[Method], float]) -> dict[str, float]:
    """Print how much longer every kernel takes for unusual data; return each kernel's worst median ratio."""
    worst: dict[str, float] = {}
    for title, change in UNUSUAL.items():
        methods = dict(kernels(tensors))
        methods |= {f"{name}, {title}": method for name, method in kernels([change(tensor) for tensor in tensors])}
        times = rounds(methods, count, clock)
        for name in times:
            base = name.split(",")[0]
            if name != base:
                ratio = ratios(times, name, base)
                print_row(name, times[name], ratio)
                worst[base] = max(worst.get(base, 0.0), statistics.median(ratio))
    return worst


def print_call_costs() -> None:
    """Print what one call costs beside the elements, as it is felt in a hook."""
    compute = compiled.load()
    if compute is None:
        return
    out = torch.empty((100, 8), dtype=torch.float64)
    small = torch.randn(8)
    cases = {
        "1 tensor of 8 elements": [small],
        "100 of them": [small] * 100,
        "1 transposed, 4 x 6": [torch.randn(4, 6).t()],
        "1 strided, 4 x 3 of 4 x 9": [torch.randn(4, 9)[:, :3]],
    }
    for name, tensors in cases.items():
        best = min(timeit.repeat(lambda tensors=tensors: compute(tensors, out, 0), number=2000, repeat=20)) / 2000
        print(f"  {name:28}{best * 1e6:8.2f} us")


def print_take_costs() -> None:
    """Print what `Collector.take` costs per tensor beside the elements, as CPU time: the median of 15 rounds."""
    parameters = [torch.nn.Parameter(torch.randn(8)) for _ in range(148)]
    for name, tensors, number in (("148 tensors", parameters, 200), ("1 tensor", parameters[:1], 5000)):
        collector = Collector(torch.device("cpu"), cast(JournalWriter, None))
        series = list(range(len(tensors)))
        spent = []
        for _ in range(15):
            collector.reset_step()  # else the slab grows with every take
            spent.append(cpu_ms(lambda: [collector.take(series, tensors) for _ in range(number)]))  # noqa: B023
        each_ns = statistics.median(spent) * 1e6 / number / len(tensors)
        print(f"  a take of {name:18}{each_ns:8.0f} ns per tensor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with a RESULT line")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = cpu_ms if arguments.device == "cpu" else device_ms
    result: dict[str, dict[str, float]] = {}
    on_cpu = arguments.device == "cpu"
    shapes = [parameter.shape for parameter in GPT().parameters()] if on_cpu else [(2048, 2048)] * 300 + [(2048,)] * 100
    for name, dtype in DTYPES.items():
        tensors = [torch.randn(shape, dtype=dtype, device=arguments.device) for shape in shapes]
        elements = sum(tensor.numel() for tensor in tensors)
        print(f"{name}: {len(tensors)} tensors, {elements / 1e6:.1f} M elements, {arguments.rounds} rounds")
        result[name] = compare(tensors, arguments.rounds, clock)
        print("  (ratios to ordinary data under the same kernel)")
        worst = compare_unusual(tensors, max(3, arguments.rounds // 3), clock)
        result[name] |= {f"{kernel}_unusual": ratio for kernel, ratio in worst.items()}
    if on_cpu:
        print("one call beside the elements, best of 20:")
        print_call_costs()
        print_take_costs()
    else:
        print_launches(arguments.device)
    if arguments.json:
        print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
