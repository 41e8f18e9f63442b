"""What a monitor costs a training step: a bare and a watched copy of one GPT train in turn in one process.

    python benchmarks/bench_step.py --monitor trainermon
    python benchmarks/bench_step.py --monitor mindstudio     # in an environment with mindstudio-probe

The model has 29.8 M parameters in 148 tensors; a step has 256 tokens, which is little for its size and makes
everything proportional to the parameters look expensive: a real step has 10 to 100 times as many.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.measure import interleaved

VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 22016, 384, 12, 6, 128, 2
GRADIENTS = {"wg_distribution": True}
STATE = GRADIENTS | {"mv_distribution": True, "param_distribution": True}
ACTIVATIONS = STATE | {"xy_distribution": True, "all_xy": True}
LEVELS = {"gradients": GRADIENTS, "state": STATE, "activations": ACTIVATIONS}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)  # else the softmax saturates, and subnormals slow every backward

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position.weight)))


def make_step(dtype: torch.dtype, batch: int = BATCH) -> tuple[GPT, torch.optim.Optimizer, Callable[[], object]]:
    torch.manual_seed(0)
    model = GPT().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (batch, CONTEXT + 1))

    def step() -> None:
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def watch(
    monitor: str, level: str, interval: int, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> object:
    config: dict[str, object] = LEVELS[level] | {"step_interval": interval}
    if monitor == "trainermon":
        from trainermon import TrainerMon

        config |= {"output_dir": str(folder), "spool_dir": str(folder / "spool"), "agent": {"start": False}}
        watcher = TrainerMon(config)
        watcher.set_monitor(model, optimizer)
        return watcher
    os.environ["MONITOR_OUTPUT_DIR"] = str(folder)
    sys.modules["megatron"] = None  # type: ignore[assignment]  # where it is installed, gradients are not all collected
    from msprobe.pytorch import TrainerMon

    config |= {"targets": {}, "format": "csv", "ops": ["min", "max", "mean", "norm", "nans"]}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    watcher = TrainerMon(str(path), params_have_main_grad=False)
    watcher.set_monitor(model, optimizer=optimizer, grad_acc_steps=1)
    return watcher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--monitor", choices=["trainermon", "mindstudio"], default="trainermon")
    parser.add_argument("--level", choices=LEVELS, default="gradients")
    parser.add_argument("--interval", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    _, _, bare = make_step(dtype)
    model, optimizer, watched = make_step(dtype)
    for _ in range(4):  # until the heap has its size
        bare(), watched()
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with tempfile.TemporaryDirectory() as folder:
        watcher = watch(arguments.monitor, arguments.level, arguments.interval, Path(folder), model, optimizer)
        ratio = interleaved(bare, watched, pairs=arguments.pairs, warm_up=2)
        getattr(watcher, "close", lambda: None)()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before_mb
    if arguments.json:
        print("RESULT " + json.dumps(dataclasses.asdict(ratio) | {"peak_mb": peak_mb}))
    else:
        print(f"{arguments.monitor} {arguments.level}: {ratio.text()}, {ratio.pairs} pairs, peak +{peak_mb:.0f} MB")


if __name__ == "__main__":
    main()
