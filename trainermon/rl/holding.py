"""The engine's side of a check of weights: digests of what it holds, by the trainer's names where shapes tell them."""

from __future__ import annotations

from collections.abc import Mapping

from trainermon.rl.digest import Digester, NamedTensors, WeightDigest, items
from trainermon.rl.names import NameMap, same
from trainermon.rl.quantised import is_scale, scale_of
from trainermon.rl.weights import Whole, fused, pieces_of


def hold(  # noqa: PLR0913 - whose weights these are
    named_tensors: NamedTensors,
    *,
    version: int,
    engine: str = "engine",
    name_map: NameMap = same,
    sent: Mapping[str, Whole] | None = None,
    shard: int = 0,
    num_shards: int = 1,
) -> WeightDigest:
    """Return the digests of what one rank of an engine holds.

    With `sent`, what the trainer sent, fused tensors are told apart by the shapes of their parts, so that parts in
    the wrong order are seen; without it, or where shapes do not tell, only their sums are compared. Nothing is copied:
    parts are views. Waits for the device at the end. If the engine has quantised tensors, with a scale beside them, it
    takes moments of what they stand for, and of its other tensors, by one pass in float64.

    Args:
        named_tensors: The engine's parameters: a mapping, or pairs of names and tensors.
        version: The version that it should have.
        engine: Its name.
        name_map: From the trainer's names to the engine's.
        sent: By the trainer's names, what was sent.
        shard: The tensor-parallel rank.
        num_shards: How many of them there are.
    """
    groups = fused(sent or {}, name_map)
    held = {same(given): tensor for given, tensor in items(named_tensors)}
    digester = Digester("float8" if any(map(is_scale, held)) else "")
    for name, tensor in held.items():
        scale = scale_of(name, held)
        if scale is not None:
            digester.add(name, tensor, scale=scale)
            continue
        pieces = pieces_of(tuple(tensor.shape), groups[name], sent or {}, shard, num_shards) if name in groups else None
        if pieces is None:
            digester.add(name, tensor)
        else:
            for piece in pieces:
                of = tensor if piece.expert is None else tensor[piece.expert]
                digester.add(piece.name, of[piece.first : piece.last] if len(pieces) > 1 else of, piece.starts)
    return WeightDigest(version=version, tensors=digester.finish(), engine=engine, shard=shard, num_shards=num_shards)
