"""`rl.align`: a trainer's dump and an engine's, brought to the same prompt tokens and names, to be compared.

The engine's dump is of its prefill; the trainer's of a forward of whole sequences, padded or packed. Prompt tokens are
cut out of both by their ids, so neither side has to be patched to compute the same batch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainermon.analysis.compare.comparison import CompareOptions, Comparison, compare_pair, num_cores, pairs_of
from trainermon.analysis.compare.mappings import NameMappings
from trainermon.analysis.compare.merging.places import find_places
from trainermon.analysis.rl.aligned_dumps import aligned_calls, write_side
from trainermon.analysis.rl.engine_names import ModuleNames, module_names
from trainermon.analysis.rl.prompt_tokens import Integers, TokenPlaces, find_prompts
from trainermon.core.errors import ConfigError, DumpError
from trainermon.core.private_files import replace_file
from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.records import FORWARD, Dump, EntryRecord, TensorRecord

_MODULES = ("Module.", "Cell.")
_NO_TOKENS = ("position", "wpe", "token_type")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Two dumps of the same tokens under the same names.

    Attributes:
        target: The trainer's, a folder that `trainermon compare` and `trainermon graph` take.
        golden: The engine's.
        match: The file for their `--match`; None: none is needed.
        names: How modules correspond.
        lengths: Of the prompts that stand in both dumps.
        modules: How many modules are there by one name on both sides, those that are joined not counted.
    """

    target: Path
    golden: Path
    match: Path | None
    names: ModuleNames
    lengths: tuple[int, ...]
    modules: int

    @property
    def options(self) -> CompareOptions:
        """How the two are compared."""
        return CompareOptions(mappings=NameMappings(joins=self.names.joins))

    def compare(self) -> Comparison:
        """Return where the two differ first, and which module is to blame."""
        (pair,) = pairs_of(self.target, self.golden, self.options).pairs
        return compare_pair(pair, self.options, threads=num_cores())


def align(
    target: Path | str,
    golden: Path | str,
    *,
    names: str = "hf-vllm",
    output: Path | str = "rl_align",
    lengths: Sequence[int] | None = None,
) -> Alignment:
    """Write both dumps again, of the prompt tokens that they share and under the engine's names of modules.

    Only forwards of modules are kept, and of them what has a place per token. Needs torch, and dumps with tensors
    (level L0 or mix, task `tensor`).

    Args:
        target: The trainer's dump, of one step and rank, or a folder with one such dump.
        golden: The engine's: with its prefill of the same prompts, without a prefix cache.
        names: The trainer's and the engine's names: `hf-vllm`, `fsdp-vllm`, `megatron-vllm`, `same` …
        output: Folder that gets `target`, `golden` and `match.yaml`.
        lengths: Of the engine's prompts, in its order; None: its positions or rows tell where each begins.

    Raises:
        DumpError: There is no dump, it has no tensors, or the two share no prompt.
        ConfigError: `names` or `lengths` are wrong.
    """
    mapping, folder = module_names(names), Path(output)
    sides = [_one_dump(Path(path)) for path in (target, golden)]
    engine_call, engine_ids = max(_embeddings(sides[1]), key=lambda found: found[1].size)
    positions = _positions(sides[1], engine_call, engine_ids)
    trainer_call, places, found = _best(sides[0], engine_ids, positions, lengths)
    calls = aligned_calls(_forwards(sides[0], trainer_call), _forwards(sides[1], engine_call), places, mapping)
    both = {call.key for call in calls[0]} & {call.key for call in calls[1]}
    if not both:
        raise DumpError(
            f"no module has one name on both sides under names={names!r}: the trainer has {calls[0][0].key}, the "
            f"engine {calls[1][0].key}"
        )
    note = f"{sum(found):,} tokens of {len(found)} prompts, cut out of {{}} by their ids"
    for side, part, place, dump in zip(("target", "golden"), calls, places, sides, strict=True):
        write_side(folder / side, part, place, [note.format(dump.directory)])
    return Alignment(
        target=folder / "target",
        golden=folder / "golden",
        match=_write_rules(folder / "match.yaml", mapping),
        names=mapping,
        lengths=tuple(found),
        modules=len(both),
    )


