"""Parts that one layout of a model joins and another keeps apart: q, k and v, gate and up, experts of a layer.

What cannot be joined keeps its parts, and each says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainermon.analysis.checkpoint.placed import PlacedTensor, RowMove, element_of, joined, rows_of, transposed

_QKV = re.compile(r"(.*\.self_attention)\.([qkv])_proj\.(weight|bias)$")
_GLU = re.compile(r"(.*)\.(gate|up)_proj\.(weight|bias)$")
_FUSED_QKV = re.compile(r"(.*)\.linear_qkv\.(weight|bias)$")
_FUSED_GLU = re.compile(r"(.*)\.linear_fc1\.(weight|bias)$")
_EXPERTS_GLU = re.compile(r".*\bexperts\..*linear_fc1\.(?:weight|bias)\d*$")
_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?$")
_HEAD_KEYS = ("num_attention_heads", "num_query_groups", "num_key_value_heads", "head_dim", "kv_channels")
_MAX_DEPTH = 4

Tensors = Mapping[str, PlacedTensor]


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How many heads attention has, as far as a checkpoint says.

    Attributes:
        heads: Of queries.
        groups: Of keys and values; queries of a group share them.
    """

    heads: int
    groups: int


def hidden_size(tensors: Tensors) -> int:
    """Return how long the rows of a model's embedding are, 0 if it has none."""
    return next((tensor.shape[-1] for name, tensor in tensors.items() if "embed" in name and tensor.shape), 0)


def with_experts_apart(tensors: Tensors, hidden: int) -> dict[str, PlacedTensor]:
    """Return tensors with each expert's on its own where transformers has those of a layer in one.

    `gate_up_proj` is [experts, 2 · ffn, hidden], gate above up, and `down_proj` [experts, hidden, ffn]; some models
    have the last two dimensions the other way round, which the `hidden` size tells.
    """
    found: dict[str, PlacedTensor] = {}
    for name, tensor in tensors.items():
        stack = _STACK.fullmatch(name)
        parts = None if stack is None or stack[3] else _experts(stack, tensor, hidden, tensors)
        if parts is not None:
            found |= parts
        elif stack is not None:
            found[name] = _with_note(tensor, "which rows of these experts are gate and which up is not known")
        else:
            found[name] = tensor
    return found


def _experts(
    stack: re.Match[str], tensor: PlacedTensor, hidden: int, tensors: Tensors
) -> dict[str, PlacedTensor] | None:
    """Return the tensors of a stack's experts, None if its layout is not known."""
    if len(tensor.shape) != 3 or f"{stack[1]}.gate_up_proj_bias" in tensors:  # with which gate and up alternate
        return None
    at = 2 if stack[2] == "gate_up_proj" else 1
    is_turned = tensor.shape[at] != hidden == tensor.shape[3 - at]
    new = "linear_fc1" if stack[2] == "gate_up_proj" else "linear_fc2"
    found = {}
    for expert in range(tensor.shape[0]):
        own = element_of(tensor, f"{tensor.name}[{expert}]", expert)
        found[f"{stack[1]}.local_experts.{expert}.{new}.weight"] = transposed(own) if is_turned else own
    return found


def with_parts_joined(tensors: Tensors, heads: HeadLayout | None) -> dict[str, PlacedTensor]:
    """Return tensors with q, k, v and gate, up joined as Megatron-Core has them; parts that stay apart say why."""
    found: dict[str, PlacedTensor] = {}
    parts: dict[str, dict[str, str]] = {}
    for name, tensor in tensors.items():
        match = _QKV.fullmatch(name) or _GLU.fullmatch(name)
        if match is None or not tensor.shape:  # as the optimizer's steps are
            found[name] = tensor
            continue
        fused = "linear_qkv" if match[2] in "qkv" else "linear_fc1"
        parts.setdefault(f"{match[1]}.{fused}.{match[3]}", {})[match[2]] = name
    for name, of in parts.items():
        whole = _whole({part: tensors[old] for part, old in of.items()}, heads)
        if isinstance(whole, str):
            found |= {old: _with_note(tensors[old], whole) for old in of.values()}
        else:
            found[name] = whole
    return found


