"""csv files into event files and into the trend database; test_msprobe.py compares both with msprobe's converters."""

import argparse
import json
import math
import sqlite3
from contextlib import closing

import pytest

from tests.msprobe.msprobe_runs import KEYS, block, header, tensors
from tests.msprobe.test_tensorboard import scalars
from trainermon.core.errors import ConfigError, StoreError
from trainermon.core.values import Kind, SeriesKey
from trainermon.exporters.export import ExportSettings
from trainermon.msprobe.convert import add_arguments, csv2tensorboard_by_step, main
from trainermon.msprobe.csv_files import CsvExporter, folder_name
from trainermon.msprobe.trend_database import FILE

NUM_STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    exporter = CsvExporter(ExportSettings(run_dir=run_dir, ops=("norm", "nans"), ndigits=17, step_count_per_record=3))
    for step in range(NUM_STEPS):
        for rank in (0, 1):
            exporter.write(header(rank=rank), block(step))
    return run_dir / "csv"


def run(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args([str(word) for word in words]))


def norm_of(kind, name, step):
    return float((tensors(step)[SeriesKey(kind, name)] ** 2).sum() ** 0.5)


@pytest.mark.parametrize("processes", [1, 2])
def test_every_row_becomes_scalars_of_its_step(folder, tmp_path, processes):
    assert csv2tensorboard_by_step(folder, process_num=processes, output_dirpath=tmp_path / "tb") == tmp_path / "tb"

    for rank in (0, 1):
        found = scalars(tmp_path / "tb" / f"rank{rank}" / "param_updated")
        expected = [norm_of(Kind.PARAM_UPDATED, "fc1.weight", step) for step in range(NUM_STEPS)]
        assert [step for step, _ in found["vp0:fc1.weight/norm"]] == list(range(NUM_STEPS))
        assert [value for _, value in found["vp0:fc1.weight/norm"]] == pytest.approx(expected, rel=1e-6)
        assert "vp1:attn.output#1:micro1/nans" in scalars(tmp_path / "tb" / f"rank{rank}" / "actv")


def test_converting_again_replaces_what_was_there(folder, tmp_path):
    for _ in range(2):
        run("csv2tensorboard", folder, "-o", tmp_path, "--kinds", "exp_avg")

    assert len(scalars(tmp_path / "rank0" / "exp_avg")["vp0:fc1.bias/norm"]) == NUM_STEPS
    assert [path.name for path in (tmp_path / "rank0").iterdir()] == ["exp_avg"]


