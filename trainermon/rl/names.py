"""How engines name and fuse the tensors that a trainer sends: name maps from the trainer's names to the engine's.

A name map is any function from a trainer's name to the engine's. Several names that give the same one are fused there:
experts by their numbers, within them q, k, v and gate, up; parts with other names in the order in which they were sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

NameMap = Callable[[str], str]

_FUSED = (
    (re.compile(r"\.(?:q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(?:gate|up)_proj\."), ".gate_up_proj."),
    (re.compile(r"\.experts\.\d+\.(?:gate|up)_proj\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.experts\.gate_up_proj$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.down_proj$"), ".experts.w2_weight"),
)
_EXPERT = re.compile(r"\.experts?\.(\d+)\.")
_PARTS = {part: place for place, parts in enumerate((("q", "gate", "w1"), ("k", "up", "w3"), ("v",))) for part in parts}
_PART = re.compile(rf"[._]({'|'.join(_PARTS)})(?:_proj)?\.")
_WRAPPERS = re.compile(
    r"^(?:module\.|base_model\.model\.)+"
    r"|(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|base_layer)\."
)


def same(name: str) -> str:
    """Return the name without the wrappers of FSDP, DDP, torch.compile and PEFT."""
    return _WRAPPERS.sub("", name)


def hf_to_vllm(name: str) -> str:
    """Return the name in vLLM and SGLang of a tensor of a Hugging Face model: q, k, v and gate, up are fused there."""
    name = same(name)
    for pattern, replacement in reversed(_FUSED):
        if pattern.search(name):
            return pattern.sub(replacement, name)
    return name


def expert_of(name: str) -> int:
    """Return the number of the expert that a tensor is of; -1: of none, or of all.

    >>> expert_of("model.layers.3.mlp.experts.17.up_proj.weight")
    17
    """
    match = _EXPERT.search(name)
    return int(match[1]) if match else -1


def in_order(names: Sequence[str]) -> list[str]:
    """Return names of one fused tensor as engines order them, whatever order they were sent in.

    >>> in_order(["layers.0.k_proj.weight", "layers.0.q_proj.weight", "layers.0.v_proj.weight"])
    ['layers.0.q_proj.weight', 'layers.0.k_proj.weight', 'layers.0.v_proj.weight']
    """
    parts = [_PART.search(name) for name in names]
    are_known = all(parts)
    places = {name: _PARTS[part[1]] if part and are_known else 0 for name, part in zip(names, parts, strict=True)}
    return sorted(names, key=lambda name: (expert_of(name), places[name]))
