"""Train a tiny GPT-2 on random numbers with transformers' Trainer, and watch it; nothing is downloaded.

    python examples/transformers_trainer.py
    torchrun --nproc-per-node 2 examples/transformers_trainer.py

The two lines that attach the monitor are marked.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from trainermon.monitor.integrations.transformers import TrainerMonCallback  # line 1

VOCABULARY = 128


class Counting(torch.utils.data.Dataset):
    """Rows that count upwards from somewhere: easy to learn."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(self.length) + 7 * index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--config", default=str(Path(__file__).with_name("monitor_config.json")))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            include_num_input_tokens_seen="all",
        )
        trainer = Trainer(model=model, args=settings, train_dataset=Counting(32))
        trainer.add_callback(TrainerMonCallback(arguments.config, trainer=trainer))  # line 2
        trainer.train()


if __name__ == "__main__":
    main()
