"""Where the prompts that an engine read stand in a trainer's batch, told by the token ids alone.

A trainer pads prompts on the left or right, packs sequences behind each other, and has responses behind the prompts; an
engine has the tokens of all prompts in a row. Nothing is asked of either: ids of both are in the dumps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from trainermon.core.errors import ConfigError, DumpError

Integers = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlaces:
    """Where the tokens of some sequences stand in the batch of one side.

    Attributes:
        rows: How many rows the batch has; 1 where tokens have no rows.
        columns: How many columns.
        row: Of each token the row, int64 [tokens].
        column: The column.
    """

    rows: int
    columns: int
    row: Integers
    column: Integers


def find_prompts(
    trainer_ids: Integers,
    engine_ids: Integers,
    *,
    engine_positions: Integers | None = None,
    lengths: Sequence[int] | None = None,
) -> tuple[TokenPlaces, TokenPlaces, list[int]]:
    """Return where the engine's prompts stand in the trainer's batch and in its own, and the lengths of those found.

    Prompts that the trainer's batch has not are left out.

    Args:
        trainer_ids: Token ids, `[N, T]`, or `[tokens]` where sequences are packed.
        engine_ids: The same of the engine.
        engine_positions: Positions of the engine's tokens within their prompts; None: not known.
        lengths: Of the engine's prompts, in its order; None: positions or rows tell them.

    Raises:
        DumpError: No prompt of the engine stands in the trainer's batch.
        ConfigError: `lengths` do not add up to the engine's tokens.
    """
    trainer, engine = np.atleast_2d(trainer_ids), np.atleast_2d(engine_ids)
    places: tuple[list[Integers], list[Integers]] = ([], [])
    found: list[int] = []
    missing = 0
    padding = _padding_tokens(engine)
    for where in _prompts(engine, engine_positions, lengths):
        row = engine.ravel()[where]
        parts = [(part, _find(trainer, row[part])) for part in _unpadded(row, padding)]
        part, start = next((each for each in parts if each[1] is not None), (slice(0), None))
        if start is None:
            missing += 1
            continue
        places[0].append(start + np.arange(len(row[part])))
        places[1].append(where[part])
        found.append(len(row[part]))
    if not found:
        raise DumpError(
            f"none of the engine's {missing} prompts stands in the trainer's batch of shape {list(trainer_ids.shape)}: "
            "dump the same sequences on both sides, without a prefix cache; or pass the lengths of the prompts"
        )
    trainer_places, engine_places = (
        TokenPlaces(rows=len(ids), columns=ids.shape[1], row=flat // ids.shape[1], column=flat % ids.shape[1])
        for ids, flat in zip((trainer, engine), map(np.concatenate, places), strict=True)
    )
    return trainer_places, engine_places, found


def _prompts(engine: Integers, positions: Integers | None, lengths: Sequence[int] | None) -> Iterator[Integers]:
    """Yield where each prompt stands among the engine's tokens in a row, with the padding of its row."""
    if lengths is not None:
        if sum(lengths) != engine.size or min(lengths, default=0) < 1:
            raise ConfigError(f"lengths: found {sum(lengths)} tokens together, expected the engine's {engine.size}")
        starts = np.cumsum([0, *lengths[:-1]])
    elif len(engine) > 1:
        starts = np.arange(0, engine.size, engine.shape[1])
    elif positions is not None:
        flat = positions.ravel()
        starts = np.nonzero(np.r_[True, flat[1:] != flat[:-1] + 1])[0]
    else:
        starts = np.zeros(1, np.int64)
    for start, end in zip(starts, [*starts[1:], engine.size], strict=True):
        yield np.arange(start, end)


def _padding_tokens(engine: Integers) -> set[int]:
    """Return the tokens of which a row has several at an end: they may be padding. None where there are no rows."""
    if len(engine) < 2 or engine.shape[1] < 2:
        return set()
    ends = ((engine[:, 0], engine[:, 1]), (engine[:, -1], engine[:, -2]))
    return {int(token) for outer, inner in ends for token in outer[outer == inner]}


def _unpadded(row: Integers, padding: set[int]) -> Iterator[slice]:
    """Yield what of a row may be the prompt: all, or all but a run of padding at either end; the longest first."""
    change = np.nonzero(row[1:] != row[:-1])[0] + 1
    first = int(change[0]) if len(change) and int(row[0]) in padding else 0
    last = int(change[-1]) if len(change) and int(row[-1]) in padding else len(row)
    options = {(0, len(row)), (first, len(row)), (0, last), (first, last)}
    yield from (slice(*each) for each in sorted(options, key=lambda each: each[0] - each[1]) if each[0] < each[1])


def _find(trainer: Integers, prompt: Integers) -> int | None:
    """Return where the prompt begins in the trainer's batch; first where nothing but one token stands before it."""
    size = len(prompt)
    if not 0 < size <= trainer.shape[1]:
        return None
    candidates = np.argwhere(trainer[:, : trainer.shape[1] - size + 1] == prompt[0])
    fitting = [
        (row, column) for row, column in candidates if np.array_equal(trainer[row, column : column + size], prompt)
    ]
    if not fitting:
        return None
    row, column = next(
        ((row, column) for row, column in fitting if len(np.unique(trainer[row, :column])) <= 1), fitting[0]
    )
    return int(row * trainer.shape[1] + column)
