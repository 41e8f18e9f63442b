"""verl: watches the batch from which the actor is updated.

Supported: verl 0.9 with `actor_rollout_ref.rollout.calculate_log_probs=True`, and not in bypass mode, in which the
trainer's log-probabilities are the engine's. Its trainer (`trainer.use_v1`, the default) passes on the keys of a batch
whose tensors are in a TransferQueue; the one before it a `DataProto`, of which only `batch` is used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from trainermon.rl.attaching import Attachment
from trainermon.rl.values import Sampling
from trainermon.rl.watch import Watch

_NEEDED = ("rollout_log_probs", "old_log_probs", "responses")
_STAGES = {
    "prompt": "prompts", "advantage": "advantages", "return": "returns", "value": "values",
    "reward": "token_level_scores", "ref_log_prob": "ref_log_prob",
}  # fmt: skip


def attach(trainer: Any, watch: Watch, *, engine: str | None = None) -> Attachment:
    """Watch verl's trainer, the newer or the older one, from now on; `detach` of what is returned ends it.

    Raises:
        AttachError: This version of verl has other methods.
    """
    watch.sampling = sampling_of(trainer.config)

    def seen(_: Any, batch: Any, *__: Any, **___: Any) -> None:
        observe(watch, batch, step=int(trainer.global_steps), engine=engine)

    return Attachment(trainer, "_update_actor", ("batch",), seen)


def observe(watch: Watch, batch: Any, *, step: int, engine: str | None = None, version: int | None = None) -> None:
    """Watch one batch: the line for a trainer of one's own, where `old_log_probs` and `rollout_log_probs` are in it.

    `batch` is a `DataProto`, or a `KVBatchMeta` whose tensors are fetched, which waits for them.
    """
    tensors = _tensors(batch)
    missing = [name for name in _NEEDED if name not in tensors]
    if missing:
        watch.say_once(
            f"verl's batch has no {', '.join(missing)}: set actor_rollout_ref.rollout.calculate_log_probs=True"
        )
        return
    responses = tensors["responses"]
    mask = tensors.get("response_mask")
    if mask is None:
        mask = tensors["attention_mask"][:, -responses.shape[1] :]
    prompts = tensors.get("prompts")
    with watch.step(step):
        watch.rollout(
            logprobs=tensors["rollout_log_probs"], ids=responses, mask=mask, engine=engine, version=version,
            prompts=None if prompts is None else [row.cpu().numpy() for row in prompts],
        )  # fmt: skip
        watch.train(logprobs=tensors["old_log_probs"], ids=responses, mask=mask)
        watch.save(
            response=responses, rollout_log_prob=tensors["rollout_log_probs"], old_log_prob=tensors["old_log_probs"],
            **{stage: tensors[name] for stage, name in _STAGES.items() if name in tensors},
        )  # fmt: skip


def _tensors(batch: Any) -> Mapping[str, Any]:
    """Return a batch's tensors by name; of nested ones, whose rows have lengths of their own, lists of rows."""
    held = getattr(batch, "batch", None)
    if held is None:
        queue = sys.modules["transfer_queue"]  # whoever passes keys has loaded it
        wanted = [*_NEEDED, "response_mask", *_STAGES.values()]
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        held = queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=wanted)
    return {name: _rows(held[name]) for name in held.keys()}  # noqa: SIM118  # a TensorDict yields rows, not names


def _rows(tensor: Any) -> Any:
    return list(tensor.unbind()) if getattr(tensor, "is_nested", False) else tensor


def sampling_of(config: Any) -> Sampling:
    """Return how a configuration of verl has its engine sample."""
    rollout = config.actor_rollout_ref.rollout
    return Sampling(
        temperature=float(rollout.temperature), top_p=float(rollout.top_p), top_k=max(0, int(rollout.top_k))
    )
