"""What is said of a step in which nothing non-finite was found: that all is finite, or what could be read of it."""

from __future__ import annotations

from collections.abc import Sequence

from trainermon.analysis.diagnosis.evidence import StepEvidence
from trainermon.analysis.diagnosis.findings import Diagnosis, DiagnosisVerdict
from trainermon.analysis.diagnosis.wording import named, sentence


def nothing_found(evidence: StepEvidence) -> Diagnosis:
    """Return the diagnosis of a step of which nothing that was read is non-finite, and what could not be read."""
    if not evidence.kinds and not any(entry.dump.entries for entry in evidence.dumps):
        return _nothing_known(evidence)
    inner = _inner(evidence)
    what = "No parameter, gradient or result of the model" if inner else "Nothing"
    is_all = evidence.num_steps > 1 and not evidence.is_asked_for
    where = f"any of {evidence.num_steps} stored steps, up to step {evidence.step}" if is_all else ""
    where = where or f"step {evidence.step}"
    read = f"what could be read of {where}; {_not_whole(evidence.unread)}" if evidence.unread else where
    return Diagnosis(
        verdict=DiagnosisVerdict.FINITE,
        run_id=evidence.run_id,
        headline=f"{what} was non-finite in {read}",
        reason=sentence(inner or _all_finite(evidence)),
        unread=evidence.unread,
    )


def _nothing_known(evidence: StepEvidence) -> Diagnosis:
    headline, reason = "Nothing is known", "No dump and no stored statistics were found in the run directory"
    if evidence.dumps or evidence.unread:
        why = f": {_not_whole(evidence.unread)}" if evidence.unread else ""
        headline, reason = f"Nothing is known of step {evidence.step}{why}", "No call of it could be read"
    return Diagnosis(
        verdict=DiagnosisVerdict.NO_EVIDENCE,
        run_id=evidence.run_id,
        headline=headline,
        reason=reason,
        unread=evidence.unread,
    )


def _all_finite(evidence: StepEvidence) -> str:
    """Return that all values are finite, the largest of them, and what to do where the run is wrong all the same."""
    largest = f"; of step {evidence.step}, {evidence.largest}" if evidence.largest else ""
    found = f"all values that {_REACHED[bool(evidence.unread)]} are finite{largest}"
    return f"{found}. If the run is wrong all the same, --against a sound one finds where they part"


_REACHED = {False: "were collected", True: "could be read"}


def _not_whole(unread: Sequence[str]) -> str:
    """Return, as it follows on a sentence, which dumps were not read as a whole."""
    return f"{named(unread)} {'was' if len(unread) == 1 else 'were'} not read as a whole"


def _inner(evidence: StepEvidence) -> str:
    """Return a few words on the first dumped value that is not finite where those that must be are; "" if none is."""
    for each in evidence.dumps:
        for entry in each.dump.entries:
            for tensor in entry.outputs:
                if tensor.nonfinite:
                    place = f"{tensor.slot} of {entry.key} on rank {each.rank}"
                    return f"{place} is not finite, but that reached none of them: it may be on purpose, as in a mask"
    return ""
