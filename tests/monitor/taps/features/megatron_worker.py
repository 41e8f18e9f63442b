"""One rank with Megatron-Core's own attention core and router, on a CPU; asserts, and leaves with status 0."""

import os
import sys
import types
import warnings
from typing import Any

import torch
import torch.distributed as dist

from tests.monitor.taps.rows import Rows
from trainermon.core.config import load_config
from trainermon.core.values import Kind
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.taps.features import FeatureTaps
from trainermon.monitor.taps.training import WatchedModule

warnings.filterwarnings("ignore")
# what Megatron asks of CUDA even where its tensors are on a CPU
cuda: Any = torch.cuda
cuda.current_device = lambda: torch.device("cpu")
cuda.get_device_capability = lambda *_: (8, 0)
cuda.get_rng_state = lambda *_: torch.get_rng_state()
cuda.manual_seed = torch.manual_seed

import megatron.core.tensor_parallel.random as random_state  # noqa: E402  # after the replacement above
from megatron.core import parallel_state  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402

if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 looks for it, but names it only where Transformer Engine is
    moe_utils.te_general_gemm = None

SEQUENCE, BATCH, HEADS, GROUPS, DEPTH = 16, 2, 4, 2, 16
TOKENS, HIDDEN, EXPERTS, TOP = 24, HEADS * DEPTH, 8, 2


def config(**options):
    return TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        **options,
    )


def taps(rows, modules, **targets):
    wanted, _ = load_config({"recording_l2_features": True, "l2_targets": targets})
    steps: Any = types.SimpleNamespace(counting=True)
    return FeatureTaps(
        [WatchedModule(*item) for item in modules.items()], rows.collector, steps, FaultGuard(sys.exit), wanted
    )


def check_attention(*, scaled_by_layer):
    core = DotProductAttention(
        config(apply_query_key_layer_scaling=scaled_by_layer, attention_softmax_in_fp32=True),
        layer_number=2,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
    )
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(SEQUENCE, BATCH, HEADS, DEPTH, generator=generator)
    key = torch.randn(SEQUENCE, BATCH, GROUPS, DEPTH, generator=generator)
    value = torch.eye(SEQUENCE)[:, None, None].expand(SEQUENCE, BATCH, GROUPS, SEQUENCE).contiguous()
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    core.hidden_size_per_partition = HEADS * SEQUENCE  # values as long as the sequence
    rows = Rows()
    features = taps(rows, {"core": core}, attention_hook=["core"])
    features.attach()

    context = core(query, key, value, mask)
    rows.collector.seal()
    features.detach()

    # with unit vectors for values, what attention returns are its probabilities
    probabilities = context.view(SEQUENCE, BATCH, HEADS, SEQUENCE).double()
    found = rows.of(0, Kind.FEATURE)
    entropy = torch.special.entr(probabilities).sum(-1)
    close(found["core.attention_entropy"].mean, entropy.mean())
    close(found["core.attention_entropy"].max, entropy.max())
    close(found["core.attention_max_probability"].mean, probabilities.amax(-1).mean())
    logits = torch.einsum("sbhd,tbhd->bhst", query.double(), key.double().repeat_interleave(2, 2)) * DEPTH**-0.5
    close(found["core.attention_max_logit"].max, logits.masked_fill(mask, -torch.inf).max())
    assert found["core.attention_entropy"].count == SEQUENCE * BATCH * HEADS


def check_router():
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp", "tp_cp", "tp_dp_cp"])
    router = TopKRouter(config(), pg_collection=groups)
    rows = Rows()
    features = taps(rows, {"router": router}, moe_router_logit_hook=["router"], moe_router_weight_hook=["router"])
    own = vars(router).get("gating")
    features.attach()
    counts, logits = torch.zeros(EXPERTS), []
    for micro_step in range(3):
        x = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(micro_step))
        _, routing_map = router(x)
        counts += routing_map.sum(0)
        logits.append(torch.nn.functional.linear(x, router.weight))
    features.at_exit()
    rows.collector.seal()
    features.detach()

    assert vars(router).get("gating") is own is None
    assert not router._forward_hooks
    assert not router._forward_pre_hooks
    assert counts.sum() == 3 * TOKENS * TOP
    compare_routing(rows.of(0, Kind.FEATURE), counts.double() / counts.sum(), logits[0].double(), router.weight)


def compare_routing(found, share, logits, weight):
    close(found["router.expert_load"].max, share.max())
    close(found["router.expert_load"].min, share.min())
    close(found["router.expert_load_variation"].sum, share.std(correction=0) / share.mean())
    close(found["router.expert_load.top0"].sum, share.max())
    assert share[int(found["router.expert_load.bottom0.expert"].sum)] == share.min()
    first = torch.distributions.Categorical(logits=logits).entropy()
    close(found["router.router_token_entropy"].mean, first.mean())
    assert found["router.router_token_entropy"].count == TOKENS
    unit = torch.nn.functional.normalize(weight.double())
    off = (unit @ unit.t())[~torch.eye(EXPERTS, dtype=torch.bool)]
    close(found["router.router_weight_similarity"].mean, off.mean())


def close(found, expected):
    assert abs(found - float(expected)) <= 2e-6 * max(1.0, abs(float(expected))), (found, float(expected))


def main():
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    random_state._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random_state._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random_state.model_parallel_cuda_manual_seed(123)
    check_attention(scaled_by_layer=False)
    check_attention(scaled_by_layer=True)
    check_router()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
