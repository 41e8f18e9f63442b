"""What an engine calls the modules of a trainer's model, and which of them it has as one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from trainermon.analysis.compare.mappings import JoinRule
from trainermon.core.errors import ConfigError
from trainermon.rl.names import same


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNames:
    """How the modules of a trainer correspond to those of an engine.

    Attributes:
        renamed: Patterns in the trainer's paths, and what stands there in the engine's.
        joins: Modules of the trainer that the engine has as one.
        adds_residual: The engine's layers return what they add beside the sum so far, and its norms add the two first.
        unordered: Pattern of the engine's paths whose results lie in another order; they are sorted within each token.
    """

    renamed: Sequence[tuple[str, str]] = ()
    joins: tuple[JoinRule, ...] = ()
    adds_residual: bool = False
    unordered: str = ""

    def path(self, trainer_path: str) -> str:
        """Return the engine's path of a module, without wrappers; its own where nothing is said of it."""
        path = same(f"{trainer_path}.").removesuffix(".")
        for pattern, replacement in self.renamed:
            path = re.sub(pattern, replacement, path)
        return path

    def is_unordered(self, engine_path: str) -> bool:
        """Return whether what this module returns is sorted before it is compared."""
        return bool(self.unordered) and re.search(self.unordered, engine_path) is not None


_PROJECTIONS = (
    JoinRule(target=("*.q_proj", "*.k_proj", "*.v_proj"), golden=("*.qkv_proj",)),
    JoinRule(target=("*.gate_proj", "*.up_proj"), golden=("*.gate_up_proj",)),
)
_HF_VLLM = ModuleNames(joins=_PROJECTIONS, adds_residual=True)
_MEGATRON_VLLM = ModuleNames(
    renamed=(
        (r"^embedding\.word_embeddings$", "model.embed_tokens"),
        (r"^decoder\.final_layernorm$", "model.norm"),
        (r"^decoder\.layers\.", "model.layers."),
        (r"\.self_attention\.linear_qkv$", ".self_attn.qkv_proj"),
        (r"\.self_attention\.linear_proj$", ".self_attn.o_proj"),
        (r"\.self_attention$", ".self_attn"),
        (r"\.pre_mlp_layernorm$", ".post_attention_layernorm"),
        (r"\.mlp\.linear_fc1$", ".mlp.gate_up_proj"),
        (r"\.mlp\.linear_fc2$", ".mlp.down_proj"),
    ),
    adds_residual=True,
    unordered=r"\.qkv_proj$",  # Megatron has q, k and v of one group beside each other
)
NAMES = {
    "same": ModuleNames(),
    "hf-vllm": _HF_VLLM,
    "fsdp-vllm": _HF_VLLM,
    "hf-sglang": _HF_VLLM,
    "fsdp-sglang": _HF_VLLM,
    "megatron-vllm": _MEGATRON_VLLM,
    "megatron-sglang": _MEGATRON_VLLM,
}
"""By name: the trainer, and the engine. `same`: both have the same modules."""


def module_names(name: str) -> ModuleNames:
    """Return the correspondence of this name.

    Raises:
        ConfigError: There is none.
    """
    if name not in NAMES:
        raise ConfigError(f"names: found {name!r}, expected one of {', '.join(NAMES)}")
    return NAMES[name]
