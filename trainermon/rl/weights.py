"""Whether engines have the weights that were sent: digests of both sides, over shards and fused tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from trainermon.rl.digest import TensorDigest, WeightDigest, added
from trainermon.rl.names import NameMap, expert_of, in_order
from trainermon.rl.quantised import TensorSums, added_moments, is_quantised, is_scale, is_within_steps
from trainermon.rl.values import WeightCheck, WeightDifference

Shape = tuple[int, ...]
LM_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """What parts make together.

    Attributes:
        dtype: Their type.
        shape: The shape of the whole; None: not known.
        total: See `TensorDigest`.
        order: None: not known, as the place of some part is not.
        moments: Where one side is quantised; None: not known.
    """

    dtype: str
    shape: Shape | None
    total: int
    order: int | None
    moments: TensorSums | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class FusedPiece:
    """Some rows of an engine's tensor, and where they belong.

    Attributes:
        name: The trainer's name.
        expert: Which part along the first dimension of a tensor that stacks experts; None: it stacks none.
        first: The first row, of that part.
        last: The row after the last.
        starts: Where the piece begins in each dimension of the trainer's tensor.
    """

    name: str
    first: int
    last: int
    starts: Shape
    expert: int | None = None


def whole_of(parts: Sequence[TensorDigest]) -> Whole:
    """Return what the parts that several ranks hold make together; copies count once."""
    distinct = list(dict.fromkeys(parts))
    total, order = added(distinct)
    moments = added_moments(part.moments for part in distinct)
    if len(distinct) == 1:
        one = distinct[0]
        is_placed = not any(one.starts)
        return Whole(
            one.dtype, one.shape if is_placed else None, total, order if is_placed or one.starts else None, moments
        )
    if not all(part.starts for part in distinct):
        return Whole(distinct[0].dtype, None, total, None, moments)
    ends = [tuple(s + n for s, n in zip(part.starts, part.shape, strict=True)) for part in distinct]
    return Whole(distinct[0].dtype, tuple(map(max, zip(*ends, strict=True))), total, order, moments)


def wholes_of(digests: Iterable[WeightDigest]) -> dict[str, Whole]:
    """Return by name what the digests of all ranks of one side make together."""
    parts: dict[str, list[TensorDigest]] = {}
    for digest in digests:
        for name, part in digest.tensors.items():
            parts.setdefault(name, []).append(part)
    return {name: whole_of(found) for name, found in parts.items()}


def fused(names: Iterable[str], name_map: NameMap) -> dict[str, list[str]]:
    """Return by the engine's name the trainer's names that it holds, in the order in which it holds them."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name_map(name), []).append(name)
    return {engine_name: in_order(found) for engine_name, found in groups.items()}


def pieces_of(
    shape: Shape, names: Sequence[str], sent: Mapping[str, Whole], shard: int, num_shards: int
) -> list[FusedPiece] | None:
    """Return which rows of an engine's tensor are which of the trainer's; None: not to be told from the shapes.

    Args:
        shape: Of the engine's tensor, on one of its ranks.
        names: The trainer's tensors that it holds.
        sent: What was sent.
        shard: The engine's rank.
        num_shards: How many ranks it has.
    """
    shapes = [sent[name].shape for name in names]
    if len(shape) > 2 and all(found is not None and len(found) == len(shape) - 1 for found in shapes):
        return _of_experts(shape, names, sent, shard, num_shards)
    if not shape or any(found is None or len(found) != len(shape) for found in shapes):
        return None
    rows = (
        _rows_of_pieces(shape[0], [found[0] for found in shapes if found], num_shards) if len(names) > 1 else [shape[0]]
    )
    if rows is None:
        return None
    pieces, first = [], 0
    for name, whole, count in zip(names, shapes, rows, strict=True):
        part = (count, *shape[1:])
        starts = tuple(_start(n, m, shard, num_shards) for n, m in zip(part, whole or (), strict=True))
        if len(part) > 2 and whole and part[1] < whole[1]:
            starts = ()  # a split gate_up has rows from two places
        pieces.append(FusedPiece(name, first, first + count, starts))
        first += count
    return pieces


def _of_experts(
    shape: Shape, names: Sequence[str], sent: Mapping[str, Whole], shard: int, num_shards: int
) -> list[FusedPiece] | None:
    """Return the pieces of a tensor `[experts, …]`, of which a rank has all experts, or its share of them, whole."""
    by_expert: dict[int, list[str]] = {}
    for name in names:
        by_expert.setdefault(expert_of(name), []).append(name)
    if shape[0] == len(by_expert):
        held, part = list(by_expert.values()), (shard, num_shards)
    elif shape[0] * num_shards == len(by_expert):
        held, part = list(by_expert.values())[shard * shape[0] : (shard + 1) * shape[0]], (0, 1)
    else:
        return None
    found = []
    for expert, of_expert in enumerate(held):
        pieces = pieces_of(shape[1:], of_expert, sent, *part)
        if pieces is None:
            return None
        found += [dataclasses.replace(piece, expert=expert) for piece in pieces]
    return found


