"""A small step of every layer of `torch.nn`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

NOT_TRIED: Mapping[str, str] = MappingProxyType(
    {
        "Container": "an old name",
        "DataParallel": "for several devices",
        "ModuleDict": "holds modules, and calls none",
        "ModuleList": "holds modules, and calls none",
        "ParameterDict": "holds parameters",
        "ParameterList": "holds parameters",
        "RNNBase": "the base of others",
        "RNNCellBase": "the base of others",
    }
)


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """A layer and what it is called with.

    Attributes:
        name: The class in `torch.nn`.
        args: What it is made of.
        inputs: Shapes of floating tensors to be drawn, or makers of other arguments.
        kwargs: Keywords of the class.
        called: Keywords of the call.
        label: What tells it from other cases of the class.
    """

    name: str
    args: Sequence[Any]
    inputs: Sequence[Any]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    called: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    label: str = ""

    def __str__(self) -> str:
        return f"{self.name}{self.label and '-'}{self.label}"

    @property
    def is_random(self) -> bool:
        """Whether all that it does may be skipped, as random."""
        return "Dropout" in self.name or self.name in ("FractionalMaxPool2d", "FractionalMaxPool3d", "RReLU")

    def made(self, dtype: torch.dtype) -> tuple[nn.Module, list[Any]]:
        """Return the layer and what it is given, in a type."""
        inputs = [
            torch.randn(one).to(dtype) if isinstance(one, tuple) else one(dtype) if callable(one) else one
            for one in self.inputs
        ]
        return getattr(nn, self.name)(*self.args, **self.kwargs).to(dtype), inputs

    def run(self, layer: nn.Module, inputs: Sequence[Any]) -> None:
        """Call the layer, and go back."""
        given = [one.clone().requires_grad_() if _is_differentiable(one) else one for one in inputs]
        made = layer(
            *[one * 1 if isinstance(one, Tensor) and one.requires_grad else one for one in given], **self.called
        )
        leaves = [one for one in pytree.tree_leaves(made) if isinstance(one, Tensor) and one.requires_grad]
        if leaves:
            torch.autograd.backward(leaves, [torch.randn(one.shape).to(one.dtype) for one in leaves])


def _is_differentiable(value: Any) -> bool:
    """Return whether a value is a floating tensor, and not of signs, which are labels."""
    return isinstance(value, Tensor) and value.is_floating_point() and not bool((value.abs() == 1).all())


def _labels(number: int, *shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda _: torch.randint(0, number, shape)


def _share(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.rand(shape).to(dtype).clamp(0.05, 0.95)


def _signs(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: (torch.randint(0, 2, shape) * 2 - 1).to(dtype)


def _causal(dtype: torch.dtype) -> Tensor:
    return torch.triu(torch.full((12, 12), float("-inf")), 1).to(dtype)


def _of(names: str, args: Sequence[Any], inputs: Sequence[Any], **kwargs: Any) -> list[LayerCase]:
    return [LayerCase(name, args, inputs, kwargs) for name in names.split()]


_ROWS, _LINE, _IMAGE, _VOLUME = (6, 16), (3, 4, 10), (3, 4, 8, 8), (2, 4, 4, 6, 6)
CASES: Sequence[LayerCase] = (
    *_of(
        "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid LogSoftmax Mish PReLU "
        "RReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax Softmin Softplus Softshrink Softsign Tanh Tanhshrink Dropout "
        "AlphaDropout FeatureAlphaDropout",
        (),
        [(64, 48)],
    ),
    LayerCase("GELU", (), [(64, 48)], {"approximate": "tanh"}, label="tanh"),
    LayerCase("Threshold", (0.1, 0.5), [(64, 48)]),
    LayerCase("GLU", (), [(64, 48)]),
    LayerCase("Softmax2d", (), [_IMAGE]),
    *_of("AdaptiveAvgPool1d AdaptiveMaxPool1d", (3,), [_LINE]),
    *_of("AdaptiveAvgPool2d AdaptiveMaxPool2d", (3,), [_IMAGE]),
    *_of("AdaptiveAvgPool3d AdaptiveMaxPool3d", (2,), [_VOLUME]),
    *_of("AvgPool1d MaxPool1d", (2,), [_LINE]),
    *_of("AvgPool2d MaxPool2d", (2,), [_IMAGE]),
    *_of("AvgPool3d MaxPool3d", (2,), [_VOLUME]),
    LayerCase("LPPool1d", (2, 2), [_LINE]),
    LayerCase("LPPool2d", (2, 2), [_IMAGE]),
    LayerCase("LPPool3d", (2, 2), [_VOLUME]),
    LayerCase("FractionalMaxPool2d", (2,), [_IMAGE], {"output_size": 3}),
    LayerCase("FractionalMaxPool3d", (2,), [_VOLUME], {"output_size": 2}),
    LayerCase("MaxUnpool1d", (2,), [(3, 4, 5), lambda _: torch.arange(0, 10, 2).expand(3, 4, 5)]),
    LayerCase("MaxUnpool2d", (2,), [(3, 4, 2, 2), lambda _: torch.tensor([[0, 2], [8, 10]]).expand(3, 4, 2, 2)]),
    LayerCase(
        "MaxUnpool3d", (2,), [(2, 4, 1, 2, 2), lambda _: torch.tensor([[[0, 2], [8, 10]]]).expand(2, 4, 1, 2, 2)]
    ),
    *_of("BatchNorm1d InstanceNorm1d", (4,), [_LINE]),
    *_of("BatchNorm2d SyncBatchNorm InstanceNorm2d", (4,), [_IMAGE]),
    *_of("BatchNorm3d InstanceNorm3d", (4,), [_VOLUME]),
    *_of("LazyBatchNorm1d LazyInstanceNorm1d", (), [_LINE]),
    *_of("LazyBatchNorm2d LazyInstanceNorm2d", (), [_IMAGE]),
    *_of("LazyBatchNorm3d LazyInstanceNorm3d", (), [_VOLUME]),
    LayerCase("GroupNorm", (2, 4), [_IMAGE]),
    *_of("LayerNorm RMSNorm", (16,), [_ROWS]),
    LayerCase("LocalResponseNorm", (2,), [_IMAGE]),
    LayerCase("CrossMapLRN2d", (2,), [_IMAGE]),
    *_of("Conv1d ConvTranspose1d", (4, 6, 3), [_LINE]),
    *_of("Conv2d ConvTranspose2d", (4, 6, 3), [_IMAGE]),
    *_of("Conv3d ConvTranspose3d", (4, 6, 3), [_VOLUME]),
    *_of("LazyConv1d LazyConvTranspose1d", (6, 3), [_LINE]),
    *_of("LazyConv2d LazyConvTranspose2d", (6, 3), [_IMAGE]),
    *_of("LazyConv3d LazyConvTranspose3d", (6, 3), [_VOLUME]),
    LayerCase("Linear", (16, 24), [_ROWS]),
    LayerCase("LazyLinear", (24,), [_ROWS]),
    LayerCase("Bilinear", (16, 8, 5), [_ROWS, (6, 8)]),
    LayerCase("Sequential", (nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), [_ROWS]),
    LayerCase("Embedding", (10, 8), [_labels(10, 5, 7)]),
    LayerCase("EmbeddingBag", (10, 8), [_labels(10, 5, 7)]),
    *_of("Dropout1d", (), [_LINE]),
    *_of("Dropout2d", (), [(8, 40, 5, 5)]),
    *_of("Dropout3d", (), [(8, 40, 2, 3, 3)]),
    LayerCase("Flatten", (), [_IMAGE]),
    LayerCase("Unflatten", (1, (2, 2)), [_IMAGE]),
    LayerCase("Fold", ((4, 5), (2, 2)), [(2, 12, 12)]),
    LayerCase("Unfold", (2,), [_IMAGE]),
    LayerCase("PixelShuffle", (2,), [_IMAGE]),
    LayerCase("PixelUnshuffle", (2,), [_IMAGE]),
    LayerCase("ChannelShuffle", (2,), [_IMAGE]),
    *_of("Upsample UpsamplingNearest2d UpsamplingBilinear2d", (), [_IMAGE], scale_factor=2),
    LayerCase("Upsample", (), [_IMAGE], {"scale_factor": 1.7, "mode": "bicubic"}, label="bicubic"),
    LayerCase("Upsample", (), [_VOLUME], {"scale_factor": 1.3, "mode": "trilinear"}, label="trilinear"),
    *_of(
        "CircularPad1d ReflectionPad1d ReplicationPad1d ZeroPad1d",
        (2,),
        [_LINE],
    ),
    *_of("CircularPad2d ReflectionPad2d ReplicationPad2d ZeroPad2d", (2,), [_IMAGE]),
    *_of("CircularPad3d ReflectionPad3d ReplicationPad3d ZeroPad3d", (2,), [_VOLUME]),
    LayerCase("ConstantPad1d", (2, 0.5), [_LINE]),
    LayerCase("ConstantPad2d", (2, 0.5), [_IMAGE]),
    LayerCase("ConstantPad3d", (2, 0.5), [_VOLUME]),
    *_of("RNN GRU LSTM", (12, 8, 2), [(7, 3, 12)]),
    *_of("RNNCell GRUCell", (12, 8), [(3, 12)]),
    LayerCase("LSTMCell", (12, 8), [(3, 12)]),
    LayerCase("RNN", (12, 8), [(7, 3, 12)], {"nonlinearity": "relu", "bidirectional": True}, label="relu"),
    LayerCase("LSTM", (12, 8), [(3, 7, 12)], {"batch_first": True, "bidirectional": True}, label="both"),
    LayerCase("MultiheadAttention", (64, 4), [(12, 4, 64)] * 3),
    LayerCase(
        "MultiheadAttention", (64, 4), [(4, 12, 64)] * 3, {"batch_first": True}, {"need_weights": False}, "fused"
    ),
    LayerCase(
        "MultiheadAttention", (64, 4), [(4, 12, 64)] * 3 + [None, False, _causal], {"batch_first": True}, label="causal"
    ),
    LayerCase(
        "MultiheadAttention", (64, 4), [(12, 4, 64), (9, 4, 32), (9, 4, 16)], {"kdim": 32, "vdim": 16}, label="kv"
    ),
    LayerCase("TransformerEncoderLayer", (32, 4, 64, 0.0), [(10, 3, 32)]),
    LayerCase("TransformerDecoderLayer", (32, 4, 64, 0.0), [(10, 3, 32), (8, 3, 32)]),
    LayerCase("TransformerEncoder", (nn.TransformerEncoderLayer(32, 4, 64, 0.0), 2, None, False), [(10, 3, 32)]),
    LayerCase("TransformerDecoder", (nn.TransformerDecoderLayer(32, 4, 64, 0.0), 2), [(10, 3, 32), (8, 3, 32)]),
    LayerCase("Transformer", (32, 4, 1, 1, 64, 0.0), [(10, 3, 32), (8, 3, 32)]),
    LayerCase("CosineSimilarity", (), [_ROWS, _ROWS]),
    LayerCase("PairwiseDistance", (), [_ROWS, _ROWS]),
    *_of("L1Loss MSELoss SmoothL1Loss HuberLoss", (), [_ROWS, _ROWS]),
    *_of("BCELoss", (), [_share(6, 16), _share(6, 16)]),
    LayerCase("BCEWithLogitsLoss", (), [_ROWS, _share(6, 16)]),
    LayerCase("KLDivLoss", (), [lambda dtype: torch.randn(_ROWS).log_softmax(-1).to(dtype), _share(6, 16)]),
    *_of("CrossEntropyLoss NLLLoss MultiMarginLoss", (), [_ROWS, _labels(16, 6)]),
    LayerCase("NLLLoss2d", (), [_IMAGE, _labels(4, 3, 8, 8)]),
    LayerCase("LinearCrossEntropyLoss", (16, 9), [_ROWS, _labels(9, 6)]),
    LayerCase("AdaptiveLogSoftmaxWithLoss", (16, 20, [5, 10]), [_ROWS, _labels(20, 6)]),
    LayerCase(
        "CTCLoss",
        (),
        [
            lambda dtype: torch.randn(12, 3, 6).log_softmax(-1).to(dtype),
            lambda _: torch.randint(1, 6, (3, 4)),
            lambda _: torch.full((3,), 12),
            lambda _: torch.full((3,), 4),
        ],
    ),
    LayerCase("PoissonNLLLoss", (), [_ROWS, _share(6, 16)]),
    LayerCase("GaussianNLLLoss", (), [_ROWS, _ROWS, _share(6, 16)]),
    *_of("HingeEmbeddingLoss SoftMarginLoss", (), [_ROWS, _signs(6, 16)]),
    LayerCase("MarginRankingLoss", (), [(8,), (8,), _signs(8)]),
    LayerCase("CosineEmbeddingLoss", (), [_ROWS, _ROWS, _signs(6)]),
    LayerCase("MultiLabelMarginLoss", (), [_ROWS, _labels(16, 6, 16)]),
    LayerCase("MultiLabelSoftMarginLoss", (), [_ROWS, lambda dtype: torch.randint(0, 2, (6, 16)).to(dtype)]),
    *_of("TripletMarginLoss TripletMarginWithDistanceLoss", (), [_ROWS, _ROWS, _ROWS]),
)
