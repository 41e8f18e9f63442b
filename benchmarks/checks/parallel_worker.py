"""A rank of a sound step of Megatron-Core's GPT, split over two ranks, with a dump in the folder that is given."""

from __future__ import annotations

import sys

import torch

from benchmarks.diagnosis.megatron_jobs import build
from trainermon import PrecisionDebugger


def main(folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    job = build("tp2", 0, experts=False)
    debugger = PrecisionDebugger(dump_path=folder, level="L1", task="tensor")
    debugger.start()
    job.step(lambda _loss: None)
    debugger.stop()
    debugger.step()
    PrecisionDebugger.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
