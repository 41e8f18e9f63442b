"""Every backward of a dump: is each gradient the sum of what the calls that take the tensor give back in float64?"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import Judgement, Status, family_of_call, judge_gradient
from trainermon.accuracy.products import BackwardCall, GradientSum, VectorProduct
from trainermon.accuracy.randomness import determined
from trainermon.accuracy.rules import ChosenRules
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

    `slots` are the places of all tensors among the arguments.
    """

    stem: str
    slots: Sequence[str]
    results: Sequence[Any]
    arguments: Mapping[int, Mapping[str, Any]]
    extra: Mapping[str, Any]
    is_per_call: bool

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


class GradientChecker:
    """Judges the backwards of one dump; keeps what was computed for the calls judged last.

    Args:
        directory: The dump's folder.
        data: What dump.json has, by key.
        entries: The forward entries of the dump.
        rules: Whose rules give the verdicts; None: ours.
    """

    def __init__(
        self,
        directory: Path,
        data: Mapping[str, Any],
        entries: Sequence[EntryRecord],
        rules: ChosenRules | None = None,
    ) -> None:
        self._directory, self._data, self._rules = directory, data, rules
        self._forwards = {entry.key.removesuffix(f".{FORWARD}"): entry for entry in entries}
        self._products: OrderedDict[str, VectorProduct] = OrderedDict()
        self._judged: dict[Any, tuple[Judgement, str]] = {}
        self._takers: dict[Any, list[Taken]] = defaultdict(list)
        for stem in self._forwards:
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

    def gradients(self, stem: str) -> tuple[Tensor, ...]:
        """Return the recorded gradients of the tensors that a call takes; () if others' are added to one of them."""
        backward = self._recorded(stem)
        alone = [Taken(stem, number) for number in backward.arguments]
        shared = [
            one for one in alone if self._takers.get(self._identity(backward, one.number), [one]) != [one]
        ] or any(_refusal(form, [Taken(stem, 0)]) for form in backward.arguments.values())
        forms = [] if shared else [backward.arguments[number] for number in sorted(backward.arguments)]
        return tuple(load_form(self._directory, form) for form in forms)

    def _judgement(self, backward: _RecordedBackward, number: int) -> Judgement | None:
        form = backward.arguments[number]
        identity = self._identity(backward, number)
        takers = self._takers[identity] if identity is not None else [Taken(backward.stem, number)]
        if Taken(backward.stem, number) not in takers:
            return None
        if identity is None or identity not in self._judged:
            given = load_form(self._directory, form)
            judged = self._judged_sum(given, form, takers)
            if identity is not None:
                self._judged[identity] = judged
        judgement, culprit = judged if identity is None else self._judged[identity]
        if judgement.status in (Status.PASS, Status.SKIP) or culprit == backward.stem:
            return judgement
        return dataclasses.replace(judgement, status=Status.SKIP, reason=f"see {culprit}.{BACKWARD}: the same tensor")

    def _judged_sum(self, given: Tensor, form: Mapping[str, Any], takers: Sequence[Taken]) -> tuple[Judgement, str]:
        """Return the verdict on the gradient of a tensor, and the key of the call that is most likely at fault."""
        refusal = _refusal(form, takers)
        if refusal:
            return Judgement(status=Status.SKIP, reason=refusal), ""
        products = []
        for taken in takers:
            backward = self._recorded(taken.stem)
            if not any(backward.results) and not backward.extra.get("mixed"):
                continue
            if backward.refusal:
                return Judgement(status=Status.SKIP, reason=f"{taken.stem} takes it, too: {backward.refusal}"), ""
            try:
                products.append((self._product(taken.stem), taken.number))
            except DumpError as error:
                return Judgement(status=Status.SKIP, reason=f"{taken.stem} takes it, too: {error}"), ""
        culprit = max(takers, key=self._effort).stem
        coarsest = max(product.backward.coarsest for product, _ in products)
        tensors = self._product(culprit).backward.call.tensors
        review = self._rules.of_call(f"{culprit}.{BACKWARD}", tensors) if self._rules else None
        judgement = judge_gradient(given, GradientSum(products, given), coarsest, review)
        if judgement.status is Status.ERROR and "consumers" not in form and "order" in form:
            return Judgement(status=Status.SKIP, reason="the dump does not say what else took the same tensor"), ""
        return _among(judgement, culprit, takers), culprit

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

    def _run(self, stem: str) -> VectorProduct:
        entry, backward = self._forwards[stem], self._recorded(stem)
        dumped = rebuild(self._directory, self._data, entry)
        call, family = self._repeatable(dumped, backward)
        if family in _NOT_JUDGED:
            raise DumpError(_NOT_JUDGED[family])
        made = [leaf for leaf in pytree.tree_leaves(dumped.result) if isinstance(leaf, Tensor)]
        if backward.is_per_call and len(made) > 1:
            raise DumpError("the dump has the gradient of its first result alone")
        gradients = [load_form(self._directory, form) if form else None for form in backward.results]
        gradients += [None] * (len(made) - len(gradients))
        inside = computed_in(dumped, entry.autocast)
        call = rounded(call, inside) if inside is not None else call
        try:
            product = VectorProduct(BackwardCall(call, gradients, family, backward.arguments, inside))
        except Exception as error:  # whatever a foreign kernel raises: there is no common type
            why = (str(error).splitlines() or [type(error).__name__])[0][:160]
            raise DumpError(f"cannot be run in float64: {why}") from error
        if not product.chooses_as(made):
            raise DumpError("of equal elements it chose others")
        return product

    def _repeatable(self, dumped: DumpedCall, backward: _RecordedBackward) -> tuple[OperationCall, Family]:
        """Return the call, or what a dropout came to in the forward, and its family."""
        family = family_of_call(dumped.name, dumped.call)
        if family is not Family.RANDOM or len(backward.arguments) != 1:
            return dumped.call, family
        [(number, form)] = backward.arguments.items()
        is_alone = form.get("consumers", 1) == 1
        gradient = load_form(self._directory, form) if is_alone and number == 0 else None
        call = determined(dumped.name, dumped.call, dumped.result[0] if dumped.result else None, gradient)
        return (call, Family.ROUNDED) if call is not None else (dumped.call, family)

    def _recorded(self, stem: str) -> _RecordedBackward:
        value, forward = self._data[f"{stem}.{BACKWARD}"], self._data[f"{stem}.{FORWARD}"]
        positional = [slot for slot, _ in _tensor_forms(forward.get("input_args", []), "input")]
        named = [slot for name, arg in forward.get("input_kwargs", {}).items() for slot, _ in _tensor_forms(arg, name)]
        gradients = value.get("output") or []
        extra = value.get(EXTRA)
        if extra is None:  # msprobe's: one for each argument, tensor or not
            gradients = [
                gradient
                for arg, gradient in zip(forward.get("input_args", []), gradients, strict=False)
                for _ in _tensor_forms(arg)
            ]
        arguments = {number: form for number, form in enumerate(gradients[: len(positional)]) if form}
        for slot, form in (value.get("output_kwargs") or {}).items():
            if form and slot in named:
                arguments[len(positional) + named.index(slot)] = form
        return _RecordedBackward(
            stem, positional + named, value.get("input") or [], arguments, extra or {}, extra is None
        )

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
