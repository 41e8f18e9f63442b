"""The commands of docs/rl.md, run as they are written there, on a run whose rollouts go wrong."""

import re
import shlex
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.analysis.rl.fused_engine import LlamaForCausalLM, dump, new_policy, prefill, trained_batch
from tests.rl.policies import Step
from trainermon import rl
from trainermon.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "rl.md").read_text()
COMMANDS = list(dict.fromkeys(re.findall(r"`(trainermon rl [^`|]* [^`|]*)`", PAGE)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the commands of the page name."""
    folder = tmp_path_factory.mktemp("page")
    watch = rl.Watch(folder / "rl_out", rank=0)
    for number, fault in ((399, None), (400, "top_p")):
        made = Step(number, fault)
        with watch.step(number):
            watch.rollout(logprobs=made.rollout, ids=made.ids, mask=made.mask)
            watch.train(logprobs=made.train, ids=made.ids, mask=made.mask)
    watch.close()
    for name, value in (("good", 1.0), ("bad", 2.0)):
        rl.StageRecorder(folder / name / "stages").save({"prompt": np.ones(3), "response": np.full(3, value)})
        (folder / f"{name}.log").write_text(f"  rollout_temperature ....... {value}\n")
    policy = new_policy()
    engine = LlamaForCausalLM(policy)
    layer: Any = engine.model.layers[1]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.mul_(1.25)
    dump(folder / "trainer_dump", policy, **trained_batch())
    dump(folder / "engine_dump", engine, **prefill())
    save_file({"weight": np.ones((3, 2), np.float32)}, folder / "model.safetensors")
    return folder


def test_the_page_leads_through_every_command():
    assert {line.split()[2] for line in COMMANDS} == {"show", "compare", "config", "digest"}


@pytest.mark.parametrize(("dtype", "equal"), [(torch.bfloat16, 2), (torch.float32, 0)])
def test_the_first_example_accuses_nobody_whatever_type_the_engine_has(dtype, equal, tmp_path, monkeypatch):
    trainer_side, engine_side = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[:2]
    loading = next(line for line in trainer_side.splitlines(keepends=True) if "load_weights" in line)
    made, engine_model = Step(1), torch.nn.Linear(8, 8, dtype=dtype)
    names: dict[str, Any] = {
        "monitor": None, "batches": [None], "policy": torch.nn.Linear(8, 8), "engine_model": engine_model,
        "engine": types.SimpleNamespace(load_weights=lambda named: engine_model.load_state_dict(dict(named))),
        "ids": made.ids, "mask": made.mask, "engine_logprobs": made.rollout, "trainer_logprobs": made.train,
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)

    exec(trainer_side.replace(loading, f"{loading}    {engine_side}"), names)
    report = names["watch"].report(0)
    names["watch"].close()

    assert report.weights.engines == ("vllm-3",)
    assert (report.weights.equal, report.weights.has_difference, report.causes) == (equal, False, ())
    assert bool(report.weights.advice) == (not equal)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_runs_as_it_is_written(line, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)

    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out


def test_the_command_that_aligns_prints_what_the_page_shows(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    block = PAGE.split("## Module by module")[1].split("```console\n$ ")[1].split("```")[0]
    line, *shown = block.splitlines()

    assert main(shlex.split(line)[1:]) == 0

    printed = re.sub(r"\.py:\d+", ".py:…", capsys.readouterr().out).splitlines()  # lines of transformers move
    shown = [re.sub(r"\.py:\d+", ".py:…", each) for each in shown]
    beginning, end = shown[: shown.index("…")], shown[shown.index("…") + 1 :]
    assert printed[: len(beginning)] == beginning
    assert printed[-len(end) :] == end
