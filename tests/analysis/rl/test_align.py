"""A trainer's dump held against an engine's: real dumps of a Llama, and of the same model laid out as vLLM does."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.analysis.rl.fused_engine import LENGTH, PROMPTS, RESPONSE, dump, new_policy, prefill, trained_batch
from tests.analysis.rl.fused_engine import LlamaForCausalLM as EngineModel
from trainermon import rl
from trainermon.analysis.compare.mappings import read_mappings
from trainermon.analysis.rl.prompt_tokens import find_prompts
from trainermon.cli import main
from trainermon.core.errors import ConfigError, DumpError
from trainermon.dump.files.reader import read_dump

LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def policy():
    return new_policy()


@pytest.fixture(scope="module")
def trained(policy, tmp_path_factory):
    return dump(tmp_path_factory.mktemp("trained"), policy, **trained_batch())


@pytest.fixture(scope="module")
def sampled(policy, tmp_path_factory):
    return dump(tmp_path_factory.mktemp("sampled"), EngineModel(policy), **prefill())


def scale(tensor):
    tensor.mul_(1.2)


def swap(tensor):
    tensor.copy_(tensor.roll(len(tensor) // 2, 0))


FAULTS = {
    "a norm": (lambda layer: scale(layer.post_attention_layernorm.weight), "post_attention_layernorm", ".weight"),
    "gate and up swapped": (lambda layer: swap(layer.mlp.gate_up_proj.weight), "mlp.{gate_proj,up_proj}", ".weight"),
    "q, k, v not loaded": (lambda layer: layer.self_attn.qkv_proj.weight.zero_(), "self_attn.{q_proj,", ".weight"),
    "rotary base": (lambda layer: setattr(layer.self_attn, "base", 500_000.0), "self_attn", "LlamaAttention"),
    "another epsilon": (lambda layer: setattr(layer.input_layernorm, "epsilon", 0.1), "input_layernorm", "RMSNorm"),
}


@pytest.mark.parametrize("left", [True, False], ids=["padded left", "padded right"])
def test_a_sound_pair_differs_by_rounding_alone(left, policy, trained, sampled, tmp_path):
    target = trained if left else dump(tmp_path / "right", policy, **trained_batch(left=False))

    found = rl.align(target, sampled, names="fsdp-vllm", output=tmp_path / "aligned")
    comparison = found.compare()

    assert found.lengths == (5, 7, 3)
    assert comparison.row_counts()["error"] == comparison.row_counts()["warning"] == 0
    passed = {call.key.rpartition(".forward")[0].removeprefix("Module.") for call in comparison.calls if
              {row.result for row in call.rows} == {"pass"}}  # fmt: skip
    own = ("input_layernorm.RMSNorm", "self_attn.{q_proj,k_proj,v_proj}.Linear", "self_attn.o_proj.RowParallelLinear",
           "self_attn.LlamaAttention", "post_attention_layernorm.RMSNorm", "mlp.{gate_proj,up_proj}.Linear",
           "mlp.down_proj.RowParallelLinear", "mlp.LlamaMLP", "LlamaDecoderLayer")  # fmt: skip
    expected = {f"model.layers.{layer}.{name}" for layer in range(3) for name in own}
    assert passed == expected | {
        "model.embed_tokens.VocabParallelEmbedding", "model.norm.RMSNorm", "model.LlamaModel"
    }  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_its_module(name, policy, trained, tmp_path):
    fault, module, what = FAULTS[name]
    engine = EngineModel(policy)
    with torch.no_grad():
        fault(engine.model.layers[1])

    comparison = rl.align(
        trained, dump(tmp_path / "engine", engine, **prefill()), output=tmp_path / "aligned"
    ).compare()

    assert comparison.blamed[0].key.startswith(f"Module.{LAYER}{module}")
    assert what in f"{comparison.blamed[0].key} {comparison.blamed[0]}"


def test_what_is_written_is_what_the_models_computed(policy, trained, sampled, tmp_path):
    found = rl.align(trained, sampled, output=tmp_path)

    batch = trained_batch()
    with torch.no_grad():
        hidden = policy.model(**batch).last_hidden_state.double().numpy()
    starts = [LENGTH - len(prompt) - RESPONSE for prompt in PROMPTS]
    expected = np.concatenate(
        [
            hidden[row, start : start + len(prompt)]
            for row, (start, prompt) in enumerate(zip(starts, PROMPTS, strict=True))
        ]
    )
    for side in (found.target, found.golden):
        (entry,) = (each for each in read_dump(side).entries if each.module == "model.norm")
        (outcome,) = entry.outputs
        assert np.allclose(torch.load(outcome.data_path).numpy(), expected, atol=1e-5)
        assert (outcome.max, outcome.min) == pytest.approx((expected.max(), expected.min()), abs=1e-5)
        assert (outcome.mean, outcome.norm) == pytest.approx((expected.mean(), np.linalg.norm(expected)), rel=1e-4)


def test_the_command_says_who_is_to_blame_and_its_files_open_in_compare_and_graph(policy, trained, tmp_path, capsys):
    engine = EngineModel(policy)
    with torch.no_grad():
        scale(engine.model.layers[1].self_attn.o_proj.weight)
    golden = dump(tmp_path / "engine", engine, **prefill())
    out = tmp_path / "aligned"

    assert main(["rl", "align", str(trained), str(golden), "-o", str(out), "--exit-code"]) == 3

    said = capsys.readouterr().out
    assert said.startswith("15 tokens of 3 prompts, 24 modules by one name\n")
    sides = [str(out / "target"), str(out / "golden"), "--match", str(out / "match.yaml")]
    assert f"more: trainermon compare {' '.join(sides)}" in said
    assert main(["compare", *sides]) == 0
    assert main(["graph", *sides, "-o", str(out / "graph.html")]) == 0
    assert capsys.readouterr().out.count(f"{LAYER}self_attn.o_proj") > 1
    assert len(read_mappings(match=out / "match.yaml").joins) == 2


class MegatronBlock(torch.nn.Module):
    """The modules of a Megatron layer by their names, on `[T, N, H]`; q, k and v of a group lie beside each other."""

    self_attention: Any

    def __init__(self):
        super().__init__()
        self.input_layernorm = torch.nn.RMSNorm(8)
        self.self_attention = torch.nn.Module()
        self.self_attention.linear_qkv = torch.nn.Linear(8, 16, bias=False)

    def forward(self, hidden):
        return hidden + self.self_attention.linear_qkv(self.input_layernorm(hidden)).sum(-1, keepdim=True)


class MegatronModel(torch.nn.Module):
    embedding: Any
    decoder: Any

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Module()
        self.embedding.word_embeddings = torch.nn.Embedding(97, 8)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([MegatronBlock()])

    def forward(self, input_ids):
        hidden = self.embedding.word_embeddings(input_ids).transpose(0, 1).contiguous()
        return self.decoder.layers[0](hidden)


class EngineBlock(torch.nn.Module):
    self_attn: Any

    def __init__(self, theirs, order):
        super().__init__()
        self.input_layernorm = torch.nn.RMSNorm(8)
        self.self_attn = torch.nn.Module()
        self.self_attn.qkv_proj = torch.nn.Linear(8, 16, bias=False)
        self.self_attn.qkv_proj.weight = torch.nn.Parameter(theirs.self_attention.linear_qkv.weight[order].detach())

    def forward(self, hidden):
        return hidden + self.self_attn.qkv_proj(self.input_layernorm(hidden)).sum(-1, keepdim=True)


class SmallEngine(torch.nn.Module):
    model: Any

    def __init__(self, theirs, order):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding.from_pretrained(theirs.embedding.word_embeddings.weight.detach())
        self.model.layers = torch.nn.ModuleList([EngineBlock(theirs.decoder.layers[0], order)])

    def forward(self, input_ids):
        return self.model.layers[0](self.model.embed_tokens(input_ids))


@pytest.mark.parametrize("is_sound", [True, False])
def test_names_and_layout_of_megatron(is_sound, tmp_path):
    torch.manual_seed(0)
    model = MegatronModel()
    order = torch.cat([torch.arange(16).view(2, 2, 4)[:, part].flatten() for part in range(2)])
    engine = SmallEngine(model, order)
    if not is_sound:
        with torch.no_grad():
            engine.model.layers[0].self_attn.qkv_proj.weight[3] *= 1.1
    target = dump(tmp_path / "a", model, input_ids=trained_batch()["input_ids"])
    golden = dump(tmp_path / "b", engine, input_ids=prefill()["input_ids"])

    found = rl.align(target, golden, names="megatron-vllm", output=tmp_path / "out", lengths=list(map(len, PROMPTS)))

    blamed = [call.key for call in found.compare().blamed]
    assert found.modules == 4
    assert blamed == ([] if is_sound else ["Module.model.layers.0.self_attn.qkv_proj.Linear.forward.0"])


def test_prompts_are_found_wherever_they_stand():
    """Against rows that are packed, and an engine whose batch is padded."""
    random = np.random.default_rng(1)
    for _ in range(200):
        prompts = [random.integers(1, 50, random.integers(2, 9)) for _ in range(4)]
        order = random.permutation(4)
        packed = np.concatenate([np.r_[prompts[k], random.integers(50, 99, 3)] for k in order])
        padded = np.zeros((4, 9), np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, 9 - len(prompt) :] = prompt

        ours, theirs, lengths = find_prompts(packed, padded)

        found = packed.reshape(ours.rows, -1)[ours.row, ours.column]
        assert found.tolist() == padded[theirs.row, theirs.column].tolist()
        assert lengths == [len(prompt) for prompt in prompts]


def test_what_does_not_fit_is_said(policy, trained, sampled, tmp_path):
    other = {**prefill(), "input_ids": prefill()["input_ids"] + 1}
    alone = dump(tmp_path / "other", EngineModel(policy), **other)
    numbers = dump(tmp_path / "numbers", EngineModel(policy), task="statistics", **prefill())

    with pytest.raises(DumpError, match="none of the engine's 3 prompts stands in the trainer's batch of shape"):
        rl.align(trained, alone, output=tmp_path / "out")
    with pytest.raises(DumpError, match="task: tensor"):
        rl.align(trained, numbers, output=tmp_path / "out")
    with pytest.raises(ConfigError, match="names: found 'x', expected one of same, hf-vllm"):
        rl.align(trained, sampled, names="x", output=tmp_path / "out")
    with pytest.raises(ConfigError, match="lengths: found 3 tokens together, expected the engine's 15"):
        rl.align(trained, sampled, lengths=[3], output=tmp_path / "out")
