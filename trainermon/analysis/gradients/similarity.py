"""How similar the signs of two runs' gradients are: by parameter and step, whichever ranks held them.

Where both runs split a parameter in the same way, their bitmaps are compared as they lie. Where they do not (a TP 2 run
against a TP 1 run, ZeRO against plain), the parts of each are put together first, parameter by parameter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.analysis.gradients.runs import GradientRun, NonFiniteKinds, RankSigns
from trainermon.core.errors import DumpError
from trainermon.core.gradient_signs import GradientPart, SignBitmaps, StoredSigns
from trainermon.core.terminal.progress import counted
from trainermon.statistics.bitmaps import differences_of_files, sign_differences

NOTHING, ZERO, POSITIVE, NEGATIVE = -1, 0, 1, 2


class SignSimilarity(NamedTuple):
    """How many elements of a parameter (on `rank`, or None: over all ranks) have the same sign in both runs.

    Attributes:
        step: The step.
        name: The parameter.
        rank: The rank whose part it is; None where the parts of several were put together.
        num_elements: How many elements were compared.
        num_equal: Of them, how many are positive in both, negative in both, or neither in both.
        num_equal_positive: How many are greater than zero in both or in neither: msprobe's similarity.
        nonfinite: Which elements that are no finite numbers one run alone has, in words; "": none that is known.
        knows_infinities: Whether something that is stored tells of both runs if an element is infinite.
    """

    step: int
    name: str
    rank: int | None
    num_elements: int
    num_equal: int
    num_equal_positive: int
    nonfinite: str = ""
    knows_infinities: bool = True

    @property
    def share(self) -> float:
        """The share of elements with the same sign; 1 of a parameter without elements."""
        return self.num_equal / self.num_elements if self.num_elements else 1.0

    @property
    def share_positive(self) -> float:
        """The share that msprobe's files can show; 1 of a parameter without elements."""
        return self.num_equal_positive / self.num_elements if self.num_elements else 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Unmatched:
    """What was not compared: a parameter, rank or step that one run lacks, or that differs in shape; and why."""

    step: int
    name: str
    reason: str


def compare_signs(
    run: GradientRun, other: GradientRun, chooses: Callable[[str], bool] = lambda _name: True
) -> Iterator[SignSimilarity | Unmatched]:
    """Yield, step by step, how similar each parameter is, and what could not be compared.

    Cost: both runs' files are read once; memory for one parameter.

    Raises:
        DumpError: A file is damaged, or the runs have no step in common.
    """
    common = sorted(run.steps.keys() & other.steps.keys())
    if not common:
        raise DumpError(
            f"{run.path} has steps {_shown(run.steps)}, {other.path} has {_shown(other.steps)}: none in common"
        )
    for step in sorted(run.steps.keys() ^ other.steps.keys()):
        yield Unmatched(
            step, "all parameters", f"only the {'first' if step in run.steps else 'second'} run has the step"
        )
    for step in counted(common, len(common), "steps"):
        here = {rank: read() for rank, read in run.steps[step].items()}
        there = {rank: read() for rank, read in other.steps[step].items()}
        by_rank = run.is_by_rank or other.is_by_rank or _have_same_parts(here, there)
        yield from _by_rank(step, here, there, chooses) if by_rank else _as_whole(step, here, there, chooses)


def _shown(steps: Mapping[int, Any]) -> str:
    return f"{min(steps)} to {max(steps)}"


def _have_same_parts(here: Mapping[int, RankSigns], there: Mapping[int, RankSigns]) -> bool:
    if here.keys() != there.keys():
        return False
    return all(here[rank].parts is there[rank].parts or _places(here[rank]) == _places(there[rank]) for rank in here)


def _places(signs: RankSigns) -> dict[str, tuple[Any, ...]]:
    return {name: (part.shape, part.boxes, part.offset, part.length) for name, part in signs.parts.items()}


