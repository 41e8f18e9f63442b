"""What a dumped call of a module computes: one function of its input, its parameters and what it was constructed with.

Decides which function, and what it takes. Attributes and further tensors are in dumps of our own, of torch's own
modules (`trainermon.dump.facts`); others name parameters alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trainermon.accuracy.calls import OperationCall
from trainermon.core.errors import DumpError

_BATCHED_DIMS = 3
_PLAIN = (bool, int, float, str, type(None))


class UnknownModuleError(DumpError):
    """A call of a module cannot be made again from what the dump has of it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DumpedModule:
    """A forward call of a module as a dump has it.

    Attributes:
        class_name: Its class, `LayerNorm`.
        args: Positional arguments.
        kwargs: Keyword arguments.
        parameters: Its own parameters by name.
        tensors: Buffers and other tensors that its forward reads, by name.
        attributes: What it was constructed with, by name; None: the dump does not say.
    """

    class_name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    parameters: Mapping[str, Any]
    tensors: Mapping[str, Any]
    attributes: Mapping[str, Any] | None

    def __getitem__(self, name: str) -> Any:
        """Return a parameter, tensor or attribute; parameters that it does not have are None.

        Raises:
            UnknownModuleError: The dump does not say.
        """
        for known in (self.parameters, self.tensors):
            if isinstance(known.get(name), Tensor):
                return known[name]
        if name in _TENSORS:
            return None
        if self.attributes is None or name not in self.attributes:
            raise UnknownModuleError(f"this dump does not say which `{name}` the {self.class_name} has")
        value = self.attributes[name]
        is_plain = type(value) in _PLAIN or (isinstance(value, list) and all(type(one) in _PLAIN for one in value))
        if not is_plain:
            raise UnknownModuleError(f"`{name}` of the {self.class_name} is no number, word or list of them")
        return tuple(value) if isinstance(value, list) else value


class _Formula(NamedTuple):
    """A function, and by name what it takes of a module behind the module's arguments."""

    function: Callable[..., Any]
    names: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    # What must have this value for the function to be all that the module does.
    plainly: Mapping[str, Any] = {}


