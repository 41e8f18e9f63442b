"""One rank: trains all runs that are named on the command line, one after the other."""

import importlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from benchmarks.detection.cases import Case
from benchmarks.detection.record import train

if __name__ == "__main__":
    folder, cases = Path(sys.argv[1]), [Case(**fields) for fields in json.loads(Path(sys.argv[2]).read_text())]
    if cases[0].split.startswith("zero"):
        importlib.import_module("tests.frameworks.deepspeed.engines").start()
    else:
        dist.init_process_group("gloo")
    for case in cases:
        train(case, folder)
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's own end is not always clean
