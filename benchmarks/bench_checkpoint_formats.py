"""Measures what opening checkpoints costs: python -m benchmarks.bench_checkpoint_formats.

CPU time of `open_checkpoint`, which reads no tensor: a file of torch, and a distributed checkpoint of 100,000 chunks.
"""

from __future__ import annotations

import io
import pickle
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from trainermon.analysis.checkpoint.opening import open_checkpoint

CHUNKS, CHUNKS_OF_A_TENSOR, TIMES = 100_000, 16, 5


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in (10, 1000):
            path = folder / f"{size}.pt"
            torch.save({f"w{number}": torch.ones(2) for number in range(size)}, path)
            print(f"a file of {size:,} tensors: {cpu_time_ms(path):.1f} ms")
        write_distributed(folder / "distributed")
        milliseconds = cpu_time_ms(folder / "distributed")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{CHUNKS:,} chunks: {milliseconds / 1e3:.2f} s, {milliseconds / CHUNKS * 1e3:.0f} µs a chunk, {peak} MB peak"
    )


def write_distributed(
    folder: Path, num_chunks: int = CHUNKS, of_tensor: int = CHUNKS_OF_A_TENSOR, rows: int = 1
) -> None:
    """Write what torch does, without its planner, which would take minutes: chunks of some rows of 16 ones."""
    folder.mkdir()
    properties = TensorProperties(dtype=torch.float32)
    buffer = io.BytesIO()
    torch.save(torch.ones(rows, 16), buffer)
    chunk = buffer.getvalue()
    shape, place = torch.Size((of_tensor * rows, 16)), 0
    tensors, storage = {}, {}
    with (folder / "__0_0.distcp").open("wb") as file:
        for number in range(num_chunks // of_tensor):
            name, chunks = f"layers.{number}.weight", []
            for index in range(of_tensor):
                offset = torch.Size((index * rows, 0))
                chunks.append(ChunkStorageMetadata(offsets=offset, sizes=torch.Size((rows, 16))))
                storage[MetadataIndex(name, offset, index)] = _StorageInfo("__0_0.distcp", place, len(chunk))
                place += file.write(chunk)
            tensors[name] = TensorStorageMetadata(properties, shape, chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({**tensors}, {}, storage)))


def cpu_time_ms(path: Path) -> float:
    times = []
    for _ in range(TIMES):
        begin = time.process_time()
        open_checkpoint(path)
        times.append(time.process_time() - begin)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
