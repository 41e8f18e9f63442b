"""CSV files: names and columns of msprobe's monitor, always rectangular, each row once whatever was killed."""

import csv
import math

import numpy as np
import pytest

from tests.exporters.runs import block_of
from tests.msprobe.msprobe_runs import block, header, tensors
from trainermon.core.values import Kind, SeriesKey
from trainermon.exporters.export import ExportSettings
from trainermon.monitor.taps.features import attention, routing, weights
from trainermon.msprobe.csv_files import CsvExporter, folder_name, forget_from, matching_folders

OPS = ("norm", "min", "max", "mean", "zeros", "nans")


def export(run_dir, blocks, *, ops=OPS, **settings):
    exporter = CsvExporter(ExportSettings(run_dir=run_dir, ops=ops, **settings))
    for head, one in blocks:
        exporter.write(head, one)
    exporter.close()
    return {path.name: read(path) for path in sorted((run_dir / "csv").glob("*/*.csv"))}


def read(path):
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    assert {len(row) for row in rows} == {len(rows[0])}, path
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def test_every_kind_has_its_file_with_the_columns_of_msprobe(tmp_path):
    files = export(tmp_path / "run", [(header(), block(0))])

    columns = {name: list(rows[0]) for name, rows in files.items()}
    plain = ["vpp_stage", "name", "step", *OPS, "shape", "dtype"]
    with_micro = ["vpp_stage", "name", "step", "micro_step", *OPS, "shape", "dtype"]
    assert columns == {
        "actv_0-0.csv": with_micro,
        "actv_grad_0-0.csv": with_micro,
        "exp_avg_0-0.csv": plain,
        "grad_reduced_0-0.csv": plain,
        "grad_unreduced_0-0.csv": plain,
        "other_0-0.csv": plain,
        "param_updated_0-0.csv": plain,
        "scalars_0-0.csv": ["vpp_stage", "name", "step", "micro_step", "value"],
    }


def test_names_number_the_tensors_of_a_module_where_there_are_several(tmp_path):
    files = export(tmp_path / "run", [(header(), block(0))])

    names = {(row["vpp_stage"], row["name"]) for row in files["actv_0-0.csv"]}
    assert names == {
        ("0", "fc1.input"),
        ("0", "fc1.output"),
        ("0", "attn.input_0"),
        ("0", "attn.input_mask"),
        ("0", "attn.output"),
        ("1", "attn.output#1"),
    }
    assert {row["micro_step"] for row in files["actv_0-0.csv"]} == {"0", "1"}


def test_values_are_those_of_the_finite_elements(tmp_path):
    files = export(tmp_path / "run", [(header(), block(0))], ops=(*OPS, "infs", "count"), ndigits=17)

    for kind in (Kind.GRAD_REDUCED, Kind.PARAM_UPDATED):
        for row in files[f"{kind}_0-0.csv"]:
            tensor = tensors(0)[SeriesKey(kind, row["name"])]
            finite = tensor[np.isfinite(tensor)]
            assert float(row["norm"]) == pytest.approx(np.linalg.norm(finite), rel=1e-12)
            assert (float(row["min"]), float(row["max"])) == (finite.min(), finite.max())
            assert float(row["mean"]) == pytest.approx(finite.mean(), rel=1e-12)
            assert float(row["zeros"]) == (tensor == 0).mean()
            assert int(row["nans"]) == (~np.isfinite(tensor)).sum()
            assert int(row["infs"]) == np.isinf(tensor).sum()
            assert row["shape"] == str(list(tensor.shape))
            assert row["dtype"] == "torch.float32"


def test_a_share_of_signs_is_one_number(tmp_path):
    files = export(tmp_path / "run", [(header(), block(0))])

    share = tensors(0)[SeriesKey(Kind.MG_DIRECTION, "fc1.weight")].mean()
    [row] = [row for row in files["other_0-0.csv"] if row["name"] == "fc1.weight"]
    assert {float(row[op]) for op in ("norm", "min", "max", "mean")} == {share}
    assert (row["nans"], row["shape"]) == ("0", "[]")


