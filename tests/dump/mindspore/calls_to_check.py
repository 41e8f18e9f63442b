"""A dump of some calls of MindSpore with their tensors, as `tests/analysis/check/recorded/mindspore.zip` has it.

.venv-mindspore/bin/python -m tests.dump.mindspore.calls_to_check tests/analysis/check/recorded/mindspore
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from trainermon.dump.mindspore import PrecisionDebugger


class Net(nn.Cell):
    def __init__(self, weight):
        super().__init__()
        self.norm = nn.LayerNorm((8,))
        self.dense = nn.Dense(8, 4, weight_init=Tensor(weight))

    def construct(self, x, weight, indices, targets):
        hidden = self.dense(self.norm(ops.gather(weight, indices, 0) + x)).reshape((6, 4))
        shown = ops.softmax(ops.matmul(hidden, ops.transpose(hidden, (1, 0))) / 2.0, axis=-1)
        kept = ops.cat((shown, mint.tanh(shown).astype(ms.float16).astype(ms.float32)), axis=0)
        return ops.cross_entropy(hidden, targets) + (1.5 - kept[1:3]).mean() + ops.relu(hidden).sum(0).sum()


def main():
    rng = np.random.default_rng(0)
    ms.set_seed(0)
    weight = ms.Parameter(Tensor(rng.normal(size=(8, 8)).astype(np.float32)), name="weight")
    x = Tensor(rng.normal(size=(2, 3, 8)).astype(np.float32))
    indices, targets = (Tensor(np.arange(6) % 4, ms.int32) for _ in range(2))
    net = Net(rng.normal(size=(4, 8)).astype(np.float32))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps({"tensor": {"risk_level": "ALL"}}))
        debugger = PrecisionDebugger(folder / "config.json", "tensor", folder, "L1")
        debugger.start(net)
        ms.value_and_grad(net, None, [weight, *net.trainable_params()])(x, weight, indices.reshape(2, 3), targets)
        debugger.close()
        (folder / "step0/rank0/sources.json").unlink(missing_ok=True)
        (folder / "step0/rank0/stack.json").unlink(missing_ok=True)
        raw = json.loads((folder / "step0/rank0/dump.json").read_text())
        (folder / "step0/rank0/dump.json").write_text(json.dumps(raw | {"dump_data_dir": None}))
        shutil.make_archive(sys.argv[1], "zip", folder / "step0/rank0")


if __name__ == "__main__":
    main()
