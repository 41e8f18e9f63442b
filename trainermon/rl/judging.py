"""From the tokens of a step to its report."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trainermon.rl.causes import Case, Limits, behind, find_causes
from trainermon.rl.measures import mean_ratio, measure
from trainermon.rl.tokens import Flags, NotComparableError, Tokens
from trainermon.rl.values import (
    HISTOGRAM_EDGES,
    VERDICT_OF,
    WITHIN_ROWS,
    Cause,
    EnginePart,
    Floor,
    FoundCause,
    PositionPart,
    Report,
    Sampling,
    SequencePart,
    TokenAt,
    Verdict,
    WeightCheck,
)

FLOOR_OF_DTYPE = {"float32": 1e-5, "bfloat16": 0.02, "float16": 0.005, "float8": 0.08}
"""Mean |Δ| that rounding gives where no floor was measured, by the engine's dtype, nats."""
MIXTURE_FACTOR = 3.0
"""By how much the floor of a mixture of experts is higher, whose routers amplify rounding."""
WORST, CONTEXT, WORST_SEQUENCES = 20, 8, 8
DIVERGING = 10.0
"""Floors of |Δ| from which a token has diverged."""


def judge(  # noqa: PLR0913 - all that is known of a step
    step: int,
    tokens: Tokens,
    *,
    floor: Floor,
    sampling: Sampling,
    limits: Limits,
    engines: Sequence[tuple[str, int | None]] = (),
    known_before: Flags | None = None,
    weights: WeightCheck | None = None,
    version_lag: int | None = None,
) -> Report:
    """Return the report on the tokens of a step.

    Args:
        step: The step.
        tokens: What both sides say of them.
        floor: What noise is measured against.
        sampling: How the engine samples.
        limits: From where on something counts as a cause.
        engines: Of each sequence, the engine that sampled it and the version of its weights; empty: one engine.
        known_before: Of each sequence, whether its prompt was used before the weights were last sent; None: unknown.
        weights: The check of weights, if there was one.
        version_lag: By how many versions the oldest engine is behind what was sent; None: not known.
    """
    measures = measure(tokens)
    parts = _by_engine(tokens, engines)
    case = Case(
        tokens=tokens,
        measures=measures,
        floor=floor,
        sampling=sampling,
        limits=limits,
        engines=parts,
        known_before=known_before,
        weights=weights,
        sampled_by=engines,
        version_lag=version_lag,
    )
    causes = find_causes(case)
    verdict = _verdict(case, causes)
    size = np.abs(tokens.train - tokens.rollout)
    return Report(
        step=step,
        verdict=verdict,
        sentence=_sentence(case, verdict, causes),
        causes=causes,
        measures=measures,
        floor=floor,
        engines=parts,
        positions=_by_position(tokens),
        histogram=tuple(
            np.bincount(np.searchsorted(HISTOGRAM_EDGES, size), minlength=len(HISTOGRAM_EDGES) + 1).tolist()
        ),
        sequences=_worst_sequences(case, engines),
        worst=_worst(tokens, size),
        first_diverging=_first_diverging(tokens, size > DIVERGING * floor.mean_abs),
        weights=weights,
        notes=_notes(case),
    )


def refuse(step: int, reason: NotComparableError, weights: WeightCheck | None = None) -> Report:
    """Return the report on a step whose tokens cannot be paired."""
    cause = FoundCause(
        cause=Cause.TOKENS_DIFFER,
        evidence=str(reason),
        advice="pass the engine's own token ids on to the trainer, and a mask of the response on both sides",
    )
    return Report(
        step=step,
        verdict=Verdict.NOT_COMPARABLE,
        sentence=f"Rollout and trainer cannot be compared: {reason}",
        causes=(cause,),
        weights=weights,
    )


