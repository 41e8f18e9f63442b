"""Two ranks dump steps of FSDP1 and FSDP2 trainings; see `grid`."""

import functools
import itertools

import torch.distributed as dist

from tests.frameworks.dump.grid import Case, main
from tests.frameworks.replay.fsdp_worker import BF16, build, fsdp1, fsdp2

CHECKPOINTING = {"none": None, "reentrant": True, "nonreentrant": False}
WRAPS = {
    "fsdp2": fsdp2,
    "fsdp2bf16": BF16,
    "fsdp1": functools.partial(fsdp1, use_orig_params=True),
    "fsdp1flat": functools.partial(fsdp1, use_orig_params=False),
}


def cases():
    """Yield every way to shard and of recomputation, with every level."""
    for kind, recomputed in itertools.product(WRAPS, CHECKPOINTING):
        made = functools.partial(build, WRAPS[kind], checkpointing=CHECKPOINTING[recomputed])
        for level in ("L0", "L1", "mix"):
            yield Case(name=f"{kind}-{recomputed}-{level}", build=made, level=level)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(list(cases()))