def test_nothing_finite_and_nothing_known_of_a_tensor_is_nan(tmp_path):
    key = SeriesKey(Kind.ACTV, "x", "output.0")
    head = header(keys=(key,), placements=(None,))
    [row] = export(tmp_path / "run", [(head, block_of({key: np.full(3, np.nan)}, [key]))])["actv_0-0.csv"]

    assert [row[name] for name in ("norm", "min", "max", "mean", "nans", "shape", "dtype")] == [
        *["nan"] * 4,
        "3",
        "nan",
        "nan",
    ]


def test_digits_are_significant_ones(tmp_path):
    files = export(tmp_path / "run", [(header(), block(0))], ndigits=3)

    assert all(len(row["norm"].lstrip("0.").replace(".", "")) <= 3 for row in files["param_updated_0-0.csv"])


def test_steps_share_files_as_asked(tmp_path):
    files = export(tmp_path / "run", [(header(), block(step)) for step in range(5)], step_count_per_record=3)

    assert [name for name in files if name.startswith("exp_avg_")] == ["exp_avg_0-2.csv", "exp_avg_3-5.csv"]
    assert [row["step"] for row in files["exp_avg_0-2.csv"]] == ["0", "0", "1", "1", "2", "2"]


def test_each_rank_and_each_start_has_a_folder(tmp_path):
    starts = [header(rank=0), header(rank=1), header(rank=0, attempt=2)]
    export(tmp_path / "run", [(head, block(0)) for head in starts])

    folders = {path.name for path in (tmp_path / "run" / "csv").iterdir()}
    assert folders == {folder_name(head) for head in starts}
    assert len(folders) == 3
    assert set(matching_folders((tmp_path / "run" / "csv").iterdir())) == {0, 1}


@pytest.mark.parametrize("per_file", [1, 2, 100])
@pytest.mark.parametrize("cut", [0, 1, 17, None])
def test_what_comes_again_after_a_kill_stands_there_once(tmp_path, per_file, cut):
    whole = export(tmp_path / "whole", [(header(), block(step)) for step in range(4)], step_count_per_record=per_file)
    export(tmp_path / "run", [(header(), block(step)) for step in range(3)], step_count_per_record=per_file)
    last = max((tmp_path / "run" / "csv").glob("*/grad_reduced_*.csv"), key=lambda path: int(path.stem.split("-")[1]))
    last.write_bytes(last.read_bytes()[: -cut if cut else None])  # the writer was killed in the middle of a row

    again = export(tmp_path / "run", [(header(), block(step)) for step in (2, 3)], step_count_per_record=per_file)

    assert again == whole


def test_earlier_rows_are_kept_by_forgetting(tmp_path):
    export(tmp_path / "run", [(header(), block(step)) for step in range(4)], step_count_per_record=4)
    [folder] = (tmp_path / "run" / "csv").iterdir()

    forget_from(folder, 2)

    assert {row["step"] for row in read(folder / "exp_avg_0-3.csv")} == {"0", "1"}


def test_rows_are_appended_to_the_newest_folder_between_two_times(tmp_path):
    export(tmp_path / "old", [(header(), block(0))], step_count_per_record=10, ops=("norm", "max"))
    [folder] = (tmp_path / "old" / "csv").iterdir()
    stamp = folder.name.split("-rank")[0]

    export(
        tmp_path / "new", [(header(), block(1))], step_count_per_record=10, append_output=(stamp, stamp), ops=("min",)
    )

    rows = read(folder / "exp_avg_0-9.csv")
    assert [row["step"] for row in rows] == ["0", "0", "1", "1"]
    assert all(math.isfinite(float(row["norm"])) for row in rows)  # the columns are those that the file has
    assert not (tmp_path / "new" / "csv").exists()


