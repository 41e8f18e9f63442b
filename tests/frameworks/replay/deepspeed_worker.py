"""Two ranks replay steps of DeepSpeed trainings at every stage of ZeRO; see `job`."""

import functools

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.frameworks.deepspeed.engines import start, step_engine, whole_weights
from tests.frameworks.replay.job import INF, Case, Fault, Job, main
from trainermon.hooks.names import plain_name

WIDTH, TOKENS, MICRO_STEPS = 8, 11, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.2)

    def forward(self, x):
        return self.norm(x + self.dropout(self.down(functional.gelu(self.up(x)))))


class Net(nn.Module):
    def __init__(self, checkpointing=None):
        super().__init__()
        self.checkpointing = checkpointing
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.checkpointing is None else checkpoint(block, x, use_reentrant=self.checkpointing)
        logits = self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()), logits


def build(stage, dtype, clip, checkpointing=None):
    net = Net(checkpointing)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": MICRO_STEPS,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 16},
        "steps_per_print": 1_000_000,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True} | ({"initial_scale_power": 8} if dtype == "fp16" else {})
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
    torch.manual_seed(100 + dist.get_rank())

    def step(number):
        losses = []
        for _ in range(MICRO_STEPS):
            loss, _ = engine(torch.randint(TOKENS, (3, 5)))
            engine.backward(loss)
            losses.append(loss)
            step_engine(engine)
        norm = engine.get_global_grad_norm()
        return [
            *losses,
            torch.tensor([float("nan" if norm is None else norm), engine.micro_steps, engine.skipped_steps]),
        ]

    def spoil(module):
        with torch.no_grad():
            getattr(module.weight, "ds_tensor", module.weight).view(-1)[1] = INF

    def bits():
        whole = [weight for _, weight in sorted(whole_weights(engine).items())]
        states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        return [*whole, *states]

    return Job(
        model=engine,
        optimizer=engine.optimizer,
        modules={plain_name(name): module for name, module in engine.module.named_modules()},
        spoil=spoil,
        step=step,
        bits=bits,
        options={"grad_acc_steps": MICRO_STEPS},
    )


class Head(nn.Module):
    """The last layer of a pipeline, which is handed what the one before returned."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, TOKENS)

    def forward(self, x):
        return self.linear(x)


def build_pipeline():
    torch.manual_seed(3)
    layers = [LayerSpec(nn.Embedding, TOKENS, WIDTH), LayerSpec(Block), LayerSpec(Block), LayerSpec(Head)]
    net = PipelineModule(
        layers,
        num_stages=2,
        partition_method="uniform",
        loss_fn=lambda logits, labels: functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": MICRO_STEPS,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1_000_000,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]

    def step(number):
        generator = torch.Generator().manual_seed(number)
        batches = [torch.randint(TOKENS, (3, 5), generator=generator) for _ in range(MICRO_STEPS)]
        return [engine.train_batch(iter([(tokens, tokens) for tokens in batches]))]

    def spoil(module):
        with torch.no_grad():
            module.weight.view(-1)[1] = INF

    return Job(
        model=engine,
        optimizer=engine.optimizer,
        modules=dict(engine.module.named_modules()),
        spoil=spoil,
        step=step,
        bits=lambda: [*engine.module.parameters()],
        options={"grad_acc_steps": MICRO_STEPS},
    )


FAULTS = {
    "weight": Fault(kind="weight", module="blocks.1.down", rank=1, phase="parameter"),
    "transient": Fault(kind="transient", module="blocks.0.up", rank=1, phase="forward"),
    "backward": Fault(kind="backward", module="blocks.1.up", rank=0, phase="backward"),
}
CHOSEN = [(0, "fp32", "backward"), (0, "bf16", "weight"), (1, "fp32", "weight"), (1, "bf16", "transient")]
CHOSEN += [(2, "fp32", "transient"), (2, "bf16", "backward")]
CHOSEN += [(3, "fp32", "weight"), (3, "bf16", "transient"), (3, "fp32", "backward")]
CASES = [
    Case(
        name=f"stage{stage}-{dtype}-{kind}",
        build=functools.partial(build, stage, dtype, clip=1.0 if dtype == "fp32" else 0.0),
        fault=FAULTS[kind],
    )
    for stage, dtype, kind in CHOSEN
]
PIPELINE = [
    Case(
        name="pipeline-first",
        build=build_pipeline,
        fault=Fault(kind="transient", module="1.up", rank=0, phase="forward"),
    ),
    Case(
        name="pipeline-last",
        build=build_pipeline,
        fault=Fault(kind="backward", module="2.up", rank=1, phase="backward"),
    ),
]
NONE = Fault(kind="none")
CASES += [
    Case(
        name="stage3-gradients",
        build=functools.partial(build, 3, "fp32", clip=1.0),
        fault=NONE,
        config={"monitor_mbs_grad": True},
        forced=True,
    ),
    Case(name="stage3-ordered", build=functools.partial(build, 3, "bf16", clip=0.0), fault=NONE, dump="order"),
    Case(
        name="stage3-checkpoint",
        build=functools.partial(build, 3, "fp32", clip=1.0, checkpointing=False),
        fault=FAULTS["transient"],
    ),
    Case(
        name="stage3-reentrant",
        build=functools.partial(build, 3, "fp32", clip=1.0, checkpointing=True),
        fault=FAULTS["transient"],
    ),
    Case(name="stage1-fp16", build=functools.partial(build, 1, "fp16", clip=1.0), fault=FAULTS["transient"]),
    *PIPELINE,  # last: no other engine can be made after one
]

if __name__ == "__main__":
    start()
    main(CASES)
