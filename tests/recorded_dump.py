"""A dump of one step, recorded by PrecisionDebugger, which is closed for the next test whatever happens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from trainermon import PrecisionDebugger


def record_dump(folder: Path, run: Callable[[], Any], *, model: nn.Module | None = None, **options: Any) -> Path:
    """Record what `run` does as one step below `folder`, and return the folder of its files."""
    debugger = PrecisionDebugger(dump_path=str(folder), **options)
    try:
        debugger.start(model=model)
        run()
        debugger.stop()
        debugger.step()
    finally:
        PrecisionDebugger.close()
    [path] = folder.rglob("dump.json")
    return path.parent
