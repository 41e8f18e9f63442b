"""How engines name and fuse the tensors that a trainer sends: name maps from the trainer's names to the engine's.

A name map is any function from a trainer's name to the engine's. Several names that give the same one are fused there,
in the order in which they were sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable

NameMap = Callable[[str], str]

_FUSED = (
    (re.compile(r"\.(?:q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(?:gate|up)_proj\."), ".gate_up_proj."),
    (re.compile(r"\.experts\.\d+\.(?:gate|up)_proj\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.experts\.gate_up_proj$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.down_proj$"), ".experts.w2_weight"),
)
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
