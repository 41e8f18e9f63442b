"""Why the log-probabilities of two sides differ: the rules, each with its evidence and what to do next.

Over tokens sampled by the rollout, the mean of π_train / π_rollout is 1 for *any* two policies, if what was logged is
what was sampled from: another mean is a bookkeeping error. A temperature shows in the spread of log-probabilities, a
shift by a token in a correlation at lag 1. Weights that differ by less than rounding only digests tell (`weights.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from trainermon.rl.measures import PolicyMeasures, measure, welch
from trainermon.rl.tokens import Flags, Floats, Integers, Tokens
from trainermon.rl.values import WITHIN_ROWS, Cause, EnginePart, Floor, FoundCause, Sampling, WeightCheck


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From where on something counts as a cause.

    Attributes:
        min_sequences: Sequences below which the mean ratio says nothing.
        ratio_z: |z| of the mean ratio that is no accident.
        ratio_difference: How far the mean ratio must be from 1 to matter; nearly certain tokens have errors near 0.
        noise: How many floors of mean |Δ| are noise.
        shift_correlation: Correlation at lag 1 from which tokens are shifted.
        shift_gain: By how much it must be above that at lag 0.
        temperature_correlation: Correlation from which other spreads are those of a temperature.
        narrow_correlation: The same where the rollout's spread is the smaller one, as it is of any other policy, too.
        temperature_spread: How far the ratio of the two sides' standard deviations must be from 1.
        truncated_ratio: Mean ratio below which support was cut.
        truncated_share: Share of tokens that must be on one side for that.
        truncated_share_as_said: The same where the sampling says that it cuts.
        context_correlation: Correlation below which the context is another.
        numerics_correlation: Correlation from which numerics may explain what equal weights and no other rule do.
        engine_factor: By how much one engine's mean |Δ| is above the others'.
        cache_factor: By how much the first positions' mean |Δ| is above the last ones'.
        cache_positions: How many positions these are.
        cache_score: Standard errors by which prompts that may be cached must be above new ones.
        routing_factor: By how much mean |Δ| is larger where routed experts differ.
        hidden_factor: In place of a smaller factor, where the mean |Δ| is no more than noise.
        hidden_score: Standard errors between two sets of sequences, where it is no more than noise.
        hidden_size: How much of the floor such a set's mean |Δ| must be; less is what any rounding does.
        hidden_routing: Share of the mean |Δ| that tokens of other experts must add, where it is no more than noise.
        hidden_experts: Share of the tokens that they must be there; rounding alone turns 3 %.
    """

    min_sequences: int = 64
    ratio_z: float = 5.0
    ratio_difference: float = 0.002
    noise: float = 3.0
    shift_correlation: float = 0.9
    shift_gain: float = 0.3
    temperature_correlation: float = 0.9
    narrow_correlation: float = 0.96
    temperature_spread: float = 0.08
    truncated_ratio: float = 0.98
    truncated_share: float = 0.99
    truncated_share_as_said: float = 0.9
    context_correlation: float = 0.8
    numerics_correlation: float = 0.96
    engine_factor: float = 3.0
    cache_factor: float = 1.3
    cache_positions: int = 8
    cache_score: float = 5.0
    routing_factor: float = 2.0
    hidden_factor: float = 1.5
    hidden_score: float = 5.0
    hidden_size: float = 0.25
    hidden_routing: float = 0.25
    hidden_experts: float = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that the rules look at.

    Attributes:
        tokens: The tokens.
        measures: Their measures.
        floor: What noise is measured against.
        sampling: How the engine samples.
        limits: From where on something counts.
        engines: By engine.
        known_before: Per sequence, whether its prompt was used before the weights were last sent; None: unknown.
        weights: The check of weights; None: there was none.
        sampled_by: Of each sequence, the engine and the version of its weights; empty: one engine.
        version_lag: By how many versions the oldest engine is behind what was sent; None: not known.
    """

    tokens: Tokens
    measures: PolicyMeasures
    floor: Floor
    sampling: Sampling
    limits: Limits
    engines: tuple[EnginePart, ...] = ()
    known_before: Flags | None = None
    weights: WeightCheck | None = None
    sampled_by: Sequence[tuple[str, int | None]] = ()
    version_lag: int | None = None

    @property
    def z(self) -> float:
        """Standard errors of the mean ratio from 1, see `judged_z`; 0 of greedy engines."""
        return 0.0 if self.sampling.is_greedy else judged_z(self.measures, self.limits)

    @property
    def is_noise(self) -> bool:
        """Whether the mean |Δ| is no more than noise."""
        return self.measures.mean_abs <= self.limits.noise * self.floor.mean_abs

    @property
    def is_miscounted(self) -> bool:
        """Whether the mean ratio is not that of two policies."""
        return abs(self.z) > self.limits.ratio_z

    @property
    def has_equal_weights(self) -> bool:
        """Whether digests say so of every engine, tensor, and order within it, and no engine is behind."""
        check = self.weights
        is_checked = check is not None and check.is_equal and not check.uncompared and not check.unordered
        return is_checked and not self.version_lag and not self.unchecked_engines

    @property
    def unchecked_engines(self) -> tuple[str, ...]:
        """The engines that sampled, and that the check of weights, if there was one, had no digests of."""
        return tuple(sorted({name for name, _ in self.sampled_by} - {*(self.weights.engines if self.weights else ())}))

    @property
    def has_nothing_stale(self) -> bool:
        """Whether no cache can hold anything of older weights: no prompt was known, or the weights are the first."""
        is_new = self.known_before is not None and not self.known_before.any()
        return is_new or (bool(self.sampled_by) and all(version == 0 for _, version in self.sampled_by))


def judged_z(measures: PolicyMeasures, limits: Limits) -> float:
    """Return by how many standard errors the mean ratio is from 1; 0 where too few sequences tell, or it is near 1."""
    matters = measures.sequences >= limits.min_sequences and abs(measures.ratio - 1.0) > limits.ratio_difference
    return 0.0 if not matters or math.isnan(measures.ratio_z) else measures.ratio_z


def behind(version_lag: int | None) -> str:
    """Return what a sentence says of engines that are behind what was sent; empty where none is known to be."""
    return (
        f", and the oldest engine is {version_lag} version{'s' * (version_lag > 1)} behind what was sent"
        if version_lag
        else ""
    )


def find_causes(case: Case) -> tuple[FoundCause, ...]:
    """Return what explains the difference, and beside it weights that differ; nothing where the two sides agree."""
    found = [cause for rule in _RULES for cause in rule(case)]
    # what explains most leaves nothing to the rules after it, but digests need no explanation
    found = [cause for index, cause in enumerate(found) if not index or cause.cause is Cause.WEIGHTS_DIFFER]
    if not found and (not case.is_noise or case.is_miscounted):
        found = [_unexplained(case)]
    return tuple(found)


def _shifted(case: Case) -> Iterator[FoundCause]:
    limits, m = case.limits, case.measures
    if m.lag_correlation > limits.shift_correlation and not m.lag_correlation < m.correlation + limits.shift_gain:
        whose = "the trainer's log-probabilities stand one token early" if m.lag == 1 else "they stand one token late"
        yield FoundCause(
            cause=Cause.SHIFTED,
            evidence=f"correlation {m.lag_correlation:.3f} with the neighbouring token, {m.correlation:.3f} with the "
            f"same one: {whose}",
            advice="logits[:, :-1] predict ids[:, 1:]; look for a slice that is made twice, or not at all",
        )


def _padding(case: Case) -> Iterator[FoundCause]:
    """The mean ratio is off, and is not without some tokens at either end of the sequences."""
    if case.tokens.num_masks_differ:
        yield FoundCause(
            cause=Cause.PADDING,
            evidence=f"{case.tokens.num_masks_differ:,} positions count on one side only",
            advice="build one mask of the response, from the end-of-sequence token, and use it on both sides",
        )
    if case.is_noise and not case.is_miscounted:
        return
    for what, kept in _without_ends(case.tokens):
        left = measure(case.tokens.only(kept))
        if _is_mended(case, left):
            yield FoundCause(
                cause=Cause.PADDING,
                evidence=f"mean |Δ| {case.measures.mean_abs:.3g}, mean ratio {case.measures.ratio:.3f}; without "
                f"{what} ({int(np.count_nonzero(~kept)):,} of {len(case.tokens):,} tokens) {left.mean_abs:.3g} and "
                f"{left.ratio:.3f}",
                advice="the mask counts tokens that were not sampled: padding, a prompt, or what follows the end of a "
                "sequence",
            )
            return


def _is_mended(case: Case, left: PolicyMeasures) -> bool:
    z = 0.0 if case.sampling.is_greedy else judged_z(left, case.limits)
    was_off, limit = abs(case.z) > case.limits.ratio_z, case.limits.ratio_z
    return left.tokens > 0 and left.mean_abs < case.measures.mean_abs / 2 and (abs(z) <= limit if was_off else True)


def _without_ends(tokens: Tokens) -> Iterator[tuple[str, Flags]]:
    """Yield what could be padding, and the tokens without it."""
    last = _run_to_end(tokens.sequence, tokens.ids) if tokens.ids is not None else None
    columns = {"trailing runs of one token": last}
    for side, values in (("the rollout's", tokens.rollout), ("the trainer's", tokens.train)):
        bits = values.view(np.int64)
        columns[f"trailing runs of one number among {side} log-probabilities"] = _run_to_end(tokens.sequence, bits)
        backwards = _run_to_end(tokens.sequence[::-1], bits[::-1])
        columns[f"leading runs of one number among {side} log-probabilities"] = backwards[::-1]
    for what, run in columns.items():
        if run is not None and run.any() and not run.all():
            yield what, ~run
    for length in sorted({int(np.quantile(tokens.position, share)) for share in (0.25, 0.5, 0.75, 0.9)}):
        if 0 < length < tokens.position.max():
            yield f"positions from {length} on", tokens.position < length


def _run_to_end(sequence: Integers, values: Integers) -> Flags:
    """Return which tokens belong to a run, of two or more of one value, that lasts to the end of their sequence."""
    index = np.arange(len(values))
    starts = np.nonzero(np.r_[True, sequence[1:] != sequence[:-1]])[0]
    ends_run = np.r_[(values[1:] != values[:-1]) & (sequence[1:] == sequence[:-1]), False]
    last_end = np.maximum.reduceat(np.where(ends_run, index, -1), starts)
    lengths = np.diff(np.r_[starts, len(values)])
    begins = np.maximum(last_end + 1, starts)
    is_run = starts + lengths - begins > 1
    run: Flags = (index >= np.repeat(begins, lengths)) & np.repeat(is_run, lengths)
    return run


def _temperature(case: Case) -> Iterator[FoundCause]:
    limits, m = case.limits, case.measures
    if not m.correlation > limits.temperature_correlation or (case.is_noise and not case.is_miscounted):
        return
    spread = m.slope / m.correlation  # a slope by itself is lower the more other things differ, too
    if abs(spread - 1.0) <= limits.temperature_spread:
        return
    # What a policy samples, it holds likelier than any other does: by that alone its log-probabilities spread less.
    if spread < 1.0 and not case.is_miscounted and not m.correlation > limits.narrow_correlation:
        return
    side, found = ("rollout", 1.0 / spread) if spread > 1.0 else ("trainer", spread)
    said = case.sampling.temperature
    yield FoundCause(
        cause=Cause.TEMPERATURE,
        evidence=f"the rollout's log-probabilities spread {spread:.2f} × as far as the trainer's, with correlation "
        f"{m.correlation:.3f}: those of the {side} are of a temperature near {found:.2f}; the sampling says {said:g}",
        advice="divide the trainer's logits by the sampling temperature, and have the engine log processed "
        "log-probabilities (of the distribution that it samples from)",
    )


def _truncated_support(case: Case) -> Iterator[FoundCause]:
    limits, m, top_p = case.limits, case.measures, case.sampling.top_p
    if m.ratio >= limits.truncated_ratio or case.z >= -limits.ratio_z:
        return
    delta, slack = case.tokens.train - case.tokens.rollout, 3.0 * case.floor.mean_abs
    one_sided = np.count_nonzero(delta <= slack) / len(delta)
    is_said = top_p < 1.0 or case.sampling.top_k > 0
    if one_sided < (limits.truncated_share_as_said if is_said else limits.truncated_share):
        return
    bound = ""
    if top_p < 1.0:
        within = np.count_nonzero(delta >= math.log(top_p) - slack) / len(delta)
        bound = f"; {within:.1%} of them by no more than ln({top_p:g})"
    yield FoundCause(
        cause=Cause.TRUNCATED_SUPPORT,
        evidence=f"{one_sided:.1%} of the tokens are as likely or likelier in the rollout{bound}: it renormalised over "
        f"{m.ratio:.1%} of the probability (top_p {top_p:g}, top_k {case.sampling.top_k})",
        advice="sample with top_p 1 and top_k 0 while training, or apply the same cut on the trainer's side",
    )


def _other_context(case: Case) -> Iterator[FoundCause]:
    if case.measures.correlation < case.limits.context_correlation and not case.is_noise:
        yield _context(case)


def _context(case: Case, evidence: str = "") -> FoundCause:
    m = case.measures
    near = f"correlation {m.correlation:.3f}, and no better with a neighbouring token ({m.lag_correlation:.3f})"
    return FoundCause(
        cause=Cause.OTHER_CONTEXT,
        evidence=evidence or near,
        advice="compare what both sides see before the response: template, system prompt, position ids, attention mask",
    )


def _weights_differ(case: Case) -> Iterator[FoundCause]:
    check = case.weights
    if check is None or not check.has_difference:
        return
    if not check.num_tensors:
        yield FoundCause(
            cause=Cause.WEIGHTS_DIFFER,
            evidence=f"as version {check.version} no tensor was sent",
            advice="Watch.sent was given nothing: pass it what is sent, and read all that it yields",
        )
        return
    (other, *more_versions) = {each.version for each in check.differing} or {None}
    if other is not None and not (more_versions or check.missing or check.equal):
        yield _other_version(check, other)
        return
    names = [f"{each.name} ({each.engine}: {each.found})" for each in check.differing]
    names += [f"{name} (missing)" for name in check.missing]
    are, they = ("is", "it was") if len(names) == 1 else ("are", "they were")
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    yield FoundCause(
        cause=Cause.WEIGHTS_DIFFER,
        evidence=f"of version {check.version}, {len(names)} of {len(names) + check.equal} tensors {are} not in the "
        f"engine as {they} sent: {', '.join(names[:3])}{more}",
        advice="look at how these names are mapped and packed when weights are sent, and whether the engine loads them",
    )


def _other_version(check: WeightCheck, version: int) -> FoundCause:
    count = len({each.name for each in check.differing})
    engines = ", ".join(dict.fromkeys(each.engine for each in check.differing))
    return FoundCause(
        cause=Cause.WEIGHTS_DIFFER,
        evidence=f"{engines} should have version {check.version}, and all {count} tensors that differ are those of "
        f"version {version}",
        advice="the engine has weights that were sent, and the number does not fit: its counter of versions is off, or "
        "it was not given the latest ones",
    )


def _one_engine(case: Case) -> Iterator[FoundCause]:
    parts = [part for part in case.engines if part.tokens]
    if len(parts) < 2:
        return
    noise = case.limits.noise * case.floor.mean_abs
    for part in parts:
        others = [other for other in parts if other is not part]
        usual = float(np.median([other.mean_abs for other in others]))
        of_part = np.array([key == (part.engine, part.version) for key in case.sampled_by], dtype=bool)
        is_above = part.mean_abs > case.limits.engine_factor * usual
        if is_above and (part.mean_abs > noise or _stands_out(case, of_part)):
            yield FoundCause(
                cause=Cause.ONE_ENGINE,
                evidence=f"mean |Δ| {part.mean_abs:.3g} in {part.engine}, {usual:.3g} in the others",
                advice=f"compare {part.engine} with the others: its weights' version, its restart, its options",
            )


def _stands_out(case: Case, some: Flags) -> bool:
    """Return whether some sequences differ more than the others by more than chance; it needs no floor.

    |Δ| is held against how uncertain a sequence is, as rounding moves an uncertain token further than a certain one.
    """
    doubt = 1.0 - np.exp(np.minimum(case.tokens.train, 0.0))
    size = np.abs(case.tokens.train - case.tokens.rollout)
    counts, sizes, doubts = (
        np.bincount(case.tokens.sequence, column, minlength=case.tokens.num_sequences)
        for column in (np.ones_like(size), size, doubt)
    )
    if len(some) != len(counts):
        return False
    relative = sizes / np.maximum(doubts, 1e-3 * np.maximum(counts, 1.0))
    mean, usual, score = welch(relative[some & (counts > 0)], relative[~some & (counts > 0)])
    limits = case.limits
    is_small = sizes[some].sum() <= limits.hidden_size * case.floor.mean_abs * counts[some].sum()
    return not is_small and mean > limits.hidden_factor * usual and score > limits.hidden_score


def _stale_cache(case: Case) -> Iterator[FoundCause]:
    """Cached keys and values of a prompt are of older weights: what comes first in the response feels it most."""
    if case.weights is not None and case.weights.has_difference:
        return
    span, factor = case.limits.cache_positions, case.limits.cache_factor
    size = np.abs(case.tokens.train - case.tokens.rollout)
    before, new, score = _by_prompt(case, size)
    is_seen = before > case.floor.mean_abs or (case.known_before is not None and _stands_out(case, case.known_before))
    if before > factor * new and score > case.limits.cache_score and is_seen:
        yield _cache(
            f"mean |Δ| {before:.3g} for prompts that the engine knew from before the weights were sent, "
            f"{new:.3g} for new ones"
        )
        return
    if case.is_noise or before <= factor * new:  # prompts that it knew differ no more than new ones: no cache is stale
        return
    lengths = np.bincount(case.tokens.sequence, minlength=case.tokens.num_sequences)[case.tokens.sequence]
    long = lengths >= 3 * span
    first, last = _means(size, long & (case.tokens.position < span), long & (case.tokens.position >= lengths - span))
    if not first > factor * last:
        return
    evidence = f"mean |Δ| {first:.3g} over the first {span} tokens of a response, {last:.3g} over the last {span}"
    if case.has_nothing_stale:
        yield _context(case, f"{evidence}, and no prompt was known under older weights: no cache can be stale")
    else:
        yield _cache(evidence)


def _by_prompt(case: Case, size: Floats) -> tuple[float, float, float]:
    """Return mean |Δ| of sequences whose prompts were known and of others, and how many standard errors are between.

    Sequences count as independent, with variances of their own (Welch). NaN where either kind has fewer than three.
    """
    counts = np.bincount(case.tokens.sequence, minlength=case.tokens.num_sequences)
    known = case.known_before
    if known is None or len(known) != len(counts):
        return math.nan, math.nan, math.nan
    means = np.bincount(case.tokens.sequence, size, minlength=len(counts)) / np.maximum(counts, 1)
    return welch(means[known & (counts > 0)], means[~known & (counts > 0)])


def _cache(evidence: str) -> FoundCause:
    return FoundCause(
        cause=Cause.STALE_CACHE,
        evidence=evidence,
        advice="reset the engine's prefix cache each time weights are sent, and drop what is half generated",
    )


def _routing(case: Case) -> Iterator[FoundCause]:
    differ = case.tokens.experts_differ
    if differ is None or not 0 < np.count_nonzero(differ) < len(differ):
        return
    size = np.abs(case.tokens.train - case.tokens.rollout)
    where, elsewhere = _means(size, differ, ~differ)
    added = (case.measures.mean_abs - elsewhere) / case.measures.mean_abs if case.measures.mean_abs else 0.0
    limits, share = case.limits, case.measures.experts_differ
    is_seen = not case.is_noise or (added > limits.hidden_routing and share > limits.hidden_experts)
    if where > limits.routing_factor * elsewhere and is_seen:
        yield FoundCause(
            cause=Cause.ROUTING,
            evidence=f"{share:.1%} of the tokens go to another first expert; mean |Δ| "
            f"{where:.3g} there and {elsewhere:.3g} elsewhere",
            advice="replay the engine's routing in the trainer, or compute router logits in float32 on both sides",
        )


def _nonfinite(case: Case) -> Iterator[FoundCause]:
    """A sampled token has a finite log-probability, on both sides."""
    tokens = case.tokens
    if tokens.num_nonfinite:
        side = "the rollout" if tokens.num_nonfinite_of_rollout else "the trainer"
        if 0 < tokens.num_nonfinite_of_rollout < tokens.num_nonfinite:
            side = "both sides"
        yield FoundCause(
            cause=Cause.NONFINITE,
            evidence=f"{tokens.num_nonfinite:,} of {len(tokens) + tokens.num_nonfinite:,} tokens that count have a "
            f"log-probability of NaN or infinity in {side}; the others say mean |Δ| {case.measures.mean_abs:.3g}",
            advice="a token that was sampled cannot have probability 0: look at what writes these log-probabilities, "
            "and mask what was not sampled",
        )


def _unexplained(case: Case) -> FoundCause:
    m = case.measures
    if case.is_miscounted:
        evidence = f"mean ratio {m.ratio:.4f}, {case.z:+.1f} standard errors from 1: what was logged is not what was "
        evidence += "sampled from"
        advice = "compare the engine's logged log-probabilities with a plain forward of its own weights"
    elif case.has_equal_weights:
        return _numerics(case) if m.correlation >= case.limits.numerics_correlation else _context(case)
    else:
        evidence = f"mean |Δ| {m.mean_abs:.3g}, {m.mean_abs / case.floor.mean_abs:.1f} × what rounding gives; the mean "
        evidence += f"ratio {m.ratio:.3f} is that of two policies{behind(case.version_lag)}"
        advice = "check the weights by digest (Watch.sent and received), then kernels and dtypes of both sides"
        if case.version_lag:
            advice = "the trainer is ahead of the engine: compare a step whose rollouts are of the weights sent last"
    return FoundCause(cause=Cause.UNEXPLAINED, evidence=evidence, advice=advice)


def _numerics(case: Case) -> FoundCause:
    """All that is left where weights are equal, nothing was miscounted and both sides see much the same."""
    m = case.measures
    return FoundCause(
        cause=Cause.NUMERICS,
        evidence=f"mean |Δ| {m.mean_abs:.3g}, {m.mean_abs / case.floor.mean_abs:.1f} × what rounding gives, and the "
        f"weights are equal ({WITHIN_ROWS}); correlation {m.correlation:.3f}, mean ratio {m.ratio:.3f}",
        advice="compare types of both sides (activations, cache, router, output layer) and attention kernels; "
        "`trainermon rl align` on dumps of both names the module",
    )


def _means(size: Floats, some: Flags, others: Flags) -> tuple[float, float]:
    """Return the means over two sets of tokens; NaN, which is no cause, of an empty one."""
    means = [float(size[chosen].mean()) if chosen.any() else math.nan for chosen in (some, others)]
    return means[0], means[1]


_RULES: tuple[Callable[[Case], Iterator[FoundCause]], ...] = (
    _shifted,
    _padding,
    _truncated_support,
    _temperature,
    _weights_differ,
    _other_context,
    _one_engine,
    _stale_cache,
    _routing,
    _nonfinite,
)
