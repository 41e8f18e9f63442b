"""Models of images: a vision transformer, a residual net with batch norm, a U-net, and a GAN."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.families.family import Batch, Family

BATCH, SIZE, CLASSES, LATENT = 32, 8, 10, 8
_TEMPLATES = torch.randn(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
_REAL, _FAKE = 1.0, 0.0


def labelled(generator: Generator) -> Batch:
    """Return `images` `[BATCH, 1, SIZE, SIZE]`, each a noisy template, and their `labels`."""
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    noise = torch.randn(BATCH, 1, SIZE, SIZE, generator=generator)
    return {"images": _TEMPLATES[labels] + 0.7 * noise, "labels": labels}


def noisy(generator: Generator) -> Batch:
    """Return `clean` images, and the same with noise of an own strength each as `images`."""
    clean = _TEMPLATES[torch.randint(CLASSES, (BATCH,), generator=generator)]
    strength = torch.rand(BATCH, 1, 1, 1, generator=generator)
    return {"clean": clean, "images": clean + strength * torch.randn(clean.shape, generator=generator)}


def with_latents(generator: Generator) -> Batch:
    """Return real `images` and `latents` `[BATCH, LATENT]` to make others from."""
    return labelled(generator) | {"latents": torch.randn(BATCH, LATENT, generator=generator)}


def vit() -> nn.Module:
    """Return a vision transformer."""
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    image = {"image_size": SIZE, "patch_size": 2, "num_channels": 1, "num_labels": CLASSES}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**size, **image))


def _normed(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _normed(inputs, outputs, stride), _normed(outputs, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x).relu())
        return functional.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Residual blocks with batch norm, whose running statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _normed(1, 8)
        self.layers = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.layers(self.stem(x).relu()).mean((2, 3)))
        return logits


class Grouped(nn.Module):
    """A convolution with group norm."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Down, through the middle, and up again beside what came down."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = Grouped(1, 8), Grouped(8, 16, 2)
        self.middle = Grouped(16, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.join, self.out = Grouped(16, 8), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down1(x)
        low = self.middle(self.down2(high))
        noise: Tensor = self.out(self.join(torch.cat([self.up(low), high], 1)))
        return x - noise


class Discriminator(nn.Module):
    """Tells real images from those of a generator, which it holds beside its own parameters and does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.out = nn.Linear(64, 1)
        generator = nn.Sequential(nn.Linear(LATENT, 64), nn.ReLU(), nn.Linear(64, SIZE * SIZE))
        self.rival = (generator, torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9)))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.leaky_relu(self.conv2(functional.leaky_relu(self.conv1(x), 0.2)), 0.2)
        scores: Tensor = self.out(y.flatten(1))
        return scores


def _classes(model: Any, batch: Batch) -> Tensor:
    out = model(batch["images"])
    return functional.cross_entropy(getattr(out, "logits", out), batch["labels"])


def _restored(model: Any, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch["images"]), batch["clean"])


def _fakes(model: Any, batch: Batch) -> Tensor:
    images: Tensor = _bare(model).rival[0](batch["latents"]).view(-1, 1, SIZE, SIZE)
    return images


def _told_apart(model: Any, batch: Batch) -> Tensor:
    scores = model(torch.cat([batch["images"], _fakes(model, batch).detach()]))
    wanted = torch.full_like(scores, _FAKE)
    wanted[: len(batch["images"])] = _REAL
    return functional.binary_cross_entropy_with_logits(scores, wanted)


def _train_rival(model: Any, batch: Batch) -> None:
    """Train the generator on what the discriminator says of it, without touching a gradient of the discriminator."""
    judge = _bare(model)
    generator, optimizer = judge.rival
    scores = judge(_fakes(model, batch))
    loss = functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, _REAL))
    weights = list(generator.parameters())
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def _bare(model: Any) -> Any:
    """Return the module within a wrapper, whose attributes the wrapper hides."""
    return model if hasattr(model, "rival") else model.module


IMAGES = (
    Family(name="vit", build=vit, draw=labelled, loss=_classes, rate=1e-3),
    Family(name="resnet", build=ResNet, draw=labelled, loss=_classes),
    Family(name="unet", build=UNet, draw=noisy, loss=_restored),
    Family(name="gan", build=Discriminator, draw=with_latents, loss=_told_apart, rate=1e-3, after_step=_train_rival),
)
