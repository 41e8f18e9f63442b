"""Which line of the user's code runs now, in short."""

from __future__ import annotations

import re
from pathlib import Path

from trainermon.dump.facts.stacks import innermost_line


def innermost_place() -> str:
    """Return file and line of the user's code that runs now, `train.py:88`; "" if there is none."""
    frame = innermost_line()
    found = re.match(r"File (.+), line (\d+)", frame)
    return f"{Path(found[1]).name}:{found[2]}" if found else frame
