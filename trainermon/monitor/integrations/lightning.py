"""A callback for Lightning's Trainer.

trainer = Trainer(callbacks=[TrainerMonCallback("monitor_config.json")])
trainer.fit(module, dataloader)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainermon.core.errors import AttachError
from trainermon.monitor.trainer_mon import TrainerMon

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the same under the name of its older package
    from pytorch_lightning import Callback, LightningModule, Trainer


class TrainerMonCallback(Callback):  # type: ignore[misc]  # untyped where lightning is not installed
    """Watches a Trainer from the beginning of `fit` to its end; changes nothing of it.

    The loss of each micro step, before it is divided by the micro steps, is filed when its backward begins. The
    learning rate is found by the monitor.

    Args:
        config: As for `TrainerMon`.
    """

    def __init__(self, config: str | Path | Mapping[str, Any] | None = None) -> None:
        self.monitor: TrainerMon | None = None
        self._config = config

    def on_train_start(self, trainer: Trainer, _pl_module: LightningModule) -> None:
        """Attach the monitor to the Trainer's model and optimizer; the strategy has wrapped the model by now.

        Raises:
            AttachError: The module has several optimizers, or none.
        """
        if len(trainer.optimizers) != 1:
            raise AttachError(
                f"TrainerMonCallback: found {len(trainer.optimizers)} optimizers, expected one whose step ends a "
                "training step; make a TrainerMon for each in on_train_start of the module instead"
            )
        self.close()
        monitor = TrainerMon(self._config)
        monitor.set_monitor(
            trainer.model,
            trainer.optimizers[0],
            grad_acc_steps=trainer.accumulate_grad_batches,
            start_iteration=trainer.global_step,
        )
        self.monitor = monitor

    def on_train_batch_start(self, trainer: Trainer, _pl_module: LightningModule, _batch: Any, batch_idx: int) -> None:
        """Tell the monitor how many micro steps the step has: Lightning steps on an epoch's last batch too."""
        if self.monitor is None:
            return
        usual = trainer.accumulate_grad_batches
        is_final = trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches
        self.monitor.expect_micro_steps(batch_idx % usual + 1 if is_final else usual)

    def on_before_backward(self, trainer: Trainer, _pl_module: LightningModule, loss: Tensor) -> None:
        """Record the loss, without the factors of accumulation and loss scale; waits for nothing."""
        if self.monitor is None:
            return
        loss = loss.detach() * trainer.accumulate_grad_batches
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            loss = loss / scaler.scale(torch.ones((), device=loss.device))
        self.monitor.record(loss=loss)

    def on_train_end(self, _trainer: Trainer, _pl_module: LightningModule) -> None:
        """Write what is left and detach from the model."""
        self.close()

    def on_exception(self, _trainer: Trainer, _pl_module: LightningModule, exception: BaseException) -> None:
        """Detach from the model of a training that has failed or was interrupted, and say so."""
        self.close(exception)

    def close(self, error: BaseException | None = None) -> None:
        """Close the monitor, if there is one; `error` is what ends the training, if something does."""
        if self.monitor is not None:
            self.monitor.__exit__(None if error is None else type(error), error, None)
            self.monitor = None
