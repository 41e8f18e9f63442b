"""Every backward of a dump: is each gradient the sum of what the calls that take the tensor give back in float64?"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall, gives
from trainermon.accuracy.families import Family
from trainermon.accuracy.fused import COMPOSITIONS
from trainermon.accuracy.judge import UNKNOWN_MEMORY, Judgement, Review, Status, family_of_call, judge_gradient
from trainermon.accuracy.large import LargeBackward, judge_large_gradient, may_be_large
from trainermon.accuracy.products import BackwardCall, GradientSum, LastStep, VectorProduct
from trainermon.accuracy.randomness import determined
from trainermon.accuracy.rules import ChosenRules
from trainermon.analysis.check.gradients.per_call import Reading, compared_alone, judge_alone, numbers_of
from trainermon.analysis.check.inputs.references import DEFAULT_REFERENCE, OpenedReferences
from trainermon.analysis.check.readings import computed_in, rounded
from trainermon.core.errors import DumpError
from trainermon.dump.files.records import BACKWARD, EXTRA, FORWARD, EntryRecord
from trainermon.replay.dumped_calls import DumpedCall, load_form, rebuild

_KEPT_PRODUCTS = 8
_NOT_JUDGED = {
    Family.RANDOM: "random",
    Family.UNDEFINED: "undefined",
    Family.GAUGE: "its result is not unique",
}
# The likelier culprit among calls that take the same tensor is the one that does more.
_EFFORT = (Family.EXACT, Family.ROUNDED, Family.FUNCTION, Family.SUM)


class Taken(NamedTuple):
    """A tensor that a call takes.

    Attributes:
        stem: The call's key without direction.
        number: The number of the tensor among its arguments, keywords last.
    """

    stem: str
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class _RecordedBackward:
    """What a dump has of the backward of a call: JSON forms of gradients, of its results and, by number, of arguments.

    `slots` are the places of all tensors among the arguments. With `is_per_call`, as msprobe records, `arguments` is by
    the number of the tensor among those that the last operation of the call takes, and `wanted` has the numbers of the
    tensors that were differentiated.
    """

    stem: str
    slots: Sequence[str]
    results: Sequence[Any]
    arguments: Mapping[int, Mapping[str, Any]]
    extra: Mapping[str, Any]
    wanted: Sequence[int] = ()
    is_per_call: bool = False

    @property
    def refusal(self) -> str:
        """Why it is not judged; "" if it can be."""
        if self.extra.get("mixed"):
            return "its gradients are of several backward passes"
        if self.extra.get("entangled"):
            return "one of its results is made of another"
        if any(form.get("hooked") for form in self.results if form):
            return "a hook of the script's may have changed the gradient of its result"
        if not any(self.results):
            return "no gradient arrived at its results" if self.results else "its results have no gradient"
        return ""


class CallSource(Protocol):
    """Interface of what has the calls whose backwards are judged, and the gradients of their results."""

    def call(self, entry: EntryRecord) -> DumpedCall:
        """Return a forward call."""

    def gradient(self, form: Mapping[str, Any]) -> Tensor:
        """Return the gradient that a JSON form stands for."""


class RecordedCalls:
    """The calls and gradients in the files of the dump in `directory`.

    `data` is what dump.json has, by key; `stand_ins` are functions by name for those that this torch does not have.
    """

    def __init__(
        self, directory: Path, data: Mapping[str, Any], stand_ins: Mapping[str, Callable[..., Any]] = COMPOSITIONS
    ) -> None:
        self._directory, self._data, self._stand_ins = directory, data, stand_ins

    def call(self, entry: EntryRecord) -> DumpedCall:
        """Return a forward call, as it was recorded."""
        return rebuild(self._directory, self._data, entry, stand_ins=self._stand_ins)

    def gradient(self, form: Mapping[str, Any]) -> Tensor:
        """Return the gradient that a JSON form stands for."""
        return load_form(self._directory, form)


class GradientChecker:
    """Judges the backwards of one dump; keeps what was computed for the calls judged last.

    Args:
        directory: The dump's folder.
        data: What dump.json has, by key.
        entries: The forward entries of the dump.
        rules: Whose rules give the verdicts; None: ours.
        source: Where calls and gradients come from; None: from the files of the dump.
        references: What is differentiated in place of recorded functions; None: what stands for fused operators.

    Attributes:
        stems: The forward entries by key without direction.
    """

    def __init__(  # noqa: PLR0913  # what a dump is, and how it is judged
        self,
        directory: Path,
        data: Mapping[str, Any],
        entries: Sequence[EntryRecord],
        *,
        rules: ChosenRules | None = None,
        source: CallSource | None = None,
        references: OpenedReferences | None = None,
    ) -> None:
        self._references = references if references is not None else DEFAULT_REFERENCE.opened("")
        self._directory, self._data, self._rules = directory, data, rules
        self._source = source if source is not None else RecordedCalls(directory, data, self._references.functions)
        self.stems = {entry.key.removesuffix(f".{FORWARD}"): entry for entry in entries}
        self._products: OrderedDict[str, VectorProduct] = OrderedDict()
        self._newest_large: tuple[str, LargeBackward | None] | None = None
        self._judged: dict[Any, tuple[Judgement, str]] = {}
        self._takers: dict[Any, list[Taken]] = defaultdict(list)
        for stem in self.stems:
            for identity, taken in self._taken_by(stem):
                self._takers[identity].append(taken)

    def judgements(self, stem: str) -> dict[str, Judgement]:
        """Return a judgement for each gradient that the backward of the call `stem` gave back, by place: `input.0`.

        Raises:
            DumpError: It cannot be judged.
        """
        backward = self._recorded(stem)
        if backward.refusal:
            raise DumpError(backward.refusal)
        if backward.is_per_call:
            return self._judged_alone(backward)
        if self._large(stem) is None:
            self._product(stem)
        found = {number: self._judgement(backward, number) for number in sorted(backward.arguments)}
        if not any(found.values()):
            raise DumpError("it gives back what it takes" if found else "no gradient arrived at its arguments")
        return {backward.slots[number]: one for number, one in found.items() if one is not None}

    def product(self, stem: str) -> VectorProduct:
        """Return what the backward of the call `stem` gives in float64.

        Raises:
            DumpError: The dump has no such backward, or it cannot be run again.
        """
        if not isinstance(self._data.get(f"{stem}.{BACKWARD}"), dict):
            raise DumpError(f"{self._directory} has no backward of {stem}")
        refusal = self._recorded(stem).refusal
        if refusal:
            raise DumpError(refusal)
        return self._product(stem)

    def backward_call(self, stem: str) -> BackwardCall:
        """Return the backward of the call `stem` by the function that was recorded, whatever it is judged against.

        Raises:
            DumpError: As of `product`.
        """
        backward, dumped = self.product(stem).backward, self.recorded(stem)
        if family_of_call(dumped.name, dumped.call) is Family.RANDOM:
            return backward._replace(call=dumped.call)
        return backward._replace(call=backward.call._replace(function=dumped.call.function))

    def recorded(self, stem: str) -> DumpedCall:
        """Return the forward call `stem`, as it was recorded."""
        return self._source.call(self.stems[stem])

    def compared(self, stem: str) -> list[tuple[Tensor, Tensor]]:
        """Return each gradient that the backward of the call `stem` gave back, and what it should be in float64.

        A tensor that several calls take has one gradient: the sum of what they give back.

        Raises:
            DumpError: One of them cannot be computed.
        """
        backward = self._recorded(stem)
        given = {number: self._source.gradient(form) for number, form in sorted(backward.arguments.items())}
        if backward.is_per_call:
            return compared_alone(given, self._readings(backward))
        parts = {number: self._parts(self._takers_of(backward, number)) for number in given}
        return [(one, GradientSum(parts[number], one).results[0]) for number, one in given.items()]

    def slots(self, stem: str) -> Sequence[str]:
        """Return the places of all tensors that the call `stem` takes, `input.0` or `weight`."""
        return self._recorded(stem).slots

    def gradients(self, stem: str) -> tuple[Tensor, ...]:
        """Return the recorded gradients of the tensors that a call takes; () if others' are added to one of them."""
        backward = self._recorded(stem)
        if backward.is_per_call:
            return self._alone(backward)
        alone = [Taken(stem, number) for number in backward.arguments]
        shared = [
            one for one in alone if self._takers.get(self._identity(backward, one.number), [one]) != [one]
        ] or any(_refusal(form, [Taken(stem, 0)]) for form in backward.arguments.values())
        forms = [] if shared else [backward.arguments[number] for number in sorted(backward.arguments)]
        return tuple(self._source.gradient(form) for form in forms)

    def _judgement(self, backward: _RecordedBackward, number: int) -> Judgement | None:
        form = backward.arguments[number]
        identity = self._identity(backward, number)
        takers = self._takers_of(backward, number)
        if Taken(backward.stem, number) not in takers:
            return None
        if identity is None or identity not in self._judged:
            given = self._source.gradient(form)
            judged = self._judged_sum(given, form, takers)
            if identity is not None:
                self._judged[identity] = judged
        judgement, culprit = judged if identity is None else self._judged[identity]
        if judgement.status in (Status.PASS, Status.SKIP) or culprit == backward.stem:
            return judgement
        return dataclasses.replace(judgement, status=Status.SKIP, reason=f"see {culprit}.{BACKWARD}: the same tensor")

    def _takers_of(self, backward: _RecordedBackward, number: int) -> list[Taken]:
        """Return every call whose backward adds to the gradient of the argument `number`."""
        identity = self._identity(backward, number)
        return self._takers[identity] if identity is not None else [Taken(backward.stem, number)]

    def _judged_sum(self, given: Tensor, form: Mapping[str, Any], takers: Sequence[Taken]) -> tuple[Judgement, str]:
        """Return the verdict on the gradient of a tensor, and the key of the call that is most likely at fault."""
        refusal = _refusal(form, takers)
        if refusal:
            return Judgement(status=Status.SKIP, reason=refusal), ""
        try:
            givers = [taken for taken in takers if self._gives_back(taken)]
            projected = self._judged_large(given, givers)
            if projected is not None:
                return _among(projected, givers[0].stem, takers), givers[0].stem
            products = self._parts(givers)
        except DumpError as error:
            return Judgement(status=Status.SKIP, reason=str(error)), ""
        total = GradientSum(products, given)
        culprit = max(takers, key=self._effort).stem
        coarsest = max(product.backward.coarsest for product, _ in products)
        tensors = self._product(culprit).backward.call.tensors
        review = self._rules.of_call(f"{culprit}.{BACKWARD}", tensors) if self._rules else None
        judgement = judge_gradient(given, total, coarsest, review)
        if judgement.status is Status.ERROR and given.shape == total.results[0].shape:
            explained = total.culprit(given)
            culprit = culprit if explained is None else givers[explained].stem
        if judgement.status is Status.ERROR and "consumers" not in form and "order" in form:
            return Judgement(status=Status.SKIP, reason="the dump does not say what else took the same tensor"), ""
        return _among(judgement, culprit, takers), culprit

    def _large(self, stem: str) -> LargeBackward | None:
        """Return the backward of a call that is a product of matrices too large for float64; None: it is none."""
        entry, name = self.stems[stem], stem.split(".")[1]
        given, made = ([tensor.count for tensor in one] for one in (entry.inputs, entry.outputs))
        if not may_be_large(name, given, made) or self._recorded(stem).is_per_call:
            return None
        if self._newest_large is None or self._newest_large[0] != stem:
            backward, dumped = self._backward_call(stem)
            self._newest_large = stem, LargeBackward.of(dumped.name, backward)
        return self._newest_large[1]

    def _judged_large(self, given: Tensor, takers: Sequence[Taken]) -> Judgement | None:
        """Return the verdict on the gradient of a tensor that is a sum of products, one of them a large one, else None.

        Raises:
            DumpError: A gradient is missing.
        """
        known = [taken for taken in takers if any(self._recorded(taken.stem).results)]
        if any(self._recorded(taken.stem).refusal for taken in known):
            return None
        backwards = [self._large(taken.stem) for taken in known]
        if not backwards or None in backwards:
            return None
        terms = [(backward, taken.number) for backward, taken in zip(backwards, known, strict=True) if backward]
        return judge_large_gradient(given, terms)

    def _parts(self, takers: Sequence[Taken]) -> list[tuple[VectorProduct, int]]:
        """Return what each call that takes a tensor gives back, with the tensor's number among its own.

        Raises:
            DumpError: Of one of them it cannot be computed.
        """
        products = []
        for taken in takers:
            if not self._gives_back(taken):
                continue
            backward = self._recorded(taken.stem)
            if backward.refusal:
                raise DumpError(f"{taken.stem} takes it, too: {backward.refusal}")
            try:
                products.append((self._product(taken.stem), taken.number))
            except DumpError as error:
                raise DumpError(f"{taken.stem} takes it, too: {error}") from error
        return products

    def _gives_back(self, taken: Taken) -> bool:
        """Return whether a gradient arrived at the results of a call; of several passes that is not known."""
        backward = self._recorded(taken.stem)
        return any(backward.results) or bool(backward.extra.get("mixed"))

    def _effort(self, taken: Taken) -> int:
        family = self._product(taken.stem).backward.family if any(self._recorded(taken.stem).results) else Family.EXACT
        return _EFFORT.index(family) if family in _EFFORT else len(_EFFORT)

    def _product(self, stem: str) -> VectorProduct:
        """Return what the backward of a call gives in float64.

        Raises:
            DumpError: It cannot be run again, or a gradient is missing.
        """
        if stem not in self._products:
            self._products[stem] = self._run(stem)
            if len(self._products) > _KEPT_PRODUCTS:
                self._products.popitem(last=False)
        self._products.move_to_end(stem)
        return self._products[stem]

    def _run(self, stem: str, kind: type[VectorProduct] = VectorProduct) -> VectorProduct:
        backward, dumped = self._backward_call(stem)
        if backward.family in _NOT_JUDGED:
            raise DumpError(_NOT_JUDGED[backward.family])
        try:
            product = kind(backward)
        except Exception as error:  # whatever a foreign kernel raises: there is no common type
            why = (str(error).splitlines() or [type(error).__name__])[0][:160]
            raise DumpError(f"cannot be run in float64: {why}") from error
        made = [leaf for leaf in pytree.tree_leaves(dumped.result) if isinstance(leaf, Tensor)]
        if not product.chooses_as(made):
            raise DumpError("of equal elements it chose others")
        if dumped.name.rstrip("_") == "as_strided" and not gives(dumped.call, made):
            raise DumpError(UNKNOWN_MEMORY)
        return product

    def _backward_call(self, stem: str) -> tuple[BackwardCall, DumpedCall]:
        """Return the backward of a call with the gradients of its results, and the call.

        Raises:
            DumpError: It cannot be built, or a gradient is missing.
        """
        entry, backward = self.stems[stem], self._recorded(stem)
        dumped = self._references.differentiated(self._source.call(entry))
        call, family = self._repeatable(dumped, backward)
        made = [leaf for leaf in pytree.tree_leaves(dumped.result) if isinstance(leaf, Tensor)]
        gradients = [self._source.gradient(form) if form else None for form in backward.results]
        gradients += [None] * (len(made) - len(gradients))
        inside = computed_in(dumped, entry.autocast)
        call = rounded(call, inside) if inside is not None else call
        wanted = backward.wanted if backward.is_per_call else backward.arguments
        return BackwardCall(call, gradients, family, wanted, inside), dumped

    def _judged_alone(self, backward: _RecordedBackward) -> dict[str, Judgement]:
        """Return the verdicts on what msprobe recorded, as what the last operation of the call gave back.

        A device may compute the call in other steps than the CPU; in a single one, it gives back the gradients of what
        the call takes.
        """
        if not backward.arguments:
            raise DumpError("no gradient arrived at its arguments")

        def review(product: VectorProduct) -> Review | None:
            tensors = product.backward.call.tensors
            return self._rules.of_call(f"{backward.stem}.{BACKWARD}", tensors) if self._rules else None

        given = {number: self._source.gradient(form) for number, form in backward.arguments.items()}
        return judge_alone(given, backward.slots, self._readings(backward), review)

    def _readings(self, backward: _RecordedBackward) -> list[Reading]:
        return [partial(self._run, backward.stem, kind) for kind in (LastStep, VectorProduct)]

    def _alone(self, backward: _RecordedBackward) -> tuple[Tensor, ...]:
        """Return the recorded gradients of what a call takes; () if msprobe recorded others."""
        last = self._run(backward.stem, LastStep)
        given = {number: self._source.gradient(form) for number, form in backward.arguments.items()}
        places = {last.argument(number): given[recorded] for recorded, number in numbers_of(last, given).items()}
        return tuple(places[number] for number in backward.wanted) if places.keys() == set(backward.wanted) else ()

    def _repeatable(self, dumped: DumpedCall, backward: _RecordedBackward) -> tuple[OperationCall, Family]:
        """Return the call, or what a dropout came to in the forward, and its family."""
        family = family_of_call(dumped.name, dumped.call)
        if family is not Family.RANDOM or len(backward.arguments) != 1:
            return dumped.call, family
        [(number, form)] = backward.arguments.items()
        is_alone = form.get("consumers", 1) == 1
        gradient = self._source.gradient(form) if is_alone and number == 0 else None
        call = determined(dumped.name, dumped.call, dumped.result[0] if dumped.result else None, gradient)
        return (call, Family.ROUNDED) if call is not None else (dumped.call, family)

    def _recorded(self, stem: str) -> _RecordedBackward:
        value, forward = self._data[f"{stem}.{BACKWARD}"], self._data[f"{stem}.{FORWARD}"]
        positional = [slot for slot, _ in _tensor_forms(forward.get("input_args", []), "input")]
        named = [slot for name, arg in forward.get("input_kwargs", {}).items() for slot, _ in _tensor_forms(arg, name)]
        gradients = value.get("output") or []
        extra = value.get(EXTRA)
        if extra is None:
            forms = [form for _, form in _tensor_forms([forward.get("input_args"), forward.get("input_kwargs")])]
            wanted = [number for number, form in enumerate(forms) if form.get("requires_grad")]
            given = {number: form for number, form in enumerate(gradients) if form}
            return _RecordedBackward(
                stem, positional + named, value.get("input") or [], given, {}, wanted, is_per_call=True
            )
        arguments = {number: form for number, form in enumerate(gradients[: len(positional)]) if form}
        for slot, form in (value.get("output_kwargs") or {}).items():
            if form and slot in named:
                arguments[len(positional) + named.index(slot)] = form
        return _RecordedBackward(stem, positional + named, value.get("input") or [], arguments, extra)

    def _taken_by(self, stem: str) -> Iterator[tuple[Any, Taken]]:
        """Yield each tensor that a call takes and does not just give back, with what tells it from others."""
        value = self._data.get(f"{stem}.{BACKWARD}")
        if not isinstance(value, dict) or value.get(EXTRA) is None:
            return
        backward = self._recorded(stem)
        forward = self._data[f"{stem}.{FORWARD}"]
        given = {form.get("tensor") for form in backward.results if form} - {None}
        orders = {form.get("order") for _, form in _tensor_forms(forward.get("output"))} - {None}
        taken = self._orders_taken(stem)
        for number, form in backward.arguments.items():
            passed = form["tensor"] in given if "tensor" in form else taken[number] in orders
            if not passed:
                yield self._identity(backward, number), Taken(stem, number)

    def _identity(self, backward: _RecordedBackward, number: int) -> Any:
        """Return what tells a tensor from others; None where the gradient is that of the call alone."""
        form = backward.arguments[number]
        if backward.is_per_call:
            return None
        if "tensor" in form:
            return form["tensor"], form.get("order")
        return "order", self._orders_taken(backward.stem)[number], form.get("order")

    def _orders_taken(self, stem: str) -> list[Any]:
        forward = self._data[f"{stem}.{FORWARD}"]
        forms = _tensor_forms([forward.get("input_args"), list((forward.get("input_kwargs") or {}).values())])
        return [form.get("order") for _, form in forms]


