"""Silent errors of FSDP2: what is sharded, over which ranks, and who updates it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.silent import tasks
from benchmarks.silent.case import Mechanism, silent
from benchmarks.silent.ddp_ranks import INPUT, SAME_DATA
from benchmarks.silent.ddp_wrapper import AFTER_BACKWARD, COPIES, UNREDUCED
from benchmarks.silent.loop import Loop, rank_of_job
from benchmarks.silent.models import MixerNet, TinyLstm, TinyMlp, TinyTransformer
from benchmarks.silent.plain_optimizer import MOVES, adam, classifier, language

STALE = ("stale", "old weights", "not the weights", "forward uses", "does not see", *MOVES)


def sharded(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """Shard the blocks of a transformer each, and then the whole model."""
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def local(tensor: Any) -> Tensor:
    """Return this rank's part."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def _replicas() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@silent(
    "fsdp2",
    "accelerate 2665, 3209, pytorch 149205, dlrover 584 (TrainCheck): an optimizer made before sharding",
    "the optimizer holds the parameters from before sharding, which nobody uses any more",
    Mechanism.STILL,
    phrases=(*MOVES, "not hold", "not in the optimizer", "optimizer's parameters", "not the model's"),
    phases=("optimizer",),
    visible=True,  # parameters with gradients never move
    ranks=2,
)
def optimizer_of_unsharded(*, broken: bool) -> Loop:
    model = TinyTransformer()
    optimizer = adam(model)
    sharded(model)
    return language(model, optimizer if broken else adam(model))


@silent(
    "fsdp2",
    "pytorch 137348: an unshard that is not waited for makes the next one do nothing",
    "parameters are not sharded again after a backward, so forwards go on with the old weights",
    Mechanism.STILL,
    phrases=STALE,
    first_wrong=10,
    phases=("parameter", "forward", "optimizer"),
    visible=True,  # what modules return is what the weights of step 10 return, though the optimizer moves the shards
    ranks=2,
)
def stays_unsharded(*, broken: bool) -> Loop:
    model: Any = sharded(TinyTransformer())
    loop = language(model)

    def before(step: int) -> None:
        if broken and step == 10:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_reshard_after_forward(reshard_after_forward=False)
                    module.set_reshard_after_backward(reshard_after_backward=False)

    loop.before = before
    return loop


@silent(
    "fsdp2",
    "torch fully_shard: set_requires_gradient_sync(False) is not taken back",
    "gradients are no longer reduced after an accumulation, so the optimizer has none",
    Mechanism.STILL,
    phrases=(*MOVES, "not reduced", "no gradient", "without gradient", "gradient_sync", "reduction"),
    first_wrong=10,
    phases=AFTER_BACKWARD,
    visible=True,  # every parameter stands still from this step on, and none has a gradient
    ranks=2,
)
def sync_left_off(*, broken: bool) -> Loop:
    model: Any = sharded(TinyMlp())
    loop = classifier(model, adam(model))

    def before(step: int) -> None:
        if broken and step == 10:
            model.set_requires_gradient_sync(requires_gradient_sync=False)

    loop.before = before
    return loop


@silent(
    "fsdp2",
    "pytorch forum: `if rank == 0: optimizer.step()`, taken over from DDP with rank-zero-only code",
    "only rank 0 updates its shards",
    Mechanism.STILL,
    phrases=(*MOVES, "rank 1", "one rank", "shard"),
    phases=("optimizer",),
    visible=True,  # the shards of rank 1 have gradients and never move
    ranks=2,
)
def stepped_on_one_rank(*, broken: bool) -> Loop:
    model: Any = sharded(MixerNet())
    loop = classifier(model, adam(model))

    def update(_step: int) -> None:
        if not broken or rank_of_job() == 0:
            loop.optimizer.step()

    loop.update = update
    return loop


