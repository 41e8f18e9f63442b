"""What an alert rule says, and how it is read from YAML.

A rule selects series (`on`), names a condition on them (`when`), says for how many steps it must hold (`for`) and be
over (`keep`), and what follows. What a condition may say is decided in `criteria`, how it becomes an alert in `state`
and `engine`. The format is described in alerts/README.md.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from trainermon.alerts.conditions.criteria import (
    ACROSS_RANKS,
    IMPLIED,
    BreaksLaw,
    Criterion,
    Dead,
    Differs,
    Flat,
    Frozen,
    NonFinite,
    Reported,
    Spike,
)
from trainermon.alerts.document import DocumentNode, every_mistake, items, nearest, read_document
from trainermon.alerts.extensions import CustomCondition
from trainermon.alerts.laws.law import Law
from trainermon.alerts.laws.registry import law_of
from trainermon.alerts.reading import criterion_names, read_criterion
from trainermon.core.derived import DERIVED, MOMENTS
from trainermon.core.errors import RuleError
from trainermon.core.values import Action, DumpTask, Kind, SeriesKey, Severity

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_RULES = Path(__file__).with_name("default_rules.yaml")
RUNBOOK = Path(__file__).with_name("runbook.md")
SUMMARY_FIELDS = (
    "k",
    "n",
    "step",
    "rank",
    "worst",
    "tensor",
    "percent",
    "usual_percent",
    "value",
    "usual",
    "times",
    "score",
    "nans",
    "infs",
    "count",
    "for",
)
"""What a rule's summary may put in braces; alerts/README.md says what each stands for."""

REPORTED_FIELDS = ("rank", "step", "value", "usual", "detail")
"""The same for a rule that looks at no series."""

WHOLE_FIELDS = ("k", "n", "step", "rank", "for")
"""Those that are whole numbers; all others are text."""

MAX_WIDTH = 99
MAX_SUMMARY = 1000
"""Characters of a summary, in the rule and with its fields filled in."""

MAX_NAME = 100
_SAMPLES = ((0, ""), (10**12, "-1.234e+05"))  # a field as whole number and as text

