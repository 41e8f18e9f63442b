"""Which tensor of one checkpoint is which of the other: names of Megatron's generations and of Hugging Face's models.

Names that are equal are paired first, then those of parameters that MindSpore calls otherwise. What is left on both
sides is translated to Megatron-Core's names (or to Hugging
Face's), with q, k and v of each query group side by side and gate above up, as Megatron-Core keeps them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trainermon.analysis.checkpoint.fused import (
    HeadLayout,
    Tensors,
    hidden_size,
    with_experts_apart,
    with_parts_joined,
    with_parts_split,
)
from trainermon.analysis.checkpoint.placed import PlacedTensor, RowMove, rows_of
from trainermon.core.errors import CheckpointError

_OUTPUT = re.compile(r"(?:^|\.)(?:output_layer|lm_head)\.weight$")
_EMBEDDING = re.compile(r"(?:^|\.)(?:word_embeddings|embed_tokens)\.weight$")
SCHEMES = ("megatron", "hf")
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_TO_MEGATRON = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        # Megatron-LM's legacy models
        (r"^language_model\.embedding\.", "embedding."),
        (r"^language_model\.(?:encoder|transformer|decoder)\.", "decoder."),
        (r"^language_model\.output_layer\.", "output_layer."),
        (r"\.(?:self_)?attention\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.(?:self_)?attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.dense_h_to_4h\.", ".linear_fc1."),
        (r"\.dense_4h_to_h\.", ".linear_fc2."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.post_attention_(?:layer)?norm\.", ".pre_mlp_layernorm."),
        (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
        # layers of Transformer Engine, which have the norm in the product that follows
        (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
        (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
        (r"\.mlp\.experts\.linear_fc([12])\.(weight|bias)(\d+)$", r".mlp.experts.local_experts.\3.linear_fc\1.\2"),
        # Hugging Face: Llama, Mistral, Qwen and their mixtures of experts
        (r"^(?:model\.)?embed_tokens\.", "embedding.word_embeddings."),
        (r"^lm_head\.", "output_layer."),
        (r"^(?:model\.)?norm\.", "decoder.final_layernorm."),
        (r"^(?:model\.)?layers\.", "decoder.layers."),
        (r"\.self_attn\.o_proj\.", ".self_attention.linear_proj."),
        (r"\.self_attn\.([qk])_norm\.", r".self_attention.\1_layernorm."),
        (r"\.self_attn\.", ".self_attention."),
        (r"\.(?:mlp|block_sparse_moe)\.gate\.", ".mlp.router."),
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.experts\.(\d+)\.", r".experts.local_experts.\1."),
        (r"\.w1\.(weight)$", r".gate_proj.\1"),
        (r"\.w3\.(weight)$", r".up_proj.\1"),
        (r"\.w2\.(weight)$", r".down_proj.\1"),
        (r"\.shared_expert\.", ".shared_experts."),
        (r"\.shared_expert_gate\.weight$", ".shared_experts.gate_weight"),
        (r"\.down_proj\.", ".linear_fc2."),
    )
)
_ENCODER_AND_DECODER = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^language_model\.encoder\.final_(?:layer)?norm\.", "encoder.final_layernorm."),
        (r"^language_model\.encoder\.", "encoder."),
        (r"^(language_model\.decoder\..*)\.post_attention_(?:layer)?norm\.", r"\1.pre_cross_attn_layernorm."),
        (r"\.post_inter_attention_(?:layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.inter_attention\.query\.", ".cross_attention.linear_q."),
        (r"\.inter_attention\.key_value\.", ".cross_attention.linear_kv."),
        (r"\.inter_attention\.dense\.", ".cross_attention.linear_proj."),
    )
)
_TO_HF = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^embedding\.word_embeddings\.", "model.embed_tokens."),
        (r"^output_layer\.", "lm_head."),
        (r"^decoder\.final_layernorm\.", "model.norm."),
        (r"^decoder\.layers\.", "model.layers."),
        (r"\.self_attention\.linear_proj\.", ".self_attn.o_proj."),
        (r"\.self_attention\.([qk])_layernorm\.", r".self_attn.\1_norm."),
        (r"\.self_attention\.", ".self_attn."),
        (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),
        (r"\.mlp\.router\.", ".mlp.gate."),
        (r"\.local_experts\.", "."),
        (r"\.shared_experts\.gate_weight$", ".shared_expert_gate.weight"),
        (r"\.shared_experts\.", ".shared_expert."),
        (r"\.linear_fc2\.", ".down_proj."),
    )
)


@dataclass(frozen=True, slots=True)
class NamePairs:
    """Which tensors belong together.

    Attributes:
        pairs: Of each pair, the tensor of both sides; names are those in the checkpoints.
        ours: Tensors of the first alone.
        theirs: Those of the second.
        notes: What was translated.
    """

    pairs: tuple[tuple[PlacedTensor, PlacedTensor], ...]
    ours: tuple[PlacedTensor, ...]
    theirs: tuple[PlacedTensor, ...]
    notes: tuple[str, ...] = ()


def pair_names(
    ours: Tensors, theirs: Tensors, *, scheme: str, heads: HeadLayout | None, renamed: Mapping[str, str]
) -> NamePairs:
    """Return which tensors of both sides belong together.

    `renamed` gives names of the first side for names of the second; `scheme` is one of `SCHEMES`, and says to which
    names is translated what has no counterpart of its own name.

    Raises:
        CheckpointError: two names of one side become the same.
    """
    second = {renamed.get(name, name): name for name in theirs}
    if len(second) < len(theirs):
        raise CheckpointError("two names of the second checkpoint become the same by the file of names: give each one")
    same = [(tensor, theirs[second[name]]) for name, tensor in ours.items() if name in second]
    left = {name: tensor for name, tensor in ours.items() if name not in second}
    right = {name: theirs[key] for name, key in second.items() if name not in ours}
    notes: tuple[str, ...] = ()
    hidden = hidden_size(ours) or hidden_size(theirs)
    for said, rename in (
        ("PyTorch's", _with_names_of_torch),
        (_SAID[scheme], partial(translated, scheme=scheme, heads=heads, hidden=hidden)),
    ):
        if not (left and right):
            break
        left, right = rename(left), rename(right)
        found = [(tensor, right[name]) for name, tensor in left.items() if name in right]
        notes += (f"{len(found):,} tensors are paired by {said} names",) if found else ()
        same += found
        left, right = ({n: t for n, t in a.items() if n not in b} for a, b in ((left, right), (right, left)))
    sides = (tuple(ours.values()), tuple(theirs.values()))
    tied = [*_tied(left, same, 0, sides[1]), *(pair[::-1] for pair in _tied(right, same, 1, sides[0]))]
    taken = {id(tensor) for pair in tied for tensor in pair}
    lonely, counters = _without_counters(
        [[tensor for tensor in side.values() if id(tensor) not in taken] for side in (left, right)], sides
    )
    return NamePairs((*same, *tied), tuple(lonely[0]), tuple(lonely[1]), (*notes, *counters))


def _with_names_of_torch(tensors: Tensors) -> dict[str, PlacedTensor]:
    """Return tensors by the names that PyTorch has for parameters of MindSpore, unless another has that name."""
    named = {name: _name_of_torch(name) for name in tensors}
    counts = Counter([*named.values(), *(name for name, new in named.items() if new != name)])
    return {new if counts[new] == 1 else name: tensors[name] for name, new in named.items()}


def _name_of_torch(name: str) -> str:
    from trainermon.analysis.compare.frameworks import parameter_name  # not needed where both have the same names

    above, dot, last = name.rpartition(".")
    return f"{above}{dot}{parameter_name(last)}"


def _tied(
    lonely: Tensors, pairs: Sequence[tuple[PlacedTensor, PlacedTensor]], side: int, others: Sequence[PlacedTensor]
) -> Iterator[tuple[PlacedTensor, PlacedTensor]]:
    """Yield tensors of one side with what they are tied to on the other, where that stands once.

    Those that share their elements with one of a pair are the other of that pair. An output layer is the embedding of a
    side that has no output layer.
    """
    if not lonely:
        return
    partners = {_elements(pair[side]): pair[1 - side] for pair in pairs}
    names = {_name_of_torch(tensor.name): tensor for tensor in others}
    has_output = any(_OUTPUT.search(name) for name in names)
    embedding = next((tensor for name, tensor in names.items() if _EMBEDDING.search(name)), None)
    for name, tensor in lonely.items():
        is_output = _OUTPUT.search(name) is not None and not has_output
        other = partners.get(_elements(tensor)) or (embedding if is_output else None)
        if other is not None:
            note = f"tied: stands there once, as {'the embedding' if other is embedding else other.name}"
            yield tensor, replace(other, name=f"{other.name} (tied)", notes=(note,))


def _elements(tensor: PlacedTensor) -> tuple[object, ...]:
    """Return what two tensors have in common if they lie at one place in a file."""
    return tensor.shape, next(((*view[:2], view.as_array()) for view in tensor.views), tensor.name)


def _without_counters(
    lonely: Sequence[list[PlacedTensor]], sides: Sequence[Sequence[PlacedTensor]]
) -> tuple[Sequence[list[PlacedTensor]], tuple[str, ...]]:
    """Return lonely tensors without the counters of BatchNorm where a side has none at all, as of MindSpore; a note."""
    has = [any(tensor.name.endswith(_COUNTER) for tensor in side) for side in sides]
    if has[0] == has[1]:
        return lonely, ()
    left = [[tensor for tensor in side if not tensor.name.endswith(_COUNTER)] for side in lonely]
    number = sum(map(len, lonely)) - sum(map(len, left))
    return left, (f"not compared: {number:,} counters of BatchNorm ({_COUNTER}), which one side does not keep",)


_COUNTER = "num_batches_tracked"
_SAID = {"megatron": "Megatron-Core's", "hf": "Hugging Face's"}


def translated(tensors: Tensors, scheme: str, heads: HeadLayout | None, hidden: int) -> dict[str, PlacedTensor]:
    """Return tensors by their names in a scheme, parts joined or split as the scheme has them.

    Raises:
        CheckpointError: two names become the same.
    """
    rules = _rules([_WRAPPERS.sub("", name) for name in tensors])
    found = _renamed(tensors, lambda name: _replaced(_WRAPPERS.sub("", name), rules))
    found = with_parts_joined(with_experts_apart(found, hidden), heads)
    if scheme == "hf":
        found = _renamed(with_parts_split(found, heads), lambda name: _replaced(name, _TO_HF))
    return found


def _rules(names: Iterable[str]) -> Iterable[tuple[re.Pattern[str], str]]:
    """Return the rules for a model: what legacy models call encoder is the decoder, unless there is one beside it."""
    has_both = any(name.startswith("language_model.decoder.") for name in names)
    return (*_ENCODER_AND_DECODER, *_TO_MEGATRON) if has_both else _TO_MEGATRON


def _replaced(name: str, rules: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, new in rules:
        if not (".local_experts." in name and "local_experts" in new):
            name = pattern.sub(new, name)
    return name


def _renamed(tensors: Tensors, rename: Callable[[str], str]) -> dict[str, PlacedTensor]:
    found: dict[str, PlacedTensor] = {}
    for name, tensor in tensors.items():
        new = rename(name)
        if new in found:
            raise CheckpointError(
                f"{tensor.name} and {found[new].name} are both {new} after translation: say with --names FILE which is"
            )
        found[new] = tensor
    return found


def same_rows(ours: PlacedTensor, theirs: PlacedTensor) -> tuple[PlacedTensor, PlacedTensor, str] | None:
    """Return two embeddings cut to the rows that both have, and what was left out; None if they are no embeddings.

    Megatron pads the vocabulary so that it can be split.
    """
    is_vocabulary = any(word in ours.name for word in ("word_embeddings", "output_layer", "embed_tokens", "lm_head"))
    if not is_vocabulary or not ours.shape or ours.shape[1:] != theirs.shape[1:]:
        return None
    rows = min(ours.shape[0], theirs.shape[0])
    cut = [replace(rows_of(side, side.name, [RowMove(0, rows, 0)]), notes=side.notes) for side in (ours, theirs)]
    more = max(ours.shape[0], theirs.shape[0]) - rows
    return cut[0], cut[1], f"{more:,} rows that pad the vocabulary are on one side only: not compared"
