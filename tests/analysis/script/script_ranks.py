"""Two ranks that do what the scripts of collectives in the folder that is given do, and judge what they get."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    lines = []
    for script in sorted(folder.glob("*/Distributed.*.py")):
        does = runpy.run_path(str(script))
        inputs, expected = (torch.load(script.with_name(f"{name}.pt"))[rank] for name in ("inputs", "expected"))
        made = does["communicate"](rank, inputs)
        is_right, said = does["judge"](script.stem, made, expected)
        lines += [f"{is_right} {line}" for line in said]
    (folder / f"rank{rank}.txt").write_text("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
