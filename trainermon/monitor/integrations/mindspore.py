"""A callback for `mindspore.train.Model`, and for MindFormers' list of callbacks, which that trains with.

model = Model(net, loss_fn, optimizer)
model.train(2, dataset, callbacks=[TrainerMonCallback("monitor_config.json", model=model)])
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore
from mindspore import nn
from mindspore.train import Callback, Model, RunContext

from trainermon.core.errors import AttachError
from trainermon.monitor.trainer_mon import TrainerMon


class TrainerMonCallback(Callback):  # type: ignore[misc]  # MindSpore has no types
    """Watches a training by `Model.train` from its beginning to its end; changes nothing of it.

    Loss (the first of what the network returns) and samples (a batch's, of this rank) are recorded after each step.
    In graph mode the optimizer is replaced, in the network that trains, by `monitor.watch` of it. In sink mode there
    are rows of the last step of each sink.

    Args:
        config: As for `TrainerMon`; a training file of MindFormers, too.
        model: What trains; needed in graph mode alone, where callbacks are not told which network holds the optimizer.
        grad_acc_steps: Backwards for each call of the optimizer.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | None = None,
        *,
        model: Model | None = None,
        grad_acc_steps: int = 1,
    ) -> None:
        super().__init__()
        self.monitor: TrainerMon | None = None
        self._config = config
        self._model = model
        self._grad_acc_steps = grad_acc_steps

    def on_train_begin(self, run_context: RunContext) -> None:
        """Attach the monitor to the network and its optimizer.

        Raises:
            AttachError: The optimizer is not known; in graph mode, which network holds it.
        """
        context = run_context.original_args()
        optimizer = context.optimizer or getattr(self._model, "_optimizer", None) or _held(context.network)
        if optimizer is None:
            raise AttachError("TrainerMonCallback: found no optimizer, neither the Model's nor one of its network's")
        self.close()
        monitor = TrainerMon(self._config)
        monitor.set_monitor(
            context.network,
            optimizer=optimizer,
            grad_acc_steps=self._grad_acc_steps,
            start_iteration=int(context.cur_step_num or 0),
        )
        self.monitor = monitor
        if mindspore.get_context("mode") == mindspore.GRAPH_MODE:
            self._watch_compiled(monitor, optimizer)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Record loss and number of samples of the step that has ended; in a sink they are those of its last step."""
        if self.monitor is None:
            return
        context = run_context.original_args()
        outputs = context.net_outputs
        loss = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
        self.monitor.record(loss=loss, samples=context.train_dataset.get_batch_size())

    def on_train_end(self, run_context: RunContext) -> None:  # noqa: ARG002  # MindSpore's signature
        """Write what is left, and detach from the network."""
        self.close()

    def close(self) -> None:
        """Close the monitor, if there is one."""
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None

    def _watch_compiled(self, monitor: TrainerMon, optimizer: nn.Cell) -> None:
        holders = [] if self._model is None else _holders(self._model.train_network, optimizer)
        if not holders:
            self.close()
            raise AttachError(
                "TrainerMonCallback: the training is compiled (graph mode), and the network that calls the optimizer "
                f"was {'not given' if self._model is None else 'not found in the Model'}; "
                "pass the Model, TrainerMonCallback(config, model=model), or train in PyNative mode"
            )
        watched = monitor.watch(optimizer)
        for cell in holders:
            cell.optimizer = watched


def _holders(network: nn.Cell, optimizer: nn.Cell) -> list[nn.Cell]:
    return [cell for _, cell in network.cells_and_names() if getattr(cell, "optimizer", None) is optimizer]


def _held(network: nn.Cell) -> nn.Cell | None:
    """Return the optimizer that a cell of the network holds, where the network trains by itself (MindFormers)."""
    found = [getattr(cell, "optimizer", None) for _, cell in network.cells_and_names()]
    return next((optimizer for optimizer in found if isinstance(optimizer, nn.Optimizer)), None)
