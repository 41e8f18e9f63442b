"""The Trainer's own log is the truth about what the callback makes the monitor collect."""

import math
import types

import pytest
import torch

from tests.journal_rows import RankJournal
from trainermon.core.catalogue import LEARNING_RATE_SERIES
from trainermon.core.errors import AttachError
from trainermon.core.values import Kind

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

MICRO_STEPS, STEPS = 2, 4
CONFIG = {"run_id": "trainer", "agent": {"start": False}}


def trainer_of(folder, *, num_rows=64, **settings):
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (num_rows, 8))]
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        **settings or {"max_steps": STEPS},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=MICRO_STEPS,
        max_grad_norm=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        include_num_input_tokens_seen="all",
        disable_tqdm=True,
    )
    return transformers.Trainer(model=model, args=settings, train_dataset=rows)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a Trainer that trained alone, one that was watched, and the journal about it."""
    from trainermon.monitor.integrations.transformers import TrainerMonCallback

    folder = tmp_path_factory.mktemp("trainer")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRAINERMON_SPOOL", str(folder / "spool"))
        patched.setenv("TRAINERMON_OUTPUT", str(folder / "output"))
        alone = trainer_of(folder / "alone")
        alone.train()
        watched = trainer_of(folder / "watched")
        callback = TrainerMonCallback(CONFIG, trainer=watched)
        watched.add_callback(callback)
        watched.train()
    assert callback.monitor is None
    return alone, watched, RankJournal(folder / "spool" / "trainer")


def logs(trainer):
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry]


def test_training_is_the_same_bit_for_bit(trained):
    alone, watched, _ = trained

    assert [entry["loss"] for entry in logs(alone)] == [entry["loss"] for entry in logs(watched)]
    pairs = zip(alone.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_steps_are_optimizer_steps(trained):
    assert sorted(trained[2].rows) == list(range(STEPS))


def test_collected_gradients_have_the_norm_that_the_trainer_logs(trained):
    _, watched, journal = trained

    for step, entry in enumerate(logs(watched)):
        squares = sum(row.sum_sq for row in journal.of(step, Kind.GRAD_REDUCED).values())
        assert math.sqrt(squares) == pytest.approx(entry["grad_norm"], rel=1e-5)
        (told,) = [row for key, row in journal.rows[step].items() if key.name == "grad_norm"]
        assert told.sum == entry["grad_norm"]


def test_loss_learning_rate_and_tokens_are_filed_under_their_step(trained):
    _, watched, journal = trained

    for step, entry in enumerate(logs(watched)):
        losses = list(journal.of(step, Kind.LOSS).values())
        assert len(losses) == MICRO_STEPS
        mean = sum(row.sum for row in losses) / MICRO_STEPS
        assert mean == pytest.approx(entry["loss"], rel=1e-3)  # the log rounds
        scalars = {key.name: row.sum for key, row in journal.rows[step].items() if key.kind is Kind.STEP}
        assert scalars[LEARNING_RATE_SERIES] == pytest.approx(entry["learning_rate"])
        assert scalars["tokens"] == MICRO_STEPS * 2 * 8


@pytest.mark.parametrize("knows_trainer", [True, False])
def test_the_last_step_of_an_epoch_may_have_fewer_micro_steps(tmp_path, monkeypatch, caplog, knows_trainer):
    from trainermon.monitor.integrations.transformers import TrainerMonCallback

    monkeypatch.setenv("TRAINERMON_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setenv("TRAINERMON_OUTPUT", str(tmp_path / "output"))
    trainer = trainer_of(tmp_path, num_rows=10, num_train_epochs=2)
    callback = TrainerMonCallback(CONFIG | {"monitor_mbs_grad": True}, trainer=trainer if knows_trainer else None)
    trainer.add_callback(callback)
    trainer.train()

    journal = RankJournal(tmp_path / "spool" / "trainer")
    entries = logs(trainer)
    assert len(entries) == len(journal.rows) == 6
    for step, entry in enumerate(entries):
        of_step = [key.micro_step for key in journal.rows[step] if key.name == "lm_head.weight" or "wte" in key.name]
        assert set(of_step) - {None} == ({0, 1} if step % 3 < 2 else {0})
        squares = sum(row.sum_sq for row in journal.of(step, Kind.GRAD_REDUCED).values())
        assert math.sqrt(squares) == pytest.approx(entry["grad_norm"], rel=1e-5)
        losses = [row.sum for row in journal.of(step, Kind.LOSS).values()]
        assert sum(losses) / len(losses) == pytest.approx(entry["loss"], rel=1e-3)
    assert "read at the optimizer step" not in caplog.text


def test_several_processes_need_the_trainer():
    from trainermon.monitor.integrations.transformers import TrainerMonCallback

    with pytest.raises(AttachError, match=r"found 2 processes.*trainer=trainer"):
        TrainerMonCallback(CONFIG).on_train_begin(types.SimpleNamespace(world_size=2), None, None)
