"""Settings as frameworks print them, in the forms of their logs."""

import json

import pytest

from trainermon.analysis.rl.logged_settings import compare_settings, read_settings, traps
from trainermon.core.errors import DumpError

MEGATRON = """\
[rank0] using world size: 8
------------------------ arguments ------------------------
  attention_dropout ............................... 0.0
  rollout_temperature ............................. 0.8
  save .............................................../ckpt
------------------- end of arguments ---------------------
"""
VERL = """\
(TaskRunner pid=4711) {'actor_rollout_ref': {'actor': {'ppo_micro_batch_size_per_gpu': 4,
(TaskRunner pid=4711)                                  'use_dynamic_bsz': False},
(TaskRunner pid=4711)                        'rollout': {'temperature': 1.0, 'top_p': 0.95}},
(TaskRunner pid=4711)  'trainer': {'project_name': "it's one"}}
"""
OPENRLHF = "2026-11-01 10:00:00,123 INFO Namespace(temperature=1.0, top_p=1, input_key='prompt', betas=(0.9, 0.95))\n"
HYDRA = "python3 -m verl.trainer.main_ppo data.train_batch_size=64 +actor.optim.lr=1e-6 trainer.logger='[console]'\n"
OPTIONS = "torchrun --nproc-per-node 8 train.py --rollout-top-p 0.9 --bf16 --seed=7\n"


def read(tmp_path, text, name="run.log"):
    path = tmp_path / name
    path.write_text(text)
    return read_settings(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MEGATRON, {"attention_dropout": "0.0", "rollout_temperature": "0.8"}),
        (
            VERL,
            {
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "4",
                "actor_rollout_ref.rollout.top_p": "0.95",
                "trainer.project_name": "it's one",
            },
        ),
        (OPENRLHF, {"temperature": "1.0", "input_key": "'prompt'", "betas": "(0.9, 0.95)"}),
        (HYDRA, {"data.train_batch_size": "64", "actor.optim.lr": "1e-6"}),
        (OPTIONS, {"rollout_top_p": "0.9", "bf16": "True", "seed": "7"}),
    ],
    ids=["megatron", "verl", "openrlhf", "hydra", "options"],
)
def test_settings_are_read_as_they_are_printed(tmp_path, text, expected):
    found = read(tmp_path, f"\x1b[32mstarting\x1b[0m\n{text}step 1 loss 2.3\n")

    assert found.items() >= expected.items()


def test_files_of_settings_are_flattened(tmp_path):
    expected = {"a.b": "1", "c": "[1, 2]"}

    assert read(tmp_path, json.dumps({"a": {"b": 1}, "c": [1, 2]}), "x.json") == expected
    assert read(tmp_path, "a:\n  b: 1\nc: [1, 2]\n", "x.yaml") == expected


def test_what_matters_to_rollouts_comes_first():
    found = compare_settings(
        {"save": "a", "rollout.temperature": "1.0", "lr": "1e-6", "n": "1"},
        {"save": "b", "rollout.temperature": "0.7", "lr": "0.000001", "n": "1.0", "extra": "x"},
    )

    assert [(each.name, each.first, each.second) for each in found.differing] == [
        ("rollout.temperature", "1.0", "0.7"),
        ("save", "a", "b"),
        ("extra", None, "x"),
    ]
    assert found.equal == 2
    assert "same temperature" in found.differing[0].why


def test_traps_are_named():
    found = list(
        traps({"rollout.top_p": "0.9", "rollout.top_k": "-1", "val_kwargs.top_p": "0.7", "hidden_dropout": "0.1"})
    )

    assert [each.split(" =")[0] for each in found] == ["rollout.top_p", "hidden_dropout"]


def test_a_log_without_settings_is_refused(tmp_path):
    with pytest.raises(DumpError, match="found no settings"):
        read(tmp_path, "hello\n")


def test_brackets_that_never_close_cost_nothing(tmp_path):
    found = read(tmp_path, "{'a': " * 2000 + "\nNamespace(" * 2000 + "\n x ..... 1\n")

    assert found == {"x": "1"}
