"""Dumps one step of one Megatron GPT in several layouts, with the same weights and data in all.

    megatron_worker.py FOLDER

writes `FOLDER/NAME/step0/rank<R>` for every variant.
"""

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from tests.frameworks.megatron import gpt
from tests.frameworks.megatron.gpt import Layout
from trainermon import PrecisionDebugger

PLAIN = Layout(tied=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A gated layout has no biases; a fault multiplies what the module `spoiled` gives on rank 1."""

    layout: Layout = PLAIN
    level: str = "L0"
    in_turn: bool = False
    spoiled: str = ""


TP = dataclasses.replace(PLAIN, tp=2)
GATED = dataclasses.replace(PLAIN, gated=True)
TP_GATED = dataclasses.replace(GATED, tp=2)
PP_GATED = dataclasses.replace(GATED, pp=2)
VARIANTS = {
    "whole": Variant(),
    "whole-gated": Variant(layout=GATED),
    "whole-mix": Variant(layout=GATED, level="mix"),
    "whole-in-turn": Variant(in_turn=True),
    "tp": Variant(layout=TP),
    "tp-sequence": Variant(layout=dataclasses.replace(TP, sp=True)),
    "tp-gated": Variant(layout=TP_GATED),
    "tp-mix": Variant(layout=TP_GATED, level="mix"),
    "pp": Variant(layout=PP_GATED),
    "dp": Variant(),
    "tp-part-fault": Variant(layout=TP, spoiled="decoder.layers.1.mlp.linear_fc1"),
    "tp-copy-fault": Variant(layout=TP, spoiled="decoder.layers.1.input_layernorm"),
    "pp-fault": Variant(layout=PP_GATED, spoiled="decoder.layers.0.mlp.linear_fc1"),
}


def dump(folder, variant):
    layout = variant.layout
    with contextlib.ExitStack() as stack:
        if layout.gated:
            without_biases = without_biases_of(gpt.transformer_config)
            stack.enter_context(mock.patch.object(gpt, "transformer_config", without_biases))
        if variant.in_turn:
            stack.enter_context(mock.patch.object(gpt, "MICRO_BATCHES", 4))
            stack.enter_context(mock.patch.object(gpt, "micro_batches", batches_of_two_replicas))
        gpt.initialise(layout)
        chunks, optimizer = gpt.build(layout)
        if variant.spoiled and dist.get_rank() == 1:
            chunks[0].module.get_submodule(variant.spoiled).register_forward_hook(spoil)
        PrecisionDebugger(dump_path=folder, level=variant.level, task="tensor")
        PrecisionDebugger.start(chunks[0])
        gpt.train_step(layout, chunks, optimizer, 0)
        PrecisionDebugger.stop()
        PrecisionDebugger.close()


def without_biases_of(make):
    return lambda layout: dataclasses.replace(make(layout), add_bias_linear=False)


def batches_of_two_replicas(_layout, step):
    """Yield in turn what two replicas would have got."""
    for i in range(4):
        tokens, labels = gpt.tokens_of(step, i % 2, i // 2)
        yield tokens, torch.arange(gpt.SEQUENCE)[None].expand(gpt.BATCH, -1), labels, torch.ones_like(tokens).float()


def spoil(_module, _inputs, outputs):
    return (outputs[0] * 1.5, *outputs[1:]) if isinstance(outputs, tuple) else outputs * 1.5


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, variant in VARIANTS.items():
        dump(Path(sys.argv[1]) / name, variant)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