@pytest.mark.parametrize(("start", "end"), [("Dec03", None), ("Dec03_10-00-00", "Dec02_10-00-00")])
def test_wrong_times_are_refused(tmp_path, start, end):
    with pytest.raises(ValueError, match=r"timestamp|after"):
        matching_folders([], start, end)


def test_only_gradients_of_micro_steps_stand_in_a_file_of_micro_steps(tmp_path):
    keys = (SeriesKey(Kind.GRAD_UNREDUCED, "w"), SeriesKey(Kind.GRAD_UNREDUCED, "w", micro_step=1))
    head = header(keys=keys, placements=(None, None))

    rows = export(tmp_path / "run", [(head, block_of({key: np.ones(2) for key in keys}, list(keys)))])

    assert [(row["name"], row["micro_step"]) for row in rows["grad_unreduced_0-0.csv"]] == [("w", "1")]


def test_features_have_columns_of_their_own(tmp_path):
    keys = (
        SeriesKey(Kind.FEATURE, "fc1", weights.SPECTRAL_NORM),
        SeriesKey(Kind.FEATURE, "fc1", weights.STABLE_RANK),
        SeriesKey(Kind.FEATURE, "attn", attention.ENTROPY),
        SeriesKey(Kind.FEATURE, "attn", attention.LARGEST_PROBABILITY),
        SeriesKey(Kind.FEATURE, "attn", attention.LARGEST_LOGIT),
        SeriesKey(Kind.FEATURE, "router", weights.SIMILARITY),
        SeriesKey(Kind.FEATURE, "router", routing.CHOICE_ENTROPY),
    )
    values = {key: np.array([float(number), number + 1.0]) for number, key in enumerate(keys)}
    head = header(keys=keys, placements=(None,) * len(keys))

    files = export(tmp_path / "run", [(head, block_of(values, list(keys)))])

    place = {"vpp_stage": "0", "step": "0"}
    assert files["linear_hook_0-0.csv"] == [{**place, "name": "fc1.linear", "sr": "1.22474", "kernel_norm": "0.5"}]
    assert files["attention_hook_0-0.csv"] == [
        {**place, "name": "attn.attention", "micro_step": "0", "entropy": "2.5", "softmax_max": "3.5"}
    ]
    assert [row["name"] for row in files["feature_0-0.csv"]] == [f"attn.{attention.LARGEST_LOGIT}"]
    [similarity], [entropy] = files["moe_router_weight_hook_0-0.csv"], files["moe_router_logit_hook_0-0.csv"]
    assert (similarity["router_weight_similarity"], entropy["per_token_expert_entropy"]) == ("5.5", "6.5")


def test_every_call_of_a_collective_has_its_row(tmp_path):
    keys = tuple(SeriesKey(Kind.COMM, "dp.all_reduce", slot, call) for call in (0, 1) for slot in ("pre.0", "post.0"))
    head = header(keys=keys, placements=(None,) * 4)
    values = {key: np.full(3, float(number + 1)) for number, key in enumerate(keys)}

    rows = export(tmp_path / "run", [(head, block_of(values, list(keys)))], ops=("max",))["other_0-0.csv"]

    assert [(row["name"], row["max"]) for row in rows] == [
        ("dp.all_reduce.pre.0", "1"),
        ("dp.all_reduce.post.0", "2"),
        ("dp.all_reduce.pre.0#1", "3"),
        ("dp.all_reduce.post.0#1", "4"),
    ]


def test_small_values_keep_their_digits(tmp_path):
    key = SeriesKey(Kind.EXP_AVG_SQ, "w")
    head = header(keys=(key,), placements=(None,))

    [row] = export(tmp_path / "run", [(head, block_of({key: np.full(2, 1.23456789e-30)}, [key]))])["exp_avg_sq_0-0.csv"]

    assert row["max"] == "1.23457e-30"