def _refusal(form: Mapping[str, Any], takers: Sequence[Taken]) -> str:
    if form.get("hooked"):
        return "a hook of the script's may have changed it"
    consumers = form.get("consumers")
    if consumers == 0:
        return "something that is not in the dump takes the same tensor"
    if consumers is not None and consumers != len(takers):
        return "the dump lacks calls that take the same tensor"
    return ""


def _among(judgement: Judgement, culprit: str, takers: Sequence[Taken]) -> Judgement:
    """Return a judgement that names the other calls that may be at fault."""
    others = sorted({taken.stem for taken in takers} - {culprit})
    if not others or judgement.status not in (Status.ERROR, Status.WARNING):
        return judgement
    names = others[0] if len(others) == 1 else f"{len(others)} others, {others[0]}"
    return dataclasses.replace(judgement, reason=f"{judgement.reason}, summed with {names}")


def _tensor_forms(form: Any, slot: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tensors in the JSON form of a value, each with its place in it."""
    if isinstance(form, dict) and "dtype" in form and "shape" in form:
        yield slot, form
    elif isinstance(form, dict):
        for name, item in form.items():
            yield from _tensor_forms(item, f"{slot}.{name}")
    elif isinstance(form, list):
        for number, item in enumerate(form):
            yield from _tensor_forms(item, f"{slot}.{number}")
