"""A Llama as vLLM lays one out: fused projections, residuals beside the hidden states, flat tokens, its names.

Classes are called as vLLM's are, as dumps have their names. A layer returns what it adds, and the sum up to it; a norm
adds the two before it normalises.
"""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from trainermon.dump.debugger import PrecisionDebugger

PROMPTS = ([10, 11, 12, 13, 14], [2, 5, 8, 11, 14, 17, 20], [4, 9, 4])
LENGTH, RESPONSE = 14, 4


class VocabParallelEmbedding(nn.Embedding):
    pass


class _Linear(nn.Module):
    def __init__(self, weight, bias=None):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x):
        return linear(x, self.weight, self.bias), None


class QKVParallelLinear(_Linear):
    pass


class MergedColumnParallelLinear(_Linear):
    pass


class RowParallelLinear(_Linear):
    pass


class RMSNorm(nn.Module):
    def __init__(self, weight, epsilon):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(weight, requires_grad=False), epsilon

    def forward(self, x, residual=None):
        total = x if residual is None else x + residual
        wide = total.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        normed = normal.to(total.dtype) * self.weight
        return normed if residual is None else (normed, total)


class SiluAndMul(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return silu(gate) * up


class LlamaMLP(nn.Module):
    def __init__(self, theirs):
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(torch.cat([theirs.gate_proj.weight, theirs.up_proj.weight]))
        self.down_proj = RowParallelLinear(theirs.down_proj.weight.detach().clone())
        self.act_fn = SiluAndMul()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class Attention(nn.Module):
    """Causal within each sequence, which begins where positions begin anew."""

    def __init__(self, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads

    def forward(self, q, k, v, positions):
        starts = torch.cumsum(positions == 0, 0)
        allowed = (starts[:, None] == starts) & (positions[:, None] >= positions)
        q, k, v = (each.unflatten(-1, (count, -1)).transpose(0, 1) for each, count in
                   ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads)))  # fmt: skip
        outcome = scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
        return outcome.transpose(0, 1).flatten(1)


class LlamaAttention(nn.Module):
    def __init__(self, theirs, config):
        super().__init__()
        parts = (theirs.q_proj, theirs.k_proj, theirs.v_proj)
        self.qkv_proj = QKVParallelLinear(torch.cat([part.weight for part in parts]))
        self.o_proj = RowParallelLinear(theirs.o_proj.weight.detach().clone())
        self.attn = Attention(config.num_attention_heads, config.num_key_value_heads)
        self.sizes = [part.out_features for part in parts]
        self.width, self.base = theirs.head_dim, config.rope_parameters["rope_theta"]

    def forward(self, positions, hidden_states):
        q, k, v = self.qkv_proj(hidden_states)[0].split(self.sizes, dim=-1)
        q, k = self._turned(q, positions), self._turned(k, positions)
        return self.o_proj(self.attn(q, k, v, positions))[0]

    def _turned(self, x, positions):
        frequencies = self.base ** (-torch.arange(0, self.width, 2) / self.width)
        angles = positions[:, None, None] * frequencies
        one, other = x.unflatten(-1, (-1, self.width)).float().chunk(2, dim=-1)
        turned = torch.cat([one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()], -1)
        return turned.to(x.dtype).flatten(1)


class LlamaDecoderLayer(nn.Module):
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm

    def __init__(self, theirs, config):
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(theirs.self_attn, config), LlamaMLP(theirs.mlp)
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm = getattr(theirs, name)
            setattr(self, name, RMSNorm(norm.weight.detach().clone(), norm.variance_epsilon))

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class LlamaModel(nn.Module):
    def __init__(self, theirs):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding.from_pretrained(theirs.embed_tokens.weight.detach().clone())
        self.layers = nn.ModuleList(LlamaDecoderLayer(layer, theirs.config) for layer in theirs.layers)
        self.norm = RMSNorm(theirs.norm.weight.detach().clone(), theirs.norm.variance_epsilon)

    def forward(self, input_ids, positions):
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return self.norm(hidden_states, residual)[0]


class LlamaForCausalLM(nn.Module):
    """The engine's model, with the weights of a `transformers.LlamaForCausalLM`."""

    def __init__(self, theirs):
        super().__init__()
        self.model = LlamaModel(theirs.model)

    def forward(self, input_ids, positions):
        return self.model(input_ids, positions)


def new_policy():
    """Return a small random Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=3, max_position_embeddings=64, **sizes))
    return model.eval()


def trained_batch(*, left=True):
    """Return ids, mask and positions of prompts with responses, padded on one side."""
    random = np.random.default_rng(0)
    ids, mask = (torch.zeros(len(PROMPTS), LENGTH, dtype=torch.int64) for _ in range(2))
    for row, prompt in enumerate(PROMPTS):
        tokens = torch.tensor([*prompt, *random.integers(1, 97, RESPONSE)])
        place = slice(LENGTH - len(tokens), None) if left else slice(len(tokens))
        ids[row, place], mask[row, place] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def prefill():
    positions = torch.cat([torch.arange(len(prompt)) for prompt in PROMPTS])
    return {"input_ids": torch.tensor([token for prompt in PROMPTS for token in prompt]), "positions": positions}


def dump(folder, model, level="L0", task="tensor", **inputs):
    """Dump a forward of `model` and return the folder."""
    PrecisionDebugger._instance = None
    debugger = PrecisionDebugger(dump_path=folder, level=level, task=task)
    debugger.start(model)
    with torch.no_grad():
        model(**inputs)
    debugger.stop()
    debugger.step()
    PrecisionDebugger._instance = None
    return folder
