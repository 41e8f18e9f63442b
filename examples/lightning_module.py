"""Train a tiny regression with Lightning's Trainer, and watch it.

    python examples/lightning_module.py
    python examples/lightning_module.py --devices 2                    # two processes, DistributedDataParallel

The two lines that attach the monitor are marked.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainermon.monitor.integrations.lightning import TrainerMonCallback  # line 1


class Regression(LightningModule):
    """Learns the sum of eight numbers. It calls itself in `training_step`, so that activations can be watched too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        x, target = batch
        return nn.functional.mse_loss(self(x), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--config", default=str(Path(__file__).with_name("monitor_config.json")))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    x = torch.randn(2048, 8)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=arguments.devices,
            max_steps=arguments.steps,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[TrainerMonCallback(arguments.config)],  # line 2
        )
        trainer.fit(Regression(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16))


if __name__ == "__main__":
    main()
