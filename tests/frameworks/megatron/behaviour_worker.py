"""What must hold beside the numbers: training is left as it is, skipped steps and clipping are told, and refusals."""

import itertools
import os
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.frameworks.megatron import gpt
from tests.frameworks.megatron.gpt import Layout
from tests.frameworks.megatron.truth import Step, Watch, merge
from trainermon.core.errors import AttachError
from trainermon.core.values import Coordinates, Kind
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.frameworks import detect
from trainermon.monitor.frameworks.megatron import coordinates_of, describe
from trainermon.monitor.frameworks.megatron.groups import PARALLEL_STATE

BF16, FP16 = torch.bfloat16, torch.float16
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def built(layout):
    gpt.initialise(layout)
    chunks, optimizer = gpt.build(layout)
    return chunks, optimizer, describe(chunks, optimizer, Coordinates())


def test_attaching_leaves_losses_and_weights_bit_identical():
    for layout in (
        Layout(distributed_optimizer=True, overlap=True, overlap_gather=True, dtype=BF16, bucket=1000, clip=0.5),
        Layout(tp=2, sp=True, dropout=0.1, clip=0.5),
        Layout(pp=2, vpp=2, layers=4, dropout=0.1),
    ):
        assert train(layout, watched=True) == train(layout, watched=False), layout.name


def train(layout, *, watched):
    """Return the losses and weights of a few steps as bytes; watched, the monitor comes and goes."""
    torch.manual_seed(7)
    chunks, optimizer, training = built(layout)
    found = []
    for step in range(4):
        watch = Watch(training) if watched and step % 2 else None
        found.append(gpt.train_step(layout, chunks, optimizer, step))
        if watch is not None:
            assert watch.step.rows
            watch.detach()
            check_nothing_is_left(training)
    weights = [p.detach().view(torch.uint8).numpy().tobytes() for chunk in chunks for p in chunk.parameters()]
    return found, weights


def check_nothing_is_left(training):
    groups = [g for chunk in training.chunks for g in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    for thing in (training.optimizer, *groups):
        assert not any(isinstance(found, types.MethodType | types.FunctionType) for found in vars(thing).values())
    assert not any(getattr(p.tensor, name) for p in training.parameters for name in HOOKS)


def test_gradients_are_those_before_clipping():
    layout = Layout(distributed_optimizer=True, clip=0.1)
    chunks, optimizer, training = built(layout)
    watch = Watch(training)
    (_, norm, _), _ = gpt.train_step(layout, chunks, optimizer, 0)
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, [row[1:] for row in watch.step.rows if row[0] is Kind.GRAD_REDUCED])
    total = sum(moments.sum_sq for moments in merge(list(itertools.chain(*rows))).values()) ** 0.5
    assert norm > 1
    assert total == pytest.approx(norm, rel=1e-6)
    assert (watch.step.outcome.grad_norm, watch.step.outcome.max_norm) == (norm, 0.1)
    watch.detach()


def test_outside_of_what_a_rank_owns_nothing_is_reduced():
    """What a monitor gets that takes the whole buffer: this rank's own gradients, and a norm that is none."""
    check_rest_is_not_reduced(Layout(distributed_optimizer=True))
    check_rest_is_not_reduced(Layout(distributed_optimizer=True, dtype=BF16, overlap=True, bucket=900))


def check_rest_is_not_reduced(layout):
    chunks, optimizer, training = built(layout)
    watch = Watch(training)
    whole: list[torch.Tensor] = []
    patched = optimizer.step
    optimizer.step = lambda: whole.extend(p.tensor.main_grad.clone() for p in training.parameters) or patched()
    (_, norm, _), _ = gpt.train_step(layout, chunks, optimizer, 0)
    assert abs(sum(float(gradient.double().square().sum()) for gradient in whole) ** 0.5 / norm - 1) > 0.02
    for index, (parameter, gradient) in enumerate(zip(training.parameters, whole, strict=True)):
        start, end = parameter.owned.offset, parameter.owned.offset + parameter.owned.length
        own = watch.step.unreduced[index].view(-1) / 2  # Megatron applies the factor 1/dp before it reduces
        for part in (slice(None, start), slice(end, None)):
            assert torch.equal(gradient.view(-1)[part], own[part]), parameter.name
    optimizer.step = patched
    watch.detach()