LEAST_SHARE, LEAST_SCORE = 0.25, 12.0
"""With so many series at once, or so far out, a single value may be called a spike."""

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSelection:
    """Which series a rule looks at.

    Attributes:
        kinds: Any of these kinds.
        names: Shell patterns; a series is meant if one of them matches its name or, with a slot, `<name>.<slot>`.
        companions: Those of the kinds of which all series are meant, whatever they are called.
        statistic: What is computed from a series' moments; see `statistics.DERIVED`.
        skipped: Whether steps count that the framework skipped to lower a loss scale, as it is meant to.
        learned: Whether alerts count while the loss is below a twentieth of its first values, as `LossLevel` tells.
    """

    kinds: tuple[Kind, ...]
    names: tuple[str, ...] = ("*",)
    companions: tuple[Kind, ...] = ()
    statistic: str = "nonfinite"
    skipped: bool = True
    learned: bool = True

    def matches(self, key: SeriesKey) -> bool:
        """Return whether the rule looks at this series."""
        if key.kind not in self.kinds:
            return False
        if key.kind in self.companions:
            return True
        pattern = _pattern(self.names)
        return bool(pattern.match(key.name) or (key.slot and pattern.match(f"{key.name}.{key.slot}")))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RuleEscalation:
    """The dump that follows when a rule fires.

    Attributes:
        action: What follows.
        task: `statistics` or `tensor`; None: the run's setting.
        steps: For how many steps; None: the run's setting.
    """

    action: Action
    task: DumpTask | None = None
    steps: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlertRule:
    """One alert rule.

    Attributes:
        name: Lower case words joined by hyphens; part of every alert's id.
        severity: How urgent it is.
        on: Which series.
        when: Which condition.
        for_steps: A series fires when the condition held on so many of its values in a row.
        share: The condition counts on a step only if it holds for at least this share of the rule's series in it.
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
    on: SeriesSelection
    when: Criterion
    for_steps: int = 1
    share: float = 0.0
    keep_steps: int = 5
    cooldown_steps: int = 0
    escalate: RuleEscalation | None = None
    inhibits: tuple[str, ...] = ()
    inhibits_later: tuple[str, ...] = ()
    summary: str
    runbook: str


def load_rules(path: Path | str | None = None) -> tuple[AlertRule, ...]:
    """Return the rules of a YAML file, or the default ones.

    Raises:
        RuleError: the file cannot be read, or a rule cannot be meant as written: an unknown key, a wrong type, a pair
            of settings that exclude each other. The message names the file, the rule, the key and the nearest right
            name.
    """
    rules, mistakes = read_rules(path)
    if mistakes:
        raise mistakes[0]
    return rules


def read_rules(path: Path | str | None = None) -> tuple[tuple[AlertRule, ...], list[RuleError]]:
    """Return the valid rules of a YAML file, and the errors in the others, in their order.

    Raises:
        RuleError: the file cannot be read, or is no list of rules.
    """
    source = DEFAULT_RULES if path is None else Path(path)
    document = DocumentNode(read_document(source), ("rules",), where=str(source))
    rules: dict[str, AlertRule] = {}
    mistakes: list[RuleError] = []
    mistaken: list[str] = []
    for number, entry in enumerate(items(document.raw("rules"), f"{source}: rules"), start=1):
        found = _rule_or_mistakes(entry, source, number)
        if isinstance(found, list):
            mistakes += found
            mistaken += [entry["name"]] if isinstance(entry, Mapping) and isinstance(entry.get("name"), str) else []
        elif found.name in rules:
            mistakes.append(
                RuleError(f"{source}: rule {found.name!r}: appears twice; every rule needs a name of its own")
            )
        else:
            rules[found.name] = found
    # What the agent reports is never held back.
    names = [*(rule.name for rule in rules.values() if not isinstance(rule.when, Reported)), *mistaken]
    checked = [_contained(_with_inhibited, rule, names, source) for rule in rules.values()]
    mistakes += [found for found in checked if isinstance(found, RuleError)]
    resolved = tuple(found for found in checked if not isinstance(found, RuleError))
    cycle = None if mistakes else _contained(_refuse_cycles, resolved, source)
    return resolved, [*mistakes, *([cycle] if cycle else [])]


def with_reported(rules: Sequence[AlertRule]) -> tuple[AlertRule, ...]:
    """Return the rules and those built-in ones about ranks and monitor that a file of other rules does not name.

    Whether a rank hangs or the monitor fails is worth knowing whatever else is watched.
    """
    named = {rule.name for rule in rules}
    added = [rule for rule in load_rules() if isinstance(rule.when, Reported) and rule.name not in named]
    known = named | {rule.name for rule in added}
    kept = (dataclasses.replace(rule, inhibits=tuple(n for n in rule.inhibits if n in known)) for rule in added)
    return (*rules, *kept)


@lru_cache(maxsize=1)
def default_criteria() -> Mapping[str, Criterion]:
    """Return the condition of each built-in rule by the rule's name."""
    return {rule.name: rule.when for rule in load_rules()}


def inhibitors(rules: Sequence[AlertRule]) -> Mapping[str, tuple[str, ...]]:
    """Return for every rule, by name, the rules whose alerts hold its alerts back, whenever these begin."""
    return {rule.name: tuple(other.name for other in rules if rule.name in other.inhibits) for rule in rules}


def later_inhibitors(rules: Sequence[AlertRule]) -> Mapping[str, tuple[str, ...]]:
    """Return for every rule, by name, the rules whose alerts hold back those of its alerts that begin later."""
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
    "share",
    "keep",
    "cooldown",
    "escalate",
    "inhibits",
    "inhibits_later",
    "summary",
    "runbook",
)


