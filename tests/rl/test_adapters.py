"""What each framework's batch is to a watch: the same tokens, in the shapes in which the framework has them."""

import dataclasses
import functools
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from tests.rl.policies import Step
from trainermon import rl
from trainermon.core.errors import AttachError
from trainermon.rl import names, openrlhf, slime, verl, vllm
from trainermon.rl.attaching import Attachment
from trainermon.rl.stages import stage_files
from trainermon.rl.trl import attach, sampling_of

MADE = Step(3, "top_p")
IDS, MASK = torch.from_numpy(MADE.ids), torch.from_numpy(MADE.mask)
ROLLOUT, TRAIN = torch.from_numpy(MADE.rollout), torch.from_numpy(MADE.train)
PROMPTS = torch.arange(len(IDS) * 5).view(len(IDS), 5)


@pytest.fixture
def watch(tmp_path):
    found = rl.Watch(tmp_path, rank=0, sampling=rl.Sampling(top_p=MADE.top_p), name_map=names.hf_to_vllm)
    yield found
    found.close()


def expected():
    return dataclasses.replace(MADE.report().measures, experts_differ=0.0)


def found(watch, step=7):
    report = watch.report(step)
    assert watch.num_failures == 0
    assert str(report.causes[0].cause) == "truncated support"
    return dataclasses.replace(report.measures, experts_differ=0.0)


def verl_batch(**more):
    tensors = {"responses": IDS, "prompts": PROMPTS, "rollout_log_probs": ROLLOUT, "old_log_probs": TRAIN}
    full = torch.cat([torch.ones_like(PROMPTS), MASK.long()], dim=1)
    return types.SimpleNamespace(batch={**tensors, "attention_mask": full, "advantages": TRAIN, **more})


def test_a_batch_of_verl(watch, tmp_path):
    verl.observe(watch, verl_batch(), step=7)

    assert found(watch) == expected()
    assert {file.key for file in stage_files(tmp_path / "stages")} == {
        "response", "prompt", "advantage", "rollout_log_prob", "old_log_prob",
    }  # fmt: skip


def test_a_trainer_of_verl(watch):
    class RayPPOTrainer:
        global_steps = 7
        config = types.SimpleNamespace(
            actor_rollout_ref=types.SimpleNamespace(
                rollout=types.SimpleNamespace(temperature=1.0, top_p=MADE.top_p, top_k=-1)
            )
        )

        def _update_actor(self, batch):
            return "updated"

    trainer = RayPPOTrainer()
    attached = verl.attach(trainer, watch)

    assert trainer._update_actor(verl_batch(response_mask=MASK.long())) == "updated"
    attached.detach()

    assert found(watch) == expected()
    assert watch.sampling == rl.Sampling(top_p=MADE.top_p)
    assert not vars(trainer)


def test_a_trainer_of_verl_that_passes_on_keys(watch, monkeypatch):
    """As in its trainer of 0.9: the batch has keys, some of padding, and the tensors are nested and fetched."""
    lengths = MADE.mask.sum(1).tolist()
    kept = {"responses": IDS, "rollout_log_probs": ROLLOUT, "old_log_probs": TRAIN, "response_mask": MASK.long()}
    stored = {name: [row[:length] for row, length in zip(rows, lengths, strict=True)] for name, rows in kept.items()}
    stored["prompts"] = list(PROMPTS)

    def kv_batch_get(*, keys, partition_id, select_fields):
        assert partition_id == "train"
        names = [name for name in select_fields if name in stored]
        return {
            name: torch.nested.nested_tensor([stored[name][key] for key in keys], layout=torch.jagged) for name in names
        }

    class PPOTrainer:
        global_steps = 7
        config = types.SimpleNamespace(
            actor_rollout_ref=types.SimpleNamespace(
                rollout=types.SimpleNamespace(temperature=1.0, top_p=MADE.top_p, top_k=-1)
            )
        )

        def _update_actor(self, batch, metrics):
            metrics["updated"] = True
            return batch

    monkeypatch.setitem(sys.modules, "transfer_queue", types.SimpleNamespace(kv_batch_get=kv_batch_get))
    keys = [*range(len(IDS)), 0, 0]
    tags = [{}] * len(IDS) + [{"is_padding": True}] * 2
    batch = types.SimpleNamespace(keys=keys, partition_id="train", tags=tags)
    trainer, metrics = PPOTrainer(), {}
    verl.attach(trainer, watch)

    assert trainer._update_actor(batch, metrics) is batch

    assert metrics == {"updated": True}
    assert found(watch) == expected()


class Worker(vllm.WeightDigests):
    """As much of vLLM's worker as is looked at."""

    model_runner: Any
    rank: int
    parallel_config: Any