def test_an_interrupted_conversion_leaves_what_was_there(folder, tmp_path, monkeypatch):
    run("csv2tensorboard", folder, "-o", tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def interrupt(self, *_more):
        raise KeyboardInterrupt

    monkeypatch.setattr("trainermon.exporters.event_files.EventFile.add", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run("csv2tensorboard", folder, "-o", tmp_path)

    assert before
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_wrong_wishes_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="data_type_list: found 'weights', expected some of actv"):
        csv2tensorboard_by_step(folder, data_type_list=["weights"])
    with pytest.raises(ConfigError, match="process_num: found 0"):
        csv2tensorboard_by_step(folder, process_num=0)
    with pytest.raises(StoreError, match="found no folder such as"):
        csv2tensorboard_by_step(tmp_path)
    with pytest.raises(StoreError, match=r"found no folder such as .* from Dec31_00-00-00 to now"):
        csv2tensorboard_by_step(folder, time_start="Dec31_00-00-00")
    with pytest.raises(StoreError, match="found 'yesterday', expected a timestamp"):
        csv2tensorboard_by_step(folder, time_end="yesterday")


def query(path, sql):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def test_micro_steps_are_numbered_through(folder, tmp_path, capsys):
    run("csv2db", folder, "--db", tmp_path)

    values = """SELECT rank, step, norm FROM trend_data JOIN monitoring_targets USING (target_id)
        JOIN monitoring_metrics USING (metric_id) WHERE rank = 1 AND """
    of_module = query(tmp_path / FILE, values + "metric_name = 'actv' AND target_name = 'fc1.input' ORDER BY step")
    expected = [
        (
            1,
            2 * step + micro,
            (tensors(step)[SeriesKey(Kind.ACTV, "fc1", "input.0", micro_step=micro)] ** 2).sum() ** 0.5,
        )
        for step in range(NUM_STEPS)
        for micro in (0, 1)
    ]
    assert of_module == [(rank, step, pytest.approx(norm, rel=1e-12)) for rank, step, norm in expected]
    of_parameter = query(
        tmp_path / FILE, values + "metric_name = 'param_updated' AND target_name = 'fc1.bias' ORDER BY step"
    )
    assert [step for _, step, _ in of_parameter] == [0, 2, 4, 6]
    assert query(tmp_path / FILE, "SELECT min_step, max_step, max_rank FROM global_stats") == [(0, 7, 1)]
    assert "rows of 2 ranks" in capsys.readouterr().out


def test_micro_steps_can_be_targets_of_their_own(folder, tmp_path):
    run("csv2db", folder, "--db", tmp_path, "--micro-step", "false")

    found = query(
        tmp_path / FILE,
        "SELECT micro_step, max(step) FROM trend_data JOIN monitoring_targets USING (target_id) "
        "WHERE target_name = 'fc1.input' GROUP BY micro_step",
    )
    assert found == [(0, 3), (1, 3)]
    assert query(tmp_path / FILE, "SELECT min_step, max_step FROM global_stats") == [(0, 3)]


def test_names_are_mapped_and_tagged(folder, tmp_path):
    (tmp_path / "mapping.json").write_text(json.dumps({"fc1": "layers.3.mlp"}))

    run("csv2db", folder, "--db", tmp_path, "--mapping", tmp_path / "mapping.json")

    tags = query(
        tmp_path / FILE,
        "SELECT DISTINCT tag_name, category FROM monitoring_tags JOIN tag_target_mapping USING (tag_id)"
        " JOIN monitoring_targets USING (target_id) WHERE target_name = 'layers.3.mlp.weight' ORDER BY 1",
    )
    assert tags == [("layers", "module"), ("layers.3", "layer"), ("mlp", "module"), ("weight", "module")]


def test_a_database_is_replaced_and_every_row_is_there(folder, tmp_path):
    run("csv2db", folder, "--db", tmp_path)
    run("csv2db", folder, "--db", tmp_path)

    assert query(tmp_path / FILE, "SELECT count(*) FROM trend_data") == [(2 * NUM_STEPS * len(KEYS),)]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_what_the_files_of_msprobe_have_broken_is_left_out_and_said(tmp_path, caplog):
    folder = tmp_path / folder_name(header())
    folder.mkdir()
    (folder / "other_0-0.csv").write_text(
        "vpp_stage,name,step,norm,min,max,shape,dtype\n"
        "all_reduce,6.835994,0,0.161287,2.0,nan,nan,14.22162,0.35564,4.0,nan,nan\n"
        "0,fc1.weight,0,inf,-2e9,nan,[],torch.float32\n"
    )

    run("csv2db", tmp_path, "--db", tmp_path / "db")

    assert query(tmp_path / "db" / FILE, "SELECT norm, min, max FROM trend_data") == [(1e9 + 1, -1e9, None)]
    assert "other_0-0.csv: 1 rows are not of the form that the header says" in caplog.text
    assert math.isfinite(1e9 + 1)


def test_a_folder_without_files_is_refused(tmp_path):
    (tmp_path / folder_name(header())).mkdir()

    with pytest.raises(StoreError, match="found no csv file of actv, actv_grad"):
        run("csv2db", tmp_path, "--db", tmp_path / "db")


def test_a_mapping_that_is_none_is_refused(folder, tmp_path):
    (tmp_path / "mapping.json").write_text("[]")

    with pytest.raises(StoreError, match="expected an object of names"):
        run("csv2db", folder, "--db", tmp_path, "--mapping", tmp_path / "mapping.json")