def _contained(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | RuleError:
    try:
        return call(*args, **kwargs)
    except RuleError as error:
        return error


_SOUND = {
    "name": "any",
    "severity": "info",
    "on": {"kind": "loss", "statistic": "mean"},
    "when": {"nonfinite": True},
    "summary": "any",
}
"""What takes the place of a key that cannot be read, for the mistakes in the others."""

_UNSURE = {
    "on": frozenset({"on.statistic"}),
    "when": frozenset({"on", "on.statistic", "for", "share", "keep", "keep.score", "escalate", "summary"}),
}
"""What nothing is said of where such a key was replaced: whether it is right depends on that."""


def _rule_or_mistakes(entry: Any, source: Path, number: int) -> AlertRule | list[RuleError]:
    read = _contained(_read_rule, entry, source, number)
    if isinstance(read, AlertRule) or not isinstance(entry, Mapping):
        return [read] if isinstance(read, RuleError) else read
    return every_mistake(lambda left: _read_rule(left, source, number, called=entry), entry, _SOUND, _UNSURE)


def _read_rule(entry: Any, source: Path, number: int, *, called: Any = None) -> AlertRule:
    """Return the rule in `entry`; errors name it as `called` does, the entry as it was before any was left out."""
    named = entry if called is None else called
    name = named.get("name") if isinstance(named, Mapping) else None
    label = repr(name[:MAX_NAME]) if isinstance(name, str) and name else f"number {number}"
    node = DocumentNode(entry, _RULE_KEYS, where=f"{source}: rule {label}")
    if not _NAME.fullmatch(node.text("name")):
        raise node.fail("name", f"found {label}, expected lower case words joined by hyphens, such as 'loss-spike'")
    if len(node.text("name")) > MAX_NAME:
        raise node.fail("name", f"found {len(node.text('name'))} characters, expected at most {MAX_NAME}")
    keep = node.child("keep", ("steps", "score")) if "keep" in node else None
    when = read_criterion(node)
    share = _read_share(node, when)
    rule = AlertRule(
        name=node.text("name"),
        severity=Severity(node.choice("severity", tuple(Severity))),
        on=_read_selection(node, when),
        when=when,
        for_steps=_read_for(node, when, share),
        share=share,
        keep_steps=keep.whole("steps", 5, at_least=1) if keep else 5,
        cooldown_steps=node.whole("cooldown", 0),
        escalate=_read_escalation(node) if "escalate" in node else None,
        inhibits=node.texts("inhibits", ()),
        inhibits_later=node.texts("inhibits_later", ()),
        summary=_read_summary(node, REPORTED_FIELDS if isinstance(when, Reported) else SUMMARY_FIELDS),
        runbook=node.text("runbook", node.text("name")),
    )
    _refuse_impossible(node, rule)
    return rule


def _read_selection(node: DocumentNode, when: Criterion) -> SeriesSelection:
    if isinstance(when, Reported):
        if "on" in node:
            raise node.fail("on", "stands beside when.reported, which looks at no series: leave it out")
        return SeriesSelection(kinds=(), names=(), statistic=IMPLIED[Reported])
    if isinstance(when, BreaksLaw):
        return _selection_of_law(node, law_of(when.law))
    on = node.child("on", ("kind", "names", "statistic", "skipped", "learned"))
    kinds = on.texts("kind")
    known = tuple(kind.value for kind in Kind)
    for kind in kinds:
        if kind not in known:
            raise on.fail("kind", f"found {kind!r}{nearest(kind, known)}")
    names = on.texts("names", ("*",))
    if not kinds or not names:
        raise on.fail("names" if kinds else "kind", "found an empty list, expected at least one entry")
    return SeriesSelection(
        kinds=tuple(Kind(kind) for kind in kinds),
        names=names,
        statistic=_read_statistic(on, when),
        skipped=on.flag("skipped", default=True),
        learned=on.flag("learned", default=True),
    )


def _selection_of_law(node: DocumentNode, law: Law) -> SeriesSelection:
    names = node.child("on", ("names",)).texts("names", law.names) if "on" in node else law.names
    kinds = (*law.rows, *law.also)
    is_of_step = kinds[0] is Kind.STEP  # then it names the numbers that it is about, which a skipped step has, too
    return SeriesSelection(
        kinds=kinds,
        names=names,
        companions=(Kind.STEP,) if Kind.STEP in kinds and not is_of_step else (),
        statistic=IMPLIED[BreaksLaw],
        skipped=is_of_step,
    )


def _read_statistic(on: DocumentNode, when: Criterion) -> str:
    implied = IMPLIED.get(type(when))
    if implied and "statistic" in on and on.text("statistic") != implied:
        raise on.fail(
            "statistic", f"found {on.text('statistic')!r}, but this condition is on {implied!r}: leave it out"
        )
    if implied:
        return implied
    if isinstance(when, Differs):
        return on.choice("statistic", (*DERIVED, MOMENTS), MOMENTS)
    return on.choice("statistic", tuple(DERIVED), "rms" if isinstance(when, CustomCondition) else None)


def _read_share(node: DocumentNode, when: Criterion) -> float:
    if "share" not in node:
        return 0.0
    if isinstance(when, (*ACROSS_RANKS, Reported)):
        raise node.fail("share", "stands beside a condition that looks at no series of one rank alone: leave it out")
    share = node.number("share", above=0.0)
    if share > 1.0:
        raise node.fail("share", f"found {share:g}, expected at most 1")
    return share


def _read_for(node: DocumentNode, when: Criterion, share: float) -> int:
    if isinstance(when, Flat | Dead | Frozen):
        given = type(when).__name__.lower()
        if "for" in node:
            raise node.fail("for", f"stands beside when.{given}.steps, which says the same: leave it out")
        known = ("relative_change", "zero_ratio", "lived", "steps")
        return node.child("when", criterion_names()).child(given, known).whole("steps", at_least=1)
    if isinstance(when, Reported) and ("for" in node or "keep" in node or "cooldown" in node):
        raise node.error("for, keep, cooldown", "stand beside when.reported, which begins and ends at once: leave out")
    if isinstance(when, Spike):
        steps = node.whole("for", 2, at_least=1)
        if steps < 2 and share < LEAST_SHARE and when.score < LEAST_SCORE:
            rest = f"or a share of at least {LEAST_SHARE:g}, or a score of at least {LEAST_SCORE:g}"
            raise node.fail(
                "for", f"found {steps}, expected at least 2, {rest}: single values leave any range by chance"
            )
        if steps > when.adopt:
            raise node.fail("for", f"found {steps}, expected at most when.spike.adopt ({when.adopt})")
        return steps
    return node.whole("for", 1, at_least=1)


def _read_escalation(node: DocumentNode) -> RuleEscalation | None:
    if node.raw("escalate") == "none":
        return None
    inner = node.child("escalate", ("action", "task", "steps"))
    inner.choice("action", (Action.DUMP.value,))
    return RuleEscalation(
        action=Action.DUMP,
        task=DumpTask(inner.choice("task", tuple(DumpTask))) if "task" in inner else None,
        steps=inner.whole("steps", at_least=1) if "steps" in inner else None,
    )


def _read_summary(node: DocumentNode, known: Sequence[str]) -> str:
    summary = node.text("summary")
    try:
        pieces = [piece for piece in string.Formatter().parse(summary) if piece[1] is not None]
    except ValueError as error:
        raise node.fail("summary", f"{error}; a brace that is meant as one is written twice") from error
    if len(summary) > MAX_SUMMARY:
        raise node.fail("summary", f"found {len(summary)} characters, expected at most {MAX_SUMMARY}")
    for _, field, form, _ in pieces:
        if field not in known:
            raise node.fail("summary", f"found {{{field}}}{nearest(str(field), known)}")
        if "{" in str(form):  # a width that is only known when the alert is worded
            raise node.fail("summary", f"found {{{field}:{form}}}, expected no field within a field")
        if any(int(width) > MAX_WIDTH for width in re.findall(r"\d+", str(form))):  # it would be that many characters
            raise node.fail("summary", f"found {{{field}:{form}}}, expected a width of at most {MAX_WIDTH}")
    _try_summary(node, summary, known)
    return summary


def _try_summary(node: DocumentNode, summary: str, known: Sequence[str]) -> None:
    """Refuse a summary that cannot be filled in, before there is an alert that it would be needed for."""
    for whole, text in _SAMPLES:
        try:
            filled = summary.format_map({name: whole if name in WHOLE_FIELDS else text for name in known})
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise node.fail("summary", f"cannot be filled in: {error}") from error
        if len(filled) > MAX_SUMMARY:
            raise node.fail("summary", f"comes to {len(filled)} characters, expected at most {MAX_SUMMARY}")


def _refuse_impossible(node: DocumentNode, rule: AlertRule) -> None:
    if rule.severity is not Severity.FATAL:
        return
    if not isinstance(rule.when, NonFinite):
        raise node.fail(
            "severity", "found 'fatal', which is kept for when.nonfinite: only that loses the step for sure"
        )
    if rule.escalate:
        raise node.fail("escalate", "stands beside severity: fatal; the rank replays that step itself: leave it out")


def _with_inhibited(rule: AlertRule, names: Sequence[str], source: Path) -> AlertRule:
    return dataclasses.replace(
        rule,
        inhibits=_named(rule, "inhibits", names, source),
        inhibits_later=_named(rule, "inhibits_later", names, source),
    )


def _named(rule: AlertRule, key: str, names: Sequence[str], source: Path) -> tuple[str, ...]:
    found: list[str] = []
    for pattern in getattr(rule, key):
        matching = [name for name in names if fnmatch.fnmatchcase(name, pattern) and name != rule.name]
        if not matching:
            what = f"found {pattern!r}, which is no other rule's name{nearest(pattern, names)}"
            raise RuleError(f"{source}: rule {rule.name!r}: {key}: {what}")
        found.extend(name for name in matching if name not in found)
    return tuple(found)


def _refuse_cycles(rules: Sequence[AlertRule], source: Path) -> None:
    inhibited = {rule.name: rule.inhibits for rule in rules}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            circle = " → ".join((*path[path.index(name) :], name))
            raise RuleError(f"{source}: rule {name!r}: inhibits: {circle} is a cycle: none of them would ever be seen")
        for other in inhibited[name]:
            visit(other, (*path, name))

    for rule in rules:
        visit(rule.name, ())
