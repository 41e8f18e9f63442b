"""What the module itself sees is the truth about what the callback makes the monitor collect."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.journal_rows import RankJournal
from trainermon.core.catalogue import LEARNING_RATE_SERIES
from trainermon.core.errors import AttachError
from trainermon.core.values import Kind

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own

MICRO_STEPS, STEPS = 2, 3
CONFIG = {"run_id": "lightning", "xy_distribution": True, "agent": {"start": False}}


def module_of(num_optimizers=1):
    import lightning.pytorch as lightning

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
            self.losses, self.norms = [], []
            self.automatic_optimization = num_optimizers == 1

        def forward(self, x):
            return self.body(x)

        def training_step(self, batch, _index):
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
            self.losses.append(float(loss))
            return loss

        def validation_step(self, batch, _index):
            self(batch[0])

        def on_before_optimizer_step(self, _optimizer):
            self.norms.append(float(torch.stack([p.grad.norm() for p in self.parameters()]).norm()))

        def configure_optimizers(self):
            return [torch.optim.AdamW(self.parameters(), lr=0.01) for _ in range(num_optimizers)]

    return Regression()


def fit(module, callbacks, *, num_rows=64, **settings):
    from lightning.pytorch import Trainer

    x = torch.randn(num_rows, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    trainer = Trainer(
        accelerator="cpu",
        **settings or {"max_steps": STEPS},
        accumulate_grad_batches=MICRO_STEPS if module.automatic_optimization else 1,
        gradient_clip_val=0.1 if module.automatic_optimization else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, loader, loader)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a module that trained alone, one that was watched, and the journal about it."""
    from trainermon.monitor.integrations.lightning import TrainerMonCallback

    folder = tmp_path_factory.mktemp("lightning")
    alone, watched, callback = module_of(), module_of(), TrainerMonCallback(CONFIG)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRAINERMON_SPOOL", str(folder / "spool"))
        patched.setenv("TRAINERMON_OUTPUT", str(folder / "output"))
        fit(alone, [])
        fit(watched, [callback])
    assert callback.monitor is None
    return alone, watched, RankJournal(folder / "spool" / "lightning")


def test_training_is_the_same_bit_for_bit(trained):
    alone, watched, _ = trained

    assert alone.losses == watched.losses
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), watched.parameters(), strict=True))


def test_steps_are_optimizer_steps(trained):
    assert sorted(trained[2].rows) == list(range(STEPS))


def test_collected_gradients_have_the_norm_before_clipping(trained):
    _, watched, journal = trained

    for step, norm in enumerate(watched.norms):
        squares = sum(row.sum_sq for row in journal.of(step, Kind.GRAD_REDUCED).values())
        assert math.sqrt(squares) == pytest.approx(norm, rel=1e-5)


def test_loss_of_each_micro_step_and_learning_rate_are_filed(trained):
    _, watched, journal = trained

    for step in range(STEPS):
        found = journal.of(step, Kind.LOSS)
        expected = watched.losses[step * MICRO_STEPS : (step + 1) * MICRO_STEPS]
        assert {label: row.sum for label, row in found.items()} == pytest.approx(
            {f"loss@{micro}": loss for micro, loss in enumerate(expected)}
        )
        rates = [row.sum for key, row in journal.rows[step].items() if key.name == LEARNING_RATE_SERIES]
        assert rates == [0.01]


def test_activations_are_collected_in_training_only(trained):
    for step in range(STEPS):
        found = trained[2].of(step, Kind.ACTV)
        assert {f"body.0.output.0@{micro}" for micro in range(MICRO_STEPS)} <= found.keys()
        assert all(row.count == 4 * 6 for label, row in found.items() if label.startswith("body.0.output"))


def test_the_last_step_of_an_epoch_may_have_fewer_micro_steps(tmp_path, monkeypatch, caplog):
    from trainermon.monitor.integrations.lightning import TrainerMonCallback

    monkeypatch.setenv("TRAINERMON_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setenv("TRAINERMON_OUTPUT", str(tmp_path / "output"))
    module = module_of()
    fit(module, [TrainerMonCallback(CONFIG)], num_rows=20, max_epochs=2)

    journal = RankJournal(tmp_path / "spool" / "lightning")
    assert len(module.norms) == len(journal.rows) == 6
    for step, norm in enumerate(module.norms):
        squares = sum(row.sum_sq for row in journal.of(step, Kind.GRAD_REDUCED).values())
        assert math.sqrt(squares) == pytest.approx(norm, rel=1e-5)
        found = {key.micro_step for key in journal.rows[step] if key.kind is Kind.ACTV}
        assert found == ({0, 1} if step % 3 < 2 else {0})
    assert "read at the optimizer step" not in caplog.text


def test_several_optimizers_are_refused(tmp_path, monkeypatch):
    from trainermon.monitor.integrations.lightning import TrainerMonCallback

    monkeypatch.chdir(tmp_path)
    with pytest.raises(AttachError, match="found 2 optimizers, expected one"):
        fit(module_of(num_optimizers=2), [TrainerMonCallback(CONFIG)])