def _by_rank(
    step: int, here: Mapping[int, RankSigns], there: Mapping[int, RankSigns], chooses: Callable[[str], bool]
) -> Iterator[SignSimilarity | Unmatched]:
    for rank in sorted(here.keys() | there.keys()):
        if rank not in here or rank not in there:
            yield Unmatched(step, f"rank {rank}", f"only the {'first' if rank in here else 'second'} run has it")
            continue
        a, b = here[rank], there[rank]
        if a.stored is not None and b.stored is not None and a.stored.layout is b.stored.layout:
            yield from _with_nonfinite(_of_files(step, rank, (a.stored, b.stored), chooses), [a], [b])
            continue
        for name in _names([a], [b], chooses):
            if name not in a.parts or name not in b.parts:
                yield Unmatched(step, name, f"only the {'first' if name in a.parts else 'second'} run has it")
                continue
            part, other = a.parts[name], b.parts[name]
            if (part.shape, part.length) != (other.shape, other.length):
                yield Unmatched(step, name, f"shapes {list(part.shape)} and {list(other.shape)}")
            elif part.is_counted or other.is_counted:
                signed = a.is_signed and b.is_signed
                found = _of_bitmaps(step, part, rank, (a.bitmaps[name], b.bitmaps[name]), signed=signed)
                yield from _with_nonfinite([found], [a], [b])


def _with_nonfinite(
    found: Iterable[SignSimilarity | Unmatched], here: Sequence[RankSigns], there: Sequence[RankSigns]
) -> Iterator[SignSimilarity | Unmatched]:
    """Yield what was found with what is known of NaN and infinities, of which signs alone say nothing."""
    for one in found:
        if isinstance(one, SignSimilarity):
            ours, theirs = (_nonfinite_of(one.name, side) for side in (here, there))
            knows = None not in (ours.has_inf, theirs.has_inf)
            yield one._replace(nonfinite=_on_one_side(ours, theirs), knows_infinities=knows)
        else:
            yield one


def _nonfinite_of(name: str, side: Sequence[RankSigns]) -> NonFiniteKinds:
    held = [signs.nonfinite.get(name, NonFiniteKinds()) for signs in side if name in signs.parts]
    return NonFiniteKinds(
        *(True if True in told else None if None in told else False for told in zip(*held, strict=True))
    )


def _on_one_side(ours: NonFiniteKinds, theirs: NonFiniteKinds) -> str:
    """Return what one run alone has, in words.

    >>> _on_one_side(NonFiniteKinds(False, True), NonFiniteKinds(False, False))
    'Inf in the first run alone'
    """
    words = []
    for kind, pair in (("NaN", (ours.has_nan, theirs.has_nan)), ("Inf", (ours.has_inf, theirs.has_inf))):
        if pair in ((True, False), (False, True)):
            words.append(f"{kind} in the {'first' if pair[0] else 'second'} run alone")
    return ", ".join(words)


def _of_files(
    step: int, rank: int, pair: tuple[StoredSigns, StoredSigns], chooses: Callable[[str], bool]
) -> Iterator[SignSimilarity]:
    """Yield the similarities of two files that hold the same parts."""
    layout = pair[0].layout
    counts = differences_of_files(pair[0].words, pair[1].words, layout.num_words).tolist()
    for part, (positive, either) in zip(layout.parts.values(), counts, strict=True):
        if part.is_counted and chooses(part.name):
            length = part.length
            yield SignSimilarity(step, part.name, rank, length, length - either, length - positive)


def _names(here: Sequence[RankSigns], there: Sequence[RankSigns], chooses: Callable[[str], bool]) -> list[str]:
    """Return the chosen names of both sides, in the order of the first."""
    names = dict.fromkeys(name for signs in (*here, *there) for name in signs.parts)
    return [name for name in names if chooses(name)]


