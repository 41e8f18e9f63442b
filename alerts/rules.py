"""What an alert rule says, and how it is read from YAML.

A rule selects series (`on`), names a condition on them (`when`), says for how many steps it must hold (`for`) and be
over (`keep`), and what follows. How a condition is computed is decided in `conditions`, how it becomes an alert in
`state` and `engine`. The format is described in alerts/README.md.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import re
import string
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainermon.alerts.document import Node, items, nearest, read_document
from trainermon.alerts.statistics import DERIVED
from trainermon.monitor.errors import RuleError
from trainermon.monitor.values import Action, Kind, SeriesKey, Severity

DEFAULT_RULES = Path(__file__).with_name("default_rules.yaml")
RUNBOOK = Path(__file__).with_name("runbook.md")
TASKS = ("statistics", "tensor")
SUMMARY_FIELDS = ("k", "n", "step", "rank", "worst", "value", "usual", "times", "score", "nans", "infs", "count", "for")
"""What a rule's summary may put in braces; alerts/README.md says what each stands for."""

_CONDITIONS = ("nonfinite", "threshold", "spike", "relative_to_mean", "flat", "dead")
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class Direction(str, enum.Enum):
    """Which side of the usual range counts."""

    BOTH = "both"
    UP = "up"
    DOWN = "down"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which series a rule looks at.

    Attributes:
        kinds: Any of these kinds.
        names: Shell patterns; a series is meant if one of them matches its name or, with a slot, `<name>.<slot>`.
        statistic: What is computed from a series' moments; see `statistics.DERIVED`.
    """

    kinds: tuple[Kind, ...]
    names: tuple[str, ...] = ("*",)
    statistic: str = "nonfinite"

    def matches(self, key: SeriesKey) -> bool:
        """Return whether the rule looks at this series."""
        if key.kind not in self.kinds:
            return False
        pattern = _pattern(self.names)
        return bool(pattern.match(key.name) or (key.slot and pattern.match(f"{key.name}.{key.slot}")))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Some element is NaN or infinite.

    Attributes:
        allow_initial_inf: Infinite elements do not count in a series that had some, but no NaN, when it was first seen:
            attention masks hold -inf by design.
    """

    allow_initial_inf: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """The statistic is greater than `above` or less than `below`."""

    above: float | None = None
    below: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """The statistic left its usual range.

    The score is the distance from the median of the last values, in robust standard deviations (1.4826 times the median
    absolute deviation); statistics that cannot be negative are compared by their logarithms.

    Attributes:
        score: Above this score the condition holds.
        clear: Below this score it is over; at most `score`.
        window: How many values make the usual range.
        warmup: How many values a series must have shown before it is judged; at most `window`.
        direction: Which side counts.
        floor: The least standard deviation: a difference of logarithms (0.1 is about 10 %), or for statistics that may
            be negative a share of the median.
        adopt: After so many values outside the usual range in a row, the new level is learned as the usual one.
    """

    score: float
    clear: float
    window: int = 128
    warmup: int = 64
    direction: Direction = Direction.BOTH
    floor: float = 0.1
    adopt: int = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RelativeToMean:
    """The magnitude of the statistic is far from the mean of its magnitudes so far.

    Attributes:
        threshold: The condition holds above `1 + threshold` times the mean, and below the mean divided by that.
        beta: Share of the old mean in the new one, the rest is the new magnitude.
        direction: Which side counts.
    """

    threshold: float
    beta: float = 0.99
    direction: Direction = Direction.BOTH


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """The statistic stayed within `relative_change` of one value."""

    relative_change: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """The share of zeros is at least `zero_ratio`."""

    zero_ratio: float = 1.0


