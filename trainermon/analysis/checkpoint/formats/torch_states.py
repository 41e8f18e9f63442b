"""What files of torch hold beside weights: of one file, of several in a folder, of those beside Hugging Face's weights.

Trainers write the optimizer, its schedule, the state of generators and arguments into files of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.analysis.checkpoint.formats.regular_files import RegularFile, file_names, read_json
from trainermon.analysis.checkpoint.formats.state_dicts import SplitState, split_state
from trainermon.analysis.checkpoint.formats.torch_file import is_torch_file, load_torch_file
from trainermon.analysis.checkpoint.pieces import TensorPieces
from trainermon.core.errors import CheckpointError

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_OTHER_SUFFIXES = (".safetensors", ".npy", ".pkl")
_TRAINER_STATE = "trainer_state.json"  # of transformers' Trainer
_STEP_KEYS = ("step", "global_step", "iteration", "global_steps")


class StatesBeside(NamedTuple):
    """All that a checkpoint holds beside a model's weights.

    Attributes:
        optimizer: The state of optimizers, by kind and name.
        values: All else.
        step: The step that it was saved on; None: nothing says it.
        missing: Sentences on files that could not be read.
        notes: Which files were not looked at, and why.
    """

    optimizer: dict[str, dict[str, TensorPieces]]
    values: dict[str, Any]
    step: int | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_state(path: Path) -> SplitState:
    """Return what one file of torch holds; what is no mapping, as arguments of a trainer, is a value.

    Raises:
        CheckpointError: it is damaged, or of an old format.
    """
    state = load_torch_file(path)
    found = split_state(state, path.name)
    is_empty = not (found.tensors or found.optimizer or found.values or found.unread)
    return found._replace(values={path.stem: state}) if is_empty else found


def joined(states: Mapping[str, SplitState]) -> StatesBeside:
    """Return what `states`, by the names of their files, hold beside weights.

    A name that several of them have gets that of its file in front.
    """
    keys = Counter(key for state in states.values() for key in state.values)
    names = Counter(
        (kind, name) for state in states.values() for kind, tensors in state.optimizer.items() for name in tensors
    )
    optimizer: dict[str, dict[str, TensorPieces]] = {}
    values: dict[str, Any] = {}
    for file, state in states.items():
        stem = Path(file).stem
        values |= {key if keys[key] == 1 else f"{stem}.{key}": value for key, value in state.values.items()}
        for kind, tensors in state.optimizer.items():
            for name, tensor in tensors.items():
                full = name if names[kind, name] == 1 else f"{stem}.{name}"
                optimizer.setdefault(kind, {})[full] = replace(tensor, name=full)
    return StatesBeside(optimizer, values, step_of(values))


def step_of(values: Mapping[str, Any]) -> int | None:
    """Return the step that values of a training say; None: none of them does."""
    return next((values[key] for key in _STEP_KEYS if type(values.get(key)) is int), None)


def read_beside(folder: Path, weights: Mapping[str, SplitState], names: Collection[str]) -> StatesBeside:
    """Return what `weights`, read of the files `names` of a folder, and its other files of torch hold beside them.

    Other files of arrays are not looked at, which is said.
    """
    states, missing, notes = dict(weights), [], []
    for name in sorted(set(file_names(folder)) - set(names)):
        path = folder / name
        if not name.endswith((*TORCH_SUFFIXES, *_OTHER_SUFFIXES)) or path.is_dir():
            continue
        try:
            state = _state_alone(path) if name.endswith(TORCH_SUFFIXES) else None
        except CheckpointError as error:
            missing.append(str(error))
            continue
        if state is None:
            notes.append(f"not looked at: {name}, beside the weights that were")
        else:
            states[name] = state
    found = joined(states)
    step = found.step
    if step is None and _TRAINER_STATE in file_names(folder):
        step = step_of(read_json(folder / _TRAINER_STATE))
    return found._replace(step=step, missing=tuple(missing), notes=tuple(notes))


def _state_alone(path: Path) -> SplitState | None:
    """Return what a file of torch holds, weights as tensors beside the model; None: it is no file of torch."""
    with RegularFile(path) as file:
        if not is_torch_file(file.read(0, min(file.size, 16))):
            return None
    found = read_state(path)
    stored = {name: tensor.pieces[0].stored for name, tensor in found.tensors.items()}
    are_states = all(array.dtype == "uint8" and len(array.shape) == 1 for array in stored.values())  # of generators
    beside = stored if are_states else {path.stem: stored}
    return found._replace(tensors={}, values={**found.values, **beside})
