"""Trains on each rank of a data-parallel job of MindSpore, unwatched and watched, and keeps what a test compares."""

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import dataset, nn
from mindspore.communication import create_group, get_group_size, get_rank, init
from mindspore.train import Model

from tests.monitor.mindspore.trainings import SmallTraining
from trainermon import TrainerMon
from trainermon.monitor.integrations.mindspore import TrainerMonCallback

STEPS, FAULT, FAULTY = 5, 3, 1
"""How many steps there are; on which the gradients are not finite any more, and through which rank."""


class RankTraining(SmallTraining):
    """A training whose batches are the rank's own, and whose gradients are averaged over all ranks."""

    def __init__(self, *, mode):
        super().__init__("Momentum", mode=mode)
        self.random = np.random.default_rng(get_rank())

    def prepare(self):
        """Build the step, which returns what this rank's backward has made, and what the optimizer is called with."""

        def forward(x, y):
            return ((self.net(x) - y) ** 2).mean()

        compute = ms.value_and_grad(forward, None, self.optimizer.parameters)
        average = nn.DistributedGradReducer(self.optimizer.parameters, mean=True)
        used = self.used

        def step(x, y):
            loss, gradients = compute(x, y)
            averaged = average(gradients)
            used(averaged)
            return loss, (gradients, averaged)

        self._step = ms.jit(step) if self.mode == "jit step" else step


def trained(mode, config=None):
    """Train, with a monitor if there is a configuration; return the bytes of all that has changed, and gradients."""
    training, kept = RankTraining(mode=mode), []
    monitor = None
    if config is not None:
        monitor = TrainerMon(config)
        monitor.set_monitor(training.net, optimizer=training.optimizer, dp_group="everyone")
        if mode == "jit step":
            training.used = monitor.watch(training.optimizer)
    for number in range(STEPS):
        x, y = training.batch()
        if (number, get_rank()) == (FAULT, FAULTY):
            y = y * ms.Tensor(np.inf, ms.float32)
        loss = training.step((x, y))
        kept.append([[each.asnumpy() for each in gradients] for gradients in training.gradients])
        if monitor is not None:
            monitor.record(loss=loss)
    if monitor is not None:
        monitor.close()
    return training, kept


def train_by_model(config):
    """Train with MindSpore's `Model`, which averages gradients by itself, under the callback."""
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    training = RankTraining(mode="pynative")
    x, y = (training.random.normal(size=(4 * STEPS, width)).astype(np.float32) for width in (8, 2))
    data = dataset.NumpySlicesDataset({"x": x, "y": y}, shuffle=False, num_parallel_workers=1).batch(4)
    model = Model(training.net, nn.MSELoss(), training.optimizer)
    model.train(1, data, callbacks=[TrainerMonCallback(config)], dataset_sink_mode=False)


def settings(own, agent):
    """Return a configuration that keeps all in the folder `own`."""
    return {"output_dir": str(own), "spool_dir": str(own / "spool"), "run_id": "job", "agent": agent}


def main(folder: Path) -> None:
    """Train in both modes, and write gradients and whether any bit differs into a file of the rank; then by `Model`."""
    ms.set_context(device_target="CPU")
    init()
    create_group("everyone", list(range(get_group_size())))
    for mode, agent in (("pynative", {"wait_s": 60}), ("jit step", {"start": False})):
        bare, _ = trained(mode)
        own = folder / mode.replace(" ", "_")
        watched, kept = trained(mode, settings(own, agent))
        arrays = {
            f"{side}/{step}/{parameter.name}": array
            for step, both in enumerate(kept)
            for side, gradients in zip(("local", "averaged"), both, strict=True)
            for parameter, array in zip(watched.optimizer.parameters, gradients, strict=True)
        }
        np.savez(own / f"rank{get_rank()}.npz", is_same=bare.bits() == watched.bits(), **arrays)
    train_by_model(settings(folder / "model", {"start": False}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
