"""What a comparison of two checkpoints finds, tensor by tensor, and what that says about the whole in words."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import Any

from trainermon.analysis.checkpoint.pieces import tensors_are

_TRAINED_SHARE = 0.5  # of the tensors that differ, from which the whole was trained on
_TRAINED_MOST = 0.5  # relative distance up to which this is training, not another model

_FAR = 10  # times the typical ΔW/W: beyond it, a tensor stands out
_FEWEST_ALIKE = 4  # tensors that differ in the number of their layer, from which one may stand out of them
_RUNNING = re.compile(r"(?:^|[._])(?:running|moving)_(?:mean|var|variance)$")
NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
"""The number of a layer or an expert in a name."""


class WeightVerdict(str, Enum):
    """How a tensor of one checkpoint relates to that of the other; the worst is first."""

    DAMAGED = "damaged"
    NONFINITE = "nonfinite"
    SHAPE = "shape"
    DIFFERENT = "different"
    UNMATCHED = "unmatched"
    CLOSE = "close"
    ROUNDING = "rounding"
    IDENTICAL = "identical"


SAME = (WeightVerdict.IDENTICAL, WeightVerdict.ROUNDING, WeightVerdict.CLOSE)
"""Verdicts that are no difference."""
WORST = (WeightVerdict.DAMAGED, WeightVerdict.NONFINITE)
"""Verdicts that stand first, wherever in the model."""
WEIGHTS = "weights"
"""The kind of the tensors that the model has."""
OUTSIDE = "outside: "
"""How kinds of tensors begin that are neither the model's nor the optimizer's; behind it is their key, as `ema`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightComparison:
    """How one tensor differs.

    Numbers are over the elements that are finite on both sides, and None where nothing was compared.

    Attributes:
        kind: `WEIGHTS`, the kind of optimizer state, or `OUTSIDE` and a key.
        name: Its name in the first checkpoint, or in the second where it is there alone.
        other_name: Its name in the second; None if it is not there.
        is_ours: Whether the first has it.
        verdict: What it comes to.
        shapes: Of both sides; None of one that has it not.
        dtypes: Likewise.
        count: Number of elements compared.
        unequal: How many are not equal, to the last bit.
        relative: Norm of the difference over the larger norm: ΔW/W.
        cosine: Cosine of the angle between both.
        distance: Norm of the difference.
        largest: Largest difference of an element.
        largest_at: Its position.
        first_at: Position of the first element that differs.
        first_values: Both values there.
        ulps: Largest difference in units in the last place; None where numpy computed.
        norms: Norms of both.
        nonfinite: NaNs and infinities of the first, and of the second.
        rounded_to: The dtype that `rounding` means.
        hints: What may be the matter, in words.
        notes: What else a reader should know.
    """

    kind: str
    name: str
    other_name: str | None = None
    is_ours: bool = True
    verdict: WeightVerdict
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    dtypes: tuple[str | None, str | None]
    count: int = 0
    unequal: int | None = None
    relative: float | None = None
    cosine: float | None = None
    distance: float | None = None
    largest: float | None = None
    largest_at: tuple[int, ...] | None = None
    first_at: tuple[int, ...] | None = None
    first_values: tuple[Any, Any] | None = None
    ulps: int | None = None
    norms: tuple[float, float] | None = None
    nonfinite: tuple[int, int] = (0, 0)
    rounded_to: str | None = None
    hints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rests_on_one_number(self) -> bool:
        """Whether `rounding` is told from elements that are all alike, in a type that holds more than they show.

        Ones are what any weights near 1 give when they are rounded: that says little about where they come from.
        """
        if self.rounded_to is None or self.rounded_to in self.dtypes or not self.norms or not self.first_values:
            return False
        sides = zip(self.norms, self.first_values, strict=True)
        return any(math.isclose(norm * norm, self.count * value * value, rel_tol=1e-9) for norm, value in sides)


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A value other than a tensor that differs: the step, the learning rate, an argument.

    Attributes:
        key: Its place, as `args.lr`.
        ours: In the first, as text; None if it is not there.
        theirs: In the second.
        level: How grave that is, by the rules of `trainermon env compare`: `error`, `warning` or `info`.
        other_key: Its place in the second, where both have it; None: the same.
        is_array: Whether it is a numpy array of numbers that are no integers, as weights are.
    """

    key: str
    ours: str | None
    theirs: str | None
    level: str = "error"
    other_key: str | None = None
    is_array: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether one side alone has it."""
        return self.ours is None or self.theirs is None

    @property
    def label(self) -> str:
        """Its place, or both."""
        both = self.other_key is not None and self.other_key != self.key
        return f"{self.key} = {self.other_key}" if both else self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSide:
    """What was compared, of one side: where it is, and how it is written.

    Attributes:
        path: Where it is.
        format: As `Checkpoint` has it.
        step: On which it was saved; None if it does not say.
        layout: How it is split.
        num_unread: How many of its tensors are not read, and so not compared.
        alone: By kind, how many tensors it has where the other has none of that kind: these are not compared.
        notes: What its reader said.
    """

    path: str
    format: str
    step: int | None = None
    layout: Mapping[str, int] = field(default_factory=dict)
    num_unread: int = 0
    alone: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointComparison:
    """How two checkpoints differ.

    Attributes:
        ours: The first.
        theirs: The second.
        tensors: Each tensor, in the order of the first; those of the second alone at the end.
        values: What else differs: step, learning rate, arguments.
        notes: What a reader should know about the comparison.
    """

    ours: CheckpointSide
    theirs: CheckpointSide
    tensors: tuple[WeightComparison, ...]
    values: tuple[ValueDifference, ...] = ()
    notes: tuple[str, ...] = ()

    def counts(self) -> Counter[WeightVerdict]:
        """Return how many tensors have each verdict."""
        return Counter(tensor.verdict for tensor in self.tensors)

    def counts_by_group(self) -> dict[str, Counter[WeightVerdict]]:
        """Return how many tensors have each verdict: of the `weights`, the `optimizer`, and `others`, if there are."""
        found: dict[str, Counter[WeightVerdict]] = {}
        for tensor in self.tensors:
            group = WEIGHTS if tensor.kind == WEIGHTS else "optimizer" if _is_state(tensor) else "others"
            found.setdefault(group, Counter())[tensor.verdict] += 1
        return found

    def differing(self) -> list[WeightComparison]:
        """Return the tensors that are neither equal, rounded nor close, in order."""
        return [tensor for tensor in self.tensors if tensor.verdict not in SAME]

    def changed_values(self) -> list[ValueDifference]:
        """Return the values that both have, and that differ."""
        return [value for value in self.values if not value.is_alone]

    def outliers(self) -> dict[int, float]:
        """Return the places in `tensors` of those that stand out, the farthest first, and the ΔW/W that is typical.

        A tensor stands out if its ΔW/W is 10 times the median of those that have its name in other layers. Where there
        are fewer than three, that of all weights counts, if ΔW/W is more than a half and the tensor is no vector, which
        may begin at zero.
        """
        return _outliers(self.tensors)

    def ranked(self) -> list[WeightComparison]:
        """Return the tensors that are not identical, the gravest first, others in order.

        Damaged and nonfinite ones, then those that stand out, then all that differ, at last what is the same.
        """
        out = {number: rank for rank, number in enumerate(self.outliers())}
        odd = [
            (tensor.verdict in SAME, tensor.verdict not in WORST, out.get(number, len(out)), number)
            for number, tensor in enumerate(self.tensors)
            if tensor.verdict is not WeightVerdict.IDENTICAL
        ]
        return [self.tensors[number] for *_, number in sorted(odd)]

    def all_notes(self) -> list[str]:
        """Return the notes on both sides, with the side that each is on, and those on the comparison."""
        sides = (self.ours.notes, self.theirs.notes)
        said = {note: side for side, notes in zip(("second", "first"), sides[::-1], strict=True) for note in notes}
        both = set(sides[0]) & set(sides[1])
        texts = [f"{'both' if note in both else said[note]}: {note}" for note in dict.fromkeys(sides[0] + sides[1])]
        return [*texts, *self.notes]

    @property
    def headline(self) -> str:
        """What the comparison comes to, in one sentence."""
        return _headline(self)