def floor_of(tokens: Tokens, *, dtype: str, is_mixture: bool) -> Floor:
    """Return what rounding alone gives: measured where the trainer computed twice, else by the engine's dtype."""
    if tokens.again is not None:
        finite = np.isfinite(tokens.again)
        if finite.any():
            measured = float(np.abs(tokens.again - tokens.train)[finite].mean())
            if measured > 0:
                return Floor(mean_abs=measured, source="measured")
    table = next(
        (value for name, value in FLOOR_OF_DTYPE.items() if dtype.startswith(name)), FLOOR_OF_DTYPE["bfloat16"]
    )
    return Floor(mean_abs=table * (MIXTURE_FACTOR if is_mixture else 1.0), source="dtype")


def _verdict(case: Case, causes: Sequence[FoundCause]) -> Verdict:
    if not causes:
        # a table knows nothing of this model: what is below its figure may be a fault; equal weights leave stale caches
        is_known = case.has_equal_weights and case.has_nothing_stale
        is_sound = is_known or case.measures.mean_abs <= case.floor.mean_abs
        return Verdict.CONSISTENT if is_sound and case.floor.source == "measured" else Verdict.NOISE
    decides = causes[0].cause
    if decides is Cause.UNEXPLAINED:
        return Verdict.BOOKKEEPING if abs(case.z) > case.limits.ratio_z else Verdict.POLICY_DIFFERS
    return VERDICT_OF[decides]


def _sentence(case: Case, verdict: Verdict, causes: Sequence[FoundCause]) -> str:
    size = f"mean |Δ| {case.measures.mean_abs:.3g} over {case.measures.tokens:,} tokens"
    if causes:
        return f"{_OPENING[verdict]}, {causes[0].cause}: {causes[0].evidence}."
    unseen = case.limits.noise * case.floor.mean_abs
    source = "" if case.floor.source == "measured" else " by a table"
    return (
        f"{_OPENING[verdict]}: {size}, where rounding gives {case.floor.mean_abs:.3g}{source}"
        f"{_known_of(case)}{behind(case.version_lag)}; "
        f"a fault that keeps the mean below {unseen:.3g} may not be seen."
    )


def _known_of(case: Case) -> str:
    """Return what a sentence without a cause says of the weights."""
    weights = case.weights
    if weights is None:
        return ", and the weights were not compared"
    if not weights.equal:
        return ", and the weights could not be compared"
    if weights.uncompared:
        return f", and {weights.equal} of {weights.num_tensors} weights are known to be equal ({WITHIN_ROWS})"
    if weights.unordered:
        return f", and the weights have equal sums; the order within {len(weights.unordered)} of them was not checked"
    if case.unchecked_engines:
        return f", and the weights of {', '.join(case.unchecked_engines)} were not compared"
    may_be_stale = not case.has_nothing_stale and case.measures.mean_abs > case.floor.mean_abs
    return f", and the weights are equal ({WITHIN_ROWS})" + (
        "; a cache of the engine may hold older ones" if may_be_stale else ""
    )


_OPENING = {
    Verdict.CONSISTENT: "The engine samples from the policy that is trained",
    Verdict.NOISE: "The two differ by no more than rounding may give",
    Verdict.POLICY_DIFFERS: "The engine samples from another policy",
    Verdict.BOOKKEEPING: "What was logged is not what was sampled from",
    Verdict.NOT_COMPARABLE: "Rollout and trainer cannot be compared",
}


def _by_engine(tokens: Tokens, engines: Sequence[tuple[str, int | None]]) -> tuple[EnginePart, ...]:
    parts = []
    for name, version in sorted(set(engines), key=lambda key: (key[0], -1 if key[1] is None else key[1])):
        of_engine = np.array([key == (name, version) for key in engines])
        chosen = of_engine[tokens.sequence]
        part = tokens.only(chosen)
        delta = part.train - part.rollout
        starts = np.nonzero(np.r_[True, part.sequence[1:] != part.sequence[:-1]])[0] if len(part) else np.zeros(0, int)
        ratio, z = mean_ratio(np.exp(np.minimum(delta, 80.0)), starts) if len(part) else (math.nan, math.nan)
        parts.append(
            EnginePart(
                engine=name,
                version=version,
                tokens=len(part),
                sequences=int(np.count_nonzero(of_engine)),
                mean_abs=float(np.abs(delta).mean()) if len(part) else math.nan,
                ratio=ratio,
                ratio_z=z,
            )
        )
    return tuple(parts)


