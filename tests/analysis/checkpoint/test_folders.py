"""A folder of files of torch, plain or as transformers' Trainer writes it: what it has beside weights is compared."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from trainermon.analysis.checkpoint.comparison import compare_checkpoints
from trainermon.analysis.checkpoint.opening import open_checkpoint
from trainermon.cli import main


def state(*, moment=0.0, rate=0.1, step=3, ema=1.0):
    """Return what a script saves: the model, the optimizer with one moment changed by `moment`, an average, a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.state[next(model[1].parameters())]["exp_avg"] += moment
    weights = {name: value.clone() for name, value in torch.nn.Linear(2, 2).state_dict().items()}
    average = {name: torch.full_like(value, ema) for name, value in weights.items()}
    return {"model": weights, "optimizer": copy.deepcopy(optimizer.state_dict()), "ema": average, "step": step}


def one_file(folder, found):
    folder.mkdir()
    torch.save(found, folder / "last.pt")


def of_trainer(folder, found):
    folder.mkdir()
    torch.save(found["model"], folder / "pytorch_model.bin")
    torch.save(found["optimizer"], folder / "optimizer.pt")
    torch.save({"ema": found["ema"]}, folder / "ema.pt")
    torch.save({"cpu": torch.zeros(16, dtype=torch.uint8), "python": (3, (1, 2), None)}, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": found["step"], "log_history": []}))


def of_shards(folder, found):
    of_trainer(folder, found)
    (folder / "pytorch_model.bin").unlink()
    names = {name: f"pytorch_model-0000{number}-of-00002.bin" for number, name in enumerate(found["model"], 1)}
    for name, file in names.items():
        torch.save({name: found["model"][name]}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))


SAVES = {"one file": one_file, "Trainer": of_trainer, "shards": of_shards}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"moment": 1.0}, "optimizer state differs in 1 of 12"),
        ({"rate": 0.2}, "other value"),
        ({"step": 4}, "steps 3 and 4"),
        ({}, ""),
    ],
    ids=["moment", "rate", "step", "nothing"],
)
def test_what_a_folder_has_beside_its_weights_is_compared(tmp_path, save, change, said):
    save(tmp_path / "a", state())
    save(tmp_path / "b", state(**change))

    found = compare_checkpoints(tmp_path / "a", tmp_path / "b")

    assert said in found.headline
    assert found.headline.startswith("the same model")
    assert (found.headline == "the same model") is not bool(said)


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_a_second_model_in_a_folder_is_compared(tmp_path, save):
    for name, value in (("a", 1.0), ("b", 2.0)):
        save(tmp_path / name, state(ema=value))

    assert "2 of 2 tensors of `ema` differ" in compare_checkpoints(tmp_path / "a", tmp_path / "b").headline


def test_files_with_one_key_are_told_apart(tmp_path):
    for name, change in (("a", 0.0), ("b", 1.0)):
        (tmp_path / name).mkdir()
        for rank, moment in enumerate((0.0, change)):
            torch.save({"optimizer": state(moment=moment)["optimizer"], "step": 3}, tmp_path / name / f"rank{rank}.pt")
        torch.save(state()["model"], tmp_path / name / "weights.pt")

    found = compare_checkpoints(tmp_path / "a", tmp_path / "b")

    assert [(tensor.kind, tensor.name) for tensor in found.differing()] == [("exp_avg", "rank1.2")]
    assert "optimizer state differs in 1 of 24" in found.headline


def test_a_damaged_file_beside_weights_is_said(tmp_path, capsys):
    of_trainer(tmp_path / "a", state())
    (tmp_path / "a" / "optimizer.pt").write_bytes((tmp_path / "a" / "optimizer.pt").read_bytes()[:300])

    assert any("optimizer.pt" in text for text in open_checkpoint(tmp_path / "a").missing)
    assert main(["checkpoint", "verify", str(tmp_path / "a")]) == 3
    assert capsys.readouterr().out.startswith("not whole: ")


def test_files_beside_weights_that_are_not_read_are_named(tmp_path):
    of_trainer(tmp_path / "a", state())
    save_file({"w": torch.ones(2)}, tmp_path / "a" / "average.safetensors")
    (tmp_path / "a" / "tokenizer.bin").write_bytes(b"words")

    notes = open_checkpoint(tmp_path / "a").notes

    said = "not looked at: {}, beside the weights that were"
    assert notes == (said.format("average.safetensors"), said.format("tokenizer.bin"))


def test_the_counts_of_weights_and_of_all_else_are_told_apart(tmp_path, capsys):
    one_file(tmp_path / "a", state())
    changed = state(ema=2.0)
    changed["model"]["bias"] += 1
    one_file(tmp_path / "b", changed)

    main(["checkpoint", "compare", str(tmp_path / "a"), str(tmp_path / "b")])

    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("differs in 1 of 2 tensors")
    assert [line for line in lines if "identical" in line or "others" in line] == [
        "  weights    1 identical, 1 different",
        "  optimizer  12 identical",
        "  others     2 different",
    ]


def test_two_files_of_an_optimizer_alone_are_compared(tmp_path, capsys):
    for name, moment in (("a", 0.0), ("b", 1.0), ("c", 0.0)):
        torch.save(state(moment=moment)["optimizer"], tmp_path / f"{name}.pt")

    for other in "bc":
        main(["checkpoint", "compare", str(tmp_path / "a.pt"), str(tmp_path / f"{other}.pt")])
    printed = capsys.readouterr().out

    assert "no weights in either; optimizer state differs in 1 of 12" in printed
    assert "no weights in either; all else is the same" in printed
