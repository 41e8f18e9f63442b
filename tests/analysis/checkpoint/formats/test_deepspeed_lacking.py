"""What a checkpoint of DeepSpeed names and does not hold is said, by number and name."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainermon.analysis.checkpoint.opening import open_checkpoint
from trainermon.cli import main

TRAINED = {"up.weight": (3, 4), "up.bias": (3,), "head.weight": (5, 3)}
FROZEN = {"embed.weight": (7, 4), "norm.weight": (4,)}
BUFFERS = {"norm.running_mean": (4,)}
RANKS = 2


def values(shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def save(folder: Path, stage, *, without=(), **changed):
    """Write what DeepSpeed 0.19 saves on two ranks, but none of the weights `without`, and other values `changed`."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {**TRAINED, **FROZEN, **BUFFERS}
    fragments = {name: values(shape).flatten() for name, shape in FROZEN.items() if name not in without}
    module = {name: values(s) if stage < 3 or name in BUFFERS else torch.empty(0) for name, s in shapes.items()}
    model = {
        "module": {name: weight for name, weight in module.items() if name not in without},
        "buffer_names": list(BUFFERS),
        "param_shapes": [{name: torch.Size(shape) for name, shape in TRAINED.items()}],
        "frozen_param_shapes": {name: torch.Size(s) for name, s in FROZEN.items()} if stage > 1 else None,
        "shared_params": {},
        "ds_config": {"zero_optimization": {"stage": stage}},
        "global_steps": 4,
    }
    for rank in range(RANKS if stage == 3 else 1):
        cut = {
            name: torch.nn.functional.pad(f, (0, len(f) % RANKS)).chunk(RANKS)[rank] for name, f in fragments.items()
        }
        own = {"frozen_param_fragments": (cut if stage == 3 else fragments) if stage > 1 else None}
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save({**model, **own, **changed}, folder / f"{prefix}mp_rank_00_model_states.pt")
    for rank in range(RANKS):
        parts = [
            torch.nn.functional.pad(values(s).flatten(), (0, torch.Size(s).numel() % RANKS)) for s in TRAINED.values()
        ]
        if stage == 3:
            flat = torch.cat([part.chunk(RANKS)[rank] for part in parts])
        else:
            joined = torch.cat([values(shape).flatten() for shape in TRAINED.values()])
            flat = torch.nn.functional.pad(joined, (0, len(joined) % RANKS)).chunk(RANKS)[rank]
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        state = {"zero_stage": stage, "partition_count": RANKS, key: [flat]}
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


@pytest.fixture
def said(capsys):
    def run(folder):
        status = main(["checkpoint", "verify", str(folder)])
        text = capsys.readouterr().out
        main(["checkpoint", "verify", str(folder), "--json"])
        return status, text, json.loads(capsys.readouterr().out)["whole"]

    return run


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_parameters_that_are_there_have_no_state_and_are_not_missing(tmp_path, said, stage):
    status, text, whole = said(save(tmp_path / "x", stage))

    assert (status, whole) == (0, True)
    assert text.startswith("whole: ")
    assert "2 parameters have no state of the optimizer" in text
    assert ("2 of them frozen" in text) == (stage > 1)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stage=st.sampled_from([2, 3]), without=st.sets(st.sampled_from(sorted(FROZEN)), min_size=1))
def test_every_frozen_parameter_that_is_named_and_in_no_file_is_counted(tmp_path_factory, said, stage, without):
    status, text, whole = said(save(tmp_path_factory.mktemp("x"), stage, without=without))

    assert (status, whole) == (3, False)
    assert text.startswith(f"not whole: {len(without)} of 5 parameters are in no file, {len(without)} of them frozen")
    assert next(name for name in FROZEN if name in without) in text.splitlines()[0]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_trained_weight_in_no_file_is_named_though_its_state_is_there(tmp_path, said, stage):
    status, text, whole = said(save(tmp_path / "x", stage, without=("up.bias",)))

    assert (status, whole) == (3, False)
    assert "1 of " in text
    assert "0 of them frozen: first up.bias" in text


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_that_was_saved_without_them_says_so(tmp_path, said, stage):
    none = {"frozen_param_shapes": None, "frozen_param_fragments": None}

    status, text, whole = said(save(tmp_path / "x", stage, without=tuple(FROZEN), **none))

    assert (status, whole) == (3, False)
    assert text.startswith("not whole: it was saved without frozen parameters, and does not say how many there are; ")


@pytest.mark.parametrize(
    ("stage", "reason"), [(1, "ZeRO 1 saves no names of them"), (None, "its DeepSpeed saved no names")]
)
def test_where_no_file_names_them_it_is_said_that_it_was_not_looked_at(tmp_path, said, stage, reason):
    folder = save(tmp_path / "x", stage or 2, without=tuple(FROZEN))
    if stage is None:  # of a DeepSpeed that did not save these keys
        path = folder / "mp_rank_00_model_states.pt"
        torch.save({key: v for key, v in torch.load(path, weights_only=False).items() if "frozen" not in key}, path)

    status, text, whole = said(folder)

    assert (status, whole) == (0, None)
    assert text.startswith("whole as far as it says: ")
    assert "not looked at: whether frozen parameters were left out" in text
    assert reason in text


def test_a_parameter_without_elements_is_not_missing(tmp_path, said):
    shapes = {name: torch.Size(shape) for name, shape in FROZEN.items()} | {"empty.weight": torch.Size((0, 4))}

    status, _, _ = said(save(tmp_path / "x", 2, frozen_param_shapes=shapes))

    assert status == 0


def test_a_universal_checkpoint_is_held_against_the_names_beside_it(tmp_path, said):
    folder = save(tmp_path / "x", 2)
    for file in folder.glob("*optim_states.pt"):
        file.unlink()
    for name, shape in TRAINED.items():
        (folder / "zero" / name).mkdir(parents=True)
        torch.save({"param": values(shape)}, folder / "zero" / name / "fp32.pt")
    assert said(folder)[0] == 0
    (folder / "zero" / "up.bias" / "fp32.pt").unlink()
    (folder / "zero" / "up.bias").rmdir()
    path = folder / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    del state["module"]["norm.weight"], state["module"]["up.bias"]
    torch.save(state, path)

    status, text, _ = said(folder)
    path.unlink()

    assert status == 3
    assert text.startswith("not whole: 2 of 5 parameters are in no file, 1 of them frozen: first up.bias")
    assert "whole as far as it says: " in said(folder)[1]
    assert "no *_model_states.pt beside" in " ".join(open_checkpoint(folder).unsaid)
