"""The states of the generators of random numbers, as hashes, and the draws that were recorded."""

from __future__ import annotations

import csv
import hashlib
import random
import sys
from pathlib import Path
from typing import Any

import torch

MAX_DRAWS = 100_000


def random_states() -> dict[str, str]:
    """Return a hash of the state of each generator by name: Python's, numpy's, torch's, those of the devices."""
    found = {"python": _digest(repr(random.getstate()).encode())}
    if "numpy" in sys.modules:
        import numpy as np

        kind, keys, *rest = np.random.get_state(legacy=True)
        found["numpy"] = _digest(f"{kind}{rest}".encode() + np.asarray(keys).tobytes())
    found["torch"] = _of_tensor(torch.get_rng_state())
    found["torch.initial_seed"] = str(torch.initial_seed())
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = _of_tensor(torch.cuda.get_rng_state())
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        found["npu"] = _of_tensor(npu.get_rng_state())
    tracker = sys.modules.get("megatron.core.tensor_parallel.random")
    if tracker is not None:
        states = tracker.get_cuda_rng_tracker().get_states()
        found.update({f"megatron.{name}": _of_tensor(state) for name, state in states.items() if _is_tensor(state)})
    return found


def read_draws(path: Path) -> list[dict[str, str]]:
    """Return the draws in the file of a `RandomLog`, the first 100,000: name, checksum, stack."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        draws: list[dict[str, Any]] = [
            {"name": row["api_name"], "crc32": row["crc32"], "stack": row["stack"]}
            for _, row in zip(range(MAX_DRAWS), rows, strict=False)
        ]
    return draws


def _is_tensor(state: object) -> bool:
    return isinstance(state, torch.Tensor)


def _of_tensor(state: torch.Tensor) -> str:
    return _digest(bytes(state.cpu().numpy()))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
