"""LoRA adapters as PEFT saves them: `adapter_config.json`, and `adapter_model.safetensors` or `.bin`.

Source: huggingface/peft, 0.17: tuners/lora/config.py, tuners/lora/layer.py (`update_layer`: the scaling; `Embedding`,
`Conv2d`: the shapes), tuners/lora/dora.py, utils/other.py (`get_pattern_key`), utils/save_and_load.py (the names).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.analysis.checkpoint.formats.regular_files import file_names, read_json
from trainermon.analysis.checkpoint.formats.safetensors_file import read_weights
from trainermon.analysis.checkpoint.pieces import Checkpoint, TensorPieces
from trainermon.core.errors import CheckpointError

LORA = "lora"
"""The format of an adapter."""
CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?!weight$|bias$)[^.]+)?(?P<kind>\.weight|\.bias)?"
)
_SAVED = re.compile(r"\.(?:modules_to_save|base_layer)(?:\.[^.]+(?=\.))?(?=\.)")  # with the adapter's name behind it
_NOT_READ = ("layer_replication", "target_parameters", "trainable_token_indices", "megatron_config")


class LowRankChange(NamedTuple):
    """What an adapter adds to a weight: `scale` times the product of `b` [out, rank] and `a` [rank, in].

    Attributes:
        a: The second factor; of a convolution with its kernel behind.
        b: The first factor.
        scale: `lora_alpha` over the rank, or over its root.
        is_turned: Whether the weight is [in, out].
        magnitude: Norms that the rows of the sum get (DoRA); None: they stay as they are.
    """

    a: TensorPieces
    b: TensorPieces
    scale: float
    is_turned: bool
    magnitude: TensorPieces | None = None


class Adapter(NamedTuple):
    """What an adapter does to its base: by names of the model, weights that it changes and tensors that it replaces."""

    path: Path
    base_name: str
    changes: Mapping[str, LowRankChange]
    replaced: Mapping[str, TensorPieces]


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter in it."""
    names = file_names(folder)
    return CONFIG in names and any(name in names for name in _WEIGHTS)


def open_adapter(folder: Path) -> Checkpoint:
    """Return the tensors of an adapter, and its configuration.

    Raises:
        CheckpointError: a file is damaged.
    """
    names = file_names(folder)
    weights = read_weights(folder / next(name for name in _WEIGHTS if name in names))
    config = read_json(folder / CONFIG)
    of = config.get("base_model_name_or_path")
    said = f"a {config.get('peft_type', 'PEFT')} adapter{f' of {of}' if of else ''}: it changes a base model"
    values = {"adapter": config}
    return Checkpoint(
        path=folder,
        format=LORA,
        tensors=weights.tensors,
        values=values,
        unread=weights.unread,
        notes=(*weights.notes, f"{said:.160}"),
    )


def read_adapter(checkpoint: Checkpoint) -> Adapter:
    """Return what an adapter that was opened does to its base.

    Raises:
        CheckpointError: it is not of LoRA, does what is not known here, or has a damaged configuration.
    """
    config = checkpoint.values["adapter"]
    kind, odd = config.get("peft_type"), [name for name in _NOT_READ if config.get(name)]
    if kind != "LORA" or odd:
        raise CheckpointError(
            f"{checkpoint.path} is a {kind} adapter{f' with {odd[0]}' if odd else ''}: only plain LoRA is merged here;"
            " merge it with PEFT (merge_and_unload), and compare what that saves"
        )
    parts: dict[str, dict[str, TensorPieces]] = {}
    replaced: dict[str, TensorPieces] = {}
    for full, tensor in checkpoint.tensors.items():
        name = full.removeprefix(_PREFIX)
        part = _PART.fullmatch(name)
        if part is None:
            replaced[_SAVED.sub("", name)] = tensor
        elif part["kind"] == ".bias":
            raise CheckpointError(f"{checkpoint.path}: {full} is a bias of LoRA's own, which is not merged here")
        else:
            parts.setdefault(part["module"], {})[part["part"].replace("embedding_", "")] = tensor
            if "embedding" in part["part"]:
                parts[part["module"]]["embedding"] = tensor
    try:
        changes = dict(_changes(checkpoint.path, config, parts))
    except (re.error, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{checkpoint.path / CONFIG} is damaged ({error}): copy it again") from error
    return Adapter(checkpoint.path, str(config.get("base_model_name_or_path") or ""), changes, replaced)


def _changes(
    path: Path, config: Mapping[str, Any], parts: Mapping[str, Mapping[str, TensorPieces]]
) -> Iterator[tuple[str, LowRankChange]]:
    for module, has in parts.items():
        if not {"lora_A", "lora_B"} <= has.keys():
            raise CheckpointError(f"{path}: {module} has {', '.join(has)}, expected lora_A and lora_B: copy it again")
        a, b = has["lora_A"], has["lora_B"]
        if not all("float" in tensor.dtype and tensor.num_elements for tensor in has.values()):
            raise CheckpointError(f"{path}: {module} has an adapter without numbers: copy it again")
        if min(len(a.shape), len(b.shape)) < 2 or not a.shape[0] == b.shape[1] > 0:
            shapes = f"lora_A {a.dtype}{list(a.shape)} and lora_B {b.dtype}{list(b.shape)}"
            raise CheckpointError(f"{path}: {module} has {shapes}, expected one rank: copy it again")
        is_embedding, rank = "embedding" in has, a.shape[0]
        alpha = _of_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", rank))
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        is_turned = is_embedding or bool(config.get("fan_in_fan_out"))
        yield f"{module}.weight", LowRankChange(a, b, scale, is_turned, has.get("lora_magnitude_vector"))


def _of_pattern(patterns: Any, module: str, usual: float) -> float:
    """Return the value of the first pattern that the end of a module's name has, as PEFT takes it."""
    found = (value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", module))
    return float(next(found, usual))
