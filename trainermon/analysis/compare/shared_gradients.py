"""Which backward calls add to one gradient, which autograd passes on as their sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from trainermon.analysis.compare.items import MODULE, DumpRow, Value, value_of
from trainermon.analysis.compare.verdicts import TensorError


def above(key: str, parents: Mapping[str, str]) -> Iterator[str]:
    """Yield the keys of the calls around the call `key`, innermost first.

    `parents` has the key of the enclosing call, by the call's key.
    """
    around = parents.get(key)
    while around is not None:
        yield around
        around = parents.get(around)


class SharedGradients:
    """Finds, on both sides, all backward calls that contribute to one gradient, which is the sum of their results.

    `parents` has the key of the enclosing call, by the call's key. A module and a call within it that return the same
    gradient contribute once.
    """

    def __init__(self, parents: Mapping[str, str]) -> None:
        self._parents = parents
        self._consumers: dict[Value | None, list[str]] = defaultdict(list)
        self._handed: dict[Value | None, list[str]] = defaultdict(list)
        self._theirs: dict[Value | None, list[str]] = defaultdict(list)
        self._their_handed: dict[Value | None, list[str]] = defaultdict(list)
        self._taken: set[tuple[Value | None, Value | None]] = set()
        self._uses: dict[Value | None, list[str]] = defaultdict(list)

    def add(self, key: str, item: DumpRow, *, is_handed: bool) -> None:
        """Register that `item` is a result of the target's backward call `key`.

        `is_handed`: the call was given the same tensor and passed it on.
        """
        (self._handed if is_handed else self._consumers)[value_of(item)].append(key)

    def add_theirs(self, key: str, item: DumpRow, *, is_handed: bool) -> None:
        """Register the same of the golden partner of the backward call `key`."""
        (self._their_handed if is_handed else self._theirs)[value_of(item)].append(key)

    def add_taken(self, ours: DumpRow, theirs: DumpRow) -> None:
        """Register what a backward call was given on either side."""
        self._taken.add((value_of(ours), value_of(theirs)))

    def add_use(self, key: str, item: DumpRow) -> None:
        """Register that the parameter's entry `key` has the gradient `item`, to which each use of its weight adds."""
        self._uses[value_of(item)].append(key)

    def uses(self, item: DumpRow) -> Sequence[str]:
        """Return the keys of the parameters' entries that have the gradient `item`; () if none or not known."""
        value = value_of(item)
        return self._uses.get(value, ()) if value else ()

    def consumers(self, item: DumpRow) -> Sequence[str]:
        """Return the keys of the backward calls that have the gradient `item` among their results.

        () if none or not known.
        """
        value = value_of(item)
        return self._consumers.get(value, ()) if value else ()

    def handed(self, item: DumpRow) -> Sequence[str]:
        """Return the keys of the modules' backwards that were given the gradient `item` and returned it unchanged."""
        value = value_of(item)
        handed = self._handed.get(value, ()) if value is not None else ()
        return [key for key in handed if key.startswith(f"{MODULE}.")]  # a function does nothing to what it hands on

    def num_terms(self, key: str, error: TensorError) -> tuple[int, int]:
        """Return of how many backward calls a result of `key` is the sum: (in the target, in the golden dump).

        Both are the same where it is one sum, whatever each call shows of it: it is what a later backward was given on
        both sides, and calls that show another value on one side are within or around those that show it.
        """
        ours, theirs = value_of(error.item), value_of(error.golden)
        of_ours, of_theirs = self._consumers.get(ours, ()), self._theirs.get(theirs, ())
        if not ours or not theirs or key not in of_theirs:
            return 1, 1
        all_ours = [*of_ours, *self._handed.get(ours, ())]
        all_theirs = [*of_theirs, *self._their_handed.get(theirs, ())]
        if (ours, theirs) in self._taken and self._covers(all_ours, of_theirs) and self._covers(all_theirs, of_ours):
            return 1, 1
        return self._num_innermost(of_ours), self._num_innermost(of_theirs)

    def are_unlike(self, error: TensorError) -> bool:
        """Return whether unlike numbers of backward calls have a gradient among their results, on both sides some."""
        of_ours = self._consumers.get(value_of(error.item), ())
        of_theirs = self._theirs.get(value_of(error.golden), ())
        return bool(of_ours and of_theirs) and self._num_innermost(of_ours) != self._num_innermost(of_theirs)

    def changers(self, error: TensorError) -> list[str]:
        """Return which modules change what a call within them passes back, before it is added to a gradient.

        These add to it, and in the golden dump, too, those calls, of which the target shows what they alone add.
        """
        ours = self._consumers.get(value_of(error.item), ())
        theirs = self._theirs.get(value_of(error.golden), ()) if value_of(error.golden) else ()
        lost = {each for key in theirs if key not in ours for each in above(key, self._parents)}
        return [key for key in ours if key in lost and not any(key in above(one, self._parents) for one in ours)]

    def _covers(self, keys: Sequence[str], others: Sequence[str]) -> bool:
        """Return whether each of the calls `others` is one of `keys`, or within or around one of them."""
        within = {each for key in keys for each in above(key, self._parents)}
        return all(
            other in keys or other in within or any(each in keys for each in above(other, self._parents))
            for other in others
        )

    def _num_innermost(self, keys: Sequence[str]) -> int:
        """Return how many of the calls `keys` are around none of the others."""
        if len(keys) < 2:
            return len(keys)
        around = {each for key in keys for each in above(key, self._parents)}
        return sum(key not in around for key in keys)
