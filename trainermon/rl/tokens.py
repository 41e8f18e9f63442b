"""The tokens of a step as both sides saw them: what was passed in, brought into columns of equal length.

Both sides say which tokens count by a mask. Where their arrays have the same shape, tokens stand side by side, and one
counts if both masks say so; else the tokens that count on one side are paired with those on the other, in order.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


MOST = 0.01
"""The largest log-probability that rounding may give."""
FEW = 8
"""Up to so many tokens may all have the same log-probability by chance."""


class NotComparableError(ValueError):
    """Raised if the tokens of the two sides cannot be paired; the message says what was found."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenSide:
    """What one side said of some sequences: all positions, one sequence after the other.

    Attributes:
        lengths: Positions of each sequence, int64 [sequences].
        logprobs: float64 [positions].
        mask: Which positions count, [positions].
        is_masked: Whether a mask was passed in; else every position counts.
        ids: Token ids, int64 [positions]; None: not passed in.
        again: Log-probabilities of a second computation; None: not passed in.
        experts: The expert of each token, int64 [positions] or [positions, layers]; None: not passed in.
    """

    lengths: Integers
    logprobs: Floats
    mask: Flags
    is_masked: bool
    ids: Integers | None = None
    again: Floats | None = None
    experts: Integers | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens that count and have two finite log-probabilities, sequence after sequence.

    Attributes:
        rollout: Log-probabilities of the engine that sampled them, float64 [tokens].
        train: Log-probabilities of the trainer.
        sequence: Which sequence a token belongs to, from 0, ascending.
        position: Its number among the tokens of its sequence that count.
        num_sequences: How many sequences were passed in.
        ids: Token ids; None: neither side gave any.
        again: The trainer's second computation; None: not given.
        experts_differ: Whether the first experts of the two sides differ in any layer; None: not given by both.
        num_nonfinite: Tokens left out because a log-probability is NaN or infinite.
        num_nonfinite_of_rollout: Those of them where the rollout's is.
        num_masks_differ: Positions that count on one side only, where positions stand side by side.
    """

    rollout: Floats
    train: Floats
    sequence: Integers
    position: Integers
    num_sequences: int
    ids: Integers | None = None
    again: Floats | None = None
    experts_differ: Flags | None = None
    num_nonfinite: int = 0
    num_nonfinite_of_rollout: int = 0
    num_masks_differ: int = 0

    def __len__(self) -> int:
        return len(self.rollout)

    def only(self, chosen: Flags) -> Tokens:
        """Return the tokens that `chosen`, [tokens], says; positions stay as they are."""
        return dataclasses.replace(
            self,
            **{name: _chosen(getattr(self, name), chosen) for name in _COLUMNS},
        )


_COLUMNS = ("rollout", "train", "sequence", "position", "ids", "again", "experts_differ")


def read_side(logprobs: Any, *, mask: Any = None, ids: Any = None, again: Any = None, experts: Any = None) -> TokenSide:
    """Return what one side passed in, from arrays `[N, T]` (numpy, torch) or a list of sequences of any lengths.

    `experts` has one dimension more, layers, or not. Without a mask every position counts. Tensors on another device
    are copied, which waits for it.

    Raises:
        NotComparableError: Shapes do not fit together.
    """
    values, lengths = _flat(logprobs, np.float64, "logprobs")
    given = {
        name: _like(value, kind, name, lengths)
        for name, value, kind in (
            ("mask", mask, np.bool_),
            ("ids", ids, np.int64),
            ("again", again, np.float64),
            ("experts", experts, np.int64),
        )
    }
    counts = given.pop("mask")
    every = np.ones(len(values), dtype=bool)
    return TokenSide(
        lengths=lengths,
        logprobs=values,
        mask=every if counts is None else counts,
        is_masked=counts is not None,
        **given,
    )


def joined(sides: Sequence[TokenSide]) -> TokenSide:
    """Return the sequences of several calls as those of one; what only some calls gave is left out."""
    if len(sides) == 1:
        return sides[0]

    def column(name: str) -> Any:
        parts = [getattr(side, name) for side in sides]
        return None if any(part is None for part in parts) else np.concatenate(parts)

    return TokenSide(
        lengths=column("lengths"),
        logprobs=column("logprobs"),
        mask=column("mask"),
        is_masked=all(side.is_masked for side in sides),
        **{name: column(name) for name in ("ids", "again", "experts")},
    )


def pair(rollout: TokenSide, train: TokenSide) -> Tokens:
    """Return the tokens of both sides, side by side.

    Raises:
        NotComparableError: The numbers of sequences or tokens differ, token ids differ, or nothing is left.
    """
    if len(rollout.lengths) != len(train.lengths):
        raise NotComparableError(
            f"the rollout has {len(rollout.lengths)} sequences and the trainer {len(train.lengths)}"
        )
    if np.array_equal(rollout.lengths, train.lengths):
        chosen = rollout.mask & train.mask
        picked = (chosen, chosen)
        differ = int(np.count_nonzero(rollout.mask ^ train.mask)) if rollout.is_masked and train.is_masked else 0
    else:
        picked, differ = (rollout.mask, train.mask), 0
    counts = [_counts(side.lengths, mask) for side, mask in zip((rollout, train), picked, strict=True)]
    unequal = np.nonzero(counts[0] != counts[1])[0]
    if len(unequal):
        first = int(unequal[0])
        raise NotComparableError(
            f"sequence {first} has {counts[0][first]} tokens of the rollout and {counts[1][first]} of the trainer"
            f" ({len(unequal)} of {len(counts[0])} sequences differ): pass the mask of each side"
        )
    sequence = np.repeat(np.arange(len(counts[0])), counts[0])
    starts = np.cumsum(counts[0]) - counts[0]
    position = np.arange(len(sequence)) - starts[sequence]
    ids = _same_ids(rollout, train, picked, sequence, position)
    return _finite(
        Tokens(
            rollout=rollout.logprobs[picked[0]],
            train=train.logprobs[picked[1]],
            sequence=sequence,
            position=position,
            num_sequences=len(counts[0]),
            ids=ids,
            again=_chosen(train.again, picked[1]),
            experts_differ=_differing(_chosen(rollout.experts, picked[0]), _chosen(train.experts, picked[1])),
            num_masks_differ=differ,
        )
    )


def _finite(tokens: Tokens) -> Tokens:
    """Return the tokens with two finite log-probabilities, which are told from what is none."""
    finite = np.isfinite(tokens.rollout) & np.isfinite(tokens.train)
    left = int(np.count_nonzero(~finite))
    if left == len(tokens):
        found = f"all {left} log-probabilities are NaN or infinite" if left else "no token counts under the masks"
        raise NotComparableError(found)
    of_rollout = int(np.count_nonzero(~np.isfinite(tokens.rollout)))
    kept = tokens
    if left:
        kept = dataclasses.replace(tokens.only(finite), num_nonfinite=left, num_nonfinite_of_rollout=of_rollout)
    _require_logprobs(kept)
    return kept


def _require_logprobs(tokens: Tokens) -> None:
    """Refuse what is no log-probability as a whole; single ones may be what stands for padding."""
    for side, values, other in (
        ("rollout", tokens.rollout, tokens.train),
        ("trainer", tokens.train, tokens.rollout),
    ):
        if np.median(values) > MOST:
            raise NotComparableError(
                f"half of the {side}'s log-probabilities are above 0: were negative log-likelihoods passed?"
            )
        if len(values) > FEW and np.ptp(values) == 0.0 < np.ptp(other):
            raise NotComparableError(f"all log-probabilities of the {side} are {values[0]:.4g}: were any computed?")


def _same_ids(
    rollout: TokenSide, train: TokenSide, picked: tuple[Flags, Flags], sequence: Integers, position: Integers
) -> Integers | None:
    """Return the ids that both sides agree on, or those that one gave."""
    ours: Integers | None = _chosen(rollout.ids, picked[0])
    theirs: Integers | None = _chosen(train.ids, picked[1])
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    unequal = np.nonzero(ours != theirs)[0]
    if len(unequal):
        first = unequal[0]
        raise NotComparableError(
            f"token {position[first]} of sequence {sequence[first]} is {ours[first]} in the rollout and {theirs[first]}"
            f" in the trainer ({len(unequal):,} of {len(ours):,} tokens differ): were responses tokenized again?"
        )
    return ours


def _differing(rollout: Integers | None, train: Integers | None) -> Flags | None:
    if rollout is None or train is None or rollout.shape != train.shape:
        return None
    per_layer = np.not_equal(rollout, train).reshape(len(rollout), -1)
    differ: Flags = np.logical_or.reduce(per_layer, axis=1)
    return differ


def _counts(lengths: Integers, mask: Flags) -> Integers:
    total = np.concatenate(([0], np.cumsum(mask)))
    ends = np.cumsum(lengths)
    counts: Integers = total[ends] - total[ends - lengths]
    return counts


def _chosen(column: Any, chosen: Flags) -> Any:
    return None if column is None else column[chosen]


def _flat(values: Any, kind: Any, name: str) -> tuple[Any, Integers]:
    """Return all sequences in a row, and the length of each."""
    if isinstance(values, list | tuple):
        parts = [_array(each, kind) for each in values]
        if any(part.ndim == 0 for part in parts):
            parts = [np.stack(parts)]  # one flat list of numbers: one sequence
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        return (np.concatenate(parts) if parts else np.zeros(0, dtype=kind)), lengths
    array = _array(values, kind)
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 and not (array.ndim == 3 and name == "experts"):
        raise NotComparableError(f"{name}: found shape {list(array.shape)}, expected [sequences, tokens]")
    lengths = np.full(array.shape[0], array.shape[1], dtype=np.int64)
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:]), lengths


def _like(values: Any, kind: Any, name: str, lengths: Integers) -> Any:
    if values is None:
        return None
    flat, found = _flat(values, kind, name)
    if not np.array_equal(found, lengths):
        raise NotComparableError(
            f"{name} has {len(found)} sequences of {_range(found)} tokens, logprobs {len(lengths)} of {_range(lengths)}"
        )
    return flat


def _range(lengths: Integers) -> str:
    if not len(lengths):
        return "0"
    low, high = int(lengths.min()), int(lengths.max())
    return str(low) if low == high else f"{low} to {high}"


def _array(values: Any, kind: Any) -> Any:
    torch = sys.modules.get("torch")  # whoever passes a tensor has loaded it
    if torch is not None and isinstance(values, torch.Tensor):
        wide = values.detach()
        wide = wide.to(torch.float64) if wide.is_floating_point() else wide
        return wide.cpu().numpy().astype(kind, copy=False)
    return np.asarray(values).astype(kind, copy=False)
