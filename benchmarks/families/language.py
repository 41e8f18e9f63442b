"""Transformers over text, as the library `transformers` builds them: decoders, an encoder, both, and experts."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.families import text
from benchmarks.families.family import Batch, Family

WIDTH, LAYERS, HEADS = 32, 2, 2
_DECODER = {
    "vocab_size": text.VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama() -> nn.Module:
    """Return a decoder with rotary positions, RMS norms and grouped queries."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))


def mixtral() -> nn.Module:
    """Return a decoder of whose four experts each token uses two."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**_DECODER, **experts))


def gpt2() -> nn.Module:
    """Return a decoder with learned positions, of which most are never used, dropout, and tied embeddings."""
    size = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, "vocab_size": text.VOCABULARY}
    tokens = {"bos_token_id": 1, "eos_token_id": 1, "use_cache": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **tokens))


def bert() -> nn.Module:
    """Return an encoder that fills gaps in a text."""
    size = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    places = {"num_attention_heads": HEADS, "max_position_embeddings": 64, "vocab_size": text.VOCABULARY}
    return transformers.BertForMaskedLM(transformers.BertConfig(**size, **places))


def t5() -> nn.Module:
    """Return an encoder and a decoder with relative positions."""
    size = {"d_model": WIDTH, "d_ff": 2 * WIDTH, "d_kv": WIDTH // HEADS, "num_layers": LAYERS, "num_heads": HEADS}
    tokens = {"vocab_size": text.VOCABULARY, "pad_token_id": text.PAD, "decoder_start_token_id": text.PAD}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**size, **tokens, use_cache=False))


def _next_token(model: Any, batch: Batch) -> Tensor:
    out = model(input_ids=batch["ids"])
    loss = functional.cross_entropy(out.logits.flatten(0, 1), batch["targets"].flatten())
    balance = getattr(out, "aux_loss", None)
    return loss if balance is None else loss + 0.02 * balance


def _gaps(model: Any, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(input_ids=batch["ids"]).logits.flatten(0, 1), batch["targets"].flatten())


def _translation(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(input_ids=batch["ids"], attention_mask=batch["mask"], labels=batch["targets"]).loss
    return loss


LANGUAGE = (
    Family(name="llama", build=llama, draw=text.continued, loss=_next_token),
    Family(name="gpt2", build=gpt2, draw=text.continued, loss=_next_token),
    Family(name="mixtral", build=mixtral, draw=text.continued, loss=_next_token),
    Family(name="bert", build=bert, draw=text.masked, loss=_gaps),
    Family(name="t5", build=t5, draw=text.reversed_pairs, loss=_translation),
)
