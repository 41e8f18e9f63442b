"""Every forward call of a dump, judged against float64."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.families import Family, family_of
from trainermon.accuracy.judge import Judgement, Status, judge_call
from trainermon.accuracy.reference import unit_roundoff
from trainermon.analysis.compare.progress import Report, no_report
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import load_raw, parse_dump
from trainermon.dump.files.records import DUMP_FILE, FORWARD, PARTIAL_FILE, EntryRecord
from trainermon.replay.dumped_calls import DumpedCall, rebuild

# Calls of modules consist of calls of functions, and what a collective gives depends on other ranks.
_NOT_JUDGED = {"Module": "a module: its functions are judged", "Distributed": "it communicates"}
_GOOD = (Status.PASS, Status.SKIP)
_ORDER = (Status.ERROR, Status.WARNING, Status.PASS, Status.SKIP)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """The verdict on one forward call of a dump.

    Attributes:
        key: The call's key in the dump, `Functional.linear.0.forward`.
        judgements: One for each tensor it returned, in order.
        skipped: Why it was not judged at all; "" if it was.
        line: The line of the user's code that called it, as in stack.json; "" if the dump has no stacks.
    """

    key: str
    judgements: tuple[Judgement, ...] = ()
    skipped: str = ""
    line: str = ""

    @property
    def status(self) -> Status:
        """The worst verdict of its tensors; SKIP if none was judged."""
        found = {judgement.status for judgement in self.judgements}
        return next((status for status in _ORDER if status in found), Status.SKIP)

    @property
    def worst(self) -> Judgement | None:
        """The first judgement that has the call's status; None if it was skipped as a whole."""
        return next((judgement for judgement in self.judgements if judgement.status is self.status), None)

    @property
    def reason(self) -> str:
        """Why it is not a pass, in a word or a sentence; "" of a pass."""
        return self.skipped or (self.worst.reason if self.worst else "it returned no tensor")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallsCheck:
    """The verdicts on all forward calls of one dump, or on those that a device was given.

    Attributes:
        source: The folder of the dump, or the device.
        calls: In the order in which they ran.
    """

    source: str
    calls: tuple[CheckedCall, ...]

    def of(self, status: Status) -> list[CheckedCall]:
        """Return the calls with this verdict, in the order in which they ran."""
        return [call for call in self.calls if call.status is status]

    @property
    def skipped(self) -> Counter[str]:
        """How many calls were not judged, by reason."""
        return Counter(call.reason for call in self.of(Status.SKIP))


def dumps_below(path: Path) -> list[Path]:
    """Return the folders at and below `path` that hold a dump of one rank and step, sorted; or that of a dump.json.

    Raises:
        DumpError: There is none.
    """
    if path.name == DUMP_FILE and path.is_file():
        return [path.parent]
    found = sorted({file.parent for name in (DUMP_FILE, PARTIAL_FILE) for file in path.rglob(name)})
    if not found:
        raise DumpError(f"{path} holds no dump: expected a {DUMP_FILE} in it, or in a folder of steps and ranks")
    return found


def check_dump(
    directory: Path, *, wanted: Callable[[str], bool] = lambda _: True, report: Report = no_report
) -> CallsCheck:
    """Return the verdicts on the forward calls of the dump in `directory` whose keys are `wanted`.

    Cost: one to six runs of each call in float64 on one core. `report` is told after each call how many are done, and
    of how many.

    Raises:
        DumpError: There is no dump, or it is damaged.
    """
    raw = load_raw(directory)
    entries = [one for one in parse_dump(directory, raw).entries if one.direction == FORWARD and wanted(one.key)]
    calls = []
    for number, entry in enumerate(entries, 1):
        calls.append(_checked(directory, raw.data, entry))
        report(number, len(entries), "calls")
    return CallsCheck(source=str(directory), calls=tuple(calls))


def _checked(directory: Path, data: dict[str, object], entry: EntryRecord) -> CheckedCall:
    line = entry.stack[0].strip() if entry.stack else ""
    reason = _NOT_JUDGED.get(entry.key.partition(".")[0])
    if reason:
        return CheckedCall(key=entry.key, skipped=reason, line=line)
    try:
        dumped = rebuild(directory, data, entry)
    except DumpError as error:
        return CheckedCall(key=entry.key, skipped=str(error), line=line)
    return CheckedCall(key=entry.key, judgements=tuple(_judged(dumped, entry.autocast)), line=line)


def _judged(dumped: DumpedCall, autocast: str) -> list[Judgement]:
    """Return the verdicts on a call; `autocast` is the type of it that the dump names.

    Where it names none, which msprobe's and older dumps never do, the better of two readings counts.
    """
    narrow = _narrow_result(dumped)
    if narrow is not None and autocast == str(narrow):
        return judge_call(dumped.name, _rounded(dumped.call, narrow), dumped.result, inside=narrow)
    as_given = judge_call(dumped.name, dumped.call, dumped.result)
    if narrow is None or not _is_product(dumped.name) or all(one.status in _GOOD for one in as_given):
        return as_given
    rounded = judge_call(dumped.name, _rounded(dumped.call, narrow), dumped.result, inside=narrow)
    ranks = [sum(_ORDER.index(one.status) for one in judgements) for judgements in (as_given, rounded)]
    return rounded if ranks[1] > ranks[0] else as_given


def _is_product(name: str) -> bool:
    return family_of(name) is Family.CONTRACTION or name == "scaled_dot_product_attention"


def _narrow_result(dumped: DumpedCall) -> torch.dtype | None:
    """Return the type of a call's result if some of what it was given is finer, as autocast leaves it; else None."""
    made = [leaf for leaf in pytree.tree_leaves(dumped.result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    given = [unit_roundoff(tensor.dtype) for tensor in dumped.call.tensors if tensor.is_floating_point()]
    if not made or not given or min(given) >= unit_roundoff(made[0].dtype):
        return None
    return made[0].dtype


def _rounded(call: OperationCall, dtype: torch.dtype) -> OperationCall:
    def narrowed(value: object) -> object:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    args, kwargs = pytree.tree_map(narrowed, (list(call.args), dict(call.kwargs)))
    return call._replace(args=args, kwargs=kwargs)
