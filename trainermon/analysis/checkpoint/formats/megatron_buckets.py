"""State of Megatron's distributed optimizer in flat buckets (`dp_reshardable`), by name of parameter.

A checkpoint says how long each bucket is and where a rank's parts of it begin, not what lies there. That follows from
the order of Megatron's modules, if every parameter then begins where a part does, and all buckets are used up.
Source: megatron/core, 0.16.1: optimizer/distrib_optimizer.py (`sharded_param_state_dp_reshardable`),
distributed/param_and_grad_buffer.py, transformer/transformer_layer.py, transformer/attention.py.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trainermon.analysis.checkpoint.formats.arrays import rows
from trainermon.analysis.checkpoint.formats.split_parts import Split, moved
from trainermon.analysis.checkpoint.pieces import Box, FlatRange, Piece, TensorPieces

BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(torch\.(\w+), torch\.\w+\)\.bucket_idx_(\d+)"
)
_ALIGNMENT = 64  # elements at which a parameter begins in a bucket
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_NORM = r"self_attention\.linear_qkv\.layer_norm_|input_layernorm\."
_PROJ = r"self_attention\.linear_proj\."
_AFTER = (
    *(r"self_attention\.linear_qkv\.(weight|bias)", r"self_attention\.q_layernorm\.", r"self_attention\.k_layernorm\."),
    *(r"mlp\.linear_fc1\.layer_norm_|pre_mlp_layernorm\.", r"mlp\.router\.weight", r"mlp\.experts\."),
    *(r"mlp\.shared_experts\.linear_fc1\.", r"mlp\.shared_experts\.linear_fc2\.", r"mlp\.shared_experts\.gate_weight"),
    *(r"mlp\.linear_fc1\.(weight|bias)", r"mlp\.linear_fc2\."),
)
_ORDERS = ((_NORM, _PROJ, *_AFTER), (_PROJ, _NORM, *_AFTER))  # of Megatron's own layers, and of Transformer Engine's
_EMBEDDINGS = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
_TAIL = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "output_layer.weight")


class UnknownLayoutError(ValueError):
    """What lies in the buckets does not follow from the checkpoint: why not."""


class BufferPlace(NamedTuple):
    """Whose buffer it is: of which optimizer, model parallel rank, part of its model and type."""

    optimizer: int
    group: int
    chunk: int
    dtype: str


class BucketPlace(NamedTuple):
    """Where a parameter lies: in which bucket of a buffer, from which element on."""

    bucket: int
    start: int


@dataclass(frozen=True)
class Degrees:
    """Over how many ranks the model is split."""

    tp: int
    pp: int
    ep: int
    etp: int


def by_name(
    tensors: Mapping[str, TensorPieces], buckets: Mapping[str, Mapping[str, TensorPieces]], args: Mapping[str, Any]
) -> dict[str, dict[str, TensorPieces]]:
    """Return the optimizer's state by kind and name of parameter; `buckets` have it by kind and name of bucket.

    Raises:
        UnknownLayoutError: it is not certain which parameter lies where.
    """
    degrees = _degrees(args)
    kinds = {kind: _buffers(own) for kind, own in buckets.items()}
    buffers = next(iter(kinds.values()))
    wholes = {name: tensor for name, tensor in tensors.items() if not name.endswith("expert_bias")}
    fits: list[dict[tuple[BufferPlace, str, int], BucketPlace]] = []
    reasons: list[UnknownLayoutError] = []
    for order, by_expert in itertools.product(_ORDERS, (True, False)):
        found = _attempt(_Model(wholes, order, args, degrees, by_expert=by_expert), buffers)
        if isinstance(found, UnknownLayoutError):
            reasons.append(found)
        else:
            fits.append(found)
    if not fits:
        raise reasons[-1]
    if any(fit != fits[0] for fit in fits):
        raise UnknownLayoutError("parameters of equal sizes could lie in several orders")
    parts: dict[str, dict[str, list[Piece]]] = {kind: {} for kind in kinds}
    for (place, name, rank), where in fits[0].items():
        whole = wholes[name]
        split = _split(name, whole.shape, args, degrees)
        _refuse_other_parts(whole, split)
        shape = _local_shape(whole.shape, split, rank)
        for kind, own in kinds.items():
            bucket = own[place][where.bucket]
            pieces = tuple(_cut(bucket, where.start, math.prod(shape)))
            local = TensorPieces(name, shape, bucket.dtype, pieces)
            parts[kind].setdefault(name, []).extend(moved(local, rank, split) if split.dim is not None else pieces)
    lacking = [name for name in wholes if any(name not in own for own in parts.values())]
    if lacking:
        raise UnknownLayoutError(f"nothing is left for {lacking[0]!r}")
    return {
        kind: {
            name: replace(wholes[name], dtype=next(iter(buckets[kind].values())).dtype, pieces=tuple(pieces), notes=())
            for name, pieces in own.items()
        }
        for kind, own in parts.items()
    }


def _attempt(
    model: _Model, buffers: Mapping[BufferPlace, list[TensorPieces]]
) -> dict[tuple[BufferPlace, str, int], BucketPlace] | UnknownLayoutError:
    """Return where parameters lie, or why this model does not fit."""
    try:
        return model.places(buffers)
    except UnknownLayoutError as error:
        return error


def _refuse_other_parts(whole: TensorPieces, split: Split) -> None:
    """Refuse a split other than that of the weights, each of whose parts is a chunk of its own."""
    if split.dim is None:
        return
    begins = itertools.accumulate(itertools.chain([0], *split.widths))
    expected = {begin for begin in begins if begin < whole.shape[split.dim]}
    found = {piece.region.starts[split.dim] for piece in whole.pieces if isinstance(piece.region, Box)}
    if found != expected:
        raise UnknownLayoutError(
            f"{whole.name!r} has parts at {sorted(found)[:6]}, expected {sorted(expected)[:6]} by the arguments"
        )


def _degrees(args: Mapping[str, Any]) -> Degrees:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    tp, pp, ep = (args.get(name) or (1 if name.startswith("expert") else None) for name in names)
    if not (isinstance(tp, int) and isinstance(pp, int) and isinstance(ep, int)):
        raise UnknownLayoutError("common.pt has no args that say over how many ranks it is split")
    return Degrees(tp, pp, ep, args.get("expert_tensor_parallel_size") or tp)


def _buffers(own: Mapping[str, TensorPieces]) -> dict[BufferPlace, list[TensorPieces]]:
    """Return the buckets of each buffer, in order."""
    numbers: dict[tuple[int, int, str], dict[int, dict[int, TensorPieces]]] = {}
    for name, tensor in own.items():
        match = BUCKET.fullmatch(name)
        if match is None:
            raise UnknownLayoutError(f"{name!r} is no name of a bucket")
        optimizer, group, buffer, bucket = (int(number or 0) for number in match.group(1, 2, 3, 5))
        numbers.setdefault((optimizer, group, match[4]), {}).setdefault(buffer, {})[bucket] = tensor
    return {
        BufferPlace(optimizer, group, chunk, dtype): [buckets[index] for index in range(len(buckets))]
        for (optimizer, group, dtype), of in numbers.items()
        for chunk, (_, buckets) in enumerate(sorted(of.items()))
    }


class _Model:
    """The parameters of a model in the order in which modules have them, and which ranks have which."""

    def __init__(
        self,
        tensors: Mapping[str, TensorPieces],
        order: Sequence[str],
        args: Mapping[str, Any],
        degrees: Degrees,
        *,
        by_expert: bool,
    ) -> None:
        self.tensors, self.args, self.degrees, self.by_expert = tensors, args, degrees, by_expert
        self.sizes: dict[str, int] = {}
        self.layers: dict[int, list[str]] = {}
        for name in tensors:
            if match := _LAYER.fullmatch(name):
                self.layers.setdefault(int(match[1]), []).append(name)
            elif name not in (*_EMBEDDINGS, *_TAIL):
                raise UnknownLayoutError(f"{name!r} is of no module whose place is known")
        for own in self.layers.values():
            own.sort(key=lambda name: self._key(name, order))

    def _key(self, name: str, order: Sequence[str]) -> tuple[Any, ...]:
        match = _LAYER.fullmatch(name)
        assert match is not None
        at = next((number for number, pattern in enumerate(order) if re.match(pattern, match[2])), None)
        if at is None:
            raise UnknownLayoutError(f"{name!r} is of no module whose place is known")
        if expert := _EXPERT.fullmatch(match[2]):
            number, rest = int(expert[1]), _with_bias_last(expert[2])
            return at, *((number, *rest) if self.by_expert else (*rest, number))
        return at, *_with_bias_last(match[2])

    def places(
        self, buffers: Mapping[BufferPlace, list[TensorPieces]]
    ) -> dict[tuple[BufferPlace, str, int], BucketPlace]:
        """Return where each rank's part of each parameter lies.

        Raises:
            UnknownLayoutError: the sizes of a buffer's buckets are not those of the parameters that should be there.
        """
        found: dict[tuple[BufferPlace, str, int], BucketPlace] = {}
        apart = any(place.optimizer for place in buffers)
        num_chunks = 1 + max(place.chunk for place in buffers)
        first = 0
        for chunk, stage in itertools.product(range(num_chunks), range(self.degrees.pp)):
            is_last = (chunk, stage) == (num_chunks - 1, self.degrees.pp - 1)
            own = [place for place in buffers if place.chunk == chunk and self._stage(place) == stage]
            dense = next((place for place in own if not place.optimizer), None)
            if dense is None:
                raise UnknownLayoutError(f"stage {stage} has no buckets")
            count = self._num_layers(dense, buffers[dense], first, is_last=is_last, apart=apart)
            for place in own:
                names = self._names(place, first, count, is_last=is_last, apart=apart)
                rank = place.group % (self.degrees.etp if place.optimizer else self.degrees.tp)
                for name, where in zip(names, self._walk(names, buffers[place]), strict=True):
                    found[place, name, rank] = where
            first += count
        if first != len(self.layers):
            raise UnknownLayoutError(f"buckets are of {first} layers, the model has {len(self.layers)}")
        return found

    def _stage(self, place: BufferPlace) -> int:
        return place.group // (self.degrees.etp * self.degrees.ep if place.optimizer else self.degrees.tp)

    def _num_layers(
        self, place: BufferPlace, buckets: Sequence[TensorPieces], first: int, *, is_last: bool, apart: bool
    ) -> int:
        """Return how many layers a stage has: as many as its buckets have elements for."""
        total = sum(bucket.num_elements for bucket in buckets)
        for count in range(len(self.layers) - first + 1):
            names = self._names(place, first, count, is_last=is_last, apart=apart)
            rest = total - sum(map(self._size, names))
            if 0 <= rest <= _ALIGNMENT * len(names) and self._fits(names, buckets):
                return count
        raise UnknownLayoutError(
            f"buckets of rank {place.group} have {total:,} elements, which no number of layers from {first} on makes"
        )

    def _names(self, place: BufferPlace, first: int, count: int, *, is_last: bool, apart: bool) -> list[str]:
        """Return the parameters in a buffer, in the model's order."""
        is_first = first == 0 and self._stage(place) == 0 and place.chunk == 0
        found = [*_EMBEDDINGS] if is_first else []
        for layer in range(first, first + count):
            found += self.layers.get(layer, [])
        if is_last:
            tied = "output_layer.weight" not in self.tensors and self.degrees.pp > 1
            found += [*_TAIL[:2], _EMBEDDINGS[0] if tied else _TAIL[2]]
        own = [name for name in found if name in self.tensors and self.tensors[name].dtype == place.dtype]
        if not apart:
            return own
        per_rank = (self.args.get("num_experts") or 0) // self.degrees.ep
        rank = place.group // self.degrees.etp % self.degrees.ep
        kept = []
        for name in own:
            expert = re.search(r"\.experts\.local_experts\.(\d+)\.", name)
            if (expert is not None) == bool(place.optimizer) and (
                expert is None or int(expert[1]) // max(1, per_rank) == rank
            ):
                kept.append(name)
        return kept

    def _size(self, name: str) -> int:
        """Return how many elements of a parameter each rank has."""
        if name not in self.sizes:
            shape = self.tensors[name].shape
            self.sizes[name] = math.prod(_local_shape(shape, _split(name, shape, self.args, self.degrees), 0))
        return self.sizes[name]

    def _fits(self, names: Sequence[str], buckets: Sequence[TensorPieces]) -> bool:
        try:
            self._walk(names, buckets)
        except UnknownLayoutError:
            return False
        return True

    def _walk(self, names: Sequence[str], buckets: Sequence[TensorPieces]) -> list[BucketPlace]:
        """Return where parameters lie in buckets, the last one first."""
        begins = [{piece.region.starts[0] for piece in b.pieces if isinstance(piece.region, Box)} for b in buckets]
        found: list[BucketPlace] = []
        bucket, end = 0, 0
        for name in reversed(names):
            size = self._size(name)
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            if end and buckets[bucket].num_elements in (end, start):
                bucket, start = bucket + 1, 0
            if bucket == len(buckets) or start not in begins[bucket] or start + size > buckets[bucket].num_elements:
                raise UnknownLayoutError(f"{name!r} does not begin where a part of a bucket does")
            found.append(BucketPlace(bucket, start))
            end = start + size
        if (bucket, end) != (len(buckets) - 1, buckets[-1].num_elements):
            raise UnknownLayoutError("there is more in a buffer than its parameters")
        return found[::-1]


