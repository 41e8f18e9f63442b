"""Two ranks dump steps of Megatron-Core trainings in several layouts; see `grid`."""

import functools
import itertools

import torch
import torch.distributed as dist

from tests.frameworks.dump.grid import Case, main
from tests.frameworks.megatron.gpt import Layout
from tests.frameworks.replay.megatron_worker import build

RECOMPUTED = {
    "none": {},
    # Megatron's own checkpoint, which is a reentrant one
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective"},
}
LAYOUTS = {
    "tp": Layout(tp=2, dropout=0.1),
    "sp": Layout(tp=2, sp=True, distributed_optimizer=True, dropout=0.1),
    "pp": Layout(pp=2, dropout=0.1),
    "vpp": Layout(pp=2, vpp=2, layers=4, dtype=torch.bfloat16, dropout=0.1),
    "dp": Layout(distributed_optimizer=True, overlap=True, overlap_gather=True, fused=True, dropout=0.1),
    "ep": Layout(ep=2, experts=4, dropout=0.1),
    "cp": Layout(cp=2, dropout=0.1),
}


def cases():
    """Yield every layout and way of recomputation, with every level."""
    for kind, recomputed in itertools.product(LAYOUTS, RECOMPUTED):
        made = functools.partial(build, LAYOUTS[kind], RECOMPUTED[recomputed])
        for level in ("L0", "L1", "mix"):
            yield Case(name=f"{kind}-{recomputed}-{level}", build=made, level=level)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(list(cases()))
