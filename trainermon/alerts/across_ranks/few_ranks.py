"""Which of two or three ranks is far from the others: the one that has moved away from where it was."""

from __future__ import annotations

import numpy as np

from trainermon.alerts.across_ranks.peers import PeerGroup
from trainermon.alerts.conditions.spread import spread_of
from trainermon.core.derived import Array

HISTORY = 128
"""So many calm steps say how far apart ranks usually are."""

WARMUP = 64
_FOLLOWED = 1 / 8
_OWN_SHARE = 0.5  # of the largest move: who has moved less is not to blame
_TINY = 1e-30


class FewRanks:
    """Scores the ranks of a group of two or three by how far each has moved from where it was.

    Args:
        score: A step with a higher score is not learned.
        floor: The least standard deviation, as a share of the level, or absolute for logarithms.
        logarithmic: Whether values are logarithms.
    """

    def __init__(self, *, score: float, floor: float, logarithmic: bool) -> None:
        self._score = score
        self._floor = floor
        self._logarithmic = logarithmic
        self._apart = np.full((0, 0, HISTORY), np.nan, np.float32)  # [ranks, columns, steps]
        self._level: Array = np.full((0, 0), np.nan)
        self._next = np.zeros((0, 0), np.intp)
        self._outside = np.zeros((0, 0), np.intp)  # steps in a row that were not learned

    def reset(self) -> None:
        """Forget everything: ranks may stand elsewhere in the next attempt."""
        self._make_room((0, 0))

    def score(self, seen: Array, group: PeerGroup) -> tuple[Array, Array]:
        """Return the score of each rank of the group, and the middle of the others, each `[ranks, columns]`.

        The score is by how many robust standard deviations the rank is further from the middle of the others than
        usual; 0 for a rank that has itself moved much less than another one, NaN where nothing is known yet.
        """
        self._make_room(seen.shape)
        place = np.ix_(group.members, group.columns)
        own = seen[place]
        others = np.stack([np.median(np.delete(own, one, axis=0), axis=0) for one in range(len(own))])
        apart = own - others
        usual, sigma = self._usual(place, others)
        score = np.abs(apart - usual) / sigma
        moved = np.abs(own - self._level[place])
        score[moved < _OWN_SHARE * moved.max(axis=0)] = 0.0
        self._learn(place, own, apart, np.nanmax(np.nan_to_num(score), axis=0) > self._score)
        return score, others

    def _usual(self, place: tuple[np.ndarray, ...], others: Array) -> tuple[Array, Array]:
        window = self._apart[place]
        spread = spread_of(window.reshape(-1, HISTORY))
        floor = self._floor if self._logarithmic else self._floor * np.abs(others)
        known = np.where(spread.num_values < WARMUP, np.nan, spread.level).reshape(others.shape)
        return known, np.maximum(np.maximum(spread.sigma.reshape(others.shape), floor), _TINY)

    def _learn(self, place: tuple[np.ndarray, ...], own: Array, apart: Array, is_odd: np.ndarray) -> None:
        outside = np.where(is_odd, self._outside[place] + 1, 0)
        lasting = outside >= HISTORY
        self._outside[place] = np.where(lasting, 0, outside)
        level = self._level[place]
        followed = np.where(np.isnan(level), own, level + _FOLLOWED * (own - level))
        learns = ~np.isnan(apart) & ~is_odd
        self._level[place] = np.where(lasting, own, np.where(learns, followed, level))
        window, at = self._apart[place], self._next[place]
        rows, columns = np.nonzero(learns)
        window[rows, columns, at[rows, columns]] = apart[rows, columns]
        window[lasting] = np.nan
        self._apart[place] = window
        self._next[place] = np.where(learns, (at + 1) % HISTORY, at)

    def _make_room(self, shape: tuple[int, ...]) -> None:
        """Have as many ranks and columns; what is known of the columns stays if the ranks are as many as before."""
        if self._level.shape == shape:
            return
        kept = self._level.shape[1] if self._level.shape[0] == shape[0] and shape[1] else 0
        for name, fill in (("_apart", np.nan), ("_level", np.nan), ("_next", 0), ("_outside", 0)):
            known = getattr(self, name)
            new = np.full((*shape, *known.shape[2:]), fill, known.dtype)
            new[:, :kept] = known[:, :kept] if kept else new[:, :0]
            setattr(self, name, new)