def _with_bias_last(name: str) -> tuple[str, bool]:
    return re.sub(r"(weight|bias)$", "", name), name.endswith("bias")


def _split(name: str, shape: tuple[int, ...], args: Mapping[str, Any], degrees: Degrees) -> Split:
    from trainermon.analysis.checkpoint.formats.megatron import GATED, known_split

    ranks = degrees.etp if ".experts." in name else degrees.tp
    dim = known_split(name, shape)
    if dim == "unknown":
        raise UnknownLayoutError(f"{name!r}: it is not known whether tensor parallelism splits it")
    if not isinstance(dim, int) or ranks == 1:
        return Split(None)
    halves = 2 if args.get("swiglu") and GATED.fullmatch(name) else 1
    if shape[dim] % (ranks * halves):
        raise UnknownLayoutError(f"{name!r} is {list(shape)}, which {ranks} ranks cannot share evenly")
    return Split(dim, [[shape[dim] // halves // ranks] * ranks] * halves)


def _local_shape(shape: tuple[int, ...], split: Split, rank: int) -> tuple[int, ...]:
    if split.dim is None:
        return shape
    return (*shape[: split.dim], sum(widths[rank] for widths in split.widths), *shape[split.dim + 1 :])


def _cut(bucket: TensorPieces, start: int, length: int) -> Iterator[Piece]:
    """Yield the pieces of a bucket's elements from `start` on, as flat ranges of what begins there."""
    for region, stored, label in bucket.pieces:
        assert isinstance(region, Box)
        begin, size = region.starts[0], region.sizes[0]
        low, high = max(start, begin), min(start + length, begin + size)
        if low < high:
            yield Piece(FlatRange(low - start, high - low), rows(stored, 0, low - begin, high - low), label)
