"""The rollouts: faults, each with the causes that would be right, and sound ones, which must raise nothing.

The tuned half is what rules were chosen on; the held-back half was written at the same time and run when the rules were
done, with other strengths, seeds and families.
"""

from __future__ import annotations

import dataclasses

STEPS, LATER = 5, 3
EVERYTHING = frozenset({"digests", "prompts", "experts"})
UNKNOWN = ("unexplained", "numerics")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCase:
    """A run of some steps, whose engines have a fault from some step on.

    Attributes:
        name: Of the case.
        fault: What goes wrong, or is unusual; empty: nothing.
        strength: Of the fault, where it has one.
        causes: Each of them is a right answer; if empty, nothing may be raised.
        begins: The first step with the fault.
        steps: How many steps there are.
        told: What the watch is told beside ids, masks and log-probabilities: digests, prompts, experts, again.
        engines: How many there are.
        rate: How much each step changes the weights, relative to their size.
        needs_experts: Runs on families with experts only.
    """

    name: str
    fault: str = ""
    strength: float = 1.0
    causes: tuple[str, ...] = ()
    begins: int = 0
    steps: int = STEPS
    told: frozenset[str] = EVERYTHING
    engines: int = 1
    rate: float = 0.01
    needs_experts: bool = False


def _told(*more: str, without: str = "") -> frozenset[str]:
    return (EVERYTHING | set(more)) - {without}


