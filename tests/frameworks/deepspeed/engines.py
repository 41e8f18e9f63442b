"""A small model, its engines in every configuration of the grid, and what its gradients are in float64."""

import contextlib
import copy
import gc
import importlib
import itertools
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that everybody knows
from deepspeed.accelerator import get_accelerator
from torch import nn

VOCABULARY, WIDTH, HIDDEN = 13, 7, 11  # odd sizes: no partition ends where a parameter does
BATCH, LENGTH, CLIP = 2, 3, 0.05
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Case(NamedTuple):
    """One engine: ZeRO stage, dtype, accumulation steps, and what else its configuration says."""

    stage: int
    dtype: str = "fp32"
    gas: int = 1
    offload: bool = False
    accumulate_in_fp32: bool = False
    zero: tuple[tuple[str, object], ...] = ()
    fused: bool = False
    unchecked: bool = False  # bfloat16 steps whatever the gradients are


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.ModuleDict({"up": nn.Linear(WIDTH, HIDDEN), "frozen": nn.Linear(HIDDEN, HIDDEN)})
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.gain = nn.Parameter(torch.ones(1))  # one element: most ranks own nothing of it
        self.inner["frozen"].requires_grad_(requires_grad=False)

    def forward(self, tokens):
        return self.head(F.gelu(self.inner["frozen"](self.inner["up"](self.embedding(tokens))))) * self.gain


def start():
    """Join the job without compiling anything, and with float16, which DeepSpeed does not offer on a CPU."""
    gc.freeze()  # DeepSpeed collects garbage several times per engine
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    if deepspeed.__version__ < "0.19":  # they put uninitialised padding into the norm
        factories: Any = torch
        factories.empty, factories.empty_like = torch.zeros, torch.zeros_like
    deepspeed.init_distributed("gloo", verbose=False)
    accelerator = get_accelerator()
    supported = [*accelerator.supported_dtypes(), torch.float16]
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: supported


def make_model(dtype="fp32"):
    """Return the model as every engine of that dtype begins with it: rounded to the dtype, in float32."""
    torch.manual_seed(7)
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(DTYPES[dtype]))
    return model


def make_engine(case: Case):
    """Return a fresh engine; two parameter groups, AdamW, clipping that bites."""
    model = make_model(case.dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "lr": 1e-2},
    ]
    zero = {"stage": case.stage, "stage3_param_persistence_threshold": 8, "reduce_bucket_size": 4096} | dict(case.zero)
    if case.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": case.gas,
        "gradient_clipping": CLIP,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    if case.unchecked:
        config["bf16"] |= {"check_grad_overflow": False}
    if case.dtype == "fp16":
        config["fp16"] |= {"initial_scale_power": 8}
    if case.accumulate_in_fp32:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    with as_fused_adam(torch.optim.AdamW) if case.fused else contextlib.nullcontext():
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


@contextlib.contextmanager
def as_fused_adam(optimizer_class):
    """Have DeepSpeed take a class for its FusedAdam, which would have to be compiled, and so choose FP16_Optimizer."""
    runtime: Any = importlib.import_module("deepspeed.runtime.engine")
    kept, runtime.FusedAdam = runtime.FusedAdam, optimizer_class
    yield
    runtime.FusedAdam = kept


def step_engine(engine):
    """Step the engine; before 0.19 it gathers into views, which torch 2.13 refuses while grad mode is on."""
    with contextlib.nullcontext() if deepspeed.__version__ >= "0.19" else torch.no_grad():
        engine.step()


def tokens_of(step, micro_step, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_step + rank)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).float().view(-1, VOCABULARY), tokens.view(-1))


def true_gradients(weights, batches):
    """Return the gradients of the mean loss over `batches` in float64, at `weights` (by name, whole)."""
    model = copy.deepcopy(make_model()).double()
    model.load_state_dict({name: weight.double() for name, weight in weights.items()})
    losses = [F.cross_entropy(model(tokens).view(-1, VOCABULARY), tokens.view(-1)) for tokens in batches]
    torch.stack(losses).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def whole_weights(engine):
    """Return copies of all parameters, whole; a collective at stage 3.

    Gathered by hand: before 0.19, DeepSpeed's own gathering on gloo at times returns what is no part of a parameter.
    """
    return {name: _whole(p).detach().clone() for name, p in engine.module.named_parameters()}


def _whole(parameter):
    if not hasattr(parameter, "ds_tensor"):
        return parameter
    shares = [torch.empty_like(parameter.ds_tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, parameter.ds_tensor.contiguous())
    return torch.cat(shares)[: parameter.ds_numel].view(parameter.ds_shape)


def global_batches(step, gas):
    return [tokens_of(step, micro, rank) for micro, rank in itertools.product(range(gas), range(dist.get_world_size()))]
