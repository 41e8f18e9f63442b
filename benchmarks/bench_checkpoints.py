"""Compares two checkpoints with trainermon and with mindstudio-probe, and the pair kernel with the best plain reader.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_checkpoints [--runs N] [--msprobe PYTHON] [--no-soak]

The checkpoints are Megatron-LM's, a GPT of 110 M parameters split over two ranks (tp = 2), in float32 and in bfloat16;
the second was trained on. CPU time and not wall time, so that other load does not count; the tools run in turn. PYTHON
has mindstudio-probe, megatron and torch. The soak compares two sparse files of 4 GB and takes the anonymous memory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.anonymous_memory import WATCH
from benchmarks.bench_compare import measure
from benchmarks.bench_statistics import READER
from benchmarks.measure import cpu_ms
from trainermon.statistics import pairs

LAYERS, HIDDEN, VOCABULARY, ELEMENTS = 12, 768, 32_000, 30_000_000
SOAK = (
    WATCH
    + """
import sys
from trainermon.analysis.checkpoint.comparison import compare_checkpoints
found = compare_checkpoints(*sys.argv[1:3])
over.set()
print(peak / 1024, found.headline, "torch" in sys.modules)
"""
)


def shard(layers: int, dtype: torch.dtype, *, rank: int, trained: bool) -> dict[str, torch.Tensor]:
    """Return what one of two ranks holds of a GPT whose products are split."""
    generator = torch.Generator().manual_seed(rank)

    def weight(*shape: int) -> torch.Tensor:
        found = torch.randn(shape, generator=generator) * 0.02
        return (found + trained * 1e-4 * torch.randn(shape, generator=generator)).to(dtype)

    model = {"embedding.word_embeddings.weight": weight(VOCABULARY // 2, HIDDEN)}
    for layer in range(layers):
        name = f"decoder.layers.{layer}"
        model |= {
            f"{name}.self_attention.linear_qkv.weight": weight(3 * HIDDEN // 2, HIDDEN),
            f"{name}.self_attention.linear_proj.weight": weight(HIDDEN, HIDDEN // 2),
            f"{name}.mlp.linear_fc1.weight": weight(4 * HIDDEN // 2, HIDDEN),
            f"{name}.mlp.linear_fc2.weight": weight(HIDDEN, 4 * HIDDEN // 2),
        }
    return model


def write_checkpoint(folder: Path, dtype: torch.dtype, *, trained: bool) -> None:
    """Write a checkpoint of Megatron-LM's layout over two ranks."""
    args = Namespace(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
        num_experts=None,
        num_layers=LAYERS,
        num_attention_heads=12,
        hidden_size=HIDDEN,
        swiglu=False,
    )
    for rank in range(2):
        part = folder / "iter_0000005" / f"mp_rank_{rank:02d}"
        part.mkdir(parents=True)
        model = shard(LAYERS, dtype, rank=rank, trained=trained)
        torch.save({"model": model, "iteration": 5, "args": args}, part / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("5")


def compare_tools(runs: int, other: Path | None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for side in ("a", "b"):
                write_checkpoint(folder / side, dtype, trained=side == "b")
            times: dict[str, list[tuple[float, float]]] = {"trainermon": [], "msprobe": []}
            for run in range(runs):
                sides = [folder / "a", folder / "b"]
                ours = [sys.executable, "-m", "trainermon", "checkpoint", "compare", *sides, "--jobs", "1"]
                times["trainermon"].append(measure([*ours, "-o", folder / f"ours{run}", "-f", "msprobe"]))
                if other is not None:
                    theirs = [other, "-m", "msprobe.msprobe", "config_check", "-c", *sides]
                    times["msprobe"].append(measure([*theirs, "-o", folder / f"theirs{run}.json"]))
        for tool, measured in times.items():
            if measured:
                seconds = [time for time, _ in measured]
                print(
                    f"{dtype}  {tool:<11} {median(seconds):.2f} s of processor time"
                    f" [{min(seconds):.2f}–{max(seconds):.2f}], {max(memory for _, memory in measured):,.0f} MB"
                )
        if times["msprobe"]:
            both = zip(times["msprobe"], times["trainermon"], strict=True)
            ratios = [theirs[0] / ours[0] for theirs, ours in both]
            print(f"{dtype}  {median(ratios):.1f} x cheaper [{min(ratios):.1f}–{max(ratios):.1f}]")


def box(ours: np.ndarray, theirs: np.ndarray) -> pairs.Boxes:
    """Return the one box of two dense arrays."""
    row = np.ones((1, pairs.BOX_WORDS), np.int64)
    row[0, :2] = ours.ctypes.data, theirs.ctypes.data
    row[0, 1 + pairs.MAX_DIMS] = ours.size
    return row


def reader() -> Callable[[np.ndarray], None]:
    """Return a loop in C that only reads."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "needs a C compiler"
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "reader.c"), Path(folder, "reader.so")
        source.write_text(READER)
        subprocess.run([compiler, "-O3", "-march=native", "-shared", "-fPIC", source, "-o", built], check=True)
        read_all = ctypes.CDLL(str(built)).read_all
    read_all.argtypes = (ctypes.c_void_p, ctypes.c_long)
    return lambda array: read_all(array.ctypes.data, array.nbytes)


def compare_kernel(rounds: int) -> None:
    read = reader()
    generator = np.random.default_rng(0)
    ours = generator.standard_normal(ELEMENTS, dtype=np.float32)
    theirs = ours + np.float32(1e-3) * generator.standard_normal(ELEMENTS, dtype=np.float32)
    sides = {
        "float32": (ours, theirs),
        "bfloat16": tuple((side.view(np.uint32) >> 16).astype(np.uint16) for side in (ours, theirs)),
        "float16": (ours.astype(np.float16), theirs.astype(np.float16)),
        "float64": (ours.astype(np.float64), theirs.astype(np.float64)),
    }
    for dtype, (one, other) in sides.items():
        compare_rounds(dtype, (one, other), read, rounds)


def compare_rounds(
    dtype: str, sides: tuple[np.ndarray, np.ndarray], read: Callable[[np.ndarray], None], rounds: int
) -> None:
    boxes, times, ratios = box(*sides), [], []
    for _ in range(rounds):
        limit = cpu_ms(lambda: [read(side) for side in sides])
        times.append(cpu_ms(lambda: pairs.pair_sums(boxes, dtype, dtype)))
        ratios.append(times[-1] / limit)
    print(f"kernel {dtype:<9} {median(times):6.1f} ms, {median(ratios):.2f} x the read limit", end="")
    print(f" [{min(ratios):.2f}–{max(ratios):.2f}]")


def write_sparse(path: Path, size_bytes: int) -> None:
    """Write a safetensors file of zeros that takes no room on the disk: eight float32 tensors."""
    each = size_bytes // 8
    header = {
        f"layers.{number}.weight": {
            "dtype": "F32",
            "shape": [each // 4096, 1024],
            "data_offsets": [number * each, (number + 1) * each],
        }
        for number in range(8)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size_bytes)


def soak() -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{side}.safetensors") for side in "ab"]
        for path in paths:
            write_sparse(path, 1 << 32)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        words: Sequence[object] = [sys.executable, "-c", SOAK, *paths]
        done = subprocess.run(list(map(str, words)), env=environment, capture_output=True, text=True, check=True)
    peak, said = done.stdout.split(" ", 1)
    print(f"soak   two files of 4 GB: {float(peak):.0f} MB of anonymous memory at most; {said.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--msprobe", type=Path, help="a Python that has mindstudio-probe, megatron and torch")
    parser.add_argument("--no-soak", action="store_true")
    arguments = parser.parse_args()
    compare_kernel(arguments.runs)
    compare_tools(arguments.runs, arguments.msprobe)
    if not arguments.no_soak:
        soak()


if __name__ == "__main__":
    main()