_TENSORS = frozenset(["weight", "bias", "pos_weight", "running_mean", "running_var", "in_proj_bias", "out_proj.bias"])
_TENSORS |= {"bias_k", "bias_v"}
_CONVOLUTION = ("weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_ZEROS = {"padding_mode": "zeros"}
_NORM = ("normalized_shape", "weight", "bias", "eps")
_POOL, _WINDOW = ("ceil_mode", "return_indices"), ("kernel_size", "stride", "padding")
_INTERPOLATION = ("size", "scale_factor", "mode", "align_corners")
_DRAWN = ("p", "training")
_FORMULAS: Mapping[str, _Formula] = {
    "Linear": _Formula(functional.linear, ("weight", "bias")),
    "Bilinear": _Formula(functional.bilinear, ("weight", "bias")),
    "Embedding": _Formula(functional.embedding, ("weight",)),
    "Identity": _Formula(torch.clone),
    "Flatten": _Formula(torch.flatten, ("start_dim", "end_dim")),
    "Sigmoid": _Formula(torch.sigmoid),
    "Tanh": _Formula(torch.tanh),
    "ReLU": _Formula(torch.relu),
    "ReLU6": _Formula(functional.relu6),
    "SELU": _Formula(functional.selu),
    "SiLU": _Formula(functional.silu),
    "Mish": _Formula(functional.mish),
    "Hardswish": _Formula(functional.hardswish),
    "Hardsigmoid": _Formula(functional.hardsigmoid),
    "LogSigmoid": _Formula(functional.logsigmoid),
    "Softsign": _Formula(functional.softsign),
    "GELU": _Formula(functional.gelu, (), ("approximate",)),
    "ELU": _Formula(functional.elu, ("alpha",)),
    "CELU": _Formula(functional.celu, ("alpha",)),
    "GLU": _Formula(functional.glu, ("dim",)),
    "LeakyReLU": _Formula(functional.leaky_relu, ("negative_slope",)),
    "Hardtanh": _Formula(functional.hardtanh, ("min_val", "max_val")),
    "Softplus": _Formula(functional.softplus, ("beta", "threshold")),
    "Softshrink": _Formula(functional.softshrink, ("lambd",)),
    "Hardshrink": _Formula(functional.hardshrink, ("lambd",)),
    "PReLU": _Formula(functional.prelu, ("weight",)),
    "Softmax": _Formula(functional.softmax, ("dim",)),
    "LogSoftmax": _Formula(functional.log_softmax, ("dim",)),
    "LayerNorm": _Formula(functional.layer_norm, _NORM),
    "RMSNorm": _Formula(functional.rms_norm, ("normalized_shape", "weight", "eps")),
    "GroupNorm": _Formula(functional.group_norm, ("num_groups", "weight", "bias", "eps")),
    "LocalResponseNorm": _Formula(functional.local_response_norm, ("size", "alpha", "beta", "k")),
    "Dropout": _Formula(functional.dropout, _DRAWN),
    "Dropout1d": _Formula(functional.dropout1d, _DRAWN),
    "Dropout2d": _Formula(functional.dropout2d, _DRAWN),
    "Dropout3d": _Formula(functional.dropout3d, _DRAWN),
    "AlphaDropout": _Formula(functional.alpha_dropout, _DRAWN),
    "Conv1d": _Formula(functional.conv1d, _CONVOLUTION, plainly=_ZEROS),
    "Conv2d": _Formula(functional.conv2d, _CONVOLUTION, plainly=_ZEROS),
    "Conv3d": _Formula(functional.conv3d, _CONVOLUTION, plainly=_ZEROS),
    "ConvTranspose1d": _Formula(functional.conv_transpose1d, _TRANSPOSED),
    "ConvTranspose2d": _Formula(functional.conv_transpose2d, _TRANSPOSED),
    "ConvTranspose3d": _Formula(functional.conv_transpose3d, _TRANSPOSED),
    "MaxPool1d": _Formula(functional.max_pool1d, (*_WINDOW, "dilation"), _POOL),
    "MaxPool2d": _Formula(functional.max_pool2d, (*_WINDOW, "dilation"), _POOL),
    "MaxPool3d": _Formula(functional.max_pool3d, (*_WINDOW, "dilation"), _POOL),
    "AvgPool1d": _Formula(functional.avg_pool1d, (*_WINDOW, "ceil_mode", "count_include_pad")),
    "AvgPool2d": _Formula(functional.avg_pool2d, (*_WINDOW, "ceil_mode", "count_include_pad", "divisor_override")),
    "AvgPool3d": _Formula(functional.avg_pool3d, (*_WINDOW, "ceil_mode", "count_include_pad", "divisor_override")),
    "AdaptiveAvgPool1d": _Formula(functional.adaptive_avg_pool1d, ("output_size",)),
    "AdaptiveAvgPool2d": _Formula(functional.adaptive_avg_pool2d, ("output_size",)),
    "AdaptiveAvgPool3d": _Formula(functional.adaptive_avg_pool3d, ("output_size",)),
    "Upsample": _Formula(functional.interpolate, _INTERPOLATION, ("recompute_scale_factor",)),
    "PixelShuffle": _Formula(functional.pixel_shuffle, ("upscale_factor",)),
    "PixelUnshuffle": _Formula(functional.pixel_unshuffle, ("downscale_factor",)),
    "CrossEntropyLoss": _Formula(
        functional.cross_entropy, (), ("weight", "ignore_index", "reduction", "label_smoothing")
    ),
    "NLLLoss": _Formula(functional.nll_loss, (), ("weight", "ignore_index", "reduction")),
    "MSELoss": _Formula(functional.mse_loss, (), ("reduction",)),
    "L1Loss": _Formula(functional.l1_loss, (), ("reduction",)),
    "SmoothL1Loss": _Formula(functional.smooth_l1_loss, (), ("reduction", "beta")),
    "HuberLoss": _Formula(functional.huber_loss, (), ("reduction", "delta")),
    "KLDivLoss": _Formula(functional.kl_div, (), ("reduction", "log_target")),
    "BCELoss": _Formula(functional.binary_cross_entropy, (), ("weight", "reduction")),
    "BCEWithLogitsLoss": _Formula(
        functional.binary_cross_entropy_with_logits, (), ("weight", "reduction", "pos_weight")
    ),
}


def module_result(module: DumpedModule, result: Any) -> Any:
    """Return what the function of `module_call` gave, where the module gave `result`: attention turns batches."""
    if not _is_turned(module) or not isinstance(result, list):
        return result
    return [result[0].transpose(0, 1), *result[1:]]


def _is_turned(module: DumpedModule) -> bool:
    if module.class_name != "MultiheadAttention" or not module["batch_first"]:
        return False
    return bool(next(iter((*module.args, *module.kwargs.values()))).dim() == _BATCHED_DIMS)


def module_call(module: DumpedModule) -> OperationCall:
    """Return the function that a module computes with its arguments, parameters and attributes.

    Raises:
        UnknownModuleError: It is none of the modules that are one function, or the dump does not say all that it takes.
    """
    special = _SPECIAL.get(module.class_name)
    if special is not None:
        return special(module)
    formula = _FORMULAS.get(module.class_name)
    if formula is None:
        raise UnknownModuleError(f"{module.class_name} is no single function of torch's")
    for name, value in formula.plainly.items():
        if module[name] != value:
            raise UnknownModuleError(f"a {module.class_name} with `{name}` {module[name]!r} is no single function")
    positional = [*module.args, *module.kwargs.values()]  # `forward(self, input)`, the losses' `(input, target)`
    extra = len(positional) - (2 if module.class_name.endswith("Loss") or module.class_name == "Bilinear" else 1)
    if extra > 0:
        raise UnknownModuleError(f"the {module.class_name} was given {len(positional)} arguments")
    keywords = {name: module[name] for name in formula.keywords}
    return OperationCall(formula.function, [*positional, *(module[name] for name in formula.names)], keywords)


def _batch_norm(module: DumpedModule) -> OperationCall:
    uses_batch = module["training"] or not module["track_running_stats"]
    statistics = (None, None) if uses_batch else (module["running_mean"], module["running_var"])
    if not uses_batch and statistics[0] is None:
        raise UnknownModuleError(f"this dump does not have the running statistics of the {module.class_name}")
    settings = (uses_batch, module["momentum"] or 0.0, module["eps"])
    args = [module.args[0], *statistics, module["weight"], module["bias"], *settings]
    return OperationCall(functional.batch_norm, args, {})


def _instance_norm(module: DumpedModule) -> OperationCall:
    return _batch_norm(module)._replace(function=functional.instance_norm)


_ATTENTION = (
    *("query", "key", "value", "key_padding_mask", "need_weights"),
    *("attn_mask", "average_attn_weights", "is_causal"),
)


def _attention(module: DumpedModule) -> OperationCall:
    given = {**dict(zip(_ATTENTION, module.args, strict=False)), **module.kwargs}
    if "in_proj_weight" not in module.parameters or "out_proj.weight" not in module.tensors:
        raise UnknownModuleError("this dump does not have all weights of the MultiheadAttention")
    operands = [given[name] for name in _ATTENTION[:3]]
    if _is_turned(module):
        operands = [operand.transpose(0, 1) for operand in operands]
    args = [
        *operands, module["embed_dim"], module["num_heads"], module["in_proj_weight"], module["in_proj_bias"],
        module["bias_k"], module["bias_v"], module["add_zero_attn"], module["dropout"],
        module["out_proj.weight"], module["out_proj.bias"],
    ]  # fmt: skip
    keywords = {
        "training": module["training"],
        "key_padding_mask": given.get("key_padding_mask"),
        "need_weights": given.get("need_weights", True),
        "attn_mask": given.get("attn_mask"),
        "average_attn_weights": given.get("average_attn_weights", True),
        "is_causal": given.get("is_causal", False),
    }
    return OperationCall(functional.multi_head_attention_forward, args, keywords)


_SPECIAL: Mapping[str, Callable[[DumpedModule], OperationCall]] = {
    **{f"BatchNorm{dims}d": _batch_norm for dims in (1, 2, 3)},
    **{f"InstanceNorm{dims}d": _instance_norm for dims in (1, 2, 3)},
    "MultiheadAttention": _attention,
}
