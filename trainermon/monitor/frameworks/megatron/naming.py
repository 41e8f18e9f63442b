"""Names in the whole model: layers and experts counted over all pipeline stages and expert parallel ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from trainermon.core.errors import AttachError
from trainermon.hooks.names import plain_name

EXPERTS = "local_experts"
TIED_COPY, TIED_ORIGINAL = "output_layer.weight", "embedding.word_embeddings.weight"

Renaming = Mapping[str, Mapping[str, str]]


def renaming_of(root: nn.Module, expert_rank: int) -> Renaming:
    """Return, by the path of each module that numbers its children locally, the global number of each child.

    Layers know their own number (`layer_number`, from 1); experts of a rank follow those of the rank before.

    Raises:
        AttachError: Layers whose numbers are not consecutive.
    """
    found: dict[str, Mapping[str, str]] = {}
    for path, module in root.named_modules():
        if isinstance(module, nn.ModuleList):
            numbers = _numbers_of(path, module, expert_rank)
            if numbers is not None:
                found[path] = {name: str(number) for name, number in zip(module._modules, numbers, strict=True)}
        elif isinstance(getattr(module, "num_gemms", None), int):  # grouped experts: weight0, weight1, …
            found[path] = dict(_grouped_names(module, expert_rank))
    return found


def global_name(name: str, renaming: Renaming) -> str:
    """Return the name in the whole model of `name`, a path below this rank's root.

    >>> global_name("module.decoder.layers.0.mlp", {"module.decoder.layers": {"0": "4"}})
    'decoder.layers.4.mlp'
    """
    parts = name.split(".")
    renamed = [renaming.get(".".join(parts[:i]), {}).get(part, part) for i, part in enumerate(parts)]
    return plain_name(".".join(renamed))


def original_name(name: str) -> str:
    """Return the name of the parameter that the tied parameter `name` on another pipeline stage is a copy of.

    >>> original_name("output_layer.weight"), original_name("embedding.word_embeddings.weight")
    ('embedding.word_embeddings.weight', 'embedding.word_embeddings.weight')
    """
    return name.removesuffix(TIED_COPY) + TIED_ORIGINAL if name.endswith(TIED_COPY) else name


def _numbers_of(path: str, modules: nn.ModuleList, expert_rank: int) -> list[int] | None:
    if path.rpartition(".")[2] == EXPERTS:
        return [expert_rank * len(modules) + i for i in range(len(modules))]
    numbers = [getattr(module, "layer_number", None) for module in modules]
    if not numbers or not all(isinstance(number, int) for number in numbers):
        return None
    first: int = numbers[0] - 1  # type: ignore[operator]  # all are int
    expected = list(range(first, first + len(numbers)))
    if [number - 1 for number in numbers] != expected:  # type: ignore[operator]
        raise AttachError(
            f"Megatron: found the layer numbers {numbers} in {path}, expected consecutive ones: layers of several "
            "pipeline stages could not be told apart by name"
        )
    return expected


def _grouped_names(module: nn.Module, expert_rank: int) -> dict[str, str]:
    names = {}
    for name, _ in module.named_parameters(recurse=False):
        numbered = re.fullmatch(r"(weight|bias)(\d+)", name)
        if numbered:
            names[name] = f"{numbered[1]}{int(numbered[2]) + expert_rank * int(module.num_gemms)}"  # type: ignore[arg-type]
    return names
