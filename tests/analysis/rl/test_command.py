"""`trainermon rl` on what a watch wrote: the sentence first, and a page that a browser shows without a script."""

import json

import numpy as np
import pytest
import torch

from tests.rl.policies import Step
from trainermon import rl
from trainermon.cli import main
from trainermon.rl.files import read_held, read_reports, read_sent

FAULTS = (None, None, "top_p", "other context")


def watched(folder, *, rank=0, faults=FAULTS):
    watch = rl.Watch(folder, rank=rank)
    for number, fault in enumerate(faults):
        made = Step(number, fault)
        with watch.step(number):
            watch.rollout(logprobs=made.rollout, ids=made.ids, mask=made.mask)
            watch.train(logprobs=made.train, ids=made.ids, mask=made.mask)
        watch.report(number)
    watch.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl")
    watched(folder)
    watched(folder, rank=1, faults=FAULTS[:3])
    return folder


def test_the_last_step_that_every_rank_has_is_shown_and_of_its_ranks_the_worst(folder, capsys):
    assert main(["rl", "show", str(folder)]) == 0

    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("step 2, rank 0 of 2: What was logged is not what was sampled from, truncated support:")
    assert any(line.startswith("  next     sample with top_p 1") for line in rest)


def test_another_step_can_be_asked_for(folder, capsys):
    assert main(["rl", "show", str(folder), "--step", "0"]) == 0

    assert "The two differ by no more than rounding may give" in capsys.readouterr().out


def test_a_step_that_is_not_there_is_said(folder, capsys):
    assert main(["rl", "show", str(folder), "--step", "9"]) == 1

    assert "--step: found 9, expected one of 0 to 3" in capsys.readouterr().err


def test_tokens_are_shown_as_text(folder, tmp_path, capsys):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({f"w{number}": number for number in range(250)}, unk_token="w0")).save(
        str(tmp_path / "tokenizer.json")
    )
    html = tmp_path / "rl.html"

    assert main(["rl", "show", str(folder), "--step", "3", "--tokenizer", str(tmp_path), "--html", str(html)]) == 0
    assert main(["rl", "show", str(folder), "--tokenizer", str(tmp_path / "none")]) == 1

    said = capsys.readouterr()
    worst = read_reports(folder)[0][3].worst[0]
    before = " ".join(f"w{number}" for number in worst.before)
    assert f"  {before}[ w{worst.id}]"[-40:] in said.out
    assert f"{before}[ w{worst.id}]" in html.read_text()
    assert "is not there, expected a model's folder with tokenizer.json" in said.err


def test_json_has_every_report_and_the_status_says_that_there_are_causes(folder, capsys):
    assert main(["rl", "show", str(folder), "--json", "--exit-code"]) == 3

    told = json.loads(capsys.readouterr().out)
    assert {rank: [each["verdict"] for each in reports] for rank, reports in told.items()} == {
        "0": ["noise", "noise", "bookkeeping", "policy differs"],
        "1": ["noise", "noise", "bookkeeping"],
    }


def test_the_page_escapes_what_engines_are_called(tmp_path, capsys):
    watch = rl.Watch(tmp_path / "out", rank=0)
    made = Step(0)
    with watch.step(0):
        for engine, half in (("<img src=x onerror=alert(1)>", slice(0, 64)), ("b", slice(64, None))):
            watch.rollout(logprobs=made.rollout[half], mask=made.mask[half], engine=engine)
        watch.train(logprobs=made.train, mask=made.mask)
    watch.close()

    assert main(["rl", "show", str(tmp_path / "out"), "--html", str(tmp_path / "rl.html")]) == 0

    page = (tmp_path / "rl.html").read_text()
    assert "<img" not in page
    assert "&lt;img src=x" in page


def test_a_checkpoint_stands_in_for_a_trainer_or_an_engine(tmp_path, capsys):
    from safetensors.torch import save_file

    weights = {"model.a.weight": torch.randn(40, 64), "module.b": torch.randn(7), "count": torch.arange(3)}
    save_file(weights, tmp_path / "model.safetensors")
    out = ["-o", str(tmp_path / "out"), "--version", "4"]

    assert main(["rl", "digest", str(tmp_path / "model.safetensors"), *out, "--dtype", "bfloat16"]) == 0
    assert main(["rl", "digest", str(tmp_path / "model.safetensors"), *out, "--engine", "vllm"]) == 0

    (sent,), (held,) = read_sent(tmp_path / "out", 4), read_held(tmp_path / "out", 4)["vllm"]
    named = {"model.a.weight": weights["model.a.weight"], "b": weights["module.b"], "count": weights["count"]}
    assert sent.tensors == rl.digest_tensors(named, dtype="bfloat16")
    assert held.tensors == rl.digest_tensors(named)
    assert "3 tensors of" in capsys.readouterr().out


def test_a_checkpoint_in_shards_has_the_digests_of_the_whole(tmp_path):
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    weights = {"a": torch.randn(33, 20), "b": torch.randn(8)}
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        save(weights, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)

    assert main(["rl", "digest", str(tmp_path / "dcp"), "-o", str(tmp_path / "out"), "--version", "1"]) == 0

    assert read_sent(tmp_path / "out", 1)[0].tensors == rl.digest_tensors(weights)


def test_stages_and_settings_have_a_status(tmp_path, capsys):
    for name, value in (("a", 1.0), ("b", 2.0)):
        rl.StageRecorder(tmp_path / name).save({"reward": np.full(3, value)})
        (tmp_path / f"{name}.json").write_text(json.dumps({"rollout": {"temperature": value}}))

    assert main(["rl", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--exit-code"]) == 3
    assert main(["rl", "compare", str(tmp_path / "a"), str(tmp_path / "a"), "--exit-code"]) == 0
    assert main(["rl", "config", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--exit-code"]) == 3
    assert main(["rl", "config", str(tmp_path / "a.json"), str(tmp_path / "a.json"), "--exit-code"]) == 0

    out = capsys.readouterr().out
    assert "The first difference is in reward of step 0, rank 0: from element [0] on, 1 against 2" in out
    assert "the trainer must divide logits by the same temperature" in out
