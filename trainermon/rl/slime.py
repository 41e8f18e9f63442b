"""slime: watches the rollout data of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainermon.rl.watch import Watch


def observe(
    watch: Watch, rollout_data: Mapping[str, Any], *, step: int, engine: str | None = None, version: int | None = None
) -> None:
    """Watch one `rollout_data`, once its `log_probs` are computed: lists with a tensor per sample, responses only.

    `tokens` are whole samples, their last `response_lengths` the responses; `loss_masks` say which of these count.
    """
    rollout, train = rollout_data.get("rollout_log_probs"), rollout_data.get("log_probs")
    if rollout is None or train is None:
        watch.say_once(
            "slime's rollout data has no rollout_log_probs: start it with --use-tis or --get-mismatch-metrics"
        )
        return
    lengths = rollout_data["response_lengths"]
    ids = [tokens[len(tokens) - length :] for tokens, length in zip(rollout_data["tokens"], lengths, strict=True)]
    prompts = [tokens[: len(tokens) - length] for tokens, length in zip(rollout_data["tokens"], lengths, strict=True)]
    mask = rollout_data.get("loss_masks")
    with watch.step(step):
        watch.rollout(logprobs=rollout, ids=ids, mask=mask, engine=engine, version=version, prompts=prompts)
        watch.train(logprobs=train, ids=ids, mask=mask)
        watch.save(response=ids, rollout_log_prob=rollout, old_log_prob=train, reward=rollout_data.get("rewards"))
