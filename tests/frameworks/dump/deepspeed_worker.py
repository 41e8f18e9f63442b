"""Two ranks dump steps of DeepSpeed trainings at every stage of ZeRO; see `grid`."""

import functools
import itertools

from tests.frameworks.deepspeed.engines import start
from tests.frameworks.dump.grid import Case, main
from tests.frameworks.replay.deepspeed_worker import build

CHECKPOINTING = {"none": None, "reentrant": True, "nonreentrant": False}


def cases():
    """Yield every stage and way of recomputation, with every level."""
    for stage, dtype, recomputed in itertools.product(range(4), ("fp32", "bf16"), CHECKPOINTING):
        made = functools.partial(build, stage, dtype, 1.0, CHECKPOINTING[recomputed])
        for level in ("L0", "L1", "mix"):
            yield Case(name=f"{stage}-{dtype}-{recomputed}-{level}", build=made, level=level)


if __name__ == "__main__":
    start()
    main(list(cases()))
