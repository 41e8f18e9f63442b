"""vLLM: digests of what its workers hold, taken where the weights are, and sent to the trainer as a few kilobytes.

    LLM(..., worker_extension_cls="trainermon.rl.vllm.WeightDigests")
    for text in llm.collective_rpc("trainermon_weights", kwargs={"version": 12, "engine": "vllm-3"}):
        watch.take(text)

Used of a worker are `model_runner.model`, `rank` and `parallel_config`, which vLLM has had since 0.6.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainermon.core.values import as_plain
from trainermon.rl.files import read_sent
from trainermon.rl.holding import hold
from trainermon.rl.names import hf_to_vllm
from trainermon.rl.weights import wholes_of


class WeightDigests:
    """What vLLM adds to its workers if it is their `worker_extension_cls`."""

    def trainermon_weights(self, version: int, engine: str = "engine", folder: str = "") -> str:
        """Return the digests of the worker's weights, see `weights_of`."""
        return weights_of(self, version, engine, folder)


def weights_of(worker: Any, version: int, engine: str = "engine", folder: str = "") -> str:
    """Return as JSON the digests of what a worker holds; for `Watch.take`. Waits for the device.

    Args:
        worker: vLLM's, which `collective_rpc` passes as the first argument.
        version: The version that it should have.
        engine: Its name.
        folder: The watch's folder, if the worker sees it: then the parts of fused tensors are told apart, too.
    """
    size = int(worker.parallel_config.tensor_parallel_size)
    held = hold(
        worker.model_runner.model.named_parameters(),
        version=version,
        engine=engine,
        name_map=hf_to_vllm,
        sent=wholes_of(read_sent(Path(folder), version)) if folder else None,
        shard=int(worker.rank) % size,
        num_shards=size,
    )
    return json.dumps(as_plain(held))
