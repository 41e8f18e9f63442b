"""The same GPT once more, in plain torch and float64, on one process: the truth that every layout is held against."""

import torch
from torch.nn import functional

HEADS, EPSILON, TOP_K = 4, 1e-5, 2


def token_losses(weights, tokens, labels, layers, experts):
    """Return the loss of each token, `[batch, sequence]`; `weights` by name."""
    positions = torch.arange(tokens.shape[1])
    x = weights["embedding.word_embeddings.weight"][tokens]
    x = x + weights["embedding.position_embeddings.weight"][positions]
    for i in range(layers):
        layer = _below(weights, f"decoder.layers.{i}.")
        x = x + _attention(_below(layer, "self_attention."), _normed(x, _below(layer, "input_layernorm.")))
        y = _normed(x, _below(layer, "pre_mlp_layernorm."))
        mlp = _below(layer, "mlp.")
        x = x + (_mixture(mlp, y, experts) if experts else _mlp(mlp, y))
    x = _normed(x, _below(weights, "decoder.final_layernorm."))
    head = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
    logits = x @ head.T
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def _attention(weights, x):
    batch, length, hidden = x.shape
    mixed = _linear(weights, "linear_qkv", x).view(batch, length, HEADS, 3, hidden // HEADS)
    query, key, value = mixed.unbind(3)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / (hidden // HEADS) ** 0.5
    future = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    mixed = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)
    return _linear(weights, "linear_proj", mixed.reshape(batch, length, hidden))


def _mlp(weights, x):
    inner = _linear(weights, "linear_fc1", x)
    if inner.shape[-1] == 2 * weights["linear_fc2.weight"].shape[1]:
        gate, up = inner.chunk(2, -1)
        return _linear(weights, "linear_fc2", functional.silu(gate) * up)
    return _linear(weights, "linear_fc2", functional.gelu(inner))


def _mixture(weights, x, experts):
    best, chosen = (x @ weights["router.weight"].T).topk(TOP_K)
    shares = torch.zeros(*x.shape[:2], experts, dtype=x.dtype).scatter(-1, chosen, best.softmax(-1))
    outputs = [_mlp(_below(weights, f"experts.local_experts.{e}."), x) for e in range(experts)]
    return sum(shares[..., e, None] * output for e, output in enumerate(outputs))


def _linear(weights, name, x):
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _normed(x, weights):
    return functional.layer_norm(x, x.shape[-1:], weights["weight"], weights["bias"], EPSILON)


def _below(weights, prefix):
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
