"""Runs whose reference is split over other ranks: sound ones are not blamed, and what is wrong is still found."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis import split_job
from tests.analysis.stored_run import actv, grad, store, store_journals
from tests.ranks import run_ranks
from trainermon.analysis.diagnosis.against.against import diagnose_against
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict
from trainermon.core.values import Kind, Placement, SeriesKey


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("splits")
    for world_size in (1, 2):
        run_ranks(Path(split_job.__file__), str(folder), world_size=world_size)
    for run in folder.iterdir():
        store_journals(run)
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize(("ours", "theirs"), [("ddp", "one"), ("one", "ddp"), ("fsdp2", "ddp"), ("fsdp2", "one")])
def test_a_sound_run_is_not_blamed_for_its_split(runs, ours, theirs):
    diagnosis = diagnose_against(runs / ours, runs / theirs)

    assert diagnosis.verdict is DiagnosisVerdict.EQUAL, diagnosis.reason
    (said,) = [line for line in diagnosis.evidence if "split otherwise" in line]
    assert "merged over ranks" in said
    assert ("neither it nor activations" in said) == ("one" in (ours, theirs))
    assert "differs" not in {link.state for link in diagnosis.gradient_chain}
    assert {link.state for link in diagnosis.gradient_chain if link.link == "weights"} == {"agrees"}


@pytest.mark.distributed
def test_gradients_that_are_doubled_are_found_over_another_split(runs):
    for reference in ("one", "ddp"):
        diagnosis = diagnose_against(runs / "fsdp2-doubled", runs / reference)

        assert (diagnosis.step, diagnosis.rank, diagnosis.ranks) == (0, None, ())
        assert "gradients are 2 times the reference's" in diagnosis.reason
        assert " on rank" not in diagnosis.headline


@pytest.mark.distributed
def test_a_module_that_computes_otherwise_is_found_where_ranks_have_the_same_data(runs):
    diagnosis = diagnose_against(runs / "fsdp2-eps", runs / "ddp")

    assert (diagnosis.step, diagnosis.module, diagnosis.phase.value) == (0, "norm", "forward")


@pytest.mark.distributed
def test_another_rate_is_the_optimizers_over_another_split(runs):
    diagnosis = diagnose_against(runs / "ddp-rate", runs / "fsdp2")

    assert (diagnosis.step, diagnosis.phase.value) == (0, "optimizer")


def moments(values):
    found = (values.min(), values.max(), values.sum(), (values**2).sum(), (values == 0).sum(), 0, 0)
    return (values.size, *map(float, found))


def stored(folder, ranks, *, sizes, places, unique=()):
    """Store one step; `unique` names what counts in the norm on each rank. Rank r stands at `places[r]`."""
    folder.mkdir()
    for rank, rows in enumerate(ranks):
        marks = {key: Placement(dtype="float32", shape=(), in_global_norm=key in unique or not rank) for key in rows}
        store(folder, {0: {rank: rows}}, placements=marks, node=f"node{rank}")
        (folder / "ranks").mkdir(exist_ok=True)
        coordinates = {"world_size": len(ranks), "dp_size": 1, "cp_size": 1, "ep_size": 1, "tp_size": 1, "pp_size": 1}
        told = {"coordinates": coordinates | sizes | {"rank": rank} | places[rank], "framework": "megatron"}
        (folder / f"ranks/rank{rank:05d}.json").write_text(json.dumps(told | {"modules": ["h", "h.0", "h.1", "head"]}))
    return folder


PARAMETER, GRADIENT = SeriesKey(Kind.PARAM_ORIGIN, "h.0.weight"), grad("h.0.weight")
ONE = [{}]


@settings(max_examples=8)
@given(
    values=st.lists(st.floats(-5, 5, width=32), min_size=4, max_size=30),
    cut=st.integers(1, 3),
    error=st.sampled_from([0.0, 0.1]),
)
def test_shards_add_up_to_the_whole(tmp_path_factory, values, cut, error):
    folder = tmp_path_factory.mktemp("runs")
    whole = np.array([*values, 1.0])
    parts = (whole[:cut], whole[cut:] + error)
    keys = (PARAMETER, GRADIENT)
    ranks = [dict.fromkeys(keys, moments(part)) | {actv("h.1", "output.0"): moments(whole)} for part in parts]
    ours = stored(
        folder / "ours", ranks, sizes={"tp_size": 2}, places=[{"tp": 0}, {"tp": 1}], unique=(PARAMETER, GRADIENT)
    )
    one = dict.fromkeys(keys, moments(whole)) | {actv("h.1", "output.0"): moments(whole)}
    theirs = stored(folder / "theirs", [one], sizes={}, places=ONE)

    diagnosis = diagnose_against(ours, theirs)

    assert (diagnosis.verdict is DiagnosisVerdict.EQUAL) == (not error), diagnosis.reason
    if error:
        assert (diagnosis.module, diagnosis.phase.value) == ("h.0", "parameter")


def test_activations_of_which_ranks_hold_parts_are_left_out(tmp_path):
    whole, other = np.arange(12.0), np.arange(12.0) * 3
    ranks = [
        {
            PARAMETER: moments(whole),
            actv("h.0", "output.0"): moments(whole[:6] if rank else whole[6:]),
            actv("h.1", "output.0"): moments(other + rank),
            actv("head", "output.0"): moments(whole),
        }
        for rank in (0, 1)
    ]
    one = {actv(name, "output.0"): moments(whole) for name in ("h.0", "h.1", "head")} | {PARAMETER: moments(whole)}
    places = [{"tp": 0}, {"tp": 1}]

    diagnosis = diagnose_against(
        stored(tmp_path / "ours", ranks, sizes={"tp_size": 2}, places=places),
        stored(tmp_path / "theirs", [one], sizes={}, places=ONE),
    )

    assert diagnosis.verdict is DiagnosisVerdict.EQUAL, diagnosis.reason


def test_a_module_that_stages_share_is_left_out_and_one_of_a_stage_is_compared(tmp_path):
    whole = np.arange(12.0)

    def stages(error):
        return [
            {PARAMETER: moments(whole), actv("h.0", "output.0"): moments(whole), actv("h", "output.0"): moments(whole)},
            {actv("h.1", "output.0"): moments(whole * error), actv("h", "output.0"): moments(whole * 7)},
        ]

    one = {actv(name, "output.0"): moments(whole) for name in ("h.0", "h.1")}
    one |= {PARAMETER: moments(whole), actv("h", "output.0"): moments(whole * 7)}
    theirs = stored(tmp_path / "theirs", [one], sizes={}, places=ONE)
    for name, error in (("sound", 1.0), ("wrong", 1.01)):
        places = [{"pp": 0}, {"pp": 1}]
        diagnosis = diagnose_against(
            stored(tmp_path / name, stages(error), sizes={"pp_size": 2}, places=places), theirs
        )
        assert diagnosis.module == ("h.1" if error > 1 else ""), diagnosis.reason