def test_a_skipped_step_is_told_with_the_scale_that_it_had():
    layout = Layout(dtype=FP16, distributed_optimizer=True)
    chunks, optimizer, training = built(layout)
    watch = Watch(training, micro=False)
    first = float(optimizer.get_loss_scale())
    for number, (damage, skipped) in enumerate(((float("inf"), True), (float("inf"), True), (1e-6, False))):
        watch.step = step = Step()
        scale = float(optimizer.get_loss_scale())
        before = [value.clone() for value in training.values() if value is not None]
        gpt.train_step(layout, chunks, optimizer, number, damage=damage)
        after = [value for value in training.values() if value is not None]
        assert step.outcome.skipped is skipped
        assert step.decisions == [skipped]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) is skipped
        assert float(step.outcome.loss_scale) == scale
        assert (step.outcome.grad_norm is None) is skipped
    assert float(optimizer.get_loss_scale()) < first  # it fell in the second of these steps
    watch.detach()


def test_without_a_loss_scale_a_norm_that_is_not_finite_decides_before_anything_is_written():
    layout = Layout(dtype=BF16, distributed_optimizer=True)
    chunks, optimizer, training = built(layout)
    before = [value.clone() for value in training.values() if value is not None]
    seen: list[Any] = []

    def decide(nonfinite):
        seen.append((nonfinite, all(map(torch.equal, before, (v for v in training.values() if v is not None)))))

    handles = training.watch_decision(FaultGuard(seen.append), decide)
    gpt.train_step(layout, chunks, optimizer, 0, damage=float("nan") if dist.get_rank() == 0 else 1.0)
    assert seen == [(True, True)]  # on every rank, also those whose own gradients are finite
    for handle in handles:
        handle.remove()


def test_a_single_optimizer_decides_by_what_it_computes():
    for layout, expected in (
        (Layout(clip=1.0), [False]),
        (Layout(clip=0.0), []),
        (Layout(clip=0.0, dtype=FP16, loss_scale=8.0), [False]),
        (Layout(clip=1.0, dtype=FP16, loss_scale=8.0), [False]),
    ):
        gpt.initialise(layout)
        chunks, chain = gpt.build(layout)
        optimizer = chain.chained_optimizers[0]
        training = describe(chunks, optimizer, Coordinates())
        watch = Watch(training)
        (_, norm, _), _ = gpt.train_step(layout, chunks, optimizer, 0)
        assert watch.step.decisions == expected, layout.name
        assert watch.step.outcome.grad_norm == (norm if layout.clip else None)
        watch.detach()


def test_other_optimizers_in_a_chain_show_their_own_state():
    layout = Layout(tied=False)
    gpt.initialise(layout)
    chunks, chain = gpt.build(layout)
    adam = chain.chained_optimizers[0]
    matrices = [p for n, p in chunks[0].named_parameters() if p.dim() == 2 and "decoder" in n]
    for group in adam.param_groups:
        group["params"] = [p for p in group["params"] if not any(p is matrix for matrix in matrices)]
    muon = gpt.FP32Optimizer(torch.optim.Muon(matrices, lr=0.01), adam.config, lambda *_: None)
    optimizer = gpt.ChainedOptimizer([muon, adam])
    training = describe(chunks, optimizer, Coordinates())
    assert all(state is None for state in training.states())
    gpt.train_step(layout, chunks, optimizer, 0)
    for parameter, state in zip(training.parameters, training.states(), strict=True):
        is_matrix = any(parameter.tensor is matrix for matrix in matrices)
        assert set(state.state) == ({"momentum_buffer"} if is_matrix else {"exp_avg", "exp_avg_sq", "step"})
        assert state.group["lr"] == 0.01
    assert training.learning_rates() == [0.01] * len(optimizer.param_groups)


def test_gradients_of_single_backwards_are_refused_where_the_gemm_adds_them_up():
    _, _, training = built(Layout(fused=True))
    with pytest.raises(AttachError, match="gradient_accumulation_fusion"):
        training.watch_micro_gradients(FaultGuard(print), lambda index, gradient: None)


