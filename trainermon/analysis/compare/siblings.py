"""Which modules of two models stand in the same place though their names differ.

Names tell nothing where one side has a layer more, as all behind it have other numbers, or where a part was renamed.
There modules of one class below matched parents are matched: by equal parameters where one side has more of them, by
their order where one kind of each class is left. What is left of one name is of another class.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import NamedTuple

from trainermon.analysis.compare.alignment import align
from trainermon.analysis.compare.items import MODULE, PARAMETERS, DumpCall, DumpRows
from trainermon.dump.files.records import FORWARD

ALONE = "\0"
"""The golden name of a module that the golden dump does not have: none is called so."""
_number = re.compile(r"\d+")
_wrappers = re.compile(r"^(\d+\.)?(?:module\.)+")
_Values = tuple[object, ...]


def unwrapped(path: str) -> str:
    """Return the path of a module without what DDP and the like add to it in msprobe's dumps.

    >>> unwrapped("module.fc"), unwrapped("0.module.module.fc")
    ('fc', '0.fc')
    """
    return _wrappers.sub(r"\1", path)


class _SiblingKind(NamedTuple):
    """What modules below one parent have in common: the name without numbers, and the class."""

    name: str
    class_name: str


class _SiblingModule(NamedTuple):
    """A module of one side: its path as it is in the dump, its class, and the parameters in it and all within."""

    path: str
    class_name: str
    shapes: Counter[object]
    values: list[object]


class _ModuleTree:
    """The modules of one side as a tree, by their paths without wrappers."""

    def __init__(self, calls: Sequence[DumpCall]) -> None:
        self.known: dict[str, _SiblingModule] = {}
        self._within: defaultdict[str, list[str]] = defaultdict(list)
        made = [call for call in calls if call.family == MODULE and call.direction == FORWARD]
        for call in made:
            path = unwrapped(call.path)
            self.known.setdefault(path, _SiblingModule(call.path, call.name.rpartition(".")[2], Counter(), []))
        done: set[str] = set()
        for call in made:
            path = unwrapped(call.path)
            if path in done:
                continue
            done.add(path)
            rows = [row for row in call.items if row.state == PARAMETERS]
            for around in (path, *self._above(path)):
                module = self.known[around]
                module.shapes.update((row.shape, row.place) for row in rows)
                module.values.extend((row.max, row.min, row.mean, row.norm, row.checksum) for row in rows)
            if path:  # the outermost, if it is among the calls, is not within itself
                self._within[next(self._above(path), "")].append(path)

    def _above(self, path: str) -> Iterator[str]:
        """Yield the modules around one, innermost first."""
        while "." in path:
            path = path.rpartition(".")[0]
            if path in self.known:
                yield path

    def kinds(self, path: str) -> dict[_SiblingKind, list[str]]:
        """Return the modules directly within one, by kind, in the order in which they ran; "" is the outermost."""
        found: defaultdict[_SiblingKind, list[str]] = defaultdict(list)
        for inner in self._within.get(path, ()):
            name = inner[len(path) + 1 :] if path else inner
            found[_SiblingKind(_number.sub("#", name), self.known[inner].class_name)].append(inner)
        return dict(found)


class SiblingMatch(NamedTuple):
    """Which modules belong together though their names differ.

    Attributes:
        names: The golden path and class of a module, by the target's path; `ALONE`: the golden dump has none.
        notes: What was taken for one another by its class and place alone, and how to say so in a file; and which
            classes stand where the golden dump has others.
        replaced: The target's paths of modules that have another class in the golden dump.
    """

    names: Mapping[str, str]
    notes: tuple[str, ...]
    replaced: frozenset[str] = frozenset()


def match_siblings(target: DumpRows, golden: DumpRows, *, across_classes: bool = True) -> SiblingMatch:
    """Return which modules of two dumps of PyTorch belong together though their names differ; nothing if none do.

    `across_classes`: modules of one name and unlike classes do, too; not where one side has fused what the other has in
    parts, as its activations are then others. Costs a look at each module's first forward.
    """
    return _SiblingMatcher(_ModuleTree(target.calls), _ModuleTree(golden.calls), across_classes=across_classes).match()


class _SiblingMatcher:
    def __init__(self, ours: _ModuleTree, theirs: _ModuleTree, *, across_classes: bool) -> None:
        self._across_classes = across_classes
        self._ours = ours
        self._theirs = theirs
        self._names: dict[str, str] = {}
        self._renamed: Counter[tuple[str, str]] = Counter()
        self._replaced: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)

    def match(self) -> SiblingMatch:
        waiting = [("", "")]
        while waiting:
            waiting += self._below(*waiting.pop())
        notes = (*map(self._renamed_note, self._renamed.items()), *map(self._replaced_note, self._replaced.items()))
        return SiblingMatch(self._names, notes, frozenset(chain.from_iterable(self._replaced.values())))

    def _below(self, ours: str, theirs: str) -> list[tuple[str, str]]:
        """Match what is directly within two modules, and return the pairs."""
        left, others = self._ours.kinds(ours), self._theirs.kinds(theirs)
        pairs: list[tuple[str, str]] = []
        for kind in [kind for kind in left if kind in others]:
            pairs += self._of_kind(left.pop(kind), others.pop(kind))
        pairs += self._renamed_kinds(left, others, (ours, theirs))
        if self._across_classes:
            pairs += self._replaced_classes(pairs, ours, theirs)
        for one, other in pairs:
            self._note_pair(one, other)
        if ours != theirs:  # names say nothing any more: what has no partner here has none
            matched = {one for one, _ in pairs}
            lone = [path for paths in self._ours.kinds(ours).values() for path in paths if path not in matched]
            self._leave_alone(lone)
        return pairs

    def _of_kind(self, ours: list[str], theirs: list[str]) -> list[tuple[str, str]]:
        """Return the pairs of modules of one kind: by number, or where one side has more by equal parameters."""
        if len(ours) == len(theirs):
            return list(zip(ours, theirs, strict=True))
        known, other = (
            [self._values(self._ours, path) for path in ours],
            [self._values(self._theirs, path) for path in theirs],
        )
        anchors = [(one, two) for one, two in align(known, other) if known[one]]
        if not anchors:
            return list(zip(ours, theirs, strict=False))
        pairs = [(ours[one], theirs[two]) for one, two in _filled(anchors, len(ours), len(theirs))]
        matched = {one for one, _ in pairs}
        self._leave_alone([path for path in ours if path not in matched])
        return pairs

    def _renamed_kinds(
        self, ours: dict[_SiblingKind, list[str]], theirs: dict[_SiblingKind, list[str]], around: tuple[str, str]
    ) -> list[tuple[str, str]]:
        """Return the pairs of modules whose class is left once on each side, with parameters of the same shapes."""
        pairs: list[tuple[str, str]] = []
        for kind, paths in ours.items():
            same = [other for other in theirs if other.class_name == kind.class_name]
            is_only = len(same) == 1 and sum(one.class_name == kind.class_name for one in ours) == 1
            if not is_only or len(theirs[same[0]]) != len(paths):
                continue
            found = list(zip(paths, theirs[same[0]], strict=True))
            if any(self._ours.known[one].shapes != self._theirs.known[other].shapes for one, other in found):
                continue
            pairs += found
            self._renamed[_rule_path(around[0], kind), _rule_path(around[1], same[0])] += len(found)
        return pairs

    def _replaced_classes(self, pairs: list[tuple[str, str]], ours: str, theirs: str) -> list[tuple[str, str]]:
        """Return the pairs of modules that are left, of one name and unlike classes.

        A number is a name only where both sides have as many: else it tells no place.
        """
        left = _left(self._ours, ours, {one for one, _ in pairs})
        others = _left(self._theirs, theirs, {other for _, other in pairs})
        is_even = sum(map(str.isdigit, left)) == sum(map(str.isdigit, others))
        found = [name for name in left if name in others and (is_even or not name.isdigit())]
        for name in found:
            place = _number.sub("*", left[name])
            one, other = self._ours.known[left[name]], self._theirs.known[others[name]]
            self._replaced[place, one.class_name, other.class_name].append(one.path)
        return [(left[name], others[name]) for name in found]

    def _note_pair(self, ours: str, theirs: str) -> None:
        one, other = self._ours.known[ours], self._theirs.known[theirs]
        if ours != theirs or one.class_name != other.class_name:
            self._names[one.path] = f"{other.path}.{other.class_name}"

    def _leave_alone(self, paths: list[str]) -> None:
        """Note that modules, and all within them, have no partner."""
        while paths:
            path = paths.pop()
            self._names[self._ours.known[path].path] = ALONE
            paths += [inner for within in self._ours.kinds(path).values() for inner in within]

    @staticmethod
    def _values(modules: _ModuleTree, path: str) -> _Values:
        return tuple(modules.known[path].values)

    @staticmethod
    def _replaced_note(replaced: tuple[tuple[str, str, str], list[str]]) -> str:
        (place, ours, theirs), paths = replaced
        where = f"{place}, in {_places(len(paths))}," if len(paths) > 1 else paths[0]
        return f"{where} is {ours}, and {theirs} in the golden dump"

    @staticmethod
    def _renamed_note(renamed: tuple[tuple[str, str], int]) -> str:
        (ours, theirs), number = renamed
        return (
            f"{ours} was taken for {theirs} in {_places(number)}, as class, parameters and place are the same; "
            f'for --match: - {{target: "{ours}", golden: "{theirs}"}}'
        )


def _places(number: int) -> str:
    return f"{number} places" if number > 1 else "one place"


def _left(modules: _ModuleTree, around: str, taken: Set[str]) -> dict[str, str]:
    """Return, by its name, the path of each module directly within one that is not among those `taken`."""
    within = [path for paths in modules.kinds(around).values() for path in paths if path not in taken]
    return {path[len(around) + 1 :] if around else path: path for path in within}


def _rule_path(around: str, kind: _SiblingKind) -> str:
    """Return the path of modules of a kind as rules have it, with `*` for numbers."""
    return f"{_number.sub('*', around)}.{kind.name.replace('#', '*')}".lstrip(".")


def _filled(anchors: Sequence[tuple[int, int]], num_ours: int, num_theirs: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs `anchors`, and between them those that stand in order, as many as the side with fewer has."""
    before = (-1, -1)
    for anchor in (*anchors, (num_ours, num_theirs)):
        yield from zip(range(before[0] + 1, anchor[0]), range(before[1] + 1, anchor[1]), strict=False)
        if anchor[0] < num_ours:
            yield anchor
        before = anchor
