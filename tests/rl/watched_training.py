"""A training whose rollouts cut the support from step 5 on: python -m tests.rl.watched_training FOLDER."""

import sys
from pathlib import Path

import torch

from tests.rl.policies import Step
from trainermon import TrainerMon, rl


def main(folder):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = TrainerMon({"output_dir": str(folder / "output"), "run_id": "rollouts"})
    monitor.set_monitor(model, optimizer)
    watch = rl.Watch(folder / "rl_out", monitor=monitor)
    for number in range(10):
        made = Step(number, "top_p" if number >= 5 else None)
        with watch.step(number):
            watch.rollout(logprobs=made.rollout, ids=made.ids, mask=made.mask, version=number)
            watch.train(logprobs=made.train, ids=made.ids, mask=made.mask)
        report = watch.report(number)
        assert report is not None
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.record(loss=loss)
    watch.close()
    monitor.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
