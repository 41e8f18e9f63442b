"""Makes the picture of docs/graph.md: a small GPT with one wrong weight, its graph against the sound one, in Chromium.

`python -m docs.graph_picture` writes docs/images/graph.png.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import ViewportSize, sync_playwright
from torch import nn

from tests.dashboards.conftest import CHROMIUM_FLAGS
from tests.server_programs import find_program
from trainermon import PrecisionDebugger
from trainermon.cli import main as trainermon

PICTURE = Path(__file__).parent / "images" / "graph.png"
SIZE: ViewportSize = {"width": 1500, "height": 950}
WIDTH, WORDS, LAYERS, MICRO_STEPS = 64, 100, 6, 2
NOTE = "Loaded from the old checkpoint?"


class Attn(nn.Module):
    """Causal self-attention with one head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what each place takes from those before it; float32 [batch, length, WIDTH], as `x`."""
        q, k, v = self.qkv(x).chunk(3, -1)
        out: torch.Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return out


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.attn, self.n2 = nn.LayerNorm(WIDTH), Attn(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 [batch, length, WIDTH], as `x`."""
        x = x + self.attn(self.n1(x))
        out: torch.Tensor = x + self.mlp(self.n2(x))
        return out


class GPT(nn.Module):
    """A language model of `LAYERS` layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits, float32 [batch, length, WORDS], of `tokens`, int64 [batch, length]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def record(folder: str, *, factor: float) -> None:
    """Dump one step, with one number of a weight multiplied by `factor`."""
    torch.manual_seed(0)
    model = GPT()
    block = model.layers[2]
    assert isinstance(block, Block)
    with torch.no_grad():
        block.n1.weight[5] *= factor
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    debugger = PrecisionDebugger(dump_path=folder, level="mix", task="statistics")
    debugger.start(model=model)
    for _ in range(MICRO_STEPS):
        tokens = torch.randint(0, WORDS, (2, 16))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    debugger.stop()
    debugger.step()
    PrecisionDebugger.close()


def main() -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        os.chdir(folder)  # the page names the dumps as the command does
        for name, factor in (("sound", 1.0), ("faulty", 1.3)):
            record(name, factor=factor)
        trainermon(["graph", "faulty", "sound", "-o", "graph.html"])
        chromium = playwright.chromium.launch(executable_path=find_program("chromium"), args=list(CHROMIUM_FLAGS))
        page = chromium.new_page(viewport=SIZE, color_scheme="light")
        page.goto(f"file://{folder}/graph.html")
        page.wait_for_selector("body[data-complete]")
        page.get_by_label("note").fill(NOTE)
        page.get_by_label("note").blur()
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page.screenshot(path=PICTURE)
        chromium.close()


if __name__ == "__main__":
    main()
