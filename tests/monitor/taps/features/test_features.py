"""Features taken from modules of torch, transformers, DeepSpeed and Megatron, against what these modules compute."""

import enum
import logging
import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.journal_rows import RankJournal, only_spool
from tests.monitor.taps.rows import Rows
from tests.ranks import run_ranks
from trainermon import TrainerMon
from trainermon.core.config import load_config
from trainermon.core.errors import ConfigError
from trainermon.core.values import Coordinates, Kind
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.frameworks import plain
from trainermon.monitor.taps.features import FeatureTaps, check
from trainermon.monitor.taps.micro_steps import in_backward
from trainermon.monitor.taps.optimizer import StateTaps
from trainermon.monitor.taps.step_values import StepValues
from trainermon.monitor.taps.training import StepOutcome, WatchedModule


class Steps:
    """Says that a training forward runs unless told otherwise or in a backward, as the real one does."""

    is_training = True

    @property
    def counting(self):
        return self.is_training and not in_backward()


class Watched:
    """A model whose features are taken; `faults` are the messages of a guard that tripped."""

    def __init__(self, model, order="s,b,h,d", **targets):
        self.modules = [WatchedModule(name, module) for name, module in model.named_modules() if name]
        self.config, _ = load_config({"recording_l2_features": True, "sa_order": order, "l2_targets": targets})
        self.rows, self.faults = Rows(), []
        steps: Any = Steps()
        self.steps = steps
        self.guard = FaultGuard(self._let_go)
        self.taps = FeatureTaps(self.modules, self.rows.collector, self.steps, self.guard, self.config)
        self.taps.attach()

    def _let_go(self, message):
        self.faults.append(message)
        self.taps.detach()

    def end_step(self, step=0):
        self.taps.at_exit()
        self.taps.new_step()
        self.rows.collector.seal()
        self.rows.collector.begin(step + 1)
        return self.rows.of(step, Kind.FEATURE)


class Heads(nn.Module):
    """Attention by torch, with fewer key heads than query heads."""

    def __init__(self, *, causal=True):
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(16, 16 + 8 + 8), nn.Linear(16, 16), causal

    def split(self, x):
        q, k, v = self.qkv(x).split([16, 8, 8], -1)
        return [t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v)]

    def forward(self, x, mask=None):
        q, k, v = self.split(x)
        y = scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, scale=0.3, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def probabilities(self, x, mask=None):
        q, k, _ = self.split(x.to(self.qkv.weight.dtype))
        logits = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) * 0.3
        if self.causal:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -math.inf)
        logits = logits if mask is None else logits.masked_fill(~mask, -math.inf)
        return logits, logits.softmax(-1)


def batch(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"heads": Heads()})


def assert_rows_of(found, logits, probabilities, name="heads"):
    entropy = torch.special.entr(probabilities).sum(-1)
    for statistic in ("mean", "min", "max"):
        expected = getattr(entropy, statistic)().item()
        assert getattr(found[f"{name}.attention_entropy"], statistic) == pytest.approx(expected, abs=1e-6)
    expected = probabilities.amax(-1).mean().item()
    assert found[f"{name}.attention_max_probability"].mean == pytest.approx(expected, abs=1e-6)
    assert found[f"{name}.attention_max_logit"].max == pytest.approx(logits.max().item(), abs=1e-6)
    assert found[f"{name}.attention_entropy"].count == entropy.numel()


def test_attention_by_torch_is_seen_with_its_scale_its_mask_and_its_groups(model):
    watched = Watched(model, attention_hook=["heads"])
    x = batch(2, 7, 16)

    model["heads"](x)
    first = watched.end_step()
    model["heads"].causal, mask = False, batch(2, 1, 7, 7) > -1
    mask |= torch.eye(7, dtype=torch.bool)
    model["heads"](x, mask)
    second = watched.end_step(1)

    assert_rows_of(second, *model["heads"].probabilities(x, mask))
    model["heads"].causal = True
    assert_rows_of(first, *model["heads"].probabilities(x))


def test_under_autocast_features_are_computed_in_float32(model):
    watched = Watched(model, attention_hook=["heads"], linear_hook=["heads.out"])
    x = batch(2, 7, 16)

    with torch.autocast("cpu", torch.bfloat16):
        model["heads"](x)
        expected = model["heads"].probabilities(x)
    found = watched.end_step()

    assert_rows_of(found, *expected)
    sigma = torch.linalg.svdvals(model["heads"].out.weight.double())[0].item()
    assert found["heads.out.spectral_norm"].sum == pytest.approx(sigma, rel=0.05)


