"""What a model is set to that changes numbers: which parameters are trained, their types, which are one, dropout."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import nn

_MAX_PATTERNS = 64
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_DROPOUT = re.compile(r"(^|_)(drop|dropout|droppath|drop_path)(_|$|out$)")


def model_settings(models: Sequence[nn.Module]) -> dict[str, Any]:
    """Return by name what the parameters and modules of a model are set to; no tensor is read.

    `trainable` is `all`, or `27 of 28 parameters`, and `dtype` the type of most; `frozen.*` and `dtype.*` name the
    others, `tied.*` which parameter is another one too, `dropout.*` every probability. Blocks that are alike are one
    name, `h.*.up.weight`, and the value says which of them: `all`, or their numbers. At most 64 names of a kind.
    Empty without parameters. Cost: a walk over all modules and parameters.
    """
    parameters = dict(_named_parameters(models))
    if not parameters:
        return {}
    types = {name: str(parameter.dtype).removeprefix("torch.") for name, parameter in parameters.items()}
    usual = Counter(types.values()).most_common(1)[0][0]
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    found: dict[str, Any] = {
        "trainable": f"{len(parameters) - len(frozen):,} of {len(parameters):,} parameters" if frozen else "all",
        "dtype": usual,
    }
    found |= _by_pattern("frozen", frozen, parameters)
    for other in sorted(set(types.values()) - {usual}):
        named = _by_pattern("dtype", [name for name, dtype in types.items() if dtype == other], parameters)
        found |= {name: f"{other}, {which}" for name, which in named.items()}
    ties = islice(_ties(models), _MAX_PATTERNS)
    return found | {f"tied.{name}": first for name, first in ties} | dict(_dropouts(models))


def _named_parameters(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for model in models:
        yield from model.named_parameters()


def _ties(models: Sequence[nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield the second name of a parameter that has several, and its first."""
    first: dict[int, str] = {}
    for model in models:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if first.setdefault(id(parameter), name) != name:
                yield name, first[id(parameter)]


def _dropouts(models: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the probabilities that modules drop with, by the pattern of module and attribute."""
    found: dict[str, set[float]] = defaultdict(set)
    for model in models:
        for name, module in model.named_modules():
            for attribute, value in _probabilities(module):
                found[pattern_of(f"{name}.{attribute}".removeprefix("."))].add(value)
    for name, values in list(found.items())[:_MAX_PATTERNS]:
        yield f"dropout.{name}", sorted(values) if len(values) > 1 else values.pop()


def _probabilities(module: nn.Module) -> Iterator[tuple[str, float]]:
    is_dropout = "drop" in type(module).__name__.lower()
    for attribute, value in vars(module).items():
        is_named = _DROPOUT.search(attribute) or (is_dropout and attribute in ("p", "drop_prob"))
        if is_named and isinstance(value, float | int) and not isinstance(value, bool) and 0 <= value <= 1:
            yield attribute, float(value)


def pattern_of(name: str) -> str:
    """Return a name with a star for each number in it.

    >>> pattern_of("h.3.up.weight")
    'h.*.up.weight'
    """
    return _NUMBER.sub("*", name)


def _by_pattern(kind: str, names: Iterable[str], every: Iterable[str]) -> dict[str, str]:
    """Return by pattern which of the names with it are among `names`: `all`, or their numbers."""
    number = Counter(map(pattern_of, every))
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[pattern_of(name)].append(".".join(_NUMBER.findall(name)))
    listed: Mapping[str, list[str]] = dict(list(found.items())[:_MAX_PATTERNS])
    return {
        f"{kind}.{pattern}": "all" if len(which) == number[pattern] else ", ".join(_runs(which))
        for pattern, which in listed.items()
    }


def _runs(numbers: Sequence[str]) -> Iterator[str]:
    """Yield numbers, those that follow one another as `3-7`."""
    begin = end = None
    for number in (*numbers, None):
        if (
            end is not None
            and number is not None
            and number.isdigit()
            and end.isdigit()
            and int(number) == int(end) + 1
        ):
            end = number
            continue
        if begin is not None:
            yield begin if begin == end else f"{begin}-{end}"
        begin = end = number
