"""TRL: watches what `GRPOTrainer` (and RLOO, which is built alike) scored, one step per generation.

Supported: trl 1.16. Log-probabilities of the engine are there with vLLM, or with a `rollout_func` that returns them;
those of the trainer where TRL computes `old_per_token_logps`, which it does with vLLM's correction and wherever a batch
is used for several updates.
"""

from __future__ import annotations

from typing import Any

from trainermon.rl.attaching import Attachment
from trainermon.rl.values import Sampling
from trainermon.rl.watch import Watch


def attach(trainer: Any, watch: Watch, *, engine: str | None = None) -> Attachment:
    """Watch a trainer from now on; `detach` of what is returned ends it.

    Args:
        trainer: A `GRPOTrainer`.
        watch: Takes what both sides say; how the trainer's engine samples is told to it.
        engine: Name of the engine in the reports.

    Raises:
        AttachError: This version of TRL has other methods.
    """
    watch.sampling = sampling_of(trainer.args)

    def observe(scored: dict[str, Any], *_: Any, **__: Any) -> None:
        if not trainer.model.training:
            return
        rollout, train = scored.get("sampling_per_token_logps"), scored.get("old_per_token_logps")
        if rollout is None or train is None:
            watch.say_once(
                f"TRL gives no {'log-probabilities of the engine' if rollout is None else 'old_per_token_logps'}: "
                "use vLLM with its correction, or a rollout_func that returns logprobs"
            )
            return
        mask = scored["completion_mask"]
        if scored.get("tool_mask") is not None:
            mask = mask * scored["tool_mask"]
        with watch.step(int(trainer.state.global_step)):
            watch.rollout(
                logprobs=rollout, ids=scored["completion_ids"], mask=mask, engine=engine,
                prompts=_prompts(scored["prompt_ids"], scored["prompt_mask"]),
            )  # fmt: skip
            watch.train(logprobs=train, ids=scored["completion_ids"], mask=mask)
            watch.save(
                prompt=scored["prompt_ids"], response=scored["completion_ids"], advantage=scored["advantages"],
                rollout_log_prob=rollout, old_log_prob=train, ref_log_prob=scored.get("ref_per_token_logps"),
            )  # fmt: skip

    return Attachment(trainer, "_generate_and_score_completions", ("inputs",), observe)


def sampling_of(args: Any) -> Sampling:
    """Return how a `GRPOConfig` has its engine sample. TRL has vLLM log processed log-probabilities."""
    return Sampling(
        temperature=float(getattr(args, "temperature", 1.0) or 0.0),
        top_p=float(getattr(args, "top_p", 1.0) or 1.0),
        top_k=max(0, int(getattr(args, "top_k", 0) or 0)),
    )


def _prompts(ids: Any, mask: Any) -> list[Any]:
    return [row[kept.bool()].tolist() for row, kept in zip(ids.cpu(), mask.cpu(), strict=True)]