def test_only_the_first_training_forward_of_a_step_is_looked_at(model):
    watched = Watched(model, attention_hook=["heads"])
    first = batch(2, 7, 16)

    watched.steps.is_training = False
    model["heads"](batch(2, 7, 16, seed=3))
    watched.steps.is_training = True
    for x in (first, batch(2, 7, 16, seed=1)):
        checkpoint(model["heads"], x, use_reentrant=False).sum().backward()

    assert_rows_of(watched.end_step(), *model["heads"].probabilities(first))
    assert not watched.end_step(1)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_training_is_bit_identical_and_nothing_stays_behind(model, reentrant):
    def train(x, taps=None):
        x = x.clone().requires_grad_()
        y = model["heads"](x) if reentrant is None else checkpoint(model["heads"], x, use_reentrant=reentrant)
        y.square().sum().backward()
        found = [x.grad, *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
        return found

    x = batch(2, 7, 16)
    state = torch.get_rng_state()
    bare = train(x)
    watched = Watched(model, attention_hook=["heads"], linear_hook=[])
    seen = train(x)
    watched.taps.detach()

    assert len(watched.end_step()) == 3 + 2 * 2
    assert all(torch.equal(a, b) for a, b in zip(bare, seen, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not _get_current_function_mode_stack()


def test_a_forward_that_fails_leaves_no_function_mode(model):
    watched = Watched(model, attention_hook=["heads"])

    with pytest.raises(RuntimeError):
        model["heads"](batch(2, 7, 15))

    assert not _get_current_function_mode_stack()
    assert not watched.faults


def test_letting_go_in_the_middle_of_a_forward_leaves_no_function_mode(model):
    watched = Watched(model, attention_hook=["heads"])
    model["heads"].out.register_forward_hook(lambda *_: watched.guard.trip(ValueError("a fault elsewhere")))

    model["heads"](batch(2, 7, 16))

    assert watched.faults
    assert not _get_current_function_mode_stack()


def test_what_is_no_attention_is_said_once_and_left_out(model, caplog):
    watched = Watched(model, attention_hook=["heads.out"])

    with caplog.at_level(logging.WARNING, "trainermon"):
        for step in range(2):
            model["heads"](batch(2, 7, 16))
            assert not watched.end_step(step)

    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("AttentionFeature of heads.out is not taken: it was not called with query and key")


def test_a_llama_layer_of_transformers_is_seen():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 31, (2, 9))
    watched = Watched(model, attention_hook=["*.self_attn"])

    model.set_attn_implementation("sdpa")
    model(tokens)
    found = watched.end_step()
    watched.taps.detach()
    model.set_attn_implementation("eager")
    probabilities = model(tokens, output_attentions=True).attentions[0].double()

    row = found["model.layers.0.self_attn.attention_entropy"]
    assert row.mean == pytest.approx(torch.special.entr(probabilities).sum(-1).mean().item(), abs=1e-6)


def test_a_router_of_transformers_is_seen():
    from transformers.models.mixtral import modeling_mixtral as modeling

    config = types.SimpleNamespace(num_experts_per_tok=2, num_local_experts=6, hidden_size=16)
    model: Any = nn.ModuleDict({"gate": modeling.MixtralTopKRouter(config)})
    nn.init.normal_(model["gate"].weight, generator=torch.Generator().manual_seed(0))
    watched = Watched(model, moe_router_logit_hook=["gate"], moe_router_weight_hook=["gate"])
    inputs = [batch(20, 16, seed=seed) for seed in range(3)]

    counts = sum(torch.bincount(model["gate"](x)[2].flatten(), minlength=6) for x in inputs)
    found = watched.end_step()

    share = counts.double() / 120
    assert found["gate.expert_load"].count == 6
    assert found["gate.expert_load"].max == pytest.approx(share.max().item())
    assert found["gate.expert_load_variation"].sum == pytest.approx((share.std(correction=0) * 6).item())
    order = share.argsort(descending=True).tolist()
    for place in range(3):
        assert found[f"gate.expert_load.top{place}"].sum == pytest.approx(share[order[place]].item())
        assert found[f"gate.expert_load.bottom{place}"].sum == pytest.approx(share[order[-1 - place]].item())
        assert share[int(found[f"gate.expert_load.top{place}.expert"].sum)] == share[order[place]]
    logits = linear(inputs[0], model["gate"].weight).double()
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert found["gate.router_token_entropy"].mean == pytest.approx(expected.mean().item(), abs=1e-6)
    assert found["gate.router_weight_similarity"].count == 6 * 5


def test_the_load_starts_anew_with_each_step():
    class Router(nn.Module):
        num_experts = 4

        def forward(self, chosen):
            return batch(3, 4), chosen

    model = nn.ModuleDict({"r": Router()})
    watched = Watched(model)

    model["r"](torch.tensor([[0, 1], [0, 1], [0, 1]]))
    first = watched.end_step()["r.expert_load"]
    model["r"](torch.tensor([[3], [3], [3]]))
    second = watched.end_step(1)

    assert (first.max, first.zeros) == (0.5, 2)
    assert (second["r.expert_load"].max, second["r.expert_load.top0.expert"].sum) == (1.0, 3)
    assert not watched.end_step(2)


def test_a_gate_of_deepspeed_is_seen(monkeypatch):
    from deepspeed.moe import sharded_moe

    gate = sharded_moe.TopKGate(16, 4, k=1, drop_tokens=True, use_rts=False)
    model = nn.ModuleDict({"gate": gate})
    watched = Watched(model, moe_router_logit_hook=["gate.wg"], moe_router_weight_hook=["gate"])
    x = batch(40, 16)

    counts = gate(x)[-1]
    found = watched.end_step()

    assert torch.equal(counts.cpu(), torch.bincount(linear(x, gate.wg.weight).argmax(-1), minlength=4))
    assert found["gate.expert_load"].max == pytest.approx(counts.max().item() / 40)
    assert found["gate.router_weight_similarity"].count == 4 * 3


def test_spectral_norm_and_stable_rank_are_taken_once_per_step_and_converge():
    model = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 8))
    layer: Any
    for layer in model:
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    watched = Watched(model, linear_hook=[])

    for step in range(20):
        for _ in range(2):
            model(batch(3, 24))
        found = watched.end_step(step)

    assert len(found) == 4
    for name, layer in model.named_children():
        values = torch.linalg.svdvals(layer.weight.detach().double())
        assert found[f"{name}.spectral_norm"].sum == pytest.approx(values[0].item(), rel=2e-3)
        expected = (values.square().sum() / values[0].square()).item()
        assert found[f"{name}.stable_rank"].sum == pytest.approx(expected, rel=4e-3)


