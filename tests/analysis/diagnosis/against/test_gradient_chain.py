"""The way of a gradient, link by link: on which step, rank and series two stored runs part."""

import json
import math

import pytest

from tests.analysis.stored_run import ALL_NAN, FINITE, grad, store
from trainermon import cli
from trainermon.analysis.diagnosis.against.against import diagnose_against
from trainermon.analysis.diagnosis.against.gradient_chain import chain_texts, gradient_chain
from trainermon.analysis.diagnosis.against.sides import open_side
from trainermon.core.values import Kind, SeriesKey

LINKS = [
    "gradient before the reduction",
    "gradient after the reduction",
    "local gradient norm",
    "gradient norm",
    "moments",
    "weights",
]
KINDS = (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.PARAM_UPDATED)
STEPS = range(6)


def scaled(factor):
    count, low, high, total, square, *rest = FINITE
    return (count, low * factor, high * factor, total * factor, square * factor**2, *rest)


def chain(tmp_path, *, kinds=KINDS, change=lambda kind, step, rank: FINITE, noise=lambda kind, step: 1.0):
    """Store two runs of two ranks; `change` gives the first one's rows of `b.weight`, `noise` scales all of it."""
    for name in ("run", "reference"):
        (tmp_path / name).mkdir()
        rows = {}
        for step in STEPS:
            rows[step] = {}
            for rank in (0, 1):
                own = name == "run"
                rows[step][rank] = {
                    grad("a.weight", kind): scaled(noise(kind, step)) if own else FINITE for kind in kinds
                } | {grad("b.weight", kind): change(kind, step, rank) if own else FINITE for kind in kinds}
        store(tmp_path / name, rows)
    return {link.link: link for link in gradient_chain(open_side(tmp_path / "run"), open_side(tmp_path / "reference"))}


def test_links_are_told_in_the_order_of_the_step(tmp_path):
    assert list(chain(tmp_path)) == LINKS


def test_each_link_has_the_first_step_on_which_it_differs(tmp_path):
    first = {Kind.GRAD_UNREDUCED: 5, Kind.GRAD_REDUCED: 5, Kind.EXP_AVG: 4, Kind.EXP_AVG_SQ: 5, Kind.PARAM_UPDATED: 4}

    found = chain(
        tmp_path,
        change=lambda kind, step, rank: scaled(1.5) if step >= first[kind] and (rank or kind != "exp_avg") else FINITE,
    )

    assert {name: link.step for name, link in found.items()} == dict(zip(LINKS, (5, 5, 5, 5, 4, 4), strict=True))
    moments = found["moments"]
    assert (moments.state, moments.rank, moments.series) == ("differs", 1, "exp_avg b.weight")
    assert moments.relative == pytest.approx(1 / 3)  # 2 beside 3
    assert found["gradient norm"].rank is None
    # a is 5 and b is 11.25 of the square: 10 in the reference
    assert found["local gradient norm"].relative == pytest.approx(1 - math.sqrt(10 / 16.25))


def test_what_is_not_stored_and_what_agrees_is_said(tmp_path):
    found = chain(tmp_path, kinds=(Kind.GRAD_REDUCED, Kind.EXP_AVG))

    states = {name: link.state for name, link in found.items()}
    assert states == {
        "gradient before the reduction": "not stored",
        "gradient after the reduction": "agrees",
        "local gradient norm": "agrees",
        "gradient norm": "agrees",
        "moments": "agrees",
        "weights": "not stored",
    }
    assert found["moments"].num_steps == len(STEPS)
    assert chain_texts(list(found.values())) == []


def test_a_value_that_is_finite_on_one_side_only_differs_by_no_number(tmp_path):
    found = chain(
        tmp_path,
        kinds=(Kind.GRAD_REDUCED,),
        change=lambda kind, step, rank: ALL_NAN if (step, rank) == (2, 1) else FINITE,
    )

    link = found["gradient after the reduction"]
    assert (link.step, link.rank, link.series) == (2, 1, "grad_reduced b.weight")
    assert math.isnan(link.relative)
    assert found["gradient norm"].step == 2
    assert "differs from step 2 on, finite on one side only, rank 1" in chain_texts(list(found.values()))[1]


def test_runs_that_never_agree_to_the_bit_are_held_against_their_noise(tmp_path):
    found = chain(
        tmp_path,
        kinds=(Kind.GRAD_REDUCED, Kind.PARAM_UPDATED),
        noise=lambda kind, step: 1 + 1e-5,
        change=lambda kind, step, rank: scaled(1.01) if step >= 4 and kind == Kind.GRAD_REDUCED else FINITE,
    )

    assert found["gradient after the reduction"].step == 4
    assert (found["weights"].state, found["weights"].relative) == ("agrees", pytest.approx(1e-5, rel=0.01))
    assert chain_texts(list(found.values()))[-1].endswith("agrees but for noise of up to 1e-05")


def test_what_differs_from_the_start_by_more_than_noise_is_told_so(tmp_path):
    found = chain(tmp_path, kinds=(Kind.PARAM_UPDATED,), change=lambda *_: scaled(2.0))

    assert (found["weights"].step, found["weights"].relative) == (0, pytest.approx(0.5))


def test_no_difference_of_the_step_that_is_told_passes_for_noise(tmp_path):
    for name, factor in (("run", 1.01), ("reference", 1.0)):
        rows = {grad("a.weight", kind): scaled(factor) for kind in (Kind.GRAD_REDUCED, Kind.PARAM_UPDATED)}
        store(tmp_path / name, {0: {0: rows | {SeriesKey(Kind.ACTV, "a", "output.0"): FINITE}}}, dtype="float32")

    diagnosis = diagnose_against(tmp_path / "run", tmp_path / "reference")

    assert diagnosis.step == 0
    states = {link.link: (link.state, link.step) for link in diagnosis.gradient_chain}
    assert states["gradient after the reduction"] == states["weights"] == states["gradient norm"] == ("differs", 0)


def test_the_way_stands_in_text_json_and_on_the_page(tmp_path, capsys):
    chain(tmp_path, change=lambda kind, step, rank: scaled(1.5) if step >= 3 and kind != "grad_unreduced" else FINITE)
    sides = [str(tmp_path / "run"), "--against", str(tmp_path / "reference")]

    cli.main(["diagnose", *sides, "--html", str(tmp_path / "page.html")])
    lines = capsys.readouterr().out.splitlines()
    cli.main(["diagnose", *sides, "--json"])
    links = json.loads(capsys.readouterr().out)["gradient_chain"]

    start = next(number for number, line in enumerate(lines) if line.startswith("gradients "))
    assert lines[start].split(maxsplit=1)[1].startswith("gradient before the reduction  agrees")
    assert "differs from step 3 on, apart by 0.33, rank " in lines[start + 1]
    assert [link["link"] for link in links] == LINKS
    assert [link["step"] for link in links] == [None, 3, 3, 3, 3, 3]
    assert "gradients&#x27; way" in (tmp_path / "page.html").read_text()