def _one_dump(path: Path) -> Dump:
    places = find_places(path)
    if len(places) > 1:
        raise ConfigError(f"{path}: found {len(places)} dumps, expected one; name its folder, as {places[0].directory}")
    return read_dump(places[0].directory)


def _embeddings(dump: Dump) -> list[tuple[int, Integers]]:
    """Return the number and the token ids of each forward of the embedding."""
    found = []
    for entry in dump.entries:
        is_embedding = entry.key.startswith(_MODULES) and entry.direction == FORWARD and entry.parameters
        if not is_embedding or not entry.inputs or not entry.outputs or any(w in entry.module for w in _NO_TOKENS):
            continue
        ids, outcome = entry.inputs[0], entry.outputs[0]
        if ids.dtype.startswith("torch.int") and outcome.shape[:-1] in (ids.shape, ids.shape[::-1]):
            found.append((entry.call, _whole_numbers(ids)))
    if not found:
        raise DumpError(
            f"{dump.directory}: found no forward of a module that takes token ids, expected that of the embedding"
        )
    return found


def _whole_numbers(record: TensorRecord) -> Integers:
    from trainermon.dump.files.tensor_files import load_tensor

    if record.data_path is None:
        raise DumpError("token ids are not in the dump: dump both sides with task: tensor")
    numbers: Integers = load_tensor(record.data_path, record.dtype, record.shape).numpy().astype(np.int64)
    return numbers


def _positions(dump: Dump, call: int, ids: Integers) -> Integers | None:
    """Return the positions that the engine's model was given beside the ids, or None."""
    entries = (entry for entry in itertools.chain(dump.root, dump.entries) if entry.call == call)
    for record in (record for entry in entries for record in entry.inputs):
        if record.dtype.startswith("torch.int") and record.shape == ids.shape and record.data_path is not None:
            found = _whole_numbers(record)
            if not np.array_equal(found, ids):
                return found
    return None


def _best(
    trainer: Dump, engine_ids: Integers, positions: Integers | None, lengths: Sequence[int] | None
) -> tuple[int, tuple[TokenPlaces, TokenPlaces], list[int]]:
    """Return the trainer's forward that has most of the engine's prompts, where they stand, and their lengths."""
    best: tuple[int, tuple[TokenPlaces, TokenPlaces], list[int]] | None = None
    problem: DumpError | None = None
    for call, ids in _embeddings(trainer):
        try:
            one, other, found = find_prompts(ids, engine_ids, engine_positions=positions, lengths=lengths)
        except DumpError as error:
            problem = problem or error
            continue
        if best is None or len(found) > len(best[2]):
            best = call, (one, other), found
    if best is None:
        assert problem is not None
        raise problem
    return best


def _forwards(dump: Dump, call: int) -> list[EntryRecord]:
    found = [
        entry
        for entry in dump.entries
        if entry.key.startswith(_MODULES) and entry.direction == FORWARD and entry.call == call
    ]
    lacking = next((r for entry in found for r in (*entry.inputs, *entry.outputs) if r.data_path is None), None)
    if lacking is not None:
        raise DumpError(f"{dump.directory}: tensors are not in the dump; dump both sides with task: tensor")
    return found


def _write_rules(path: Path, names: ModuleNames) -> Path | None:
    if not names.joins:
        return None
    lines = ["# for --match: modules of the trainer, and the one that the engine has for them"]
    for rule in names.joins:
        target = ", ".join(f'"{name}"' for name in rule.target)
        lines += [f"- target: [{target}]", f'  golden: "{rule.golden[0]}"']
    replace_file(path, ("\n".join(lines) + "\n").encode())
    return path