class Format(enum.Enum):
    HYBRID = "hybrid"
    E5M2 = "e5m2"


class Quantizing(nn.Module):
    """The attributes of a module of Transformer Engine with delayed scaling, which cannot be imported here."""

    def __init__(self, fp8_format):
        super().__init__()
        forward = types.SimpleNamespace(scale=torch.tensor([2.0, 8.0, 1.0]), amax_history=batch(5, 3).abs())
        backward = types.SimpleNamespace(scale=torch.tensor([4.0, 1.0]), amax_history=batch(5, 2).abs())
        recipe = types.SimpleNamespace(fp8_format=fp8_format)
        self.fp8_meta = {"scaling_fwd": forward, "scaling_bwd": backward, "recipe": recipe}

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("fp8_format", "dtype"), [(Format.HYBRID, torch.float8_e4m3fn), (Format.E5M2, torch.float8_e5m2)]
)
def test_scales_amaxes_and_underflows_of_fp8_are_taken(fp8_format, dtype):
    model: Any = nn.ModuleDict({"fc": Quantizing(fp8_format), "new": Quantizing(fp8_format)})
    model["new"].fp8_meta = {}  # as before its first forward in FP8
    watched = Watched(model)
    x = batch(50, 20) * torch.logspace(-7, 1, 20)
    x[0] = 0

    model["fc"](x)
    model["new"](x)
    found = watched.end_step()

    becomes_zero = (x != 0) & ((x * 2).to(dtype).float() == 0)
    assert 0.0 < becomes_zero.float().mean() < 1.0
    assert found["fc.fp8_underflow"].mean == pytest.approx(becomes_zero.double().mean().item())
    assert (found["fc.fp8_scale.forward"].max, found["fc.fp8_scale.backward"].count) == (8.0, 2)
    expected = model["fc"].fp8_meta["scaling_fwd"].amax_history.max().item()
    assert found["fc.fp8_amax.forward"].max == pytest.approx(expected)
    assert not [name for name in found if name.startswith("new")]


