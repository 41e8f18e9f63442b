"""OpenRLHF: watches an experience, before the actor is trained on it."""

from __future__ import annotations

from typing import Any

from trainermon.rl.watch import Watch


def observe(watch: Watch, experience: Any, *, step: int, engine: str | None = None, version: int | None = None) -> None:
    """Watch one `Experience` (0.8 or newer, with `--enable_vllm_is_correction`, so that `rollout_log_probs` are kept).

    Its `sequences` are `[N, T + 1]` with prompts, `action_mask` and both log-probabilities `[N, T]`, one token later.
    """
    rollout, train = experience.rollout_log_probs, experience.action_log_probs
    if rollout is None or train is None:
        watch.say_once("the experience has no rollout_log_probs: start OpenRLHF with --enable_vllm_is_correction")
        return
    mask = experience.action_mask
    ids = experience.sequences[:, -mask.shape[1] :]
    with watch.step(step):
        watch.rollout(logprobs=rollout, ids=ids, mask=mask, engine=engine, version=version)
        watch.train(logprobs=train, ids=ids, mask=mask)
        watch.save(
            response=ids, rollout_log_prob=rollout, old_log_prob=train,
            advantage=getattr(experience, "advantages", None),
            ref_log_prob=getattr(experience, "base_action_log_probs", None),
        )  # fmt: skip