def test_the_loss_of_each_token_is_found_on_the_last_stage():
    for layout in (Layout(), Layout(dtype=BF16), Layout(pp=2)):
        chunks, optimizer, training = built(layout)
        outputs = []
        handle = training.roots[-1].register_forward_hook(
            lambda module, inputs, output, into=outputs: into.append(output)
        )
        _, losses = gpt.train_step(layout, chunks, optimizer, 0)
        handle.remove()
        found = [training.loss_of(output) for output in outputs]
        if losses:
            assert [float(f.mean()) for f in found] == pytest.approx(losses, rel=1e-5)
        else:
            assert found == [None, None]


def test_names_of_modules_are_global():
    layout = Layout(pp=2, vpp=2, layers=4)
    _, _, training = built(layout)
    first = 0 if gpt.parallel_state.get_pipeline_model_parallel_rank() == 0 else 1
    for stage in (0, 1):
        names = {module.name for module in training.modules if module.stage == stage}
        assert f"decoder.layers.{first + 2 * stage}.self_attention.linear_qkv" in names
    layout = Layout(ep=2, experts=4)
    _, _, training = built(layout)
    names = {module.name for module in training.modules}
    first = 2 * gpt.parallel_state.get_expert_model_parallel_rank()
    assert f"decoder.layers.0.mlp.experts.local_experts.{first + 1}.linear_fc1" in names
    assert f"decoder.layers.0.mlp.experts.local_experts.{(first + 2) % 4}" not in names


def test_coordinates_are_megatrons():
    rank = dist.get_rank()
    for layout, expected in (
        (Layout(tp=2), {"tp": rank, "tp_size": 2}),
        (Layout(pp=2), {"pp": rank, "pp_size": 2}),
        (Layout(cp=2), {"cp": rank, "cp_size": 2}),
        (Layout(ep=2, experts=4), {"dp": rank, "dp_size": 2, "ep": rank, "ep_size": 2}),
    ):
        gpt.initialise(layout)
        assert coordinates_of(Coordinates(rank=rank, world_size=2)) == Coordinates(rank=rank, world_size=2, **expected)
    gpt.parallel_state.destroy_model_parallel()
    assert coordinates_of(Coordinates(rank=rank)) == Coordinates(rank=rank)
    assert PARALLEL_STATE in sys.modules


def test_axes_of_the_forward():
    for layout, expected in (
        (Layout(), ()),
        (Layout(tp=2), ("tp",)),
        (Layout(ep=2, experts=4), ("ep",)),
        (Layout(distributed_optimizer=True, overlap=True, overlap_gather=True), ()),
    ):
        assert built(layout)[2].communicates == expected


def test_what_is_not_recognised_is_refused():
    chunks, optimizer, _ = built(Layout())
    assert detect(chunks, optimizer, Coordinates()).framework == "megatron"
    for model, steps, message in (
        ([chunks[0].module], optimizer, "expected megatron.core.distributed.DistributedDataParallel"),
        (chunks, torch.optim.SGD(chunks[0].parameters(), lr=0.1), "expected the one that get_megatron_optimizer"),
    ):
        with pytest.raises(AttachError, match=message):
            detect(model, steps, Coordinates())
    for wrapper in gpt.other_wrappers():
        sharded = wrapper.__new__(wrapper)
        torch.nn.Module.__init__(sharded)
        with pytest.raises(AttachError, match=f"found a model of megatron.*{wrapper.__name__}, .*not supported"):
            detect([sharded], optimizer, Coordinates())
    group = optimizer.chained_optimizers[0].optimizer.param_groups[0]
    group["params"] = group["params"][1:]
    with pytest.raises(AttachError, match=r"does not step .*weight, which requires a gradient"):
        describe(chunks, optimizer, Coordinates())


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print("megatron-core", gpt.version, flush=True)
    tests = {name: test for name, test in globals().items() if name.startswith("test_")}
    for name in sys.argv[1:] or tests:
        tests[name]()
        if dist.get_rank() == 0:
            print(name, flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