NOTHING = frozenset[str]()
TUNED = (
    RolloutCase(name="sound"),
    RolloutCase(name="sound, nothing told", told=NOTHING),
    RolloutCase(name="sound, measured rounding", told=_told("again")),
    RolloutCase(name="sound, four engines", engines=4),
    RolloutCase(name="sound, float16", fault="float16"),
    RolloutCase(name="sound, becomes uncertain", fault="cooling", strength=0.8),
    RolloutCase(name="sound, one engine's prompts are certain", fault="certain engine", engines=4),
    RolloutCase(name="sound, known prompts are uncertain", fault="certain news"),
    RolloutCase(name="sound, tokens of a tool", fault="tool tokens"),
    RolloutCase(name="sound, float16, nothing told", fault="float16", told=NOTHING),
    RolloutCase(
        name="one stale engine", fault="stale engine", engines=4, begins=1, told=NOTHING,
        causes=("one engine",),
    ),
    RolloutCase(
        name="one stale engine, digests", fault="stale engine", engines=4, begins=1,
        causes=("weights differ",),
    ),
    RolloutCase(name="stale", fault="stale", begins=LATER, told=NOTHING, causes=UNKNOWN, rate=0.02),
    RolloutCase(name="a layer not sent", fault="layer", begins=1, causes=("weights differ",)),
    RolloutCase(name="temperature forgotten", fault="temperature", strength=0.7, causes=("temperature",)),
    RolloutCase(name="raw log-probabilities", fault="raw", strength=0.7, causes=("temperature",)),
    RolloutCase(name="top_p", fault="top_p", strength=0.9, causes=("truncated support",)),
    RolloutCase(name="another prompt", fault="flipped", causes=("other context",)),
    RolloutCase(name="another prompt, at first only", fault="flipped", steps=1, causes=("other context",)),
    RolloutCase(name="another prompt, later", fault="flipped", begins=LATER, causes=("other context",)),
    RolloutCase(
        name="another prompt, measured rounding", fault="flipped", told=_told("again"),
        causes=("other context",),
    ),
    RolloutCase(name="cache kept", fault="cache", begins=1, rate=0.05, causes=("stale cache",)),
    RolloutCase(name="cache kept, weakly", fault="cache", begins=1, rate=0.015, causes=("stale cache",)),
    RolloutCase(
        name="cache kept, prompts not told", fault="cache", begins=LATER, rate=0.05, told=_told(without="prompts"),
        causes=("stale cache",),
    ),
    RolloutCase(name="routers flipped", fault="router", strength=0.1, causes=("routing",), needs_experts=True),
    RolloutCase(
        name="routers flipped, later", fault="router", strength=0.1, begins=LATER,
        causes=("routing",), needs_experts=True,
    ),
    RolloutCase(name="shifted", fault="shifted", causes=("shifted",)),
    RolloutCase(name="padding counts", fault="padding", causes=("padding",)),
    RolloutCase(name="log-probabilities of -inf", fault="infinite", strength=0.2, causes=("non-finite",)),
    RolloutCase(name="activations in float8", fault="float8", begins=LATER, causes=("numerics",)),
    RolloutCase(name="tokenized again", fault="ids", causes=("tokens differ",)),
)  # fmt: skip
HELD_BACK = (
    RolloutCase(name="sound"),
    RolloutCase(name="sound, no digests", told=_told(without="digests")),
    RolloutCase(name="sound, two engines, nothing told", engines=2, told=NOTHING),
    RolloutCase(name="sound, measured rounding, four engines", told=_told("again"), engines=4),
    RolloutCase(name="sound, becomes uncertain slowly", fault="cooling", strength=0.93, steps=12),
    RolloutCase(name="sound, becomes certain", fault="cooling", strength=1.25),
    RolloutCase(name="sound, one of two engines' prompts are certain", fault="certain engine", engines=2),
    RolloutCase(name="sound, sequences of one token", fault="short"),
    RolloutCase(name="sound, large updates", rate=0.06),
    RolloutCase(name="sound, float16, four engines", fault="float16", engines=4),
    RolloutCase(
        name="one of three engines is stale", fault="stale engine", engines=3, begins=LATER, told=NOTHING, rate=0.015,
        causes=("one engine",),
    ),
    RolloutCase(
        name="one engine samples hotter", fault="hot engine", strength=1.2, engines=4, told=NOTHING,
        causes=("one engine",),
    ),
    RolloutCase(name="one engine in float8", fault="float8 engine", engines=4, causes=("one engine", "numerics")),
    RolloutCase(name="embedding not sent", fault="embedding", begins=1, causes=("weights differ",)),
    RolloutCase(name="stale, digests", fault="stale", begins=2, causes=("weights differ",)),
    RolloutCase(name="hotter than said", fault="temperature", strength=1.3, causes=("temperature",)),
    RolloutCase(name="raw, hotter", fault="raw", strength=1.4, causes=("temperature",)),
    RolloutCase(name="top_k", fault="top_k", strength=20, causes=("truncated support",)),
    RolloutCase(name="prompt without its second half", fault="half prompt", causes=("other context",)),
    RolloutCase(
        name="prompt without its second half, later", fault="half prompt", begins=LATER,
        causes=("other context",),
    ),
    RolloutCase(name="one token of the prompt is another", fault="last token", causes=("other context",)),
    RolloutCase(
        name="prompt without its second half, at first only", fault="half prompt", steps=1, told=NOTHING,
        causes=("other context",),
    ),
    RolloutCase(
        name="cache kept for a while", fault="cache", begins=LATER, rate=0.025, causes=("stale cache",)
    ),
    RolloutCase(
        name="cache kept, measured rounding", fault="cache", begins=2, rate=0.02, told=_told("again"),
        causes=("stale cache",),
    ),
    RolloutCase(
        name="few routers flipped", fault="router", strength=0.05, causes=("routing",), needs_experts=True
    ),
    RolloutCase(
        name="few routers flipped, no digests", fault="router", strength=0.05, begins=2, told=_told(without="digests"),
        causes=("routing",), needs_experts=True,
    ),
    RolloutCase(name="shifted the other way", fault="shifted back", causes=("shifted",)),
    RolloutCase(name="padding counts in the trainer", fault="padding", told=NOTHING, causes=("padding",)),
    RolloutCase(name="a NaN in the trainer", fault="nan", strength=0.02, causes=("non-finite",)),
    RolloutCase(name="activations in float8, measured", fault="float8", told=_told("again"), causes=("numerics",)),
    RolloutCase(name="a token lost", fault="lost", causes=("tokens differ",)),
)  # fmt: skip
