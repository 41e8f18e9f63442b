"""The first call in which the dumps of a step are apart from those of a reference, over all ranks.

Which calls differ, and which of them is to blame, is decided in `compare`; which of several was first, in `order`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

from trainermon.analysis.compare.comparison import CompareOptions, Comparison, compare_pair
from trainermon.analysis.compare.items import INPUT, PARAMETERS
from trainermon.analysis.compare.merging.places import PlacePair
from trainermon.analysis.compare.verdicts import ERROR, PASS, UNMATCHED, WARNING, CallResult, ResultRow
from trainermon.analysis.diagnosis.domains import Places
from trainermon.analysis.diagnosis.order import CallEvent, CommunicationCall, communications, earliest, receives
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import RawDump, load_raw, split_key
from trainermon.dump.files.records import BACKWARD, EXTRA, FORWARD


class DifferenceCause(IntEnum):
    """How a difference came into a call.

    `PARAMETER`: with a weight. `GIVEN`: with another input. `MADE`: in the call itself.
    """

    PARAMETER = 0
    GIVEN = 1
    MADE = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """The dump of one rank, compared with the reference's.

    Attributes:
        rank: The rank.
        pair: Where both dumps are.
        comparison: The result.
        raw: The rank's files as they stand.
        golden: The reference's files as they stand.
    """

    rank: int
    pair: PlacePair
    comparison: Comparison
    raw: RawDump
    golden: RawDump

    @property
    def batch_differs(self) -> bool | None:
        """Whether the model itself was given another batch than in the reference; None if a side does not tell."""
        ours, theirs = (_given(raw) for raw in (self.raw, self.golden))
        return ours != theirs if ours and theirs else None

    @property
    def differs(self) -> bool:
        """Whether any call differs by more than rounding."""
        return any(differing_rows(call) for call in self.comparison.calls)

    def parent(self, key: str) -> str | None:
        """Return the key of the call around the call `key`; None at the top."""
        found = self.raw.construct.get(key)
        parent = found[0] if isinstance(found, list) and found else found
        return parent if isinstance(parent, str) else None

    def noted(self, key: str) -> Mapping[str, int]:
        """Return the numbers that our own dumps note on a call beside msprobe's fields (`order`, `micro_step`, …).

        {} in others.
        """
        value = self.raw.data.get(key)
        found = value.get(EXTRA, {}) if isinstance(value, dict) else {}
        return found if isinstance(found, dict) else {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallDifference:
    """One call that may have been the first to differ from the reference.

    Attributes:
        rank: The rank's comparison.
        event: The call, and its position in the order of its rank.
        cause: How the difference came into it.
        call: What was compared of it.
        micro_step: Number of the forward and backward within the step; None: not known.
    """

    rank: RankComparison
    event: CallEvent
    cause: DifferenceCause
    call: CallResult
    micro_step: int | None

    @property
    def is_backward(self) -> bool:
        """Whether the call is a backward, or the entry of the gradients of parameters."""
        return self.call.target is not None and self.call.target.direction != FORWARD

    @property
    def api(self) -> str:
        """Key of the call, if it is that of a function; "" for a module's."""
        is_function = self.call.target is not None and not self.call.key.startswith("Module.")
        return self.call.key if is_function and not self.hooked_module else ""

    @property
    def module_key(self) -> str:
        """Key of the innermost module call that it is or belongs to, "" if the dump has none."""
        key: str | None = self.call.key
        while key is not None and not key.startswith("Module."):
            key = self.rank.parent(key)
        return key or ""

    @property
    def hooked_module(self) -> str:
        """Name of the module whose gradient, the very tensor that differs first, has a hook of the script's.

        "" if there is none.
        """
        if not self.is_backward or self.cause is not DifferenceCause.MADE:
            return ""
        entries = self.rank.raw.data
        value = entries.get(self.call.key, {})
        orders = {form.get("order") for form in _tensors(value.get("output")) if form.get("hooked")}
        standing = [
            split_key(key)[0]
            for key, other in entries.items()
            if key.startswith("Module.")
            and f".{BACKWARD}." in key
            and isinstance(other, dict)
            and orders & {form.get("order") for form in _tensors(other.get("input")) if form.get("hooked")}
        ]
        return max(standing, key=lambda name: name.count("."), default="")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DumpDifference:
    """How the dumps of one step differ from the reference's.

    Attributes:
        ranks: Every rank that was compared.
        origins: The calls whose difference none of the others explains.
        first: The earliest of them; None if nothing differs.
        is_tied: Whether communication was seen that orders the ranks.
        damaged: What could not be compared: the pair's step and rank, and why.
    """

    ranks: tuple[RankComparison, ...]
    origins: tuple[CallDifference, ...] = ()
    first: CallDifference | None = None
    is_tied: bool = False
    damaged: tuple[tuple[str, str], ...] = ()

    @property
    def one_sided(self) -> tuple[str, ...]:
        """Keys of the forward calls that only one side has, each once; a rank on which all are such is left out."""
        unmatched = [
            call.target or call.golden
            for rank in self.ranks
            if any(call.result != UNMATCHED for call in rank.comparison.calls)
            for call in rank.comparison.calls
            if call.result == UNMATCHED
        ]
        return tuple(dict.fromkeys(call.key for call in unmatched if call and call.direction == FORWARD))