def _of_bitmaps(
    step: int, part: GradientPart, rank: int, pair: tuple[SignBitmaps, SignBitmaps], *, signed: bool
) -> SignSimilarity:
    one, two = pair
    if signed:
        differ = sign_differences((one.positive, one.negative), (two.positive, two.negative))
    else:
        differ = sign_differences((one.positive, one.positive), (two.positive, two.positive))
    return SignSimilarity(
        step=step,
        name=part.name,
        rank=rank,
        num_elements=part.length,
        num_equal=part.length - differ.either,
        num_equal_positive=part.length - differ.positive,
    )


def _as_whole(
    step: int, here: Mapping[int, RankSigns], there: Mapping[int, RankSigns], chooses: Callable[[str], bool]
) -> Iterator[SignSimilarity | Unmatched]:
    sides = list(here.values()), list(there.values())
    for name in _names(*sides, chooses):
        wholes = [whole_signs(name, side) for side in sides]
        if wholes[0] is None or wholes[1] is None:
            yield Unmatched(step, name, f"only the {'second' if wholes[0] is None else 'first'} run has it")
        elif wholes[0].shape != wholes[1].shape:
            yield Unmatched(step, name, f"shapes {list(wholes[0].shape)} and {list(wholes[1].shape)}")
        else:
            yield from _with_nonfinite(_of_wholes(step, name, wholes[0].ravel(), wholes[1].ravel()), *sides)


def _of_wholes(
    step: int, name: str, one: npt.NDArray[np.int8], two: npt.NDArray[np.int8]
) -> Iterator[SignSimilarity | Unmatched]:
    both = (one != NOTHING) & (two != NOTHING)
    num_both = int(np.count_nonzero(both))
    if num_both < one.size:
        missing = one.size - num_both
        yield Unmatched(step, name, f"{missing:,} of {one.size:,} elements are on no rank whose file is there")
    yield SignSimilarity(
        step=step,
        name=name,
        rank=None,
        num_elements=num_both,
        num_equal=int(np.count_nonzero((one == two) & both)),
        num_equal_positive=int(np.count_nonzero(((one == POSITIVE) == (two == POSITIVE)) & both)),
    )


def whole_signs(name: str, side: Sequence[RankSigns]) -> npt.NDArray[np.int8] | None:
    """Return the sign of every element of a parameter, put together from the parts of all ranks; None without any.

    int8 in the parameter's shape: `POSITIVE`, `NEGATIVE`, `ZERO` (zero or NaN), or `NOTHING` where no rank holds it.

    Raises:
        DumpError: Ranks disagree on the parameter's shape.
    """
    held = [signs for signs in side if name in signs.parts]
    if not held:
        return None
    whole = np.full(held[0].parts[name].shape, NOTHING, np.int8)
    for signs in held:
        part = signs.parts[name]
        if part.shape != whole.shape:
            raise DumpError(f"{name}: ranks hold parts of shapes {list(whole.shape)} and {list(part.shape)}")
        _fill(whole, part, signs.bitmaps[name])
    return whole


def _fill(whole: npt.NDArray[np.int8], part: GradientPart, bitmaps: SignBitmaps) -> None:
    sizes = [math.prod(box.sizes) for box in part.boxes]
    flat = np.full(sum(sizes), NOTHING, np.int8)
    values = _bits(bitmaps.positive, part.length) * np.int8(POSITIVE) + _bits(bitmaps.negative, part.length) * np.int8(
        NEGATIVE
    )
    flat[part.offset : part.offset + part.length] = values
    local = list(part.boxes[0].sizes)
    if local:
        local[part.dim] = sum(box.sizes[part.dim] for box in part.boxes)
    tensor = flat.reshape(local)
    begin = 0
    for box in part.boxes:
        here = [slice(None)] * len(local)
        if local:
            here[part.dim] = slice(begin, begin + box.sizes[part.dim])
            begin += box.sizes[part.dim]
        there = tuple(slice(start, start + size) for start, size in zip(box.starts, box.sizes, strict=True))
        known = tensor[tuple(here)]
        whole[there] = np.where(known == NOTHING, whole[there], known)


def _bits(words: npt.NDArray[np.uint64], length: int) -> npt.NDArray[np.int8]:
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little", count=length).view(np.int8)
