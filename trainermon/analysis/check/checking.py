"""Every call of a dump, forward and backward, judged against float64."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.judge import Judgement, Status, unjudged_writes, without_unknown_memory
from trainermon.accuracy.large import judge_any_call
from trainermon.accuracy.rules import ChosenRules, RuledVerdict
from trainermon.analysis.check.backward import GradientChecker
from trainermon.analysis.check.collectives import COLLECTIVE, CollectiveChecker
from trainermon.analysis.check.devices import run_again
from trainermon.analysis.check.gradients.again import gradients_again
from trainermon.analysis.check.inputs.masks import RepeatedMasks
from trainermon.analysis.check.inputs.options import DEFAULT_INPUTS, CallInputs
from trainermon.analysis.check.inputs.random_checks import RandomChecker
from trainermon.analysis.check.inputs.references import DEFAULT_REFERENCE, ReferenceChoice
from trainermon.analysis.check.readings import is_product, narrow_result, rounded
from trainermon.analysis.compare.merging.places import LonePlace, find_places, hollow_places
from trainermon.core.errors import DumpError
from trainermon.core.terminal.progress import Report, no_report
from trainermon.dump.files.reader import DAMAGED_ENTRY, is_spoiled, load_raw, parse_dump
from trainermon.dump.files.records import BACKWARD, DUMP_FILE, FORWARD, PARTIAL_FILE, EntryRecord
from trainermon.replay.drawn_calls import draws_the_same
from trainermon.replay.dumped_calls import DumpedCall, rebuild
from trainermon.replay.dumped_values import UNREADABLE

# Calls of modules consist of calls of functions.
_NOT_JUDGED = {"Module": "a module: its functions are judged"}
_WORTH_THREADS = 1 << 20
_FRAME = re.compile(r"File (.+), line (\d+)")
_GOOD = (Status.PASS, Status.SKIP)
_ORDER = (Status.ERROR, Status.WARNING, Status.PASS, Status.SKIP)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """The verdict on the forward or the backward of one call of a dump.

    Attributes:
        key: The key in the dump, `Functional.linear.0.forward`.
        judgements: One for each tensor it returned, in order; of a backward for each gradient of what the call took.
        skipped: Why it was not judged at all; "" if it was.
        slots: Of a backward what each judgement is of, `input.0` or `weight`; else none.
        line: The line of the user's code that called it, as in stack.json; "" if the dump has no stacks.
        rerun: Where the call was run again on a device: one judgement for each tensor that it returned there.
        cause: Why a result is wrong, as far as running it again tells; "" if none is or it was not run again.
    """

    key: str
    judgements: tuple[Judgement, ...] = ()
    skipped: str = ""
    line: str = ""
    slots: tuple[str, ...] = ()
    rerun: tuple[Judgement, ...] = ()
    cause: str = ""

    @property
    def status(self) -> Status:
        """The worst verdict of its tensors, then and again; SKIP if none was judged."""
        found = {judgement.status for judgement in (*self.judgements, *self.rerun)}
        return next((status for status in _ORDER if status in found), Status.SKIP)

    @property
    def is_backward(self) -> bool:
        """Whether it is the backward of a call."""
        return self.key.endswith(f".{BACKWARD}")

    @property
    def stem(self) -> str:
        """The call's key without direction, `Functional.linear.0`."""
        return self.key.removesuffix(f".{FORWARD}").removesuffix(f".{BACKWARD}")

    @property
    def worst(self) -> Judgement | None:
        """The first judgement that has the call's status; None if it was skipped as a whole."""
        every = (*self.judgements, *self.rerun)
        return next((judgement for judgement in every if judgement.status is self.status), None)

    def slot_of(self, judgement: Judgement) -> str:
        """Return the place of the tensor whose gradient was judged, then or again: `input.0`; "" of a forward."""
        for found in (self.judgements, self.rerun):
            for slot, one in zip(self.slots, found, strict=False):
                if one is judgement:
                    return slot
        return ""

    @property
    def reason(self) -> str:
        """Why it is not a pass, in a word or a sentence; "" of a pass."""
        found = self.skipped or (self.worst.reason if self.worst else "it returned no tensor")
        return "; ".join(filter(None, [found, self.cause]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallsCheck:
    """The verdicts on all calls of one dump, or on those that a device was given.

    Attributes:
        source: The folder of the dump, or the device.
        calls: In the order in which they ran; the backwards behind all forwards.
        reference: What they were judged against, as the command names it.
    """

    source: str
    calls: tuple[CheckedCall, ...]
    reference: str = DEFAULT_REFERENCE.source

    def of(self, status: Status) -> list[CheckedCall]:
        """Return the calls with this verdict, in the order in which they ran."""
        return [call for call in self.calls if call.status is status]

    @property
    def skipped(self) -> Counter[str]:
        """How many calls were not judged, by reason."""
        return Counter(call.reason for call in self.of(Status.SKIP))

    @property
    def num_unread(self) -> int:
        """How many calls were not judged because their entry, or a tensor, in the dump cannot be read."""
        return sum(number for why, number in self.skipped.items() if why.startswith((UNREADABLE, DAMAGED_ENTRY)))


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


def ranks_without_dump(path: Path, known: Sequence[Path]) -> list[LonePlace]:
    """Return the folders of ranks at and below `path` without a dump, of which none of the folders `known` has one."""
    places = [find_places(folder)[0] for folder in known]
    return hollow_places(path, {(place.step, place.rank) for place in places}) if path.is_dir() else []


@contextlib.contextmanager
def _threads_for(elements: int) -> Iterator[None]:
    """Compute with one thread where there is little to compute: more of them would wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if elements < _WORTH_THREADS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_dump(
    directory: Path,
    *,
    wanted: Callable[[str], bool] = lambda _: True,
    rules: ChosenRules | None = None,
    report: Report = no_report,
) -> CallsCheck:
    """Return the verdicts on the calls of the dump in `directory` whose keys are `wanted`.

    They are by `rules`, with msprobe's measures; None: by ours, without these. Cost: one to six runs of each forward
    and backward in float64 on one core. `report` is told after each call how many are done, and of how many.

    Raises:
        DumpError: There is no dump, or it is damaged.
    """
    checker = DumpChecker(directory, wanted=wanted, rules=rules)
    calls = []
    for number in range(len(checker.keys)):
        calls.append(checker.check(number))
        report(number + 1, len(checker.keys), "calls")
    return CallsCheck(source=str(directory), calls=tuple(calls))


class DumpChecker:
    """Judges the calls of one dump, each on its own, in any order.

    Args:
        directory: The folder of the dump.
        wanted: Chooses calls by key.
        rules: Whose rules give the verdict, see `check_dump`.
        max_elements: A call whose tensors have more elements together is not judged; None: no limit.
        device: Where forward calls are run again, and judged, too; "": nowhere.
        inputs: What calls are given there.
        reference: What forward calls are judged against.

    Attributes:
        keys: Keys of the chosen calls, in the order of `CallsCheck.calls`.

    Raises:
        DumpError: There is no dump, or it is damaged.
    """

    def __init__(  # noqa: PLR0913  # each is an option of the command
        self,
        directory: Path,
        *,
        wanted: Callable[[str], bool] = lambda _: True,
        rules: ChosenRules | None = None,
        max_elements: int | None = None,
        device: str = "",
        inputs: CallInputs = DEFAULT_INPUTS,
        reference: ReferenceChoice = DEFAULT_REFERENCE,
    ) -> None:
        raw = load_raw(directory)
        self._damaged: dict[str, str] = {}
        entries = parse_dump(directory, raw, self._damaged).entries
        forwards = [entry for entry in entries if entry.direction == FORWARD]
        chosen = [one for one in forwards if wanted(one.key)]
        chosen += [one for one in entries if one.direction == BACKWARD and wanted(one.key)]
        forwards = [one for one in forwards if not is_spoiled(one.key, self._damaged)]
        self._directory, self._data, self._entries = directory, raw.data, chosen
        self._rules, self._max_elements, self._device = rules, max_elements, device
        self._inputs, self._references = inputs, reference.opened(device)
        self._gradients = GradientChecker(directory, raw.data, forwards, rules=rules, references=self._references)
        self._collectives = CollectiveChecker(directory, raw.data)
        self._random = RandomChecker(directory, raw.data, forwards, device=device, inputs=inputs, judged=self._verdicts)
        self._masks = RepeatedMasks(forwards, self._rebuilt)
        self.keys = tuple(entry.key for entry in chosen)

    def check(self, number: int) -> CheckedCall:
        """Return the verdict on the call `number` of `keys`."""
        entry = self._entries[number]
        size = sum(tensor.count for tensor in (*entry.inputs, *entry.outputs))
        if self._max_elements is not None and size > self._max_elements:
            return self.lost(number, f"more than {self._max_elements:,} elements")
        with _threads_for(size), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says of calls like this one was said to the script
            return self._checked(entry)

    def lost(self, number: int, reason: str) -> CheckedCall:
        """Return the row of the call `number`, which is not judged for this reason."""
        entry = self._entries[number]
        return CheckedCall(key=entry.key, skipped=reason, line=_place(entry.stack[0]) if entry.stack else "")

    def _checked(self, entry: EntryRecord) -> CheckedCall:
        line = _place(entry.stack[0]) if entry.stack else ""
        reason = self._damaged.get(entry.key) or _NOT_JUDGED.get(entry.key.partition(".")[0])
        if entry.function.startswith("torch.nn.init."):
            reason = "random"
        if reason:
            return CheckedCall(key=entry.key, skipped=reason, line=line)
        try:
            found = self._found(entry)
        except DumpError as error:
            return CheckedCall(key=entry.key, skipped=str(error), line=line)
        except Exception as error:  # noqa: BLE001  # a damaged entry, or a type that this torch cannot compute with
            why = (str(error).splitlines() or [""])[0][:160]
            return CheckedCall(key=entry.key, skipped=f"cannot be judged: {type(error).__name__}: {why}", line=line)
        return dataclasses.replace(found, line=line)

    def _found(self, entry: EntryRecord) -> CheckedCall:
        if self._device and not entry.key.startswith(COLLECTIVE) and self._inputs.are_random(entry):
            judgements, slots, seed = self._random.worst(entry)
            cause = f"random inputs of seed {seed}" if any(one.status is Status.ERROR for one in judgements) else ""
            return CheckedCall(key=entry.key, judgements=judgements, slots=slots, cause=cause)
        return self._backward(entry) if entry.direction == BACKWARD else self._forward(entry)

    def _backward(self, entry: EntryRecord) -> CheckedCall:
        if entry.key.startswith(COLLECTIVE):
            raise DumpError("it communicates")
        stem = entry.key.removesuffix(f".{BACKWARD}")
        if stem not in self._gradients.stems:
            raise DumpError("the dump has no forward of it that can be read")
        named = self._gradients.judgements(stem)
        found = CheckedCall(key=entry.key, judgements=tuple(named.values()), slots=tuple(named))
        if not self._device:
            return found
        again = gradients_again(self._gradients, stem, named, self._device)
        return dataclasses.replace(found, rerun=again.judgements, cause=again.cause)

    def _forward(self, entry: EntryRecord) -> CheckedCall:
        if entry.key.startswith(COLLECTIVE):
            return CheckedCall(key=entry.key, judgements=tuple(self._collectives.judgements(entry.key)))
        dumped = self._rebuilt(entry)

        def judged(result: Any) -> list[Judgement]:
            return self._verdicts(dataclasses.replace(dumped, result=result), entry)

        found = judged(dumped.result)
        if all((one.status, one.reason) == (Status.SKIP, "random") for one in found) and draws_the_same(dumped):
            found = [dataclasses.replace(one, status=Status.PASS, reason="") for one in found]
        twin = self._masks.earlier(entry)
        if twin and all(one.status is Status.PASS for one in found):
            found = [
                dataclasses.replace(one, status=Status.ERROR, reason=f"drops what {twin} dropped") for one in found
            ]
        writes = (
            unjudged_writes(dumped.name, dumped.call) if any(one.status is not Status.SKIP for one in found) else []
        )
        if not self._device:
            return CheckedCall(key=entry.key, judgements=(*found, *writes))
        again = run_again(dumped, self._device, entry.autocast, found, judged)
        return CheckedCall(key=entry.key, judgements=(*found, *writes), rerun=again.judgements, cause=again.cause)

    def _rebuilt(self, entry: EntryRecord) -> DumpedCall:
        return rebuild(self._directory, self._data, entry, stand_ins=self._references.functions)

    def _verdicts(self, dumped: DumpedCall, entry: EntryRecord) -> list[Judgement]:
        review = self._rules.of_call(entry.key, dumped.call.tensors) if self._rules else None
        found = judge_result(self._references.judged(dumped), entry.autocast, review)
        return without_unknown_memory(dumped.name, found)


def _place(frame: object) -> str:
    """Return file and line of a frame of stack.json, `train.py:88`; the frame itself if it has another form."""
    found = _FRAME.match(str(frame))
    return f"{Path(found[1]).name}:{found[2]}" if found else str(frame).strip()


def judge_result(dumped: DumpedCall, autocast: str, review: RuledVerdict | None = None) -> list[Judgement]:
    """Return the verdicts on the result of a call; `autocast` is the type of it that the dump names.

    Where it names none, which msprobe's and older dumps never do, or the kernel may have rounded a number among the
    arguments, the best of several readings counts; msprobe has one.
    """
    if review is not None and review.is_literal:
        return judge_any_call(dumped.name, dumped.call, dumped.result, review=review)
    narrow = narrow_result(dumped)
    if narrow is not None and autocast == str(narrow):
        return judge_any_call(dumped.name, rounded(dumped.call, narrow), dumped.result, inside=narrow, review=review)
    best = judge_any_call(dumped.name, dumped.call, dumped.result, review=review)
    for call, inside in _other_readings(dumped, narrow, autocast):
        if all(one.status in _GOOD for one in best):
            break
        found = judge_any_call(dumped.name, call, dumped.result, inside=inside, review=review)
        best = max(best, found, key=_grade)  # the first one where they are equal
    return best


def _grade(judgements: Sequence[Judgement]) -> int:
    """Return how good the verdicts on a call are together; a reading that cannot be judged excuses nothing."""
    return sum(2 * (one.status is Status.PASS) + (one.status is Status.WARNING) for one in judgements)


def _other_readings(
    dumped: DumpedCall, narrow: torch.dtype | None, autocast: str
) -> Iterator[tuple[OperationCall, torch.dtype | None]]:
    """Yield the call as the kernel may have seen it, and the type that it may have computed in."""
    said = getattr(torch, autocast.removeprefix("torch."), None) if autocast else narrow
    if said is not None and is_product(dumped.name):
        yield rounded(dumped.call, said), said
    numbers = pytree.tree_leaves((list(dumped.call.args), dict(dumped.call.kwargs)))
    if any(type(number) is float for number in numbers):
        types = {tensor.dtype for tensor in dumped.call.tensors if tensor.is_floating_point()}
        for dtype in (*types, torch.float32):
            yield _with_rounded_numbers(dumped.call, dtype), None


def _with_rounded_numbers(call: OperationCall, dtype: torch.dtype) -> OperationCall:
    """Return the call with its Python numbers rounded to a type, as comparisons round them to their tensor's."""

    def rounded(value: object) -> object:
        return torch.tensor(value, dtype=torch.float64).to(dtype).item() if type(value) is float else value

    args, kwargs = pytree.tree_map(rounded, (list(call.args), dict(call.kwargs)))
    return call._replace(args=args, kwargs=kwargs)