def _outliers(tensors: Sequence[WeightComparison]) -> dict[int, float]:
    alike: dict[tuple[str, str], list[int]] = {}
    kinds: dict[str, list[float]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.relative is not None:
            alike.setdefault((tensor.kind, NUMBER.sub("*", tensor.name)), []).append(number)
            kinds.setdefault(tensor.kind, []).append(tensor.relative)
    of_kinds = {kind: median(changes) for kind, changes in kinds.items()}
    found: dict[int, float] = {}
    for (kind, _), numbers in alike.items():
        changes = [tensors[number].relative or 0.0 for number in numbers]
        has_many = len(numbers) >= _FEWEST_ALIKE
        typical = median(changes) if has_many else of_kinds[kind]
        least = 0.0 if has_many else _TRAINED_MOST
        for number, change in zip(numbers, changes, strict=True):
            is_judged = has_many or len(tensors[number].shapes[0] or ()) > 1
            if is_judged and typical and change > max(_FAR * typical, least) and tensors[number].verdict not in SAME:
                found[number] = typical
    return dict(sorted(found.items(), key=lambda item: -(tensors[item[0]].relative or 0.0)))


def _headline(found: CheckpointComparison) -> str:
    weights = [tensor for tensor in found.tensors if tensor.kind == WEIGHTS]
    compared = [tensor for tensor in weights if tensor.verdict is not WeightVerdict.UNMATCHED]
    if not compared:
        if weights or all(tensor.verdict is WeightVerdict.UNMATCHED for tensor in found.tensors):
            return _nothing(found)
        return "no weights in either" + (_of_all_else(found, "; ") or "; all else is the same")
    counts = Counter(tensor.verdict for tensor in weights)
    wrong = [tensor for tensor in weights if tensor.verdict not in SAME]
    tail = _of_all_else(found, ", but " if not wrong else "; ")
    if not wrong:
        unread = max(found.ours.num_unread, found.theirs.num_unread)
        return _same(weights, counts) + (f", as far as it is read: {tensors_are(unread)} not" if unread else "") + tail
    if counts[WeightVerdict.DAMAGED]:
        first = next(tensor for tensor in wrong if tensor.verdict is WeightVerdict.DAMAGED)
        said = f"cannot be compared in full: {counts[WeightVerdict.DAMAGED]:,} damaged, first {first.name}"
        others = [t for t in found.ranked() if t in wrong and t.verdict is not WeightVerdict.DAMAGED]
        return said + (f"; {len(others):,} more differ, first {others[0].name}" if others else "") + tail
    out = [found.tensors[number] for number in found.outliers() if found.tensors[number].kind == WEIGHTS]
    trained = _trained_on(_weights(found, [tensor for tensor in compared if tensor not in out]), counts, out)
    if trained:
        return _one_step(found) + trained + tail
    bad = counts[WeightVerdict.NONFINITE]
    said = f", NaN or Inf in {bad:,}" if bad else f", {_stand_out(out)}" if out else ""
    gravest = next(tensor for tensor in found.ranked() if tensor.kind == WEIGHTS)
    where = "" if out and not bad else f", first {gravest.name}"
    return f"differs in {len(wrong):,} of {len(weights):,} tensors{said}{where}" + tail


def _nothing(found: CheckpointComparison) -> str:
    for adapter, other in ((found.ours, found.theirs), (found.theirs, found.ours)):
        if adapter.format == "lora" and other.format != "lora":
            return (
                f"nothing to compare: {adapter.path} is a LoRA adapter, which changes a base model; give both:"
                f" trainermon checkpoint compare BASE+{adapter.path} {other.path}"
            )
    unmerged = next((tensor for tensor in found.tensors if ".lora_A." in tensor.name), None)
    if unmerged is not None:
        side = found.ours if unmerged.is_ours else found.theirs
        return (
            f"nothing to compare: {side.path} holds a base and a LoRA adapter that is not merged: merge it (PEFT:"
            " merge_and_unload), or save it alone (save_pretrained) and give BASE+ADAPTER"
        )
    return "nothing to compare: no tensor has a name that both have"


def _stand_out(tensors: list[WeightComparison]) -> str:
    worst = f"{tensors[0].name} (ΔW/W {tensors[0].relative or 0.0:.2%})"
    return f"{len(tensors):,} stand out, first {worst}" if len(tensors) > 1 else f"one stands out: {worst}"


def _same(weights: list[WeightComparison], counts: Counter[WeightVerdict]) -> str:
    bad = sum(1 for tensor in weights if any(tensor.nonfinite))
    tail = f", with NaN or Inf in {bad:,} tensors of both" if bad else ""
    if counts[WeightVerdict.CLOSE]:
        number = counts[WeightVerdict.CLOSE]
        return f"the same within the limit: {number:,} of {len(weights):,} tensors are close, not equal{tail}"
    if counts[WeightVerdict.ROUNDING]:
        targets = sorted({tensor.rounded_to for tensor in weights if tensor.rounded_to})
        return f"the same after rounding to {' and '.join(targets)}{tail}"
    return f"the same model{tail}"


def _trained_on(
    compared: list[WeightComparison], counts: Counter[WeightVerdict], out: list[WeightComparison]
) -> str | None:
    different = [tensor for tensor in compared if tensor.verdict is WeightVerdict.DIFFERENT and tensor.relative]
    others = sum(counts[verdict] for verdict in (WeightVerdict.SHAPE, WeightVerdict.NONFINITE, WeightVerdict.UNMATCHED))
    changes = [tensor.relative for tensor in different if tensor.relative is not None]
    if others or not different or len(different) < _TRAINED_SHARE * len(compared) or median(changes) > _TRAINED_MOST:
        return None
    moved = math.hypot(*(tensor.distance or 0.0 for tensor in different))
    size = math.hypot(*(max(tensor.norms) if tensor.norms else 0.0 for tensor in compared))
    most = max(different, key=lambda tensor: tensor.relative or 0.0)
    whole = moved / size if size else 0.0
    if out:
        return f"ΔW/W {whole:.2%}, but {_stand_out(out)}"
    return f"ΔW/W {whole:.2%}, largest in {most.name} ({most.relative or 0.0:.2%})"


def _one_step(found: CheckpointComparison) -> str:
    """Return what is known of how both came about: of two trainings at one step, neither is a later state."""
    same = found.ours.step == found.theirs.step is not None
    return f"trained apart, both at step {found.ours.step:,}: " if same else "trained on: "


def _weights(found: CheckpointComparison, compared: list[WeightComparison]) -> list[WeightComparison]:
    """Return the tensors without those that a training moves by other means than an optimizer.

    These are counters, running statistics, and what differs without a state of the optimizer where others have one.
    """
    state = {tensor.name for tensor in found.tensors if _is_state(tensor)} & {tensor.name for tensor in compared}
    return [
        tensor
        for tensor in compared
        if not _is_statistic(tensor) and (not state or tensor.name in state or tensor.verdict in SAME)
    ]


def are_integers(dtypes: Iterable[str | None]) -> bool:
    """Return whether all types are of whole numbers, which are equal or different, and never close."""
    return all(dtype is not None and dtype.startswith(("int", "uint", "bool")) for dtype in dtypes)


def _is_statistic(tensor: WeightComparison) -> bool:
    return are_integers(tensor.dtypes) or _RUNNING.search(tensor.name) is not None


def _is_state(tensor: WeightComparison) -> bool:
    return tensor.kind != WEIGHTS and not tensor.kind.startswith(OUTSIDE)


def _of_all_else(found: CheckpointComparison, lead: str) -> str:
    """Return what differs beside the weights; `lead` stands before tensors that are not the optimizer's, either."""
    outside = [f"; {text}" for text in _of_outside(found)]
    state = [tensor for tensor in found.tensors if _is_state(tensor)]
    wrong = [tensor for tensor in state if tensor.verdict not in SAME]
    bad = sum(1 for tensor in state if any(tensor.nonfinite))
    parts = [f"optimizer state differs in {len(wrong):,} of {len(state):,}"] if wrong else []
    kept = "of it" if wrong else f"{'tensor' if bad == 1 else 'tensors'} of the optimizer's state"
    parts += [f"NaN or Inf in {bad:,} {kept}"] if bad else []
    steps = (found.ours.step, found.theirs.step)
    if None not in steps and steps[0] != steps[1]:
        parts.append(f"steps {steps[0]:,} and {steps[1]:,}")
    values = [value for value in found.changed_values() if not value.is_array]
    if values:
        parts.append(f"{len(values):,} other {'value differs' if len(values) == 1 else 'values differ'}")
    said = "".join(outside) + (f"; {', '.join(parts)}" if parts else "") + _of_one_side(found)
    return lead + said.removeprefix("; ") if outside else said


def _of_one_side(found: CheckpointComparison) -> str:
    """Return how many tensors one side alone has, of what: no difference in them would be seen."""
    said = ""
    for ordinal, side in (("first", found.ours), ("second", found.theirs)):
        numbers: Counter[str] = Counter()
        for kind, number in side.alone.items():
            name = f"`{kind.removeprefix(OUTSIDE)}`" if kind.startswith(OUTSIDE) else "the optimizer's state"
            numbers[name] += number
        texts = [f"{number:,} {'tensor' if number == 1 else 'tensors'} of {name}" for name, number in numbers.items()]
        said += f"; only the {ordinal} has {', '.join(texts)}" if texts else ""
    return said


def _of_outside(found: CheckpointComparison) -> Iterator[str]:
    """Yield for each key beside the model and the optimizer how many of its tensors differ, and by how much."""
    for kind in dict.fromkeys(tensor.kind for tensor in found.tensors if tensor.kind.startswith(OUTSIDE)):
        tensors = [tensor for tensor in found.tensors if tensor.kind == kind]
        wrong = [tensor for tensor in tensors if tensor.verdict not in SAME]
        if not wrong:
            continue
        bad = sum(tensor.verdict is WeightVerdict.NONFINITE for tensor in wrong)
        changes = [tensor.relative for tensor in wrong if tensor.relative is not None]
        said = f", NaN or Inf in {bad:,}" if bad else ""
        said += f", ΔW/W up to {max(changes):.2%}" if changes else ""
        yield f"{len(wrong):,} of {len(tensors):,} tensors of `{kind.removeprefix(OUTSIDE)}` differ{said}"
    arrays = [value.label for value in found.changed_values() if value.is_array]
    if arrays:
        yield f"{len(arrays):,} numpy {'array differs' if len(arrays) == 1 else 'arrays differ'}, first {arrays[0]}"
