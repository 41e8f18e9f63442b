"""Which functions of a framework compute, and which only move elements, by their names; what risk levels go by."""

from __future__ import annotations

# Names that msprobe counts among those that multiply, normalise or look up (risk level CORE).
CORE = frozenset(
    [
        "_fused_adamw_",
        "_fused_adam_",
        "matmul",
        "__matmul__",
        "bmm",
        "addmm",
        "addmm_",
        "addbmm",
        "addbmm_",
        "baddbmm",
        "baddbmm_",
        "mm",
        "mv",
        "addmv",
        "addmv_",
        "addr",
        "addr_",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "conv_tbc",
        "convolution",
        "_convolution",
        "chain_matmul",
        "linear",
        "bilinear",
        "multi_dot",
        "vecdot",
        "batch_norm",
        "instance_norm",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "local_response_norm",
        "embedding",
        "embedding_bag",
        "multi_head_attention_forward",
        "scaled_dot_product_attention",
        # of MindSpore
        "batch_mat_mul",
        "dense",
        "flash_attention_score",
    ]
)
# What only moves, makes or converts elements: its output says nothing that its input did not say (risk level FOCUS).
MOVES = frozenset(
    [
        "squeeze",
        "squeeze_",
        "unsqueeze",
        "unsqueeze_",
        "reshape",
        "reshape_as",
        "view",
        "view_as",
        "flatten",
        "unflatten",
        "expand",
        "expand_as",
        "repeat",
        "repeat_interleave",
        "tile",
        "transpose",
        "transpose_",
        "permute",
        "moveaxis",
        "movedim",
        "swapaxes",
        "swapdims",
        "chunk",
        "unsafe_chunk",
        "split",
        "split_with_sizes",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "tensor_split",
        "hsplit",
        "vsplit",
        "dsplit",
        "unbind",
        "stack",
        "cat",
        "concat",
        "concatenate",
        "hstack",
        "vstack",
        "dstack",
        "column_stack",
        "row_stack",
        "align_as",
        "align_to",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "ravel",
        "clamp",
        "unfold",
        "type_as",
        "to",
        "float",
        "double",
        "int",
        "long",
        "half",
        "bfloat16",
        "byte",
        "char",
        "bool",
        "cfloat",
        "numpy",
        "empty",
        "empty_like",
        "zeros",
        "zeros_like",
        "ones",
        "ones_like",
        "full",
        "full_like",
        "arange",
        "linspace",
        "logspace",
        "eye",
        "diag",
        "diagflat",
        "diag_embed",
        "triu",
        "tril",
        "triu_indices",
        "tril_indices",
        "clone",
        "__bool__",
        "stride",
        "__getitem__",
        "__neg__",
        "contiguous",
        "detach",
        "detach_",
        "alias",
        "tensor",
        "as_tensor",
        "view_as_real",
        "view_as_complex",
        "movedim",
        "select",
        "narrow",
        "size",
        "item",
        "tolist",
        "cpu",
        "cuda",
        "type",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "new_tensor",
        "__len__",
        "__iter__",
        "dim",
        "is_floating_point",
        "is_complex",
        "element_size",
        "numel",
        "__hash__",
        "__format__",
        "__repr__",
        "__contains__",
        "broadcast_tensors",
        "broadcast_to",
        "meshgrid",
        # of MindSpore
        "astype",
        "cast",
        "expand_dims",
        "identity",
    ]
)
# With what the keys of torch's functions begin.
TORCHS = ("Tensor.", "Torch.", "Functional.")


# With what those of a framework begin; others are collectives, and custom.
_OF_FRAMEWORK = (*TORCHS, "Mint.", "MintFunctional.", "Primitive.")


def is_core(key: str, name: str) -> bool:
    """Return whether a function multiplies, normalises, looks up, communicates, or is custom (risk level CORE).

    `key` is the call's key in the dump (`Functional.linear.0.forward`), `name` the function's name.
    """
    return _is_among(CORE, key, name) or not key.startswith(_OF_FRAMEWORK)


def only_moves(key: str, name: str) -> bool:
    """Return whether a function only moves, makes or converts elements (left out at risk level FOCUS).

    `key` is the call's key in the dump (`Tensor.view.0.forward`), `name` the function's name.
    """
    return _is_among(MOVES, key, name) and key.startswith(_OF_FRAMEWORK)


def _is_among(names: frozenset[str], key: str, name: str) -> bool:
    # a primitive of MindSpore is a class: `MatMul`, `LayerNorm`
    return _joined(name) in map(_joined, names) if key.startswith("Primitive.") else name in names


def _joined(name: str) -> str:
    return name.replace("_", "").lower()
