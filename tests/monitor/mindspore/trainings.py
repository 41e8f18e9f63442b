"""A small training of MindSpore: residual, a shared layer that is called twice, a norm; in every mode and dtype."""

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.experimental import optim as experimental

from tests.moments import numpy_moments

OPTIMIZERS = {
    "Adam": lambda parameters: nn.Adam(parameters, 1e-2),
    "AdamWeightDecay": lambda parameters: nn.AdamWeightDecay(parameters, 1e-2, weight_decay=0.01),
    "SGD": lambda parameters: nn.SGD(parameters, 1e-2, momentum=0.9),
    "Momentum": lambda parameters: nn.Momentum(parameters, 1e-2, 0.9),
    "AdamW": lambda parameters: experimental.AdamW(parameters, lr=1e-2),
}
MODES = ("pynative", "jit step", "jit construct")
SCALE = 1024.0


class SmallNet(nn.Cell):
    """Its residual stream is of `dtype`; the matrices are of float32, as the CPU multiplies no others."""

    def __init__(self, *, dtype=ms.float32):
        super().__init__()
        self.first = nn.Dense(8, 8)
        self.norm = nn.LayerNorm((8,))
        self.head = nn.Dense(8, 2)
        self.dtype = dtype

    def construct(self, x):
        hidden = (x + self.first(x)).astype(self.dtype)
        hidden = hidden + self.first(hidden.astype(ms.float32)).astype(self.dtype)
        return self.head(self.norm(hidden.astype(ms.float32)))


class SmallTraining:
    """The model, its optimizer and data, all from one seed; `step` trains once and returns loss and gradients."""

    def __init__(self, optimizer="Adam", *, mode="pynative", dtype="float32"):
        ms.set_seed(7)
        random = np.random.default_rng(7)
        self.net = SmallNet(dtype=getattr(ms, dtype))
        for parameter in self.net.get_parameters():
            values = random.normal(scale=0.3, size=parameter.shape).astype(np.float32)
            parameter.set_data(ms.Tensor(values))
        self.optimizer = OPTIMIZERS[optimizer](self.net.trainable_params())
        self.mode = mode
        self.scale = SCALE if dtype == "float16" else 1.0
        self.random = random
        self.used = self.optimizer
        self.gradients = None
        self._step = None

    def batch(self):
        x = ms.Tensor(self.random.normal(size=(16, 8)).astype(np.float32))
        return x, ms.Tensor(self.random.normal(size=(16, 2)).astype(np.float32))

    def prepare(self):
        """Build the step; `used` may have been replaced by what watches the optimizer."""
        if self.mode == "jit construct":
            setattr(self.net, "construct", ms.jit(self.net.construct))  # noqa: B010  # types take it for a method
        scale = self.scale

        def forward(x, y):
            return ((self.net(x).astype(ms.float32) - y) ** 2).mean() * scale

        compute = ms.value_and_grad(forward, None, self.optimizer.parameters)
        used = self.used

        def step(x, y):
            loss, gradients = compute(x, y)
            unscaled: tuple = ()
            for gradient in gradients:
                unscaled += (gradient / scale,)
            used(unscaled)
            return loss / scale, unscaled

        self._step = ms.jit(step) if self.mode == "jit step" else step

    def step(self, batch=None):
        if self._step is None:
            self.prepare()
        loss, self.gradients = self._step(*(batch or self.batch()))
        return loss

    def bits(self):
        """Return the bytes of all that training changes."""
        held = [*self.net.get_parameters(), *self.optimizer.get_parameters()]
        return [each.asnumpy().tobytes() for each in held]


def truth(tensor):
    """Return the eight moments of a tensor, by numpy in float64."""
    return numpy_moments(tensor.astype(ms.float32).asnumpy())
