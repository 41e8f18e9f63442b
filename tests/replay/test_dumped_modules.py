"""Calls of torch's own modules, dumped at level L0 and built again: they give what the module gave."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.recorded_dump import record_dump
from trainermon.dump.files.reader import load_raw, read_dump
from trainermon.dump.files.records import FORWARD
from trainermon.replay.dumped_calls import rebuild
from trainermon.replay.dumped_modules import _FORMULAS, _SPECIAL, UnknownModuleError

# Each with settings that are not the default: what is not read from the dump shows.
SEQUENCES = {  # take (2, 6, 8)
    "layer_norm": nn.LayerNorm(8, eps=0.1),
    "rms_norm": nn.RMSNorm(8, eps=0.2),
    "group_norm": nn.GroupNorm(3, 6, eps=0.3),
    "local": nn.LocalResponseNorm(2, alpha=0.5, k=2.0),
    "batch_norm": nn.BatchNorm1d(6, eps=0.4),
    "evaluated": nn.BatchNorm1d(6, eps=0.4).eval(),
    "without_statistics": nn.BatchNorm1d(6, track_running_stats=False, momentum=None).eval(),
    "instance_norm": nn.InstanceNorm1d(6, eps=0.2, affine=True),
    "linear": nn.Linear(8, 3, bias=False),
    "conv": nn.Conv1d(6, 4, 3, stride=2, padding=1, groups=2),
    "same": nn.Conv1d(6, 4, 3, padding="same", dilation=2),
    "transposed": nn.ConvTranspose1d(6, 4, 3, stride=2, output_padding=1),
    "max_pool": nn.MaxPool1d(2, stride=1, return_indices=True),
    "avg_pool": nn.AvgPool1d(3, padding=1, count_include_pad=False),
    "adaptive": nn.AdaptiveAvgPool1d(3),
    "upsample": nn.Upsample(scale_factor=1.5, mode="linear", align_corners=True),
    "flatten": nn.Flatten(0, 1),
    "gelu": nn.GELU("tanh"),
    "elu": nn.ELU(0.3),
    "celu": nn.CELU(0.3),
    "glu": nn.GLU(1),
    "leaky": nn.LeakyReLU(0.3),
    "hardtanh": nn.Hardtanh(-0.1, 0.2),
    "softplus": nn.Softplus(2.0, 1.0),
    "softshrink": nn.Softshrink(0.3),
    "hardshrink": nn.Hardshrink(0.3),
    "prelu": nn.PReLU(6, init=0.3),
    "softmax": nn.Softmax(1),
    "log_softmax": nn.LogSoftmax(1),
    "identity": nn.Identity(),
    "dropout": nn.Dropout(0.5).eval(),
    **{kind.__name__.lower(): kind() for kind in (nn.Sigmoid, nn.Tanh, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Mish)},
    **{kind.__name__.lower(): kind() for kind in (nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Softsign)},
}
IMAGES = {  # take (2, 4, 6, 6)
    "batch_norm": nn.BatchNorm2d(4).eval(),
    "instance_norm": nn.InstanceNorm2d(4, track_running_stats=True).eval(),
    "conv": nn.Conv2d(4, 2, (3, 1), padding=(1, 0)),
    "transposed": nn.ConvTranspose2d(4, 2, 2, dilation=2),
    "max_pool": nn.MaxPool2d(2, ceil_mode=True),
    "avg_pool": nn.AvgPool2d(2, divisor_override=3),
    "adaptive": nn.AdaptiveAvgPool2d((2, None)),
    "shuffle": nn.PixelShuffle(2),
    "unshuffle": nn.PixelUnshuffle(3),
}
LOSSES = {  # take logits (12, 4) and targets
    "cross_entropy": nn.CrossEntropyLoss(torch.arange(4.0), ignore_index=1, label_smoothing=0.2),
    "nll": nn.NLLLoss(reduction="sum"),
    "mse": nn.MSELoss(reduction="none"),
    "l1": nn.L1Loss(),
    "smooth": nn.SmoothL1Loss(beta=0.3),
    "huber": nn.HuberLoss(delta=0.3),
    "divergence": nn.KLDivLoss(reduction="batchmean", log_target=True),
    "bce": nn.BCELoss(),
    "logits": nn.BCEWithLogitsLoss(pos_weight=torch.arange(4.0)),
}
CLASSES = {"cross_entropy", "nll"}


class Zoo(nn.Module):
    def __init__(self):
        super().__init__()
        self.sequences, self.images = nn.ModuleDict(SEQUENCES), nn.ModuleDict(IMAGES)
        self.losses = nn.ModuleDict(LOSSES)
        self.embedding = nn.Embedding(9, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.plain_attention = nn.MultiheadAttention(8, 4, bias=False, add_bias_kv=True)
        self.circular, self.lstm = nn.Conv1d(6, 6, 3, padding=1, padding_mode="circular"), nn.LSTM(8, 8)
        for module in self.modules():
            mean = module._buffers.get("running_mean")
            if mean is not None:
                mean += torch.rand(mean.shape)
        for parameter in self.parameters():
            parameter.data = parameter.data + 0.1 * torch.randn(parameter.shape)

    def forward(self, numbers, images, tokens):
        for module in (*self.sequences.values(), self.circular, self.lstm):
            module(numbers)
        for module in self.images.values():
            module(images)
        targets = torch.rand(12, 4)
        for name, module in self.losses.items():
            module(targets.flip(0), torch.arange(12) % 4 if name in CLASSES else targets)
        hidden = self.embedding(tokens)
        mask = torch.tensor([[False] * 5 + [True]] * 2)
        self.attention(hidden, hidden, value=hidden * 2, key_padding_mask=mask, average_attn_weights=False)
        self.plain_attention(hidden, hidden, hidden, need_weights=False)


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    torch.manual_seed(0)
    zoo = Zoo()

    @torch.no_grad()
    def run():
        zoo(torch.randn(2, 6, 8), torch.randn(2, 4, 9, 6).narrow(2, 0, 6), torch.arange(12).view(2, 6) % 9)

    return record_dump(folder, run, model=zoo, task="tensor", level="L0")


def modules_of(dump):
    return {entry.key: entry for entry in read_dump(dump).entries if entry.direction == FORWARD}


@pytest.mark.filterwarnings("ignore")
def test_a_module_is_called_again_with_what_it_was_constructed_with(dump):
    data, called = load_raw(dump).data, {}
    for key, entry in modules_of(dump).items():
        if entry.module in ("circular", "lstm"):
            continue
        again = rebuild(dump, data, entry)
        with torch.no_grad():
            result = again.call.function(*again.call.args, **again.call.kwargs)
        found, given = (
            [one for one in pytree.tree_leaves(each) if isinstance(one, torch.Tensor)]
            for each in (result, again.result)
        )
        torch.testing.assert_close(found, given, msg=partial("{}: {}".format, key))
        called[entry.class_name] = key

    assert len(called) > 55
    rest = {name for name in (*_FORMULAS, *_SPECIAL) if name[-2:] not in ("1d", "2d", "3d")} - called.keys()
    assert rest == {"AlphaDropout", "Bilinear"} & _FORMULAS.keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [("circular", "a Conv1d with `padding_mode` 'circular'"), ("lstm", "LSTM is no single function")],
)
def test_what_is_no_single_function_is_refused(dump, name, message):
    [entry] = [one for one in modules_of(dump).values() if one.module == name]

    with pytest.raises(UnknownModuleError, match=message):
        rebuild(dump, load_raw(dump).data, entry)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (None, "does not say which `normalized_shape` the LayerNorm has"),
        ({"normalized_shape": [8]}, "does not say which `eps`"),
        ({"normalized_shape": [8], "eps": {"type": "torch.device"}}, "`eps` of the LayerNorm is no number"),
    ],
)
def test_a_dump_that_does_not_say_what_a_module_was_constructed_with_is_refused(dump, attributes, message):
    """As msprobe's and older ones do not; and nothing but plain values is taken from it."""
    [entry] = [one for one in modules_of(dump).values() if one.module == "sequences.layer_norm"]
    value = json.loads(json.dumps(load_raw(dump).data[entry.key]))
    del value["trainermon"]["attributes"]
    if attributes is not None:
        value["trainermon"]["attributes"] = attributes

    with pytest.raises(UnknownModuleError, match=message):
        rebuild(dump, {entry.key: value}, entry)
