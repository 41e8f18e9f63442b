"""verl: watches the batch from which the actor is updated.

Supported: verl 0.9 with `actor_rollout_ref.rollout.calculate_log_probs=True`, and not in bypass mode, in which the
trainer's log-probabilities are the engine's. A batch is a `DataProto`, of which only `batch` is used.
"""

from __future__ import annotations

from typing import Any

from trainermon.rl.attaching import Attachment
from trainermon.rl.values import Sampling
from trainermon.rl.watch import Watch


def attach(trainer: Any, watch: Watch, *, engine: str = "engine") -> Attachment:
    """Watch a `RayPPOTrainer` from now on; `detach` of what is returned ends it.

    Raises:
        AttachError: This version of verl has other methods.
    """
    watch.sampling = sampling_of(trainer.config)

    def seen(_: Any, batch: Any) -> None:
        observe(watch, batch, step=int(trainer.global_steps), engine=engine)

    return Attachment(trainer, "_update_actor", ("batch",), seen)


def observe(watch: Watch, batch: Any, *, step: int, engine: str = "engine", version: int | None = None) -> None:
    """Watch one batch: the line for a trainer of one's own, where `old_log_probs` and `rollout_log_probs` are in it."""
    tensors = batch.batch
    names = set(tensors.keys())
    missing = {"rollout_log_probs", "old_log_probs", "responses"} - names
    if missing:
        watch.say_once(
            f"verl's batch has no {', '.join(sorted(missing))}: set actor_rollout_ref.rollout.calculate_log_probs=True"
        )
        return
    responses = tensors["responses"]
    mask = tensors["response_mask"] if "response_mask" in names else tensors["attention_mask"][:, -responses.shape[1] :]
    optional = {
        "advantage": "advantages", "return": "returns", "value": "values", "reward": "token_level_scores",
        "ref_log_prob": "ref_log_prob", "prompt": "prompts",
    }  # fmt: skip
    with watch.step(step):
        watch.rollout(
            logprobs=tensors["rollout_log_probs"], ids=responses, mask=mask, engine=engine, version=version,
            prompts=None if "prompts" not in names else list(tensors["prompts"].cpu().numpy()),
        )  # fmt: skip
        watch.train(logprobs=tensors["old_log_probs"], ids=responses, mask=mask)
        watch.save(
            response=responses, rollout_log_prob=tensors["rollout_log_probs"], old_log_prob=tensors["old_log_probs"],
            **{stage: tensors[name] for stage, name in optional.items() if name in names},
        )  # fmt: skip


def sampling_of(config: Any) -> Sampling:
    """Return how a configuration of verl has its engine sample."""
    rollout = config.actor_rollout_ref.rollout
    return Sampling(
        temperature=float(rollout.temperature), top_p=float(rollout.top_p), top_k=max(0, int(rollout.top_k))
    )
