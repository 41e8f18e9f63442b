"""Runs that train other parameters than their reference: what differs by that alone is no finding."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.stored_run import actv, grad, store
from trainermon.analysis.diagnosis.against.against import diagnose_against
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict
from trainermon.core.values import Kind, SeriesKey

NAMES = ("a.weight", "b.weight", "c.weight")
SIZES = dict(zip(NAMES, (3.0, 4.0, 12.0), strict=True))  # the norms of their gradients
STEPS = 4


def gradient(norm):
    return (4, -norm, norm, norm / 2, norm * norm, 0, 0, 0)


def run_of(folder, trained, *, scale=1.0):
    """Store a run of two ranks; `trained(step)` are the parameters that have gradients, `scale` times the usual."""
    folder.mkdir()
    rows = {}
    for step in range(STEPS):
        own = {
            grad(name, kind): gradient(scale * SIZES[name])
            for name in trained(step)
            for kind in (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED)
        }
        own[actv("b", "output.0")] = gradient(1.0)
        if NAMES[0] in trained(step):  # what comes before b is trained
            own[SeriesKey(Kind.ACTV_GRAD, "b", "input.0")] = gradient(1.0)
        own[SeriesKey(Kind.ACTV_GRAD, "c", "output.0")] = gradient(1.0)
        rows[step] = {0: own, 1: own}
    store(folder, rows)
    return folder


@settings(deadline=None, max_examples=6)
@given(st.lists(st.sets(st.sampled_from(NAMES)), min_size=2, max_size=2))
def test_runs_that_train_other_parameters_agree_in_what_both_train(tmp_path_factory, frozen):
    folder = tmp_path_factory.mktemp("runs")
    sets = [set(NAMES) - {name for name in some if name != NAMES[2]} for some in frozen]
    ours, theirs = (
        run_of(folder / name, lambda _, own=own: own) for name, own in zip(("run", "reference"), sets, strict=True)
    )

    diagnosis = diagnose_against(ours, theirs)

    said = [line for line in diagnosis.evidence if line.startswith("gradient norms are compared without")]
    assert diagnosis.verdict is DiagnosisVerdict.EQUAL, diagnosis.reason
    assert len(said) == (sets[0] != sets[1])
    assert all(name in said[0] for name in sets[0] ^ sets[1])
    assert {link.state for link in diagnosis.gradient_chain if "gradient" in link.link} == {"agrees"}


def test_a_parameter_that_is_trained_later_is_no_other_split(tmp_path):
    ours = run_of(tmp_path / "run", lambda step: NAMES if step > 0 else NAMES[1:])
    theirs = run_of(tmp_path / "reference", lambda _: NAMES)

    diagnosis = diagnose_against(ours, theirs)

    links = {link.link: link for link in diagnosis.gradient_chain}
    assert "merged" not in " ".join(diagnosis.evidence)
    assert links["gradient before the reduction"].state == "agrees"
    assert links["gradient norm"].state == "agrees"


@pytest.mark.parametrize(("scale", "state"), [(1.0, "agrees"), (1.5, "differs")])
def test_a_norm_over_what_both_train_is_compared(tmp_path, scale, state):
    ours = run_of(tmp_path / "run", lambda _: NAMES[1:], scale=scale)
    theirs = run_of(tmp_path / "reference", lambda _: NAMES)

    links = {link.link: link for link in diagnose_against(ours, theirs).gradient_chain}

    for norm in ("local gradient norm", "gradient norm"):
        assert links[norm].state == state
        assert (links[norm].relative or 0.0) == pytest.approx(1 - 1 / scale)