@silent(
    "fsdp2",
    "pytorch 176076: FSDP2 does not update the last rank's part of an uneven tied weight",
    "the last rank's part of the tied embedding has no gradient, and is not updated",
    Mechanism.STILL,
    phrases=(*MOVES, "no gradient", "without gradient", "shard", "rank 2", "one rank"),
    modules=("embed", "head"),
    phases=("optimizer", "before_step", "reduction"),
    visible=True,  # a third of the rows stands still, though their tokens occur
    ranks=3,
)
def last_part_not_updated(*, broken: bool) -> Loop:
    model: Any = sharded(TinyTransformer(tied=True))
    loop = language(model, adam(model))

    def between(_step: int) -> None:
        if broken and rank_of_job() == dist.get_world_size() - 1:
            model.embed.weight.grad = None

    loop.between = between
    return loop


@silent(
    "fsdp2",
    "torch fully_shard(ignored_params=…), AReaL 313: replicated parameters are not reduced",
    "the norms are left out of sharding, and nobody reduces their gradients",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    modules=("ln_1", "ln_2", "ln_f"),
    phases=AFTER_BACKWARD,
    visible=True,  # these weights' copies differ
    ranks=2,
)
def ignored_not_reduced(*, broken: bool) -> Loop:
    model = TinyTransformer()
    ignored = {p for name, p in model.named_parameters() if "ln_" in name}
    sharded(model, ignored_params=ignored)
    loop = language(model)

    @torch.no_grad()
    def between(_step: int) -> None:
        for parameter in () if broken else ignored:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    loop.between = between
    return loop


@silent(
    "fsdp2",
    "torchtitan HSDP: the mesh of one replica instead of both dimensions",
    "of four ranks pairs shard the model, and nothing reduces between the pairs",
    Mechanism.UNREDUCED,
    phrases=(*UNREDUCED, "part of the ranks", "mesh", "placement"),
    phases=AFTER_BACKWARD,
    visible=True,  # the shards of ranks 0 and 2 are copies, and differ
    ranks=4,
)
def mesh_of_one_replica(*, broken: bool) -> Loop:
    mesh = _replicas()
    model: Any = sharded(TinyMlp(), mesh["shard"] if broken else mesh)
    return classifier(model, adam(model))


@silent(
    "fsdp2",
    "OLMo-core PR 319: replicas are initialised with different seeds",
    "each replica of HSDP starts from weights of its own; gradients are reduced properly",
    Mechanism.START,
    phrases=(*COPIES, "initial", "start"),
    phases=("parameter", "forward"),
    visible=True,  # shards that are copies of each other differ from the first step on
    ranks=4,
)
def replicas_start_apart(*, broken: bool) -> Loop:
    mesh = _replicas()
    model: Any = sharded(TinyTransformer(), mesh)
    with torch.no_grad():
        place = mesh.get_coordinate() or (0, 0)
        generator = torch.Generator().manual_seed(place[1] + (2 * place[0] if broken else 0))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                local(parameter).normal_(0, 0.1, generator=generator)
    return language(model)


@silent(
    "fsdp2",
    "lingua 58, VeOmni PR 853: a data rank computed from the wrong dimension of the mesh",
    "both replicas of HSDP read the same batches",
    Mechanism.DATA,
    phrases=("replica", "shard", "sampler", *SAME_DATA),
    modules=INPUT,
    phases=("forward",),
    visible=True,  # losses and inputs of two ranks are equal, pair by pair
    ranks=4,
)
def replicas_read_the_same(*, broken: bool) -> Loop:
    mesh = _replicas()
    loop = language(sharded(TinyLstm(), mesh))
    mine = mesh.get_local_rank("shard") if broken else rank_of_job()
    loop.batch = lambda step, micro: tasks.words(step, micro, mine)
    return loop