def test_attention_cores_and_routers_of_megatron_are_seen():
    run_ranks(Path(__file__).with_name("megatron_worker.py"), world_size=1)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"attention_hook": ["head"]}, "l2_targets.attention_hook: 'head' names no module; did you mean 'heads'"),
        ({"linear_hook": ["heads"]}, "'heads' names 'heads', which has no weight of two dimensions"),
    ],
)
def test_a_target_that_does_not_exist_is_refused(model, targets, message):
    watched = Watched(model, **targets)

    with pytest.raises(ConfigError, match=message):
        check(watched.modules, watched.config)


def test_targets_that_exist_are_accepted(model):
    watched = Watched(model, attention_hook=["heads"], linear_hook=["*.out"], moe_router_logit_hook=["heads.out"])

    check(watched.modules, watched.config)


def test_features_and_step_values_reach_the_journal_and_leave_training_alone(places):
    def train(monitor=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), Heads(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if monitor:
            monitor.set_monitor(model, optimizer)
        losses = []
        for step in range(3):
            loss = model(batch(2, 7, 16, seed=step)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    config = {"recording_l2_features": True, "l2_targets": {"attention_hook": ["1"], "linear_hook": []}}
    bare = train()
    with TrainerMon({**config, "mv_distribution": True, "mg_direction": True, "agent": {"start": False}}) as monitor:
        watched = train(monitor)

    assert watched == bare
    journal = RankJournal(only_spool(places[0]))
    assert set(journal.of(2, Kind.FEATURE)) == {
        *(f"1.attention_{name}" for name in ("entropy", "max_probability", "max_logit")),
        *(f"{name}.{slot}" for name in ("0", "1.qkv", "1.out", "2") for slot in ("spectral_norm", "stable_rank")),
    }
    assert "0.weight.momentum_buffer" in journal.of(2, Kind.STATE)
    assert "0.weight" in journal.of(2, Kind.MG_DIRECTION)
    values = journal.of(2, Kind.STEP)
    assert 0.0 < values["clip_ratio"].sum < 1.0
    assert values["learning_rate.0"].sum == 0.1


class NoWaiting(TorchDispatchMode):
    """Fails on what would wait for an accelerator: the value of a tensor, or a shape that depends on values."""

    WAITING = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"})

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name() not in self.WAITING
        return func(*args, **(kwargs or {}))


def test_nothing_that_is_taken_of_a_step_asks_for_a_value_on_the_host(model):
    from transformers.models.mixtral import modeling_mixtral as modeling

    config = types.SimpleNamespace(num_experts_per_tok=2, num_local_experts=6, hidden_size=16)
    model["gate"], model["fc"] = modeling.MixtralTopKRouter(config), Quantizing(Format.HYBRID)
    watched = Watched(model, attention_hook=["heads"], linear_hook=[], moe_router_logit_hook=["gate"])
    training = plain.describe([model], torch.optim.AdamW(model.parameters(), fused=True), Coordinates())
    collector = watched.rows.collector
    states, values = StateTaps(training, range(len(training.parameters)), collector), StepValues(training, collector)

    for step in range(2):
        collector.take((0,), (torch.ones(1),))  # opens the slab
        with NoWaiting():
            y = model["fc"](model["heads"](batch(2, 7, 16)))
            (y.square().mean() + model["gate"](y.flatten(0, 1))[0].mean()).backward()
            values.at_backward_end(training.reduced_gradients())
            values.at_entry(is_scaled=False)
            states.take_direction()
        training.optimizer.step()
        with NoWaiting():
            states.take_states()
            states.take_updates()
            values.at_exit(StepOutcome(grad_norm=torch.tensor(2.0), max_norm=1.0, loss_scale=torch.tensor(8.0)))
            watched.taps.at_exit()
        found = watched.end_step(step)

    assert {"heads.attention_entropy", "gate.expert_load", "fc.fp8_underflow", "gate.spectral_norm"} <= set(found)
    assert not watched.faults
    kinds = {key.kind for key in watched.rows.rows[1]}
    assert kinds >= {Kind.EXP_AVG, Kind.UPDATE, Kind.RATIO, Kind.MG_DIRECTION, Kind.STEP}
