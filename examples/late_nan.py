"""Train a small text classifier whose loss turns NaN at step 8000, and find the line of code that did it.

    trainermon run -- python examples/late_nan.py        # 8 010 steps, a few seconds
    trainermon diagnose

`docs/nan_to_line.md` goes from there to the line, command by command. The code is wrong for a document of a kind that
comes once in 128 000.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from trainermon import PrecisionDebugger, TrainerMon

FIRST = int(os.environ.get("LATE_NAN_FIRST", "0"))  # the steps before this one are left out
STEPS, CHECKPOINT_EVERY, LOG_EVERY = 8010, 1500, 1000
BATCH, LENGTH, VOCABULARY, CLASSES, WIDTH = 16, 12, 64, 4, 16
EMPTY_DOCUMENT = 8000 * BATCH + 5  # one that was left without a word when the text was cleaned


class AttentionPool(nn.Module):
    """Gives the mean of a document's words, weighted by what each has to say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        scores = self.score(x).squeeze(-1)
        padding = torch.arange(x.shape[1]) >= lengths[:, None]
        weights = torch.softmax(scores.masked_fill(padding, -math.inf), dim=-1)
        return (weights[..., None] * x).sum(1)


class Classifier(nn.Module):
    """Sorts documents into classes; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.pool = AttentionPool(WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, tokens: Tensor, lengths: Tensor, classes: Tensor) -> Tensor:
        pooled = self.pool(self.words(tokens), lengths)
        return nn.functional.cross_entropy(self.head(pooled), classes)


def batch_of(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens `[batch, length]`, lengths and classes `[batch]` of a step, the same in every run."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (BATCH,), generator=generator)
    lengths[step * BATCH + torch.arange(BATCH) == EMPTY_DOCUMENT] = 0
    return tokens, lengths, tokens[:, 0] % CLASSES


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default={}, metavar="FILE", help="configuration of the monitor")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", type=int, metavar="STEP", help="go on from the last checkpoint before this step")
    parser.add_argument("--debugger", metavar="FILE", help="dump what this configuration of PrecisionDebugger says")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)  # tensors as small as these only wait for more
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = FIRST
    if arguments.resume is not None:
        first = max(step for step in saved_steps(arguments.checkpoints) if step < arguments.resume)
        state = torch.load(arguments.checkpoints / f"step{first}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    if arguments.debugger:
        dump(model, optimizer, first, arguments.debugger)
    else:
        train(model, optimizer, first, arguments)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, arguments: argparse.Namespace) -> None:
    monitor = TrainerMon(arguments.config)
    monitor.set_monitor(model, optimizer, start_iteration=first)
    for step in range(first, STEPS):
        if step % CHECKPOINT_EVERY == 0 or step == FIRST:
            arguments.checkpoints.mkdir(exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, arguments.checkpoints / f"step{step}.pt")
        loss = model(*batch_of(step))
        loss.backward()
        monitor.record(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            print(f"step {step}   loss {loss.item():.4f}", flush=True)
    monitor.close()


def dump(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, config: str) -> None:
    debugger = PrecisionDebugger(config)
    debugger.set_init_step(first)
    for step in range(first, STEPS):
        debugger.start(model)
        model(*batch_of(step)).backward()
        debugger.stop()
        debugger.step()
        optimizer.step()
        optimizer.zero_grad()


def saved_steps(folder: Path) -> list[int]:
    return [int(path.stem.removeprefix("step")) for path in folder.glob("step*.pt")]


if __name__ == "__main__":
    main()