Condition = NonFinite | Threshold | Spike | RelativeToMean | Flat | Dead


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Escalation:
    """What the ranks concerned shall do when the rule fires; None takes the run's setting."""

    action: Action
    task: str | None = None
    steps: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One alert rule.

    Attributes:
        name: Lower case words joined by hyphens; part of every alert's id.
        severity: How urgent it is.
        on: Which series.
        when: Which condition.
        for_steps: A series fires when the condition held on so many of its values in a row.
        keep_steps: It is over when the condition did not hold on so many of its values in a row.
        cooldown_steps: How many steps after the end of an alert the next one may begin.
        escalate: What follows, if anything.
        inhibits: Names of the rules whose alerts are consequences of this one: they are held back while it fires.
        inhibits_later: The same for alerts that begin on a later step than this one's; on the same step they are news.
        summary: The message, with fields of `SUMMARY_FIELDS` in braces.
        runbook: The heading in the runbook that explains the rule.
    """

    name: str
    severity: Severity
    on: Selection
    when: Condition
    for_steps: int = 1
    keep_steps: int = 5
    cooldown_steps: int = 0
    escalate: Escalation | None = None
    inhibits: tuple[str, ...] = ()
    inhibits_later: tuple[str, ...] = ()
    summary: str
    runbook: str


def load_rules(path: Path | str | None = None) -> tuple[Rule, ...]:
    """Return the rules of a YAML file, or the default ones.

    Raises:
        RuleError: the file cannot be read, or a rule cannot be meant as written: an unknown key, a wrong type, a pair
            of settings that exclude each other. The message names the file, the rule, the key and the nearest right
            name.
    """
    source = DEFAULT_RULES if path is None else Path(path)
    document = Node(read_document(source), ("rules",), where=str(source))
    names: list[str] = []
    rules: list[Rule] = []
    for number, entry in enumerate(items(document.raw("rules"), f"{source}: rules"), start=1):
        rule = _read_rule(entry, source, number)
        if rule.name in names:
            raise RuleError(f"{source}: rule {rule.name!r}: stands twice; every rule needs a name of its own")
        names.append(rule.name)
        rules.append(rule)
    resolved = tuple(_with_inhibited(rule, names, source) for rule in rules)
    _refuse_cycles(resolved, source)
    return resolved


def inhibitors(rules: Sequence[Rule]) -> Mapping[str, tuple[str, ...]]:
    """Return for every rule the rules that hold it back, whenever it begins."""
    return {rule.name: tuple(other.name for other in rules if rule.name in other.inhibits) for rule in rules}


def later_inhibitors(rules: Sequence[Rule]) -> Mapping[str, tuple[str, ...]]:
    """Return for every rule the rules that hold it back if it begins after them."""
    return {rule.name: tuple(other.name for other in rules if rule.name in other.inhibits_later) for rule in rules}


@lru_cache(maxsize=256)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{fnmatch.translate(name)})" for name in names))


_RULE_KEYS = (
    "name",
    "severity",
    "on",
    "when",
    "for",
    "keep",
    "cooldown",
    "escalate",
    "inhibits",
    "inhibits_later",
    "summary",
    "runbook",
)


def _read_rule(entry: Any, source: Path, number: int) -> Rule:
    name = entry.get("name") if isinstance(entry, Mapping) else None
    node = Node(entry, _RULE_KEYS, where=f"{source}: rule {name!r}" if name else f"{source}: rule number {number}")
    if not _NAME.fullmatch(node.text("name")):
        raise node.fail("name", f"found {name!r}, expected lower case words joined by hyphens, such as 'loss-spike'")
    keep = node.child("keep", ("steps", "score")) if "keep" in node else None
    when = _read_condition(node, keep)
    rule = Rule(
        name=node.text("name"),
        severity=Severity(node.choice("severity", tuple(Severity))),
        on=_read_selection(node, when),
        when=when,
        for_steps=_read_for(node, when),
        keep_steps=keep.whole("steps", 5, at_least=1) if keep else 5,
        cooldown_steps=node.whole("cooldown", 0),
        escalate=_read_escalation(node) if "escalate" in node else None,
        inhibits=node.texts("inhibits", ()),
        inhibits_later=node.texts("inhibits_later", ()),
        summary=_read_summary(node),
        runbook=node.text("runbook", node.text("name")),
    )
    _refuse_impossible(node, rule)
    return rule


def _read_selection(node: Node, when: Condition) -> Selection:
    on = node.child("on", ("kind", "names", "statistic"))
    kinds = on.texts("kind")
    known = tuple(kind.value for kind in Kind)
    for kind in kinds:
        if kind not in known:
            raise on.fail("kind", f"found {kind!r}{nearest(kind, known)}")
    names = on.texts("names", ("*",))
    if not kinds or not names:
        raise on.fail("names" if kinds else "kind", "found an empty list, expected at least one entry")
    implied = "nonfinite" if isinstance(when, NonFinite) else "zero_ratio" if isinstance(when, Dead) else None
    if implied and "statistic" in on and on.text("statistic") != implied:
        raise on.fail(
            "statistic", f"found {on.text('statistic')!r}, but this condition is on {implied!r}: leave it out"
        )
    statistic = implied or on.choice("statistic", tuple(DERIVED))
    return Selection(kinds=tuple(Kind(kind) for kind in kinds), names=names, statistic=statistic)


def _read_condition(node: Node, keep: Node | None) -> Condition:
    when = node.child("when", _CONDITIONS)
    given = when.only(_CONDITIONS)
    if keep and "score" in keep and given != "spike":
        raise keep.fail("score", f"stands beside when.{given}: only a spike has a score; use keep.steps")
    if given == "nonfinite":
        return _read_nonfinite(when)
    if given == "threshold":
        return _read_threshold(when)
    if given == "spike":
        return _read_spike(when, keep)
    if given == "relative_to_mean":
        return _read_relative(when)
    if given == "flat":
        flat = when.child("flat", ("relative_change", "steps"))
        return Flat(relative_change=flat.number("relative_change", above=0.0))
    dead = when.child("dead", ("zero_ratio", "steps"))
    ratio = dead.number("zero_ratio", 1.0, above=0.0)
    if ratio > 1.0:
        raise dead.fail("zero_ratio", f"found {ratio:g}, expected a share, at most 1")
    return Dead(zero_ratio=ratio)


def _read_nonfinite(when: Node) -> NonFinite:
    if when.raw("nonfinite") is True:
        return NonFinite()
    node = when.child("nonfinite", ("allow_initial_inf",))
    return NonFinite(allow_initial_inf=node.flag("allow_initial_inf", default=False))


def _read_threshold(when: Node) -> Threshold:
    node = when.child("threshold", ("above", "below"))
    above = node.number("above") if "above" in node else None
    below = node.number("below") if "below" in node else None
    if above is None and below is None:
        raise node.error(node.path, "found neither above nor below, expected at least one of them")
    if above is not None and below is not None and below > above:
        raise node.fail("below", f"found {below:g}, which is more than above ({above:g}): every value would count")
    return Threshold(above=above, below=below)


def _read_spike(when: Node, keep: Node | None) -> Spike:
    node = when.child("spike", ("score", "window", "warmup", "direction", "floor", "adopt"))
    score = node.number("score", above=0.0)
    clear = keep.number("score", score / 2, above=0.0) if keep else score / 2
    if keep and clear > score:
        raise keep.fail("score", f"found {clear:g}, expected at most when.spike.score ({score:g})")
    window = node.whole("window", 128, at_least=8)
    warmup = node.whole("warmup", min(64, window), at_least=8)
    if warmup > window:
        raise node.fail("warmup", f"found {warmup}, expected at most window ({window}): it would never be reached")
    return Spike(
        score=score,
        clear=clear,
        window=window,
        warmup=warmup,
        direction=Direction(node.choice("direction", tuple(Direction), Direction.BOTH)),
        floor=node.number("floor", 0.1, above=0.0),
        adopt=node.whole("adopt", 128, at_least=1),
    )


def _read_relative(when: Node) -> RelativeToMean:
    node = when.child("relative_to_mean", ("threshold", "beta", "direction"))
    beta = node.number("beta", 0.99, above=0.0)
    if beta >= 1.0:
        raise node.fail("beta", f"found {beta:g}, expected less than 1: nothing would ever be learned")
    return RelativeToMean(
        threshold=node.number("threshold", above=0.0),
        beta=beta,
        direction=Direction(node.choice("direction", tuple(Direction), Direction.BOTH)),
    )


def _read_for(node: Node, when: Condition) -> int:
    if isinstance(when, Flat | Dead):
        given = "flat" if isinstance(when, Flat) else "dead"
        if "for" in node:
            raise node.fail("for", f"stands beside when.{given}.steps, which says the same: leave it out")
        inner = node.child("when", _CONDITIONS).child(given, ("relative_change", "zero_ratio", "steps"))
        return inner.whole("steps", at_least=1)
    if isinstance(when, Spike):
        steps = node.whole("for", 2, at_least=1)
        if steps < 2:
            raise node.fail("for", f"found {steps}, expected at least 2: single values leave any range by chance")
        if steps > when.adopt:
            raise node.fail("for", f"found {steps}, expected at most when.spike.adopt ({when.adopt})")
        return steps
    return node.whole("for", 1, at_least=1)


def _read_escalation(node: Node) -> Escalation | None:
    if node.raw("escalate") == "none":
        return None
    inner = node.child("escalate", ("action", "task", "steps"))
    inner.choice("action", (Action.DUMP.value,))
    return Escalation(
        action=Action.DUMP,
        task=inner.choice("task", TASKS) if "task" in inner else None,
        steps=inner.whole("steps", at_least=1) if "steps" in inner else None,
    )


def _read_summary(node: Node) -> str:
    summary = node.text("summary")
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(summary) if field is not None]
    except ValueError as error:
        raise node.fail("summary", f"{error}; a brace that is meant as one is written twice") from error
    for field in fields:
        if field not in SUMMARY_FIELDS:
            raise node.fail("summary", f"found {{{field}}}{nearest(field, SUMMARY_FIELDS)}")
    return summary


def _refuse_impossible(node: Node, rule: Rule) -> None:
    if rule.severity is not Severity.FATAL:
        return
    if not isinstance(rule.when, NonFinite):
        raise node.fail(
            "severity", "found 'fatal', which is kept for when.nonfinite: only that loses the step for sure"
        )
    if rule.escalate:
        raise node.fail("escalate", "stands beside severity: fatal; the rank replays that step itself: leave it out")


def _with_inhibited(rule: Rule, names: Sequence[str], source: Path) -> Rule:
    return dataclasses.replace(
        rule,
        inhibits=_named(rule, "inhibits", names, source),
        inhibits_later=_named(rule, "inhibits_later", names, source),
    )


def _named(rule: Rule, key: str, names: Sequence[str], source: Path) -> tuple[str, ...]:
    found: list[str] = []
    for pattern in getattr(rule, key):
        matching = [name for name in names if fnmatch.fnmatchcase(name, pattern) and name != rule.name]
        if not matching:
            what = f"found {pattern!r}, which is no other rule's name{nearest(pattern, names)}"
            raise RuleError(f"{source}: rule {rule.name!r}: {key}: {what}")
        found.extend(name for name in matching if name not in found)
    return tuple(found)


def _refuse_cycles(rules: Sequence[Rule], source: Path) -> None:
    inhibited = {rule.name: rule.inhibits for rule in rules}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            circle = " → ".join((*path[path.index(name) :], name))
            raise RuleError(f"{source}: rule {name!r}: inhibits: {circle} is a circle: nobody would see any of them")
        for other in inhibited[name]:
            visit(other, (*path, name))

    for rule in rules:
        visit(rule.name, ())