def check_weights(
    version: int,
    sent: Mapping[str, Whole],
    engines: Mapping[str, Mapping[str, Whole]],
    *,
    name_map: NameMap,
    others: Mapping[int, Mapping[str, Whole]],
) -> WeightCheck:
    """Return whether each engine has what was sent.

    Args:
        version: The version that was sent.
        sent: Its tensors, by the trainer's names.
        engines: By engine, what it holds: by the trainer's names where pieces could be told apart, else by its own.
        name_map: From the trainer's names to the engine's.
        others: What was sent as other versions; to say which version an engine has instead.
    """
    differing: list[WeightDifference] = []
    missing: list[str] = []
    unexpected: dict[str, None] = {}
    uncompared: dict[str, str] = {}
    unordered: dict[str, None] = {}
    bad: set[str] = set()
    groups = fused(sent, name_map)
    for engine, held in engines.items():
        known = set(sent) | set(groups)
        unexpected.update(dict.fromkeys(name for name in held if name not in known and not is_scale(name)))
        for engine_name, names in groups.items():
            for group in [[name] for name in names] if all(name in held for name in names) else [names]:
                found = held.get(group[0] if len(group) == 1 and group[0] in held else engine_name)
                if found is None:
                    if not _is_tied(group, sent):
                        missing += [name for name in group if name not in missing]
                        bad.update(group)
                    continue
                if _cannot_compare(found, _together(group, sent)):
                    uncompared.update(dict.fromkeys(group, found.dtype))
                    continue
                difference = _difference(group, found, sent, others, version)
                if difference is None:
                    if not _has_known_order(found, _together(group, sent)):
                        unordered.update(dict.fromkeys(group))
                else:
                    said, of_version = difference
                    differing.append(
                        WeightDifference(name=" + ".join(group), engine=engine, found=said, version=of_version)
                    )
                    bad.update(group)
    return WeightCheck(
        version=version,
        engines=tuple(engines),
        equal=len(sent) - len(bad | uncompared.keys()),
        differing=tuple(differing),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        uncompared=tuple(uncompared),
        uncompared_types=tuple(sorted(set(uncompared.values()))),
        unordered=tuple(name for name in unordered if name not in bad and name not in uncompared),
    )


def _difference(
    names: Sequence[str],
    found: Whole,
    sent: Mapping[str, Whole],
    others: Mapping[int, Mapping[str, Whole]],
    version: int,
) -> tuple[str, int | None] | None:
    wanted = _together(names, sent)
    is_of_one_type = found.dtype == wanted.dtype and not is_quantised(found.dtype)
    if found.moments is not None and wanted.moments is not None and not is_of_one_type:
        is_same = is_within_steps(wanted.moments, found.moments)
        return None if is_same else ("other numbers than a quantisation gives, or another scale", None)
    if found.dtype == wanted.dtype and found.total == wanted.total:
        is_same = not _has_known_order(found, wanted) or found.order == wanted.order
        return None if is_same else ("the same numbers in rows of another order", None)
    for other in sorted(others, reverse=True):
        if all(name in others[other] for name in names) and _together(names, others[other]).total == found.total:
            return f"{'still' if other < version else 'already'} those of version {other}", other
    return "other numbers" if found.total else "all zeros", None


def _has_known_order(found: Whole, wanted: Whole) -> bool:
    """Return whether rows that have changed places would be seen: the places of all parts are known.

    Of more than two dimensions these are the rows of the first two, which engines may hold transposed.
    """
    shapes = (found.shape, wanted.shape)
    is_transposed = any(shape is not None and len(shape) > 2 for shape in shapes) and shapes[0] != shapes[1]
    is_quantised_there = is_quantised(found.dtype) and found.moments is not None
    return None not in (found.order, wanted.order) and not is_transposed and not is_quantised_there


def _together(names: Sequence[str], of: Mapping[str, Whole]) -> Whole:
    if len(names) == 1:
        return of[names[0]]
    total = sum(of[name].total for name in names) & ((1 << 64) - 1)
    return Whole(of[names[0]].dtype, None, total, None, added_moments(of[name].moments for name in names))


def _cannot_compare(found: Whole, wanted: Whole) -> bool:
    """Return whether the two are of different types, which tells nothing, unless only the engine's is all zeros."""
    is_of_one_type = found.dtype == wanted.dtype or None not in (found.moments, wanted.moments)
    return not is_of_one_type and (found.total != 0 or wanted.total == 0)


def _is_tied(names: Sequence[str], sent: Mapping[str, Whole]) -> bool:
    """Return whether this is an output layer that equals an embedding, which engines keep only once."""
    if len(names) != 1 or not names[0].endswith(LM_HEAD):
        return False
    mine = sent[names[0]]
    return any("embed" in name and one.total == mine.total and one.shape == mine.shape for name, one in sent.items())


def _rows_of_pieces(rows: int, wholes: Sequence[int], num_shards: int) -> list[int] | None:
    """Return how many rows of an engine's fused tensor are of each part; a q is split further than k and v may be."""
    if sum(wholes) == rows * num_shards:
        return [count // num_shards for count in wholes]
    if len(wholes) == 3 and wholes[1] == wholes[2] and not wholes[0] % num_shards:
        left = rows - wholes[0] // num_shards
        if left > 0 and not left % 2 and not wholes[1] % (left // 2):
            return [wholes[0] // num_shards, left // 2, left // 2]
    return None


def _start(part: int, whole: int, shard: int, num_shards: int) -> int:
    """Return where in a dimension a rank's part begins: padded, split evenly, split with copies, or not split."""
    if part >= whole:
        return 0
    copies = max(1, part * num_shards // whole)
    return shard // copies * part
