"""What operations lose in sums on the way to their result, where moving the inputs by a roundoff does not show it.

For tensors whose channels lie last, torch's norms on the CPU add a channel up in float32, one number after the other;
`group_norm` adds squares, and takes the square of the mean from them. `ctc_loss` adds probabilities up by their
logarithms, whose roundoff is that of the whole path's.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

from trainermon.accuracy.calls import OperationCall, cast, plain

_OF_CTC_LOSS = ("log_probs", "targets", "input_lengths", "target_lengths")
_TRAINING = 5
"""Its place among the arguments of a batch norm, of `torch.nn.functional` and of `torch`."""


def error_of_sums(name: str, call: OperationCall, values: Tensor) -> Tensor | None:
    """Return how many roundoffs each element of `values` may be off by, which has the shape of the first argument.

    The sum of n numbers is off by the square root of n roundoffs, and so is what is divided by it, over the largest
    element of the channel or group. None for operations that are not known to lose anything in sums.
    """
    taken = call.args[0] if call.args else None
    if not isinstance(taken, Tensor) or taken.shape != values.shape or values.dim() < 2 or not values.numel():
        return None
    if name == "batch_norm" and call.kwargs.get("training", len(call.args) > _TRAINING and call.args[_TRAINING]):
        dims = [dim for dim in range(values.dim()) if dim != 1]
        return math.sqrt(values.numel() / values.shape[1]) * values.abs().amax(dims, keepdim=True)
    return _of_groups(call, values) if name == "group_norm" else None


def error_of_paths(name: str, call: OperationCall, gradient: Tensor) -> Tensor | None:
    """Return how many roundoffs each element of a gradient of `ctc_loss` may be off by; None of other operations.

    Every step rounds the logarithm of the probability of the paths up to it, which is at most that of the whole.
    """
    if name != "ctc_loss" or gradient.dim() != 3:
        return error_of_sums(name, call, gradient)
    named = [call.kwargs[key] for key in _OF_CTC_LOSS[len(call.args) :]]
    paths, labels, lengths, label_lengths = (cast(value, gradient.dtype) for value in (*call.args[:4], *named))
    blank = int(call.kwargs.get("blank", call.args[4] if len(call.args) > 4 else 0))
    lost = functional.ctc_loss(paths, labels, lengths, label_lengths, blank, reduction="none", zero_infinity=True)
    return math.sqrt(gradient.shape[0]) * lost[:, None] * gradient.abs().amax(-1, keepdim=True)


def _of_groups(call: OperationCall, values: Tensor) -> Tensor | None:
    groups = call.kwargs.get("num_groups", call.args[1] if len(call.args) > 1 else None)
    if not isinstance(groups, int) or groups < 1 or values.shape[1] % groups:
        return None
    folded = values.abs().reshape(values.shape[0], groups, -1)
    taken = plain(call.args[0]).to(values.dtype).reshape(folded.shape)
    variance = taken.var(-1, correction=0, keepdim=True) + max(1e-30, call.kwargs.get("eps", 1e-5))
    cancelled = 1 + taken.mean(-1, keepdim=True).square() / variance
    lost: Tensor = math.sqrt(folded.shape[-1]) * cancelled * folded.amax(-1, keepdim=True)
    return lost.expand_as(folded).reshape(values.shape)
