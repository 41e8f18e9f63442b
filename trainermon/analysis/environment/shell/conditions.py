"""Whether a condition of a script holds: `[ … ]` and `[[ … ]]`, as far as it needs no file and nothing unknown."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Sequence

from trainermon.analysis.environment.shell.expansion import is_unknown

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def holds(words: Sequence[str], *, has_patterns: bool = False) -> bool | None:
    """Return whether a condition holds; None if that is not known. Files are not looked at.

    `has_patterns`: the right side of `==` is a pattern, as in `[[ … ]]`.
    """
    for joint, decide in (("||", _either), ("-o", _either), ("&&", _both), ("-a", _both)):
        if joint in words[1:-1]:
            at = list(words).index(joint, 1)
            left = holds(words[:at], has_patterns=has_patterns)
            return decide(left, holds(words[at + 1 :], has_patterns=has_patterns))
    if words[:1] == ["!"] and len(words) > 1:
        found = holds(words[1:], has_patterns=has_patterns)
        return None if found is None else not found
    if len(words) > 2 and words[0] == "(" and words[-1] == ")":
        return holds(words[1:-1], has_patterns=has_patterns)
    return _single(words, has_patterns=has_patterns)


def _single(words: Sequence[str], *, has_patterns: bool) -> bool | None:
    if len(words) == 3:
        return None if is_unknown(words[0]) or is_unknown(words[2]) else _of_two(*words, has_patterns=has_patterns)
    if len(words) == 2 and words[0] in ("-n", "-z"):
        found = _known_text(words[1])
        return found if words[0] == "-n" or found is None else not found
    return (_known_text(words[0]) if words else False) if len(words) < 2 else None


def _of_two(left: str, sign: str, right: str, *, has_patterns: bool) -> bool | None:
    if sign in _NUMBERS:
        try:
            return _NUMBERS[sign](int(left or "0"), int(right or "0"))
        except ValueError:
            return None
    if sign in ("=", "==", "!="):
        is_same = fnmatch.fnmatchcase(left, right) if has_patterns else left == right
        return is_same is (sign != "!=")
    return {"<": left < right, ">": left > right}.get(sign)


def _known_text(text: str) -> bool | None:
    return None if is_unknown(text) else bool(text)


def _either(one: bool | None, other: bool | None) -> bool | None:  # noqa: FBT001  # three values
    return True if True in (one, other) else None if None in (one, other) else False


def _both(one: bool | None, other: bool | None) -> bool | None:  # noqa: FBT001  # three values
    return False if False in (one, other) else None if None in (one, other) else True
