"""Two ranks replay steps of Megatron-Core trainings in several layouts; see `job`."""

import contextlib
import dataclasses
import functools

import torch
import torch.distributed as dist

from tests.frameworks.megatron import gpt
from tests.frameworks.megatron.gpt import Layout
from tests.frameworks.replay.job import INF, Case, Fault, Job, main
from trainermon.monitor.frameworks.megatron import naming


def build(layout, config_changes):
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    gpt.initialise(layout)
    get_moe_layer_wise_logging_tracker().clear()  # its sums outlive a training
    with changed(gpt, "transformer_config", functools.partial(changed_config, gpt.transformer_config, config_changes)):
        chunks, optimizer = gpt.build(layout)
    modules = {}
    for chunk in chunks:
        renaming = naming.renaming_of(chunk.module, gpt.parallel_state.get_expert_model_parallel_rank())
        modules |= {naming.global_name(path, renaming): module for path, module in chunk.module.named_modules()}

    def step(number):
        (done, norm, _), losses = gpt.train_step(layout, chunks, optimizer, number)
        gradients = [p.main_grad for chunk in chunks for p in chunk.parameters()]
        return [torch.tensor([float(done), float(norm), *losses], dtype=torch.float64), *gradients]

    def spoil(module):
        with torch.no_grad():
            module.weight.view(-1)[1] = INF

    def bits():
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        held = [tensor for chunk in chunks for tensor in (*chunk.module.parameters(), *chunk.module.buffers())]
        sums = [found["values"] for found in get_moe_layer_wise_logging_tracker().values()]
        return [*held, *get_cuda_rng_tracker().get_states().values(), *sums]

    return Job(
        model=chunks,
        optimizer=optimizer,
        modules=modules,
        spoil=spoil,
        step=step,
        bits=bits,
        options={"grad_acc_steps": gpt.MICRO_BATCHES},
    )


def changed_config(make, changes, layout):
    return dataclasses.replace(make(layout), **changes)


@contextlib.contextmanager
def changed(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def case(name, layout, fault, *, config_changes=None, **options):
    return Case(name=name, build=functools.partial(build, layout, config_changes or {}), fault=fault, **options)


MLP, ATTENTION = "decoder.layers.{}.mlp.linear_fc1", "decoder.layers.{}.self_attention.linear_qkv"
TP = functools.partial(Layout, tp=2, dropout=0.1)
PP = functools.partial(Layout, pp=2, dropout=0.1)
EP = Layout(ep=2, experts=4, dropout=0.1)
EXPERT = Fault(
    kind="transient", module="decoder.layers.0.mlp.experts.local_experts.2.linear_fc1", rank=1, phase="forward"
)
# losses that are added up for the log, and a bias that is moved between forward and optimizer
ROUTING = {
    "moe_aux_loss_coeff": 0.01,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}
CASES = [
    case("tp-weight", TP(), Fault(kind="weight", module=MLP.format(1), rank=1, phase="parameter")),
    case("tp-transient", TP(), Fault(kind="transient", module=ATTENTION.format(0), rank=1, phase="forward")),
    case(
        "sp-backward",
        TP(sp=True, distributed_optimizer=True),
        Fault(kind="backward", module=MLP.format(0), rank=0, phase="backward"),
    ),
    case(
        "tp-recompute",
        TP(),
        Fault(kind="transient", module=MLP.format(1), rank=1, phase="forward"),
        config_changes={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    case("tp-gradients", TP(sp=True), Fault(kind="none"), config={"monitor_mbs_grad": True}, forced=True),
    case("pp-ordered", PP(), Fault(kind="none"), dump="order"),
    case("pp-first", PP(), Fault(kind="transient", module=MLP.format(0), rank=0, phase="forward")),
    case("pp-last", PP(), Fault(kind="backward", module=ATTENTION.format(1), rank=1, phase="backward")),
    case(
        "vpp",
        PP(vpp=2, layers=4, dtype=torch.bfloat16),
        Fault(kind="transient", module=MLP.format(1), rank=1, phase="forward"),
    ),
    case("cp", Layout(cp=2, dropout=0.1), Fault(kind="transient", module=MLP.format(0), rank=1, phase="forward")),
    case(
        "dp",
        Layout(distributed_optimizer=True, overlap=True, overlap_gather=True, fused=True, dropout=0.1),
        Fault(kind="transient", module=MLP.format(1), rank=1, phase="forward"),
    ),
    case("ep", EP, EXPERT, config_changes=ROUTING),
    case(
        "ep-gradients", EP, Fault(kind="none"), config_changes=ROUTING, config={"monitor_mbs_grad": True}, forced=True
    ),
]

if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(CASES)
