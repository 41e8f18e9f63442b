"""Event files, read back by TensorBoard's own reader."""

import dataclasses
import math
import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
from tensorboard.util import tensor_util

from tests.exporters.runs import block_of
from tests.msprobe.msprobe_runs import KEYS, block, header, tensors
from tests.statistics.histogram_truth import numpy_histogram
from trainermon.core.errors import ConfigError
from trainermon.core.values import BlockHistograms, Kind, SeriesKey
from trainermon.exporters.export import ExportSettings, make_exporter


def export(run_dir, blocks, ops=("norm", "nans", "shape")):
    exporter = make_exporter("tensorboard", ExportSettings(run_dir=run_dir, ops=ops))
    for head, one in blocks:
        exporter.write(head, one)
    exporter.flush()
    exporter.close()


def scalars(folder):
    events = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tags_and_folders_are_those_of_msprobe(tmp_path):
    export(tmp_path, [(header(), block(step)) for step in range(3)])

    root = tmp_path / "tensorboard" / "rank0"
    assert {path.name for path in root.iterdir()} == {
        "actv",
        "actv_grad",
        "exp_avg",
        "grad_reduced",
        "grad_unreduced",
        "other",
        "param_updated",
        "scalars",
    }
    assert set(scalars(root / "grad_reduced")) == {
        "vp0:fc1.weight/norm",
        "vp0:fc1.weight/nans",
        "vp0:fc1.bias/norm",
        "vp0:fc1.bias/nans",
    }
    assert "vp0:fc1.input:micro1/norm" in scalars(root / "actv")


def test_values_are_read_back(tmp_path):
    export(tmp_path, [(header(), block(step)) for step in range(3)])

    found = scalars(tmp_path / "tensorboard" / "rank0" / "param_updated")
    for step, value in found["vp0:fc1.weight/norm"]:
        tensor = tensors(step)[SeriesKey(Kind.PARAM_UPDATED, "fc1.weight")]
        assert value == pytest.approx((tensor**2).sum() ** 0.5, rel=1e-6)  # event files hold float32


def test_histograms_are_read_back_with_the_counts_of_numpy(tmp_path):
    weight, bias = (SeriesKey(Kind.GRAD_REDUCED, f"fc1.{name}") for name in ("weight", "bias"))
    elements = {**tensors(0), weight: np.array([3e5, -7e4, 1.0, 1.5, -0.3, 0.0, 1e-20])}
    places = np.array([KEYS.index(weight), KEYS.index(bias)], np.uint32)
    counts = np.array([numpy_histogram(elements[key].ravel()) for key in (weight, bias)])
    made = block_of(elements, list(KEYS), step=0)
    made = dataclasses.replace(made, histograms=BlockHistograms(places=places, counts=counts))

    export(tmp_path, [(header(), made)])

    folder = tmp_path / "tensorboard" / "rank0" / "grad_reduced"
    events = plugin_event_accumulator.EventAccumulator(str(folder), tensor_size_guidance={"histograms": 0})
    events.Reload()
    assert set(events.PluginTagToContent("histograms")) == {"vp0:fc1.weight", "vp0:fc1.bias"}
    for key in (weight, bias):
        [event] = events.Tensors(f"vp0:{key.name}")
        finite = elements[key][np.isfinite(elements[key])]
        bars = tensor_util.make_ndarray(event.tensor_proto)  # left, right, count of each
        assert bars[:, 2].sum() == finite.size
        assert bars[0, 0] == pytest.approx(finite.min(), rel=1e-6)
        assert bars[-1, 1] == pytest.approx(finite.max(), rel=1e-6)
        edges = [-np.inf, *bars[1:, 0].astype(float), np.inf]
        np.testing.assert_array_equal(np.histogram(finite, [max(min(e, 1e300), -1e300) for e in edges])[0], bars[:, 2])


@pytest.mark.parametrize("attempt", [1, 2])
def test_steps_that_come_again_stand_there_once(tmp_path, attempt):
    export(tmp_path, [(header(), block(step)) for step in range(4)])
    export(tmp_path, [(header(attempt=attempt), block(step)) for step in (2, 3, 4)])

    found = scalars(tmp_path / "tensorboard" / "rank0" / "grad_reduced")
    assert [step for step, _ in found["vp0:fc1.weight/norm"]] == [0, 1, 2, 3, 4]


def test_a_new_attempt_in_one_agent_replaces_what_it_repeats(tmp_path):
    export(tmp_path, [(header(), block(step)) for step in range(4)] + [(header(attempt=2), block(2))])

    found = scalars(tmp_path / "tensorboard" / "rank0" / "grad_reduced")
    assert [step for step, _ in found["vp0:fc1.weight/norm"]] == [0, 1, 2]


@pytest.mark.parametrize("ops", [("norm", "max"), ()])
def test_numbers_of_the_step_are_drawn_as_they_are(tmp_path, ops):
    loss = [SeriesKey(Kind.LOSS, "loss", micro_step=number) for number in range(2)]
    keys = (*loss, SeriesKey(Kind.STEP, "reward"))
    blocks = [
        block_of({loss[0]: np.array([-3.0]), loss[1]: np.array([-4.0]), keys[2]: np.array([0.25])}, list(keys), step=0),
        block_of({loss[0]: np.array([math.nan]), loss[1]: np.array([1.0])}, list(keys), step=1),
    ]

    export(tmp_path, [(header(keys=keys, placements=(None,) * 3), one) for one in blocks], ops=ops)

    found = scalars(tmp_path / "tensorboard" / "rank0" / "scalars")
    assert found["loss"] == [(0, -3.5), (1, pytest.approx(math.nan, nan_ok=True))]
    assert found["loss:micro0"][0] == (0, -3.0)
    assert found["reward"] == [(0, 0.25)]


def test_without_the_package_it_is_said_what_to_install(tmp_path, monkeypatch):
    modules = ("trainermon.msprobe.tensorboard", "trainermon.exporters.event_files")
    for module in modules:
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)

    with pytest.raises(ConfigError, match=r"need the package tensorboard.*pip install tensorboard"):
        make_exporter("tensorboard", ExportSettings(run_dir=tmp_path))
    for module in modules:
        sys.modules.pop(module, None)


def test_the_series_are_those_of_the_run():
    assert len(KEYS) == len(set(KEYS))
