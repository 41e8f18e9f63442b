"""Trains a small model of MindSpore under an agent, breaks a weight, and waits for a line before it ends."""

import sys

import mindspore as ms

from tests.monitor.mindspore.trainings import SmallTraining
from trainermon import TrainerMon

STEPS, FAULT = 14, 10


def main(config_file: str) -> None:
    """Train, break a weight before step `FAULT`, and close the monitor once standard input says so."""
    training = SmallTraining("AdamWeightDecay")
    with TrainerMon(config_file) as monitor:
        monitor.set_monitor(training.net, optimizer=training.optimizer)
        for step in range(STEPS):
            if step == FAULT:
                training.net.first.bias.set_data(training.net.first.bias * ms.Tensor(float("nan")))
            monitor.record(loss=training.step())
        print("trained", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1])
