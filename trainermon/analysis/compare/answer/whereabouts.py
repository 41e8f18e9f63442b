"""Where a call is in the model and in the code: the module with its class, its line, and the user's line behind it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.items import MODULE
from trainermon.analysis.compare.verdicts import CallResult
from trainermon.dump.files.reader import split_key, stack_of
from trainermon.dump.files.sources import SourceFrame, is_library, parse_frame

_FRAMEWORK = re.compile(r"/(torch|mindspore)/")


def placed_in(comparison: Comparison, result: CallResult) -> str:
    """Return where a call is, as it follows on its name; "" if nothing is known.

    As ` in layers.1.norm (RMSNorm), modeling.py:66; from train.py:195`. The lines are the target's: of a call that the
    golden dump alone has none are known.
    """
    lines = lines_of(comparison.stacks, result.key) if result.target is not None else ""
    return f"{module_around(comparison, result)}{f', {lines}' if lines else ''}"


def module_around(comparison: Comparison, result: CallResult) -> str:
    """Return the module that makes a call, ` in layers.1.norm (RMSNorm)`; "" for a module itself, and without any."""
    call = result.target or result.golden
    if call is None or call.family == MODULE or not call.scope:
        return ""
    parent = comparison.parents.get(call.key) if result.target is not None else None
    if parent is not None:
        return f" in {call.scope} ({split_key(parent)[1]})"
    sides = (side for one in comparison.calls for side in (one.golden, one.target) if side is not None)
    around = next((one.name for one in sides if one.family == MODULE and one.path == call.scope), call.scope)
    class_name = around[len(call.scope) + 1 :]
    return f" in {call.scope}" + (f" ({class_name})" if class_name else "")


def lines_of(stacks: Mapping[str, Sequence[str]], key: str) -> str:
    """Return the line that made the call `key`, and if that is a library's the innermost of the user's own.

    As `modeling.py:66; from train.py:195`; of a backward, the lines of its forward. The framework's own lines, which
    lead from every module to its forward, are passed over. "" if `stacks` do not tell.
    """
    known = [frame for frame in map(parse_frame, stack_of(stacks, key)) if frame is not None]
    frames = [frame for frame in known if not (is_library(frame.file) and _FRAMEWORK.search(frame.file))] or known
    own = next((frame for frame in frames if not is_library(frame.file)), None)
    if not frames:
        return ""
    return _line(frames[0]) + (f"; from {_line(own)}" if own is not None and own is not frames[0] else "")


def _line(frame: SourceFrame) -> str:
    return f"{PurePath(frame.file).name}:{frame.line}"
