"""A small residual model of MindSpore, trained for some steps, with or without a dump."""

import mindspore as ms
import numpy as np
from mindspore import nn, ops

WIDTH, VOCABULARY, NUM_STEPS = 8, 10, 3


class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm((WIDTH,))
        self.up = nn.Dense(WIDTH, 2 * WIDTH)
        self.down = nn.Dense(2 * WIDTH, WIDTH)

    def construct(self, x, scale=1.0):
        return x + scale * self.down(ops.relu(self.up(self.norm(x))))


class Model(nn.Cell):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.CellList([Block(), Block()])
        self.head = nn.Dense(WIDTH, VOCABULARY)

    def construct(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def model_and_batches(dtype=ms.float32):
    """Return a model with weights of this seed, and a batch of ids for each step."""
    rng = np.random.default_rng(3)
    model = Model()
    for parameter in model.trainable_params():
        parameter.set_data(ms.Tensor(rng.normal(0.2, 0.5, parameter.shape).astype(np.float32)))
    for _, cell in model.cells_and_names():
        if isinstance(cell, nn.Dense):
            cell.to_float(dtype)
    return model, [ms.Tensor(rng.integers(0, VOCABULARY, (2, 3)), ms.int32) for _ in range(NUM_STEPS)]


def loss_of(model, ids):
    return (model(ids).astype(ms.float32) ** 2).mean()


def train(debugger=None, *, dtype=ms.float32, optimizer=nn.Adam, compiled=False):
    """Return losses and weights, as bytes, after training."""
    model, batches = model_and_batches(dtype)
    steps = optimizer(model.trainable_params(), 0.01)

    def loss_of_step(ids):
        return loss_of(model, ids)

    both = ms.value_and_grad(loss_of_step, None, steps.parameters)
    both = ms.jit(both) if compiled else both
    losses = []
    for ids in batches:
        if debugger is not None:
            debugger.start(model)
        loss, gradients = both(ids)
        steps(gradients)
        losses.append(loss.asnumpy().tobytes())
        if debugger is not None:
            debugger.stop()
            debugger.step()
    return losses, [parameter.asnumpy().tobytes() for parameter in model.get_parameters()]