@silent(
    "fsdp2",
    "torchtitan 3106, pytorch 196562, FLA PR 753: every rank draws its shard from the same random numbers",
    "both shards of each weight are initialised alike",
    Mechanism.START,
    phrases=("initial", "same values", "equal shards", "identical", "shards are equal", "alike"),
    phases=("parameter", "forward"),
    visible=True,  # the halves of each weight are equal at the beginning
    ranks=2,
)
def equal_shards(*, broken: bool) -> Loop:
    model: Any = sharded(MixerNet())
    generator = torch.Generator().manual_seed(0 if broken else rank_of_job())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                local(parameter).uniform_(-0.25, 0.25, generator=generator)
    return classifier(model, adam(model))


def kept_locally(loop: Loop) -> Callable[[], dict[str, Any]]:
    """Return what saves this rank's parts of weights and moments, by name."""

    def save() -> dict[str, Any]:
        named = dict(loop.model.named_parameters())
        states = {name: loop.optimizer.state[parameter] for name, parameter in named.items()}
        return {
            "model": {name: local(parameter).clone() for name, parameter in named.items()},
            "states": {n: {key: local(value).clone() for key, value in s.items()} for n, s in states.items()},
        }

    return save


@torch.no_grad()
def put_back(loop: Loop, model: dict[str, Tensor], states: dict[str, dict[str, Tensor]]) -> None:
    """Load this rank's parts."""
    for parameter in loop.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rate, decay = (loop.optimizer.param_groups[0][name] for name in ("lr", "weight_decay"))
    loop.optimizer.param_groups[0] |= {"lr": 0.0, "weight_decay": 0.0}
    loop.optimizer.step()  # makes the states
    loop.optimizer.param_groups[0] |= {"lr": rate, "weight_decay": decay}
    loop.optimizer.zero_grad()
    for name, parameter in loop.model.named_parameters():
        local(parameter).copy_(model[name])
        for key, value in loop.optimizer.state[parameter].items():
            local(value).copy_(states[name][key])


@silent(
    "fsdp2",
    "Megatron-LM issue 7452, finding 12: a checkpoint is loaded into other parts than it came from",
    "each rank loads the moments of the other rank's shards, which have the same shapes",
    Mechanism.RESTART,
    phrases=("moment", "restart", "resume", "state", "checkpoint"),
    first_wrong=20,
    phases=("optimizer",),
    visible=True,  # moments after the restart are not those before it
    ranks=2,
    restart=20,
)
def moments_of_the_other_shard(*, broken: bool) -> Loop:
    model: Any = sharded(TinyTransformer())
    loop = language(model)
    loop.save = kept_locally(loop)

    def restore(saved: dict[str, Any]) -> None:
        states = saved["states"]
        if broken:
            both: list[Any] = [None, None]
            dist.all_gather_object(both, states)
            states = both[1 - rank_of_job()]
        put_back(loop, saved["model"], states)

    loop.restore = restore
    return loop


@silent(
    "fsdp2",
    "Megatron-LM issue 7452, finding 12: a strict load succeeds, of another layer",
    "the shards of the two blocks are loaded in each other's place",
    Mechanism.RESTART,
    phrases=("weights changed", "restart", "resume", "checkpoint", "not those", "outside", "between steps"),
    first_wrong=20,
    modules=("blocks",),
    phases=("parameter", "forward"),
    visible=True,  # weights after the restart are not those before it
    ranks=2,
    restart=20,
)
def blocks_exchanged(*, broken: bool) -> Loop:
    model: Any = sharded(TinyTransformer())
    loop = language(model)
    loop.save = kept_locally(loop)

    def restore(saved: dict[str, Any]) -> None:
        other = {"blocks.0.": "blocks.1.", "blocks.1.": "blocks.0."} if broken else {}
        names = {name: name.replace(name[:9], other.get(name[:9], name[:9])) for name in saved["model"]}
        put_back(loop, {name: saved["model"][names[name]] for name in names}, saved["states"])

    loop.restore = restore
    return loop
