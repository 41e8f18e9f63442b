"""Records what msprobe's `config_check` writes: two packs, and its comparison of them.

    env -i PATH=/usr/bin:/bin HOME=/somewhere PYTHON tests/analysis/environment/record_with_msprobe.py

PYTHON is one with `mindstudio-probe==26.2.0` and torch. The two sides differ in variables, a flag, the learning rate,
one weight, the order of the samples and one draw.
"""

import json
import os
import random
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent / "recorded"
SIDES = {
    "bench": ({"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "4"}, "--lr 1e-4 --bf16 --adam-beta2 0.95"),
    "cmp": ({"CUDA_LAUNCH_BLOCKING": "1", "OMP_NUM_THREADS": "8"}, "--lr 2e-4 --bf16 --adam-beta2 0.95"),
}
KEPT_PACKAGES = ("torch", "numpy", "packaging")


def record(side):
    """Write the pack of one side."""
    import torch
    from msprobe.core.config_check import ConfigChecker

    ConfigChecker.apply_patches("pytorch")
    variables, options = SIDES[side]
    os.environ.update(variables)
    torch.manual_seed(1)
    last = torch.nn.Linear(3, 2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), last)
    inputs = torch.arange(32.0).reshape(8, 4)
    random.random()
    if side == "cmp":
        with torch.no_grad():
            last.weight[0, 0] += 1
        inputs = inputs.flip(0)
        torch.rand(2)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.sh"
        script.write_text(f"torchrun --nproc_per_node 2 train.py {options}\n")
        pack = str(Path(folder) / "pack.zip")
        ConfigChecker(model, [str(script)], pack)
        model(inputs)
        keep(pack, FOLDER / f"{side}.zip")


def keep(pack, path):
    """Copy a pack, with few packages and short stacks, at a fixed time: recorded again, it is the same file."""
    with zipfile.ZipFile(pack) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name in sorted(source.namelist()):
            content = source.read(name).decode()
            if name == "pip":
                content = "".join(line for line in content.splitlines(True) if line.split("=")[0] in KEPT_PACKAGES)
            target.writestr(zipfile.ZipInfo(name), content.replace(str(Path(__file__).parents[3]), "/repository"))


def compare():
    """Write what msprobe finds in the two packs, sheet by sheet."""
    import openpyxl
    from msprobe.core.config_check import ConfigChecker

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        ConfigChecker.compare(str(FOLDER / "bench.zip"), str(FOLDER / "cmp.zip"), str(out))
        content = {}
        for sheet in openpyxl.load_workbook(out / "result.xlsx"):
            columns, *rows = (list(row) for row in sheet.iter_rows(values_only=True))
            content[sheet.title] = {"columns": columns, "data": rows}
    (FOLDER / "result.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    if len(sys.argv) > 1:
        record(sys.argv[1])
    else:
        for each in SIDES:
            if os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, each]):
                sys.exit(1)
        compare()
        shutil.rmtree("config_check_pack.zip", ignore_errors=True)
