"""How the condition of an alert rule is read from YAML: one reader per condition of `criteria`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from trainermon.alerts.conditions.criteria import (
    MAX_WINDOW,
    BreaksLaw,
    Criterion,
    Dead,
    Differs,
    Direction,
    Drift,
    Exceeds,
    Flat,
    Frozen,
    NonFinite,
    NotDecreasing,
    Ratio,
    RelativeToMean,
    Reported,
    Saturated,
    Spike,
    Spread,
    Straggler,
    Threshold,
    Vanishing,
)
from trainermon.alerts.document import DocumentNode, nearest
from trainermon.alerts.extensions import CustomCondition, conditions_of_others
from trainermon.alerts.laws.registry import law_names, law_of
from trainermon.core.values import Kind


def criterion_names() -> tuple[str, ...]:
    """Return the keys allowed under `when`: the built-in conditions, then those of installed packages."""
    return (*READERS, *(name for name in conditions_of_others() if name not in READERS))


def read_criterion(node: DocumentNode) -> Criterion:
    """Return the condition that a rule has under `when`, whose mapping is `node`.

    Raises:
        RuleError: There is not exactly one, or it has an unknown key or an impossible value.
    """
    known = criterion_names()
    when = node.child("when", known)
    given = when.only(known)
    keep = node.child("keep", ("steps", "score")) if "keep" in node else None
    if keep and "score" in keep and given not in ("spike", "spread"):
        raise keep.fail("score", f"stands beside when.{given}: only spike and spread have a score; use keep.steps")
    if given in _SCORED:
        return _SCORED[given](when, keep)
    if given in READERS:
        return READERS[given](when)
    return CustomCondition(name=given, settings=when.plain(given))


def _nonfinite(when: DocumentNode) -> NonFinite:
    if when.raw("nonfinite") is True:
        return NonFinite()
    node = when.child("nonfinite", ("allow_initial_inf", "allow_initial"))
    return NonFinite(
        allow_initial_inf=node.flag("allow_initial_inf", default=False),
        allow_initial=node.flag("allow_initial", default=False),
    )


def _limits(node: DocumentNode) -> tuple[float | None, float | None]:
    above = node.number("above") if "above" in node else None
    below = node.number("below") if "below" in node else None
    if above is None and below is None:
        raise node.error(node.path, "found neither above nor below, expected at least one of them")
    if above is not None and below is not None and below > above:
        raise node.fail("below", f"found {below:g}, which is more than above ({above:g}): every value would count")
    return above, below


def _threshold(when: DocumentNode) -> Threshold:
    node = when.child("threshold", ("above", "below", "over"))
    above, below = _limits(node)
    return Threshold(above=above, below=below, over=node.whole("over", 1, at_least=1, at_most=MAX_WINDOW))


def _clear(node: DocumentNode, keep: DocumentNode | None, score: float) -> float:
    clear = keep.number("score", score / 2, above=0.0) if keep else score / 2
    if keep and clear > score:
        raise keep.fail("score", f"found {clear:g}, expected at most {node.path}.score ({score:g})")
    return clear


def _spike(when: DocumentNode, keep: DocumentNode | None) -> Spike:
    node = when.child("spike", ("score", "window", "warmup", "direction", "floor", "adopt", "share_of_first"))
    score = node.number("score", above=0.0)
    clear = _clear(node, keep, score)
    window = node.whole("window", 128, at_least=8, at_most=MAX_WINDOW)
    warmup = node.whole("warmup", min(64, window), at_least=8)
    if warmup > window:
        raise node.fail("warmup", f"found {warmup}, expected at most window ({window}): it would never be reached")
    return Spike(
        score=score,
        clear=clear,
        window=window,
        warmup=warmup,
        direction=_direction(node),
        floor=node.number("floor", 0.1, above=0.0),
        adopt=node.whole("adopt", 128, at_least=1),
        share_of_first=node.number("share_of_first", 0.0, above=-1e-300),
    )


def _direction(node: DocumentNode) -> Direction:
    return Direction(node.choice("direction", tuple(Direction), Direction.BOTH))


def _relative_to_mean(when: DocumentNode) -> RelativeToMean:
    node = when.child("relative_to_mean", ("threshold", "beta", "direction", "floor"))
    beta = node.number("beta", 0.99, above=0.0)
    if beta >= 1.0:
        raise node.fail("beta", f"found {beta:g}, expected less than 1: nothing would ever be learned")
    threshold = node.number("threshold", above=0.0)
    floor = node.number("floor", 0.1, above=-1e-300)
    return RelativeToMean(threshold=threshold, beta=beta, direction=_direction(node), floor=floor)


def _flat(when: DocumentNode) -> Flat:
    return Flat(relative_change=when.child("flat", ("relative_change", "steps")).number("relative_change", above=0.0))


def _share(node: DocumentNode, key: str, default: float) -> float:
    share = node.number(key, default, above=0.0)
    if share > 1.0:
        raise node.fail(key, f"found {share:g}, expected a share, at most 1")
    return share


def _dead(when: DocumentNode) -> Dead:
    node = when.child("dead", ("zero_ratio", "steps", "lived"))
    return Dead(zero_ratio=_share(node, "zero_ratio", 1.0), lived=node.whole("lived", 20))


def _frozen(when: DocumentNode) -> Frozen:
    return Frozen(lived=when.child("frozen", ("steps", "lived")).whole("lived", 20, at_least=1))


def _exceeds(when: DocumentNode) -> Exceeds:
    node = when.child("exceeds", ("times", "warmup", "adopt"))
    return Exceeds(
        times=node.number("times", above=1.0),
        warmup=node.whole("warmup", 16, at_least=1),
        adopt=node.whole("adopt", 128, at_least=1),
    )


def _drift(when: DocumentNode) -> Drift:
    node = when.child("drift", ("factor", "direction", "steps", "levels", "warmup", "score", "share_of_first"))
    direction = Direction(node.choice("direction", (Direction.UP, Direction.DOWN), Direction.UP))
    return Drift(
        factor=node.number("factor", above=1.0),
        direction=direction,
        steps=node.whole("steps", 16, at_least=1, at_most=MAX_WINDOW),
        levels=node.whole("levels", 5, at_least=2, at_most=MAX_WINDOW),
        warmup=node.whole("warmup", 4),
        score=node.number("score", 4.0, above=-1e-300),
        share_of_first=node.number("share_of_first", 0.0, above=-1e-300),
    )


def _ratio(when: DocumentNode) -> Ratio:
    node = when.child("ratio", ("over", "above", "below", "times_learning_rate"))
    over = node.text("over")
    kinds = tuple(kind.value for kind in Kind)
    if over not in kinds:
        raise node.fail("over", f"found {over!r}{nearest(over, kinds)}")
    above, below = _limits(node)
    times_rate = node.flag("times_learning_rate", default=False)
    return Ratio(over=Kind(over), above=above, below=below, times_rate=times_rate)


def _vanishing(when: DocumentNode) -> Vanishing:
    node = when.child("vanishing", ("share", "warmup"))
    return Vanishing(share=_share(node, "share", 1e-4), warmup=node.whole("warmup", 64, at_least=1))


def _saturated(when: DocumentNode) -> Saturated:
    return Saturated(share=_share(when.child("saturated", ("share",)), "share", 0.5))


def _not_decreasing(when: DocumentNode) -> NotDecreasing:
    node = when.child("not_decreasing", ("steps", "improvement"))
    improvement = node.number("improvement", 0.0, above=-1e-300)
    return NotDecreasing(steps=node.whole("steps", at_least=2), improvement=improvement)


def _spread(when: DocumentNode, keep: DocumentNode | None) -> Spread:
    node = when.child("spread", ("score", "floor", "ranks"))
    score = node.number("score", above=0.0)
    clear = _clear(node, keep, score)
    ranks = node.whole("ranks", 4, at_least=2)
    return Spread(score=score, clear=clear, floor=node.number("floor", 0.1, above=0.0), ranks=ranks)


def _differs(when: DocumentNode) -> Differs:
    if when.raw("differs") is True:
        return Differs()
    node = when.child("differs", ("tolerance", "fewest"))
    return Differs(tolerance=node.number("tolerance", 0.0, above=-1e-300), fewest=node.flag("fewest", default=False))


def _straggler(when: DocumentNode) -> Straggler:
    node = when.child("straggler", ("ratio", "least_s", "lasts_s", "window"))
    window = node.whole("window", 10, at_least=1, at_most=MAX_WINDOW)
    least_s = node.number("least_s", 0.025, above=-1e-300)
    lasts_s = node.number("lasts_s", 2.0, above=-1e-300)
    return Straggler(ratio=node.number("ratio", 1.2, above=1.0), least_s=least_s, lasts_s=lasts_s, window=window)


def _law(when: DocumentNode) -> BreaksLaw:
    if isinstance(when.raw("law"), str):
        return BreaksLaw(law=when.choice("law", law_names()))
    name = when.child("law", ("name", *_all_settings())).choice("name", law_names())
    node = when.child("law", ("name", *law_of(name).settings))
    return BreaksLaw(law=name, settings={key: node.number(key) for key in law_of(name).settings if key in node})


def _all_settings() -> tuple[str, ...]:
    return tuple({key: None for name in law_names() for key in law_of(name).settings})


def _reported(when: DocumentNode) -> Reported:
    if when.raw("reported") is not True:
        raise when.fail("reported", "expected true: the agent itself says when it holds")
    return Reported()


_SCORED: Mapping[str, Callable[[DocumentNode, DocumentNode | None], Criterion]] = MappingProxyType(
    {"spike": _spike, "spread": _spread}
)

READERS: Mapping[str, Callable[[DocumentNode], Criterion]] = MappingProxyType(
    {
        "nonfinite": _nonfinite,
        "threshold": _threshold,
        "spike": lambda when: _spike(when, None),
        "relative_to_mean": _relative_to_mean,
        "flat": _flat,
        "dead": _dead,
        "ratio": _ratio,
        "vanishing": _vanishing,
        "saturated": _saturated,
        "not_decreasing": _not_decreasing,
        "spread": lambda when: _spread(when, None),
        "differs": _differs,
        "straggler": _straggler,
        "drift": _drift,
        "exceeds": _exceeds,
        "frozen": _frozen,
        "law": _law,
        "reported": _reported,
    }
)
"""The built-in conditions by name."""
