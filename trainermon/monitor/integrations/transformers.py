"""A callback for `transformers.Trainer`.

trainer = Trainer(model=model, args=args, train_dataset=dataset)
trainer.add_callback(TrainerMonCallback("monitor_config.json", trainer=trainer))
trainer.train()
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainermon.core.errors import AttachError
from trainermon.monitor.trainer_mon import TrainerMon


class TrainerMonCallback(TrainerCallback):  # type: ignore[misc]  # untyped where transformers is not installed
    """Watches a Trainer from the beginning of its training to the end; changes nothing of it.

    Loss (of each micro step, on the scale of the one that the Trainer reports) and learning rate are found by the
    monitor. The callback adds `tokens`, if `include_num_input_tokens_seen` has the Trainer count them (over all ranks),
    and on the steps that the Trainer logs its `grad_norm`, before clipping.

    Args:
        config: As for `TrainerMon`.
        trainer: The Trainer that the callback is added to. Callbacks are told of the bare model only, and the monitor
            needs the one that is called (DistributedDataParallel, DeepSpeed …); without it, one process can be watched.
    """

    def __init__(self, config: str | Path | Mapping[str, Any] | None = None, *, trainer: Any = None) -> None:
        self.monitor: TrainerMon | None = None
        self._config = config
        self._trainer = trainer
        self._tokens_seen = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, _control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach the monitor to the Trainer's model and optimizer, which are prepared by now.

        Raises:
            AttachError: Several processes, but the callback was not given its Trainer.
        """
        if self._trainer is None and args.world_size > 1:
            raise AttachError(
                f"TrainerMonCallback: found {args.world_size} processes, and callbacks are not told how the model is "
                "wrapped; add it by trainer.add_callback(TrainerMonCallback(config, trainer=trainer))"
            )
        self.close()
        model = kwargs["model"] if self._trainer is None else self._trainer.model_wrapped
        monitor = TrainerMon(self._config)
        monitor.set_monitor(
            model,
            kwargs["optimizer"],
            grad_acc_steps=args.gradient_accumulation_steps,
            start_iteration=state.global_step,
        )
        self.monitor = monitor
        self._tokens_seen = state.num_input_tokens_seen

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, _control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell the monitor how many micro steps the step has: the last one of an epoch may have fewer."""
        if self.monitor is not None:
            micro_steps = self._micro_steps(args, state, kwargs.get("train_dataloader"))
            self.monitor.expect_micro_steps(micro_steps)
            self.monitor.scale_found_loss(self._loss_factor(args, kwargs["model"], micro_steps))

    def _micro_steps(self, args: TrainingArguments, state: TrainerState, loader: Any) -> int:
        """Return the number of micro steps as the Trainer has it, else as its batches divide into steps."""
        known: int | None = getattr(self._trainer, "current_gradient_accumulation_steps", None)
        if known is not None:
            return known
        usual: int = args.gradient_accumulation_steps
        try:
            steps, rest = divmod(len(loader), usual)
        except TypeError:  # a data set without a length
            return usual
        is_short = rest and state.global_step % (steps + 1) == steps
        return rest if is_short else usual

    def _loss_factor(self, args: TrainingArguments, model: Any, micro_steps: int) -> float:
        """Return how many shares make up the loss that the Trainer reports.

        A model whose forward takes further keywords is told how many tokens all micro steps have, and those of all
        ranks where the Trainer averages them across devices. It divides by that number: what it returns is a share.
        """
        known = getattr(self._trainer, "model_accepts_loss_kwargs", None)
        if not (_takes_keywords(model) if known is None else known):
            return 1.0
        ranks = args.world_size if getattr(args, "average_tokens_across_devices", False) else 1
        return float(micro_steps * ranks)

    def on_step_end(
        self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Record the number of tokens of the step that has ended, if the Trainer counts them."""
        tokens, self._tokens_seen = state.num_input_tokens_seen - self._tokens_seen, state.num_input_tokens_seen
        if self.monitor is not None and tokens:
            self.monitor.record(tokens=tokens)

    def on_log(
        self,
        _args: TrainingArguments,
        _state: TrainerState,
        _control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_kwargs: Any,
    ) -> None:
        """Record the gradient norm that the Trainer logs, under the step that has ended."""
        if self.monitor is not None and logs is not None and logs.get("grad_norm") is not None:
            self.monitor.record(grad_norm=logs["grad_norm"])

    def on_train_end(
        self, _args: TrainingArguments, _state: TrainerState, _control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Write what is left and detach from the model."""
        self.close()

    def close(self) -> None:
        """Close the monitor, if there is one."""
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None


def _takes_keywords(model: Any) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
