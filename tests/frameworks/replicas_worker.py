"""One rank: trains in several ways with copies of parameters on the ranks, some with one bit flipped in one copy."""

import contextlib
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainermon import TrainerMon

# The bit flips behind step 3, so it is there on step 4, whose checksums are taken. A copy that is overwritten in each
# step, by a gather or from the main copy, holds it on that step only.
STEPS, INTERVAL, FLIPPED_AT = 9, 2, 3
FAULTY_RANK = 1
CONFIG = {"wg_distribution": False, "checksum_interval": INTERVAL, "agent": {"start": False}}


def flip(parameter, bit=3):
    """Flip one bit of one element."""
    words = parameter.detach().view(-1).view({2: torch.int16, 4: torch.int32}[parameter.element_size()])
    words[words.numel() // 2] ^= 1 << bit


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.norm = nn.Embedding(16, 24), nn.Linear(24, 48), nn.LayerNorm(48)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(48, 16)

    def forward(self, tokens):
        return self.last(self.drop(self.norm(torch.tanh(self.first(self.embed(tokens))))))


def train_torch(name, *, dtype=torch.float32, zero=False, flipped=False, skipped_sync=False):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net().to(dtype))
    optimizer: torch.optim.Optimizer
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of its own use of torch.jit

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + dist.get_rank())  # other data and other dropout on every rank
    with TrainerMon(CONFIG | {"run_id": name}) as monitor:
        monitor.set_monitor(model, 1, optimizer)
        for step in range(STEPS):
            tokens = torch.randint(0, 16, (8, 5))
            lonely = skipped_sync and step >= FLIPPED_AT
            with model.no_sync() if lonely else contextlib.nullcontext():
                nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if flipped and step == FLIPPED_AT and dist.get_rank() == FAULTY_RANK:
                flip(model.module.first.weight)


def train_megatron(name, *, flipped=None, main=False, apart=False, activations=False, **options):
    from tests.frameworks.megatron import gpt  # takes seconds, so only where it is asked for

    layout = gpt.Layout(dropout=0.1, **options)
    gpt.initialise(layout)
    chunks, optimizer = gpt.build(layout)
    with TrainerMon(CONFIG | {"run_id": name, "xy_distribution": activations}) as monitor:
        monitor.set_monitor(chunks, gpt.MICRO_BATCHES, optimizer)
        for step in range(STEPS):
            if apart and step == FLIPPED_AT:
                torch.manual_seed(dist.get_rank())  # other dropout on every rank, of what all ranks hold
            gpt.train_step(layout, chunks, optimizer, step)
            if flipped and step == FLIPPED_AT and dist.get_rank() == FAULTY_RANK:
                [found] = [p for n, p in chunks[0].named_parameters() if n.endswith(flipped)]
                flip(found.main_param if main else found)


BF16, FP16 = torch.bfloat16, torch.float16
QKV, NORM = "layers.1.self_attention.linear_qkv.weight", "layers.0.input_layernorm.weight"
VARIANTS = {
    "ddp": partial(train_torch),
    "ddp-bf16": partial(train_torch, dtype=BF16),
    "zero-redundancy": partial(train_torch, zero=True),
    "ddp-flipped": partial(train_torch, flipped=True),
    "ddp-bf16-flipped": partial(train_torch, flipped=True, dtype=BF16),
    "ddp-skipped-sync": partial(train_torch, skipped_sync=True),
    "megatron": partial(train_megatron),
    "megatron-bf16": partial(train_megatron, dtype=BF16),
    "megatron-distributed-bf16": partial(
        train_megatron, dtype=BF16, distributed_optimizer=True, overlap=True, overlap_gather=True
    ),
    "megatron-tp": partial(train_megatron, tp=2),
    "megatron-tp-sp": partial(train_megatron, tp=2, sp=True, dtype=BF16, distributed_optimizer=True),
    "megatron-pp": partial(train_megatron, pp=2),
    "megatron-ep": partial(train_megatron, ep=2, experts=4),
    "megatron-flipped": partial(train_megatron, flipped=QKV),
    "megatron-bf16-main-flipped": partial(train_megatron, flipped=QKV, main=True, dtype=BF16),
    "megatron-distributed-bf16-flipped": partial(train_megatron, flipped=QKV, dtype=BF16, distributed_optimizer=True),
    "megatron-tp-flipped": partial(train_megatron, flipped=NORM, tp=2),
    "megatron-tp-activations-flipped": partial(train_megatron, flipped=NORM, tp=2, activations=True),
    "megatron-tp-dropout-apart": partial(train_megatron, apart=True, tp=2, activations=True),
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for variant in sys.argv[2:]:  # the first is a folder, of which it needs nothing
        VARIANTS[variant](variant)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's own end is not always clean
