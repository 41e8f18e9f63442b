"""Runs mindstudio-probe's checker on a machine without accelerator: its device is the CPU, as is its golden result.

PYTHON benchmarks/checks/msprobe_on_cpu.py DUMP_JSON OUT     # in an environment with mindstudio-probe
"""

import sys

import torch
from msprobe.pytorch.api_accuracy_checker.acc_check import acc_check, acc_check_utils


def main() -> None:
    dump, output = sys.argv[1:]
    for module in (acc_check, acc_check_utils):
        module.current_device = "cpu"
    acc_check.is_gpu = True
    torch.cuda.is_available = lambda: True
    torch.cuda.empty_cache = torch.cuda.set_device = lambda *_: None
    sys.argv = ["acc_check", "-api_info", dump, "-o", output]
    acc_check._acc_check()


if __name__ == "__main__":
    main()