def _whole(parts: Mapping[str, PlacedTensor], heads: HeadLayout | None) -> PlacedTensor | str:
    """Return the tensor of all parts, or why there is none."""
    said = " + ".join(tensor.name.rsplit(".", 2)[-2] for tensor in parts.values())
    first = next(iter(parts.values()))
    name_there = f"{first.name.rsplit('.', 2)[0]}.({said}).{first.name.rsplit('.', 1)[-1]}"
    if set(parts) == {"gate", "up"}:
        rows = parts["gate"].shape[0]
        gate = (parts["gate"], [RowMove(0, rows, 0)])
        return joined(name_there, [gate, (parts["up"], [RowMove(0, parts["up"].shape[0], rows)])])
    lacking = sorted({"q", "k", "v"} - set(parts)) if set(parts) & {"q", "k", "v"} else {"gate", "up"} - set(parts)
    if lacking:
        return f"not joined: its layer has no {' and no '.join(lacking)}"
    if heads is None:
        return "q, k and v are not joined: how many heads there are stands in no config.json and in no args"
    odd = next((tensor for tensor in parts.values() if tensor.shape[0] % heads.groups), None)
    if odd is not None:
        return f"q, k and v are not joined: {odd.shape[0]} rows do not make {heads.groups} groups of heads"
    tables = group_rows({part: parts[part].shape[0] // heads.groups for part in "qkv"}, heads.groups)
    return joined(name_there, [(parts[part], tables[part]) for part in "qkv"])


def _with_note(tensor: PlacedTensor, note: str) -> PlacedTensor:
    return replace(tensor, notes=(*tensor.notes, note))


def with_halves(tensors: Tensors, block: int) -> dict[str, PlacedTensor]:
    """Return tensors with the gates of each expert above its ups, where they take turns in blocks of `block` rows.

    Source: Megatron-Core, `moe_mlp_glu_interleave_size`.
    """
    return {name: _halves(tensor, block) if _EXPERTS_GLU.match(name) else tensor for name, tensor in tensors.items()}


def _halves(tensor: PlacedTensor, block: int) -> PlacedTensor:
    rows = tensor.shape[0]
    if rows % (2 * block):
        return _with_note(tensor, f"its {rows} rows are no pairs of blocks of {block}: taken as they are")
    places = range(rows // (2 * block))
    moves = [RowMove(2 * place * block, block, place * block) for place in places]
    moves += [RowMove((2 * place + 1) * block, block, rows // 2 + place * block) for place in places]
    return rows_of(tensor, tensor.name, moves)


def group_rows(sizes: Mapping[str, int], groups: int) -> dict[str, list[RowMove]]:
    """Return where rows of q, k and v stand in Megatron-Core's one tensor; `sizes` are the rows of a group.

    >>> group_rows({"q": 2, "k": 1, "v": 1}, 2)["k"]
    [RowMove(start=0, length=1, to=2), RowMove(start=1, length=1, to=6)]
    """
    step, before, found = sum(sizes.values()), 0, {}
    for part, size in sizes.items():
        found[part] = [RowMove(group * size, size, group * step + before) for group in range(groups)]
        before += size
    return found


def with_parts_split(tensors: Tensors, heads: HeadLayout | None) -> dict[str, PlacedTensor]:
    """Return tensors with q, k, v and gate, up apart, as Hugging Face has them."""
    found: dict[str, PlacedTensor] = {}
    for name, tensor in tensors.items():
        qkv, glu = _FUSED_QKV.fullmatch(name), _FUSED_GLU.fullmatch(name)
        if qkv and heads is not None:
            width = tensor.shape[0] // (heads.heads + 2 * heads.groups)
            sizes = {"q": heads.heads // heads.groups * width, "k": width, "v": width}
            for part, moves in group_rows(sizes, heads.groups).items():
                back = [RowMove(move.to, move.length, move.start) for move in moves]
                key = f"{qkv[1]}.{part}_proj.{qkv[2]}"
                found[key] = rows_of(tensor, f"{tensor.name} ({part})", back)
        elif glu and not tensor.shape[0] % 2:
            half = tensor.shape[0] // 2
            for part, start in (("gate", 0), ("up", half)):
                key = f"{glu[1]}.{part}_proj.{glu[2]}"
                found[key] = rows_of(tensor, f"{tensor.name} ({part})", [RowMove(start, half, 0)])
        else:
            found[name] = tensor
    return found


def head_layout(*values: Mapping[str, Any]) -> HeadLayout | None:
    """Return how many heads the model has, as its arguments or its config say; None if neither does."""
    found: dict[str, int] = {}
    for side in values:
        for key in _HEAD_KEYS:
            number = _find(side, key, 0)
            if isinstance(number, int) and not isinstance(number, bool) and number > 0:
                found.setdefault(key, number)
    heads = found.get("num_attention_heads")
    if heads is None:
        return None
    is_grouped = _find_first(values, "group_query_attention")
    groups = found.get("num_key_value_heads") or (found.get("num_query_groups") if is_grouped is not False else heads)
    return HeadLayout(heads, groups or heads)


def glu_block(values: Mapping[str, Any]) -> int | None:
    """Return in blocks of how many rows gates and ups of experts take turns, by Megatron's arguments; None: never."""
    found = _find(values, "moe_mlp_glu_interleave_size", 0)
    return found if type(found) is int and found > 0 else None


def _find_first(values: Iterable[Any], key: str) -> Any:
    return next((found for value in values if (found := _find(value, key, 0)) is not None), None)


def _find(value: Any, key: str, depth: int) -> Any:
    """Return what stands under a key in nested values, the outermost first."""
    inside = value if isinstance(value, Mapping) else getattr(value, "state", None)
    if not isinstance(inside, Mapping) or depth > _MAX_DEPTH:
        return None
    if inside.get(key) is not None:
        return inside[key]
    return next((found for part in inside.values() if (found := _find(part, key, depth + 1)) is not None), None)
