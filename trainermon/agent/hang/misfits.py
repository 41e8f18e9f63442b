"""Whether what ranks have passed into one collective fits together, by what each has noted of it.

A library whose ranks pass in unlike sizes aborts a process, or raises something that does not tell of sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainermon.agent.hang.evidence import GroupState, PendingCall, RankEvidence, spans
from trainermon.agent.hang.wording import MAX_NAMED, call_text, form_text
from trainermon.core.call_notes import SAME_SIZE

_Calls = dict[int, PendingCall]


def misfit_text(evidence: Sequence[RankEvidence]) -> str:
    """Return in words in which collective ranks were with unlike operations or sizes; "" if in none that is known.

    It counts what a rank was in when it died, and what had just failed. Only of operations to which all ranks must pass
    as many elements the sizes are known.
    """
    calls: dict[tuple[str, tuple[int, ...], int], _Calls] = {}
    for one in evidence:
        for state, call in _collectives(one):
            calls.setdefault((state.name, state.ranks, call.sequence), {})[one.rank] = call
    for (group, _, _), ranks in sorted(calls.items()):
        ops = {call.op for call in ranks.values()}
        if len(ops) > 1:
            number = next(iter(ranks.values())).sequence
            return f"collective {number} of {group} was not the same on all ranks: {_listed(ranks)}"
        if ops <= SAME_SIZE and len({call.shapes for call in ranks.values()}) > 1:
            named = call_text(next(iter(ranks.values())), group)
            return f"{named} was not given the same number of elements on all ranks: {_listed(ranks)}"
    return ""


def _collectives(one: RankEvidence) -> Iterator[tuple[GroupState, PendingCall]]:
    for state in one.noted or ():
        for call in (*state.in_flight, *state.failed):
            if not call.is_p2p:
                yield state, call


def _listed(ranks: _Calls) -> str:
    """Return which ranks were in what, those in the same together."""
    by_form: dict[str, list[int]] = {}
    for rank, call in sorted(ranks.items()):
        by_form.setdefault(form_text(call), []).append(rank)
    return ", ".join(f"{form} on {spans(among, most=MAX_NAMED)}" for form, among in by_form.items())
