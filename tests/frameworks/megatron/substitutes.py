"""Parts for which Megatron needs Transformer Engine or Apex, in plain torch."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state


class GatheringAttention(torch.nn.Module):
    """Causal attention of this rank's part of the sequence to the whole of it, keys and values gathered."""

    def __init__(self, config, *arguments, **options):
        super().__init__()
        self.scale = (config.hidden_size // config.num_attention_heads) ** -0.5

    def forward(self, query, key, value, attention_mask, **options):
        group = parallel_state.get_context_parallel_group()
        key, value = (GatherSequence.apply(x, group) for x in (key, value))
        length, batch = query.shape[:2]
        rows = attention_mask[..., group.rank() * length : (group.rank() + 1) * length, :]
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.scale
        weights = scores.masked_fill(rows, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).reshape(length, batch, -1)


class GatherSequence(torch.autograd.Function):
    """All parts of a sequence, one after the other; the gradient of a part is what all ranks have of it."""

    @staticmethod
    def forward(context, part, group):
        context.group = group
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(context, gradient):
        total = gradient.contiguous()
        dist.all_reduce(total, group=context.group)
        return total.chunk(context.group.size())[context.group.rank()], None


class SequenceLayerNorm(torch.nn.LayerNorm):
    """Layer norm over a part of the sequence: Megatron sums up the gradients of its parameters over the parts."""

    def __init__(self, config, hidden_size, eps=1e-5, **options):
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel
