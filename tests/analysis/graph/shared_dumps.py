"""Dumps of two tensor parallel ranks, of which one has a fault in what both should have alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.analysis.compare.dumps import forward, tensor, write_dump


def write_shared(folder: Path) -> tuple[Path, Path]:
    """Write the dumps of both sides; return their folders.

    A norm has the same on both ranks, a linear layer behind it half of the features each. On rank 1 of the target the
    norm is wrong, and so is what follows, there and, as the ranks add up what they have, in the last layer of both.
    """
    for side, fault in (("target", 3.0), ("golden", 1.0)):
        for rank in range(2):
            normed, part = (fault if rank else 1.0), (1.0 + rank) * (fault if rank else 1.0)
            data = {
                "Module.norm.LayerNorm.forward.0": forward(tensor(value=7.0), output=tensor(value=normed)),
                "Module.fc1.Linear.forward.0": forward(tensor(value=normed), output=tensor(value=part)),
                "Module.fc2.Linear.forward.0": forward(tensor(value=part), output=tensor(value=5.0 * fault)),
            }
            info: dict[str, Any] = {"rank": rank, "layout": {"axes": {"tp": [rank, 2], "pp": [0, 1]}}}
            write_dump(folder / side / "step0" / f"rank{rank}", data, info=info)
    return folder / "target", folder / "golden"
