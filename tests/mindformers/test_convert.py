"""What MindFormers' monitor leaves, in both forms of names, becomes csv files that the other conversions read."""

import logging

import numpy as np
import pytest

from trainermon import cli
from trainermon.core.errors import StoreError
from trainermon.exporters.event_files import EventFile
from trainermon.mindformers.convert import convert
from trainermon.mindformers.dumped_numbers import read_folder
from trainermon.msprobe.csv_tables import rank_folders, read_tables

# In the order of writing: two steps, and one that was not finished.
WRITTEN = [
    ("local_loss", 2.5),
    ("local_loss", 2.25),
    ("local_norm__layers.0.wq.weight", 0.5),
    ("local_norm__layers.10.wo.weight", 0.125),
    ("device_local_norm", 0.75),
    ("finish_step", 0.0),
    ("local_loss", 2.0),
    ("local_norm__layers.0.wq.weight", np.nan),
    ("finish_step", 0.0),
    ("local_loss", 1.0),
]
NAMES = {
    "new": lambda tag, number: f"{tag}_float{32 if number % 2 else 16}_{number}.npy",
    "old": lambda tag, number: f"{number}_{tag}.npy",
}


def write(folder, form):
    folder.mkdir(parents=True)
    for number, (tag, value) in enumerate(WRITTEN, start=8):  # from one digit to two: order is by number
        np.save(folder / NAMES[form](tag, number), np.array([value], np.float32))


@pytest.mark.parametrize("form", NAMES)
def test_arrays_belong_to_the_step_that_ends_behind_them(tmp_path, form, caplog):
    write(tmp_path / "rank_0", form)

    with caplog.at_level(logging.WARNING):
        found = [(one.step, one.tag, one.value) for one in read_folder(tmp_path / "rank_0")]

    assert found[:-1] == [
        (1, "local_loss", 2.5),
        (1, "local_loss", 2.25),
        (1, "local_norm/layers.0.wq.weight", 0.5),
        (1, "local_norm/layers.10.wo.weight", 0.125),
        (1, "device_local_norm", 0.75),
        (2, "local_loss", 2.0),
    ]
    assert found[-1][:2] == (2, "local_norm/layers.0.wq.weight")
    assert np.isnan(found[-1][2])
    assert "1 arrays of a step that was not finished are left out" in caplog.text


def test_every_number_is_in_the_csv_files(tmp_path):
    for rank in (0, 3):
        write(tmp_path / "dump" / f"rank_{rank}", "new")
    before = sorted(path.name for path in tmp_path.glob("dump/**/*"))

    convert(tmp_path / "dump", tmp_path / "csv")

    assert sorted(path.name for path in tmp_path.glob("dump/**/*")) == before
    folders = rank_folders(tmp_path / "csv")
    assert list(folders) == [0, 3]
    tables = {kind: rows for kind, rows in read_tables(folders[3]) if rows}
    norms = [(row.step, row.name, row.values["norm"]) for row in tables["grad_unreduced"]]
    assert norms[:2] == [(1, "layers.0.wq.weight", 0.5), (1, "layers.10.wo.weight", 0.125)]
    losses = [(row.step, row.micro_step, row.values["value"]) for row in tables["scalars"] if row.name == "local_loss"]
    assert losses == [(1, 0, 2.5), (1, 1, 2.25), (2, None, 2.0)]


def test_event_files_are_read_too_but_not_twice(tmp_path):
    file = EventFile(tmp_path / "events" / "rank_0")
    file.add([("loss", 2.5), ("adam_m_norm/layers.0.wq.weight", 0.25), ("loss-vs-samples", 2.5)], 4, 0.0)
    file.add([("loss vs samples", 2.5)], 64, 0.0)
    file.add_text("seed", "0")
    file.close()

    convert(tmp_path / "events", tmp_path / "csv")

    tables = {kind: rows for kind, rows in read_tables(rank_folders(tmp_path / "csv")[0]) if rows}
    assert [(row.step, row.name, row.values) for row in tables["scalars"]] == [(4, "loss", {"value": 2.5})]
    assert [(row.step, row.values) for row in tables["exp_avg"]] == [(4, {"norm": 0.25})]


def test_the_other_conversions_read_what_was_written(tmp_path, capsys):
    write(tmp_path / "dump" / "rank_0", "new")

    assert cli.main(["convert", "mindformers", str(tmp_path / "dump"), "-o", str(tmp_path / "csv")]) == 0
    assert cli.main(["convert", "csv2tensorboard", str(tmp_path / "csv"), "-o", str(tmp_path / "events")]) == 0
    assert cli.main(["convert", "csv2db", str(tmp_path / "csv"), "--db", str(tmp_path / "db")]) == 0

    assert "rows of 1 rank" in capsys.readouterr().out
    assert (tmp_path / "events" / "rank0" / "grad_unreduced").is_dir()


def test_a_damaged_file_costs_itself_alone(tmp_path, caplog):
    write(tmp_path / "rank_0", "new")
    (tmp_path / "rank_0" / "local_norm__layers.0.wq.weight_float16_10.npy").write_bytes(b"\x93NUMPY")
    np.save(tmp_path / "rank_0" / "device_local_norm_float16_12.npy", np.array(["words"]))
    np.save(tmp_path / "rank_0" / "local_loss_float32_9.npy", np.array([{}], object), allow_pickle=True)

    found = [(one.step, one.tag) for one in read_folder(tmp_path / "rank_0")]

    assert found == [
        (1, "local_loss"),
        (1, "local_norm/layers.10.wo.weight"),
        (2, "local_loss"),
        (2, "local_norm/layers.0.wq.weight"),
    ]
    assert caplog.text.count("is left out") == 3


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: (path / "rank_0").mkdir(parents=True)])
def test_nothing_to_convert_is_said(tmp_path, make):
    make(tmp_path / "dump")
    with pytest.raises(StoreError, match="found no"):
        convert(tmp_path / "dump", tmp_path / "csv")