def _by_position(tokens: Tokens) -> tuple[PositionPart, ...]:
    """Return the means by position, in ranges that double in length from 8 on."""
    delta = tokens.train - tokens.rollout
    ratio = np.exp(np.minimum(delta, 80.0))
    bucket = np.maximum(np.ceil(np.log2((tokens.position + 1) / 8.0)), 0.0).astype(np.int64)
    count = np.bincount(bucket)
    size, ratios = np.bincount(bucket, np.abs(delta)), np.bincount(bucket, ratio)
    return tuple(
        PositionPart(
            first=0 if k == 0 else 8 << (k - 1),
            last=(8 << k) - 1,
            tokens=int(count[k]),
            mean_abs=float(size[k] / count[k]),
            ratio=float(ratios[k] / count[k]),
        )
        for k in range(len(count))
        if count[k]
    )


def _worst_sequences(case: Case, engines: Sequence[tuple[str, int | None]]) -> tuple[SequencePart, ...]:
    tokens = case.tokens
    delta = tokens.train - tokens.rollout
    counts = np.bincount(tokens.sequence)
    sizes, sums = np.bincount(tokens.sequence, np.abs(delta)), np.bincount(tokens.sequence, delta)
    means = sizes / np.maximum(counts, 1)
    diverged = np.nonzero(np.abs(delta) > DIVERGING * case.floor.mean_abs)[0]
    of, firsts = np.unique(tokens.sequence[diverged], return_index=True)
    first = dict(zip(of.tolist(), tokens.position[diverged[firsts]].tolist(), strict=True))
    order = [number for number in np.argsort(-means, kind="stable").tolist() if counts[number]]
    return tuple(
        SequencePart(
            sequence=number,
            engine=engines[number][0] if engines else "",
            tokens=int(counts[number]),
            mean_abs=float(means[number]),
            log_ratio=float(sums[number]),
            first_diverging=first.get(number),
        )
        for number in order[:WORST_SEQUENCES]
    )


def _worst(tokens: Tokens, size: np.ndarray) -> tuple[TokenAt, ...]:
    some = min(WORST, len(size))
    largest = np.argpartition(size, len(size) - some)[len(size) - some :]
    found = []
    for index in largest[np.argsort(-size[largest], kind="stable")].tolist():
        first = max(index - int(tokens.position[index]), index - CONTEXT, 0)
        found.append(
            TokenAt(
                sequence=int(tokens.sequence[index]),
                position=int(tokens.position[index]),
                id=None if tokens.ids is None else int(tokens.ids[index]),
                before=() if tokens.ids is None else tuple(tokens.ids[first:index].tolist()),
                rollout=float(tokens.rollout[index]),
                train=float(tokens.train[index]),
            )
        )
    return tuple(found)


def _first_diverging(tokens: Tokens, diverges: Flags) -> int | None:
    where = np.nonzero(diverges)[0]
    _, firsts = np.unique(tokens.sequence[where], return_index=True)
    positions = np.sort(tokens.position[where[firsts]])
    middle = len(np.unique(tokens.sequence)) // 2
    return int(positions[middle]) if len(positions) > middle else None


def _notes(case: Case) -> tuple[str, ...]:
    notes = []
    if case.sampling.is_greedy:
        notes.append("the engine is greedy: nothing was sampled, and the mean ratio says nothing")
    elif case.measures.sequences < case.limits.min_sequences:
        notes.append(
            f"too few sequences for the mean ratio: {case.measures.sequences}, expected {case.limits.min_sequences}"
        )
    if case.known_before is None:
        notes.append("prompts= was not passed: whether an engine's cache is stale was judged by positions alone")
    if case.tokens.num_nonfinite:
        notes.append(f"{case.tokens.num_nonfinite:,} tokens are left out: a log-probability is NaN or infinite")
    if case.floor.source == "dtype":
        notes.append("what rounding gives is a table's figure; again=, a second computation, measures it")
    if case.weights is not None and case.weights.advice:
        notes.append(case.weights.advice)
    return tuple(notes)