def compare_dumps(pairs: Sequence[PlacePair], places: Places) -> DumpDifference:
    """Compare the dumps of all ranks of one step with the reference's.

    Return what differs, and which call was the first; what is damaged is told apart. `places` are the ranks' positions
    on the axes (tp, pp …).
    """
    read = [_compared_or_why(number, pair) for number, pair in enumerate(pairs)]
    ranks = tuple(one for one in read if isinstance(one, RankComparison))
    damaged = tuple(
        (pair.label or str(pair.target.directory), why)
        for pair, why in zip(pairs, read, strict=True)
        if isinstance(why, str)
    )
    candidates = {one.event: one for rank in ranks for one in _candidates(rank)}
    calls: dict[int, list[CommunicationCall]] = {rank.rank: communications(rank.raw, rank.rank) for rank in ranks}
    origins = tuple(candidates[event] for event in earliest(candidates, calls))
    first = min(origins, key=lambda one: _place(one, places), default=None)
    return DumpDifference(ranks=ranks, origins=origins, first=first, is_tied=any(calls.values()), damaged=damaged)


def differing_rows(call: CallResult) -> list[ResultRow]:
    """Return the rows (tensors, arguments) of a call that differ.

    Another dtype alone does not count, as in a run with another precision, nor does what a buffer held before it was
    filled.
    """
    fills = receives(call.key)
    return [
        row
        for row in call.rows
        if row.result in (ERROR, WARNING)
        and not any(text.startswith("error: dtype") for text in row.messages)
        and not (fills and row.target is not None and row.target.state == INPUT)
    ]


def _compared_or_why(number: int, pair: PlacePair) -> RankComparison | str:
    try:
        return _compared(number, pair)
    except DumpError as error:
        return str(error)


def _compared(number: int, pair: PlacePair) -> RankComparison:
    comparison = compare_pair(pair, CompareOptions())
    if all(call.result == UNMATCHED for call in comparison.calls):
        comparison = compare_pair(pair, CompareOptions(fuzzy=True))
    rank = pair.target.rank if pair.target.rank is not None else number
    return RankComparison(
        rank=rank,
        pair=pair,
        comparison=comparison,
        raw=load_raw(pair.target.directory),
        golden=load_raw(pair.golden.directory),
    )


def _given(raw: RawDump) -> list[Any]:
    """Return the statistics of what the model as a whole was given, call by call."""
    return [
        [_statistics(value.get(side)) for side in ("input_args", "input_kwargs")]
        for key, value in raw.root.items()
        if f".{FORWARD}." in key and isinstance(value, dict)
    ]


def _tensors(form: Any) -> Iterator[dict[str, Any]]:
    if isinstance(form, dict):
        if "dtype" in form:
            yield form
        else:
            for part in form.values():
                yield from _tensors(part)
    for part in form if isinstance(form, list) else ():
        yield from _tensors(part)


def _statistics(form: Any) -> Any:
    """Return a form of a dump without what need not agree between two runs: orders and files."""
    if isinstance(form, dict):
        return {name: _statistics(part) for name, part in form.items() if name not in ("order", "data_name", "hooked")}
    return [_statistics(part) for part in form] if isinstance(form, list) else form


def _candidates(rank: RankComparison) -> Iterator[CallDifference]:
    positions = {key: position for position, key in enumerate(rank.raw.data)}

    def found(call: CallResult, cause: DifferenceCause) -> CallDifference:
        place = -1 if cause is DifferenceCause.PARAMETER else order(call)
        micro_step = rank.noted(call.key).get("micro_step")
        return CallDifference(
            rank=rank, event=CallEvent(rank.rank, place, call.key), cause=cause, call=call, micro_step=micro_step
        )

    def order(call: CallResult) -> int:
        return rank.noted(call.key).get("order", positions.get(call.key, 0))

    calls = sorted((call for call in rank.comparison.calls if call.target and call.golden), key=order)
    weights = [call for call in calls if any(_is_weight(row) for row in differing_rows(call))]
    if weights:
        yield found(weights[0], DifferenceCause.PARAMETER)
        return
    differing = next((call for call in calls if differing_rows(call)), None)
    if differing is not None and not differing.blamed and _is_forward(differing) and _only_given(differing):
        yield found(differing, DifferenceCause.GIVEN)
        return
    yield from (found(call, DifferenceCause.MADE) for call in calls if call.blamed)
    if differing is not None and not any(call.blamed for call in calls):
        yield found(differing, DifferenceCause.GIVEN)


def _is_weight(row: ResultRow) -> bool:
    return row.target is not None and row.target.state == PARAMETERS and row.result != PASS


def _is_forward(call: CallResult) -> bool:
    return call.target is not None and call.target.direction == FORWARD


def _only_given(call: CallResult) -> bool:
    return any(row.target is not None and row.target.state == INPUT for row in differing_rows(call))


def _place(found: CallDifference, places: Places) -> tuple[int, ...]:
    """Return what candidates of several ranks are sorted by, where communication does not order them."""
    info = found.rank.raw.info
    stage = info.get("pipeline_stage") or places.get(found.event.rank, {}).get("pp", 0)
    stages = max(info.get("pipeline_size", 1), 1 + max((place.get("pp", 0) for place in places.values()), default=0))
    pipeline = found.rank.noted(found.call.key).get("stage", 0) * stages + stage
    return (
        found.cause is not DifferenceCause.PARAMETER,
        found.micro_step or 0,
        found.is_backward,
        -pipeline if found.is_backward else pipeline,
        found.event.order,
        found.event.rank,
    )