def test_workers_of_vllm_tell_what_they_hold(watch, tmp_path):
    """As vLLM extends its workers: they are called by name, and what they return goes to the trainer as text."""
    sent = {"model.layers.0.self_attn.q_proj.weight": torch.randn(8, 4), "model.norm.weight": torch.randn(4)}
    sent |= {f"model.layers.0.self_attn.{part}_proj.weight": torch.randn(4, 4) for part in "kv"}
    dict(watch.sent(sent, version=3))
    q, k, v = (sent[f"model.layers.0.self_attn.{part}_proj.weight"].bfloat16() for part in "qkv")
    for wrong in (False, True):
        for rank in range(2):
            parts = [each.chunk(2)[rank] for each in ((q, v, k) if wrong else (q, k, v))]
            held = {"model.layers.0.self_attn.qkv_proj.weight": torch.cat(parts)}
            held["model.norm.weight"] = sent["model.norm.weight"].bfloat16()
            worker = Worker()
            worker.model_runner = types.SimpleNamespace(
                model=types.SimpleNamespace(named_parameters=functools.partial(iter, held.items()))
            )
            worker.rank, worker.parallel_config = rank, types.SimpleNamespace(tensor_parallel_size=2)
            for folder in ("", str(tmp_path)):
                watch.take(worker.trainermon_weights(version=3, engine="vllm-0", folder=folder))
            assert watch.num_failures == 0
        check = watch.check(3)
        assert check.is_equal is not wrong
    assert {each.name for each in check.differing} == {
        "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight",
    }  # fmt: skip


def test_an_experience_of_openrlhf(watch):
    experience = types.SimpleNamespace(
        sequences=torch.cat([PROMPTS, IDS], dim=1), action_mask=MASK, rollout_log_probs=ROLLOUT, action_log_probs=TRAIN
    )

    openrlhf.observe(watch, experience, step=7)

    assert found(watch) == expected()


def test_rollout_data_of_slime(watch):
    lengths = MADE.mask.sum(1).tolist()
    whole = torch.cat([PROMPTS, IDS], dim=1)
    data = {
        "tokens": [tokens[: PROMPTS.shape[1] + length] for tokens, length in zip(whole, lengths, strict=True)],
        "response_lengths": lengths,
        "rollout_log_probs": [row[:length] for row, length in zip(ROLLOUT, lengths, strict=True)],
        "log_probs": [row[:length] for row, length in zip(TRAIN, lengths, strict=True)],
        "loss_masks": [torch.ones(length, dtype=torch.int) for length in lengths],
    }

    slime.observe(watch, data, step=7)

    assert found(watch) == expected()


class FakeGRPOTrainer:
    """As much of TRL's trainer as the adapter looks at."""

    def __init__(self, **scored):
        self.model = torch.nn.Linear(1, 1)
        self.args = types.SimpleNamespace(temperature=1.0, top_p=MADE.top_p, top_k=None)
        self.state = types.SimpleNamespace(global_step=7)
        self.scored = {
            "prompt_ids": PROMPTS, "prompt_mask": torch.ones_like(PROMPTS), "completion_ids": IDS,
            "completion_mask": MASK.long(), "advantages": TRAIN[:, 0], **scored,
        }  # fmt: skip

    def _generate_and_score_completions(self, inputs):
        return self.scored


def test_what_trl_scored(watch):
    trainer = FakeGRPOTrainer(sampling_per_token_logps=ROLLOUT, old_per_token_logps=TRAIN)
    attached = attach(trainer, watch)

    assert trainer._generate_and_score_completions([]) is trainer.scored
    attached.detach()

    assert found(watch) == expected()


def test_what_trl_does_not_compute_is_said_once(watch, caplog):
    trainer = FakeGRPOTrainer(sampling_per_token_logps=ROLLOUT)
    attach(trainer, watch)

    trainer._generate_and_score_completions([])
    trainer._generate_and_score_completions([])

    assert caplog.text.count("TRL gives no old_per_token_logps") == 1


def test_evaluation_is_not_watched(watch):
    trainer = FakeGRPOTrainer(sampling_per_token_logps=ROLLOUT, old_per_token_logps=TRAIN)
    attach(trainer, watch)
    trainer.model.eval()

    trainer._generate_and_score_completions([])

    assert watch.report(7) is None


def test_how_trl_samples():
    arguments = types.SimpleNamespace(temperature=0.7, top_p=0.9, top_k=50)

    assert sampling_of(arguments) == rl.Sampling(temperature=0.7, top_p=0.9, top_k=50)


@pytest.mark.parametrize(
    ("observe", "batch", "message"),
    [
        (verl.observe, verl_batch(rollout_log_probs=None), ""),
        (openrlhf.observe, types.SimpleNamespace(rollout_log_probs=None, action_log_probs=None), "vllm_is_correction"),
        (slime.observe, {"tokens": []}, "no rollout_log_probs"),
    ],
)
def test_a_batch_without_the_engines_log_probabilities_is_said(observe, batch, message, watch, caplog):
    if not message:
        del batch.batch["rollout_log_probs"]
        message = "calculate_log_probs=True"

    observe(watch, batch, step=1)
    observe(watch, batch, step=2)

    assert caplog.text.count(message) == 1
    assert watch.report(1) is None


def test_another_version_of_a_framework_is_refused():
    class Trainer:
        def step(self, other):
            return other

    with pytest.raises(AttachError, match=r"Trainer\.step: found parameters other, expected batch"):
        Attachment(Trainer(), "step", ("batch",), print)
    with pytest.raises(AttachError, match=r"Trainer\.leap: found no such method"):
        Attachment(Trainer(), "leap", (), print)


def test_an_observer_that_fails_is_logged_once_and_training_goes_on(caplog):
    class Trainer:
        def step(self, batch):
            return batch + 1

    def fail(*_):
        raise RuntimeError("the observer's own")

    trainer = Trainer()
    Attachment(trainer, "step", ("batch",), fail)

    assert [trainer.step(1), trainer.step(np.int64(2))] == [2, 3]
    assert caplog.text.count("step could not be observed") == 1
