"""Silent errors of data parallelism: what goes around the wrapper, or is done to a model after it was wrapped."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.silent import tasks
from benchmarks.silent.case import Mechanism, silent
from benchmarks.silent.loop import Loop
from benchmarks.silent.models import TinyTransformer
from benchmarks.silent.plain_optimizer import language

COPIES = ("copies", "replica", "ranks differ", "differ between ranks", "same on all ranks", "differs between")
UNREDUCED = (*COPIES, "not reduced", "unreduced", "reduction", "all-reduce", "averag")
AFTER_BACKWARD = ("reduction", "before_step", "optimizer")


@silent(
    "ddp",
    "x-jxmnop: DDP out of sync (TrainCheck)",
    "in every second step the loss is computed by the wrapped module itself, around the wrapper",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    first_wrong=1,
    phases=AFTER_BACKWARD,
    visible=True,  # the copies of a weight differ from this step on
    ranks=2,
)
def wrapper_bypassed(*, broken: bool) -> Loop:
    loop = language(model := DistributedDataParallel(TinyTransformer()))
    step = 0

    def before(number: int) -> None:
        nonlocal step
        step = number

    def loss_of(_model: Any, batch: Any) -> Tensor:
        return tasks.continued(model.module if broken and step % 2 else model, batch)

    loop.before, loop.loss_of = before, loss_of
    return loop
