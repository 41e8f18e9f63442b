"""Signs and numbers of MindSpore's gradients in files, against numpy in float64, and the run without the probe."""

import csv

import mindspore as ms
import numpy as np
import pytest

from tests.journal_rows import RankJournal, only_spool
from tests.monitor.mindspore.trainings import SmallTraining, truth
from trainermon import TrainerMon
from trainermon.core.errors import AttachError, ConfigError
from trainermon.core.gradient_signs import read_signs, signs_path
from trainermon.core.values import Kind
from trainermon.monitor.mindspore.gradient_probe import GradientMonitor

pytestmark = pytest.mark.mindspore
BOUNDS = [-0.01, 0.0, 0.01]


def probe(folder, **settings):
    return {"dump_path": str(folder), "step": [0, 2], "grad_probe": {"grad_level": "L2", "bounds": BOUNDS, **settings}}


def kept_steps(training, count=3):
    """Train, and return name and numpy array of each gradient of each step."""
    names = [parameter.name for parameter in training.optimizer.parameters]
    kept = []
    for _ in range(count):
        training.step()
        arrays = [gradient.asnumpy().copy() for gradient in training.gradients]
        kept.append(dict(zip(names, arrays, strict=True)))
    return kept


def signs_in(path):
    """Return by name the signs of a file, -1, 0 or 1, flat."""
    stored = read_signs(path)
    found = {}
    for name, bitmaps in stored.bitmaps().items():
        bits = [
            np.unpackbits(words.view(np.uint8), bitorder="little") for words in (bitmaps.positive, bitmaps.negative)
        ]
        found[name] = bits[0].astype(int) - bits[1]
    return found, stored


def assert_signs(path, gradients):
    found, stored = signs_in(path)
    assert sorted(found) == sorted(gradients)
    for name, values in gradients.items():
        np.testing.assert_array_equal(found[name][: values.size], np.sign(values.reshape(-1)), err_msg=name)
        assert not found[name][values.size :].any()
        [counts] = stored.counts[[part == name for part in stored.layout.parts]]
        expected = [(values == 0).sum(), np.isnan(values).sum(), *((values <= np.float32(b)).sum() for b in BOUNDS)]
        assert counts.tolist() == expected


def test_a_probe_writes_what_numpy_finds_and_changes_nothing(tmp_path):
    bare, training = SmallTraining("AdamWeightDecay"), SmallTraining("AdamWeightDecay")
    kept_steps(bare)
    GradientMonitor(probe(tmp_path)).monitor(training.net, training.optimizer)

    kept = kept_steps(training)

    for one, other in zip(bare.optimizer.parameters, training.optimizer.parameters, strict=True):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())
    assert sorted(path.name for path in (tmp_path / "rank0").iterdir()) == ["grad_summary_0.csv", "grad_summary_2.csv"]
    for step in (0, 2):
        assert_signs(signs_path(tmp_path, step, 0), kept[step])
        with (tmp_path / f"rank0/grad_summary_{step}.csv").open(encoding="utf-8-sig") as file:
            rows = {row["param_name"]: row for row in csv.DictReader(file)}
        for name, values in kept[step].items():
            wide = values.astype(np.float64)
            found = [float(rows[name][column]) for column in ("max", "min", "norm")]
            assert found == pytest.approx([wide.max(), wide.min(), np.linalg.norm(wide)], rel=1e-12)
            assert float(rows[name]["(-inf, -0.01]"]) == pytest.approx(np.mean(values <= np.float32(-0.01)))


def test_a_run_has_the_signs_of_its_gradients(spool, tmp_path):
    training = SmallTraining()
    signs = {"level": "L2", "bounds": BOUNDS, "step_interval": 2}
    monitor = TrainerMon({"agent": {"start": False}, "run_id": "run", "gradient_signs": signs})
    monitor.set_monitor(training.net, optimizer=training.optimizer)
    kept = kept_steps(training)
    monitor.close()

    files = {path.name: path for path in tmp_path.rglob("*.bits")}
    assert sorted(files) == ["step0.rank0.bits", "step2.rank0.bits"]
    for step in (0, 2):
        assert_signs(files[f"step{step}.rank0.bits"], kept[step])


def test_signs_of_a_compiled_step_are_refused(spool, tmp_path):
    training = SmallTraining()
    monitor = TrainerMon({"agent": {"start": False}, "gradient_signs": {"level": "L1"}})
    monitor.set_monitor(training.net, optimizer=training.optimizer)
    with pytest.raises(AttachError, match=r"gradient_signs\.level"):
        monitor.watch(training.optimizer)
    monitor.close()


@pytest.mark.parametrize("model", [None, [], ms.Tensor(1.0)])
def test_what_is_no_model_is_refused(tmp_path, model):
    with pytest.raises(AttachError, match=r"monitor: found"):
        GradientMonitor(probe(tmp_path)).monitor(model, SmallTraining().optimizer)


@pytest.mark.parametrize(("optimizer", "state"), [("Adam", "moment1"), ("Momentum", "moments"), ("AdamW", "exp_avg")])
def test_the_direction_is_the_share_of_elements_whose_signs_agree(spool, optimizer, state):
    training, expected = SmallTraining(optimizer), []
    monitor = TrainerMon({"agent": {"start": False}, "mg_direction": True})
    monitor.set_monitor(training.net, optimizer=training.optimizer)
    for _ in range(3):
        moments = [tensor.asnumpy().copy() for tensor in getattr(training.optimizer, state)]
        training.step()
        signs = [np.sign(g.asnumpy()) * np.sign(m) for g, m in zip(training.gradients, moments, strict=True)]
        expected.append({p.name: (s + 1) / 2 for p, s in zip(training.optimizer.parameters, signs, strict=True)})
    monitor.close()

    journal = RankJournal(only_spool(spool))
    assert not journal.of(0, Kind.MG_DIRECTION)  # there is no moment yet
    for step in (1, 2):
        found = journal.of(step, Kind.MG_DIRECTION)
        assert sorted(found) == sorted(expected[step])
        for name, values in expected[step].items():
            row = found[name]
            got = [row.count, row.min, row.max, row.sum, row.sum_sq, row.zeros, row.nans, row.infs]
            np.testing.assert_allclose(got, truth(ms.Tensor(values.astype(np.float32))), rtol=1e-6, err_msg=name)


def test_a_direction_needs_a_momentum(spool):
    training = SmallTraining()
    with pytest.raises(ConfigError, match="keeps no first moment"):
        TrainerMon({"agent": {"start": False}, "mg_direction": True}).set_monitor(
            training.net, optimizer=ms.nn.Rprop(training.net.trainable_params())
        )
