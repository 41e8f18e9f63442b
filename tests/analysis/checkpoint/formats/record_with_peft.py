"""Writes recorded/peft.zip: small models, adapters of PEFT with its options, and what PEFT makes of both.

PEFT is no dependency: install it elsewhere (`pip install --no-deps --target FOLDER peft`, with accelerate and
transformers), then `PYTHONPATH=FOLDER python tests/analysis/checkpoint/formats/record_with_peft.py`.
Recorded with 0.21.2.
"""

import itertools
import json
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

LINEARS = ["up", "down"]
CASES = {
    "plain": {"target_modules": LINEARS},
    "rslora": {"target_modules": LINEARS, "use_rslora": True},
    "patterns": {
        "target_modules": LINEARS,
        "rank_pattern": {"blocks.1.up": 2, "down": 4},
        "alpha_pattern": {"up": 5, "^blocks.0.down": 9},
    },
    "dora": {"target_modules": LINEARS, "use_dora": True},
    "biases": {"target_modules": ["up"], "bias": "all"},
    "saved": {"target_modules": ["down"], "modules_to_save": ["head"]},
    "embedding": {"target_modules": ["words", "head"]},
    "convolution": {"target_modules": ["image"]},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Block(nn.Module):
    """Two linear layers: one widens, the other narrows again."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.down(self.up(x))


class Model(nn.Module):
    """What LoRA can change: an embedding, products, a convolution, a head."""

    def __init__(self):
        super().__init__()
        self.words, self.image = nn.Embedding(7, 6), nn.Conv2d(2, 3, 3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 7)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def record(folder, options, dtype):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = Model().to(dtype)
    save_file({name: value.clone() for name, value in model.state_dict().items()}, folder / "base.safetensors")
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=7, **options))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) / 16
    adapted.save_pretrained(folder / "adapter")
    merged = adapted.merge_and_unload().state_dict()
    save_file({name: value.contiguous() for name, value in merged.items()}, folder / "merged.safetensors")


def main():
    archive = zipfile.ZipFile(Path(__file__).parent / "recorded" / "peft.zip", "w", zipfile.ZIP_DEFLATED)
    with archive, tempfile.TemporaryDirectory() as top:
        for (case, options), (name, dtype) in itertools.product(CASES.items(), DTYPES.items()):
            folder = Path(top) / f"{case}-{name}"
            folder.mkdir()
            record(folder, options, dtype)
            config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
            (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
            for path in (
                folder / "base.safetensors",
                folder / "merged.safetensors",
                *(folder / "adapter").glob("adapter_*"),
            ):
                archive.write(path, path.relative_to(top))


if __name__ == "__main__":
    main()
