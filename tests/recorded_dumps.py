"""Dumps of one step, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainermon import PrecisionDebugger


def recorded(folder: Path, step: Callable[[], object], **settings: Any) -> Path:
    """Dump the functions that `step` calls, with their tensors, below `folder`; return the folder of the dump.

    `settings` are those of the task, `risk_level="ALL"`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    task = {"task": "tensor", "level": "L1", "dump_path": str(folder / "dump"), "tensor": settings}
    config.write_text(json.dumps(task))
    debugger = PrecisionDebugger(str(config))
    try:
        debugger.start()
        step()
        debugger.stop()
        debugger.step()
    finally:
        PrecisionDebugger.close()
    [path] = (folder / "dump").rglob("dump.json")
    return path.parent
