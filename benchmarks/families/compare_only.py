"""Models on which only `trainermon compare` is judged, and which nobody looks into while it is mended."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.families import text
from benchmarks.families.family import Batch, Family

WIDTH, LAYERS, HEADS = 32, 2, 2
CLASSES, SIZE, BANDS, FRAMES, BATCH = 10, 16, 8, 32, 8
_DECODER = {
    "vocab_size": text.VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def spoken(generator: Generator) -> Batch:
    """Return `sounds` `[BATCH, BANDS, FRAMES]` and what was said, `targets` `[BATCH, LENGTH]`."""
    targets = text.continued(generator)["targets"][:BATCH]
    sounds = torch.nn.functional.one_hot(targets.repeat_interleave(FRAMES // text.LENGTH, 1) % BANDS, BANDS).float()
    noise = torch.randn(BATCH, BANDS, FRAMES, generator=generator)
    return {"sounds": (sounds.mT + 0.3 * noise).contiguous(), "targets": targets}


def photographs(generator: Generator) -> Batch:
    """Return `images` `[BATCH, 3, SIZE, SIZE]` and `labels`, which tell their brightness."""
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    noise = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
    return {"images": noise + labels[:, None, None, None] / CLASSES, "labels": labels}


def gemma2() -> nn.Module:
    """Return a decoder with capped scores, norms on both sides of a block, and sliding windows in every other layer."""
    own = {"num_key_value_heads": 1, "head_dim": WIDTH // HEADS, "sliding_window": 8, "query_pre_attn_scalar": 16}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**_DECODER, **own, attn_implementation="eager"))


def gpt_neox() -> nn.Module:
    """Return a decoder whose attention and feed-forward take the same input and are added up."""
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_DECODER))


def deepseek_v3() -> nn.Module:
    """Return a decoder with compressed keys, and routed experts in groups beside a shared one."""
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    own = {"moe_intermediate_size": WIDTH, "first_k_dense_replace": 1, "num_key_value_heads": HEADS}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**_DECODER, **heads, **experts, **own))


def whisper() -> nn.Module:
    """Return convolutions over sound, an encoder and a decoder."""
    layers = {f"{part}_layers": LAYERS for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": HEADS for part in ("encoder", "decoder")}
    widths = {f"{part}_ffn_dim": 2 * WIDTH for part in ("encoder", "decoder")}
    sound = {"num_mel_bins": BANDS, "max_source_positions": FRAMES // 2, "max_target_positions": text.LENGTH}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    size = {"d_model": WIDTH, "vocab_size": text.VOCABULARY, "use_cache": False, "suppress_tokens": None}
    config = transformers.WhisperConfig(
        **layers, **heads, **widths, **sound, **tokens, **size, begin_suppress_tokens=None
    )
    return transformers.WhisperForConditionalGeneration(config)


def swin() -> nn.Module:
    """Return a vision transformer in shifted windows that merge."""
    stages = {"depths": [2, 2], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4, "drop_path_rate": 0.0}
    image = {"image_size": SIZE, "patch_size": 2, "num_channels": 3, "num_labels": CLASSES}
    return transformers.SwinForImageClassification(transformers.SwinConfig(**stages, **image))


def convnext() -> nn.Module:
    """Return depthwise convolutions with layer norms and learned scales."""
    stages = {"num_stages": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "patch_size": 2, "drop_path_rate": 0.0}
    image = {"image_size": SIZE, "num_channels": 3, "num_labels": CLASSES}
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**stages, **image))


def _next_token(model: Any, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(input_ids=batch["ids"]).logits.flatten(0, 1), batch["targets"].flatten())


def _heard(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(input_features=batch["sounds"], labels=batch["targets"]).loss
    return loss


def _classes(model: Any, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["images"]).logits, batch["labels"])


COMPARE_ONLY = (
    Family(name="gemma2", build=gemma2, draw=text.continued, loss=_next_token),
    Family(name="gpt_neox", build=gpt_neox, draw=text.continued, loss=_next_token),
    Family(name="deepseek_v3", build=deepseek_v3, draw=text.continued, loss=_next_token),
    Family(name="whisper", build=whisper, draw=spoken, loss=_heard),
    Family(name="swin", build=swin, draw=photographs, loss=_classes),
    Family(name="convnext", build=convnext, draw=photographs, loss=_classes),
)
