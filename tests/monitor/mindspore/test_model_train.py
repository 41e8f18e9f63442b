"""`mindspore.train.Model` with the callback, in both modes: losses, gradients and weights of the run without it."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import dataset, nn
from mindspore.train import Callback, Model

from tests.journal_rows import RankJournal, only_spool
from tests.monitor.mindspore.trainings import SmallNet, truth
from trainermon.core.errors import AttachError, ConfigError
from trainermon.core.values import Kind
from trainermon.monitor.integrations.mindspore import TrainerMonCallback

pytestmark = pytest.mark.mindspore
CONFIG = {"agent": {"start": False}, "param_distribution": True}
NUM_STEPS, BATCH = 3, 4


@pytest.fixture(autouse=True)
def _pynative():
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


class KeptLosses(Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def step_end(self, run_context):
        outputs = run_context.original_args().net_outputs
        self.losses.append(float((outputs[0] if isinstance(outputs, tuple) else outputs).asnumpy()))


def training(**options):
    """Return a Model with weights of one seed, and its data."""
    rng = np.random.default_rng(5)
    net = SmallNet()
    for parameter in net.get_parameters():
        parameter.set_data(ms.Tensor(rng.normal(scale=0.3, size=parameter.shape).astype(np.float32)))
    x = rng.normal(size=(NUM_STEPS * BATCH, 8)).astype(np.float32)
    y = rng.normal(size=(NUM_STEPS * BATCH, 2)).astype(np.float32)
    data = dataset.NumpySlicesDataset({"x": x, "y": y}, shuffle=False, num_parallel_workers=1).batch(BATCH)
    return Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.1), **options), data, net


def trained(make=lambda _model: None, **options):
    """Return losses and weights of a training with a callback."""
    model, data, net = training(**options)
    kept, ours = KeptLosses(), make(model)
    model.train(1, data, callbacks=[kept, *([] if ours is None else [ours])], dataset_sink_mode=False)
    return kept.losses, {parameter.name: parameter.asnumpy() for parameter in net.get_parameters()}


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
def test_a_training_by_model_is_watched_and_not_changed(spool, mode):
    ms.set_context(mode=mode)
    losses, weights = trained()

    found = trained(lambda model: TrainerMonCallback(CONFIG, model=model))

    assert found[0] == losses
    assert all((found[1][name] == weights[name]).all() for name in weights)
    journal = RankJournal(only_spool(spool))
    assert sorted(journal.rows) == list(range(NUM_STEPS))
    assert [journal.of(step, Kind.LOSS)["loss"].sum for step in range(NUM_STEPS)] == losses
    updated = journal.of(NUM_STEPS - 1, Kind.PARAM_UPDATED)
    assert sorted(updated) == sorted(weights)
    for name, row in updated.items():
        np.testing.assert_allclose([row.count, row.sum_sq], np.array(truth(ms.Tensor(weights[name])))[[0, 4]], 1e-6)
    # plain SGD: the step of a weight is the rate times its gradient
    first, second = (journal.of(step, Kind.PARAM_ORIGIN)["head.bias"].sum for step in (0, 1))
    assert journal.of(0, Kind.GRAD_REDUCED)["head.bias"].sum == pytest.approx((first - second) / 0.1, rel=1e-4)


def test_a_loss_scale_is_the_models_own_business(spool):
    manager = ms.amp.FixedLossScaleManager(128.0, drop_overflow_update=False)
    expected = trained(loss_scale_manager=manager)

    found = trained(lambda _model: TrainerMonCallback(CONFIG), loss_scale_manager=manager)

    assert found[0] == expected[0]
    journal = RankJournal(only_spool(spool))
    assert [journal.of(step, Kind.LOSS)["loss"].sum for step in range(NUM_STEPS)] == expected[0]


def test_a_second_training_begins_where_the_first_one_ended_for_its_model(spool):
    model, data, _ = training()
    model.train(1, data, callbacks=[callback := TrainerMonCallback(CONFIG)], dataset_sink_mode=False)
    assert callback.monitor is None
    model.train(1, data, callbacks=[TrainerMonCallback(CONFIG | {"run_id": "second"})], dataset_sink_mode=False)

    assert sorted(RankJournal(spool / "second").rows) == list(range(NUM_STEPS))


def test_graph_mode_needs_the_model(spool):
    ms.set_context(mode=ms.GRAPH_MODE)
    model, data, net = training()
    with pytest.raises(AttachError, match=r"pass the Model, TrainerMonCallback\(config, model=model\)"):
        model.train(1, data, callbacks=[TrainerMonCallback(CONFIG)], dataset_sink_mode=False)

    assert not any(cell._forward_hook for _, cell in net.cells_and_names())


def test_what_is_no_configuration_is_refused_before_the_first_step(spool):
    model, data, _ = training()
    with pytest.raises(ConfigError, match="xy_distributio"):
        model.train(1, data, callbacks=[TrainerMonCallback({"xy_distributio": True})], dataset_sink_mode=False)
