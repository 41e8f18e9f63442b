"""Two ranks replay steps of FSDP1 and FSDP2 trainings; see `job`."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.frameworks.replay.job import INF, Case, Fault, Job, main
from trainermon.hooks.names import plain_name

WIDTH, TOKENS = 8, 11
MICRO_STEPS = 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.2)

    def forward(self, x):
        return self.norm(x + self.dropout(self.down(functional.gelu(self.up(x)))))


class Net(nn.Module):
    """Returns loss and logits, as models of the transformers library do, of which only the loss is used."""

    calls: torch.Tensor

    def __init__(self, checkpointing=None):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("calls", torch.zeros(()))
        self.checkpointing = checkpointing

    def forward(self, tokens):
        self.calls += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.checkpointing is None else checkpoint(block, x, use_reentrant=self.checkpointing)
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()), "logits": logits}


def fsdp2(net, *, policy=None, reshard=True):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    common = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy(), "reshard_after_forward": reshard}
    for block in net.blocks:
        fully_shard(block, **common)
    return fully_shard(net, **common)


def fsdp1(net, *, use_orig_params):
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        net, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )


def build(wrap, *, clip=True, checkpointing=None, micro_steps=MICRO_STEPS):
    net = Net(checkpointing)
    model = wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    torch.manual_seed(100 + dist.get_rank())
    damages = []

    def step(number):
        losses = []
        for micro_step in range(micro_steps):
            if not is_fsdp1:
                model.set_requires_gradient_sync(micro_step == micro_steps - 1)
            output = model(torch.randint(TOKENS, (3, 5)))
            (output["loss"] / micro_steps).backward()
            losses.append(output["loss"])
        for damage in damages:
            damage()
        if clip:
            model.clip_grad_norm_(1.0) if is_fsdp1 else nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        gradients = [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        return [*losses, *gradients]

    def spoil_gradient(module):
        damages.append(lambda: set_infinite(module.weight.grad))
        return damages.clear

    return Job(
        model=model,
        optimizer=optimizer,
        modules={plain_name(name): m for name, m in model.named_modules() if type(m) is not FullyShardedDataParallel},
        spoil=functools.partial(spoil_weight, model),
        spoil_gradient=spoil_gradient,
        step=step,
        bits=lambda: [local(tensor) for tensor in (*model.parameters(), *model.buffers())],
        options={"grad_acc_steps": micro_steps},
    )


def spoil_weight(model, module):
    """Make an element of the weight infinite in this rank's shard."""
    block = model.blocks[1]
    if isinstance(block, FullyShardedDataParallel):  # of a flat parameter; the second rank's shard begins in `down`
        with torch.no_grad():
            block._handle.flat_param.view(-1)[50] = INF
    else:
        set_infinite(module.weight)


def set_infinite(tensor):
    with torch.no_grad():
        local(tensor).view(-1)[-1] = INF


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


FAULTS = {
    "weight": Fault(kind="weight", module="blocks.1.down", rank=1, phase="parameter"),
    "transient": Fault(kind="transient", module="blocks.0.up", rank=1, phase="forward"),
    "backward": Fault(kind="backward", module="blocks.1.up", rank=0, phase="backward"),
}
BF16 = functools.partial(
    fsdp2, policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), reshard=False
)
CASES = [
    *(Case(name=f"fsdp2-{name}", build=functools.partial(build, fsdp2), fault=fault) for name, fault in FAULTS.items()),
    Case(name="fsdp2-bf16", build=functools.partial(build, BF16, micro_steps=1), fault=FAULTS["weight"]),
    Case(
        name="fsdp2-reentrant",
        build=functools.partial(build, fsdp2, checkpointing=True),
        fault=FAULTS["transient"],
    ),
    Case(
        name="fsdp2-checkpoint",
        build=functools.partial(build, fsdp2, checkpointing=False, clip=False),
        fault=FAULTS["transient"],
    ),
    *(
        Case(
            name=f"fsdp1-{'original' if original else 'flat'}-{name}",
            build=functools.partial(build, functools.partial(fsdp1, use_orig_params=original)),
            fault=FAULTS[name],
        )
        for original, name in ((True, "transient"), (True, "backward"), (False, "transient"), (False, "weight"))
    ),
    *(
        Case(
            name=f"{kind}-gradients",
            build=functools.partial(build, wrap),
            fault=Fault(kind="none"),
            config={"monitor_mbs_grad": True},
            forced=True,
        )
        for kind, wrap in (("fsdp2", fsdp2), ("fsdp1", functools.partial(fsdp1, use_orig_params=True)))
    ),
    *(
        Case(name=f"{kind}-ordered", build=functools.partial(build, wrap), fault=Fault(kind="none"), dump="order")
        for kind, wrap in (("fsdp2", fsdp2), ("fsdp1", functools.partial(fsdp1, use_orig_params=False)))
    ),
]

if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(CASES)
