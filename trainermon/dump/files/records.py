"""What a dump holds, once read: tensors, entries, and what is known about the dump itself. Standard library only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainermon.dump.files.verdicts import OperationVerdict, Reproducibility

INFO_FILE = "dump_info.json"
DUMP_FILE = "dump.json"
DEBUG_FILE = "debug.json"
STACK_FILE = "stack.json"
SOURCES_FILE = "sources.json"
CONSTRUCT_FILE = "construct.json"
PARTIAL_FILE = "dump.partial.jsonl"
# In dump_info.json: how long the partial file was when the other files were put in place.
LINES_BYTES = "lines_bytes"
TENSOR_FOLDER = "dump_tensor_data"
TENSOR_SUFFIXES = (".pt", ".npy")

# What we add to an entry of dump.json stands in one dict under this name: msprobe's compare cannot bear a number there.
EXTRA = "trainermon"
TRANSFORMED = "transformed"
"""In the form of a tensor inside a function transform of torch.func: which."""
IN_VMAP = "inside vmap; the shape is that of the whole batch"
IN_GRAD = "inside grad"
RECOMPUTED = "recomputed"
"""In a backward's extra: its forward ran a second time for it (activation checkpointing), unrecorded.

Of modules the number, from 1, of the part of the model that ran again at once; true where that is not known.
"""

UNSEEN = "not looked at"
"""In the form of a value of another class, under `value`: what it holds is not in the dump."""

HOOKED = "hooked"
"""In the form of a gradient: the script has a hook on its tensor; `LATER`: one that runs when the dump has seen it."""
LATER = "later"
BUFFERS = "buffers"
"""In a module's extra: its buffers that a checkpoint has, by name, as they stood before its first forward."""

FORWARD = "forward"
BACKWARD = "backward"
PARAMETERS_GRAD = "parameters_grad"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor that a call took or gave, as read from a dump.

    Statistics are None where there is no such number (an empty tensor, a boolean's mean). Ours are over finite
    elements; msprobe's are over all elements.

    Attributes:
        slot: Its place: `input.0`, `kwargs.mask`, `output.0.1`, `parameters.weight`.
        dtype: Type of its elements.
        shape: Its shape.
        max: Largest element.
        min: Smallest element.
        mean: Mean.
        norm: Root of the sum of squares.
        nans: Number of NaNs; None in msprobe's dumps. So with the next two.
        infs: Number of infinities.
        zeros: Number of zeros.
        requires_grad: Whether autograd follows it.
        order: Position in the sequence in which values became known, over forward and backward; equal orders are one
            unchanged tensor in several slots, which tells whose output is whose input. None: not known.
        hooked: The script itself had a gradient hook on it.
        data_path: File of its elements; None: they were not saved.
    """

    slot: str
    dtype: str
    shape: tuple[int, ...]
    max: float | None = None
    min: float | None = None
    mean: float | None = None
    norm: float | None = None
    nans: int | None = None
    infs: int | None = None
    zeros: int | None = None
    requires_grad: bool = False
    order: int | None = None
    hooked: bool = False
    data_path: Path | None = None

    @property
    def count(self) -> int:
        """Number of elements, from the shape."""
        return math.prod(self.shape)

    @property
    def nonfinite(self) -> bool:
        """Whether an element is NaN or infinite; without counts, by the extrema, the mean and the norm."""
        if self.nans is not None and self.infs is not None:
            return self.nans + self.infs > 0
        return any(value is not None and not math.isfinite(value) for value in (self.max, self.min, self.mean))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EntryRecord:
    """One entry of a dump: one forward or backward of one call of a module or function, or the gradients of parameters.

    `key` is the whole name, `Module.h.0.Linear.forward.2`; `module`, `class_name`, `direction` and `call` (from 0) are
    its parts. In a backward entry `inputs` are the gradients of the module's outputs and `outputs` those of its inputs,
    as autograd sees it. In a `parameters_grad` entry the gradients are `outputs`. `order` is that of the newest value
    (see `TensorRecord`). `parent` is the key of the enclosing call, `stage` the number of the root below which the
    module is (a virtual pipeline stage), `stack` the lines of the script that made the call, innermost first.
    `function` is where torch has the function that was called (`torch.linalg.svd`), if the key does not say so;
    `autocast` the type of autocast that held (`torch.bfloat16`). Both are "" otherwise, and in msprobe's dumps.
    """

    key: str
    module: str
    class_name: str
    direction: str
    call: int
    order: int | None = None
    micro_step: int | None = None
    stage: int = 0
    inputs: tuple[TensorRecord, ...] = ()
    outputs: tuple[TensorRecord, ...] = ()
    parameters: tuple[TensorRecord, ...] = ()
    stack: tuple[str, ...] = ()
    parent: str | None = None
    function: str = ""
    autocast: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """A rank's position in the job, and how what it dumps relates to the whole model.

    `axes` gives the position and the size by axis: `tp`, `cp`, `dp`, `pp`, `ep`. `splits` gives, for each parameter
    that is split over `tp`, the dimension and the number of blocks that each rank has (a gated MLP: 2). `partial` are
    parameters of which each rank of `tp` has only a summand of the gradient (sequence parallel). `renamed` gives the
    path in the whole model of modules that have another name on this rank; it holds for all below them too.
    """

    axes: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    splits: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    partial: tuple[str, ...] = ()
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def name_in_whole(self, path: str) -> str:
        """Return the name that `path`, a module or parameter of this rank, has in the whole model.

        >>> RankLayout(renamed={"decoder.layers.0": "decoder.layers.4"}).name_in_whole("decoder.layers.0.mlp")
        'decoder.layers.4.mlp'
        """
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            other = self.renamed.get(".".join(parts[:length]))
            if other is not None:
                return ".".join([*([other] if other else []), *parts[length:]])
        return path

    def in_whole(self) -> RankLayout:
        """Return a copy whose keys are names in the whole model, for a dump whose names were changed to those."""
        return dataclasses.replace(
            self,
            splits={self.name_in_whole(name): split for name, split in self.splits.items()},
            partial=tuple(map(self.name_in_whole, self.partial)),
            renamed={},
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DumpInfo:
    """What is known about a dump as a whole; a dump of msprobe's has the defaults.

    Attributes:
        id: The alert or command that led to it.
        step: The dumped step; None: not known. So with the next two.
        attempt: The start of the job.
        rank: Global rank.
        reason: Why it was made, in words.
        replay: Whether it is of a replay, not of the step itself.
        micro_steps: Number of replayed micro steps.
        reproduced: Whether the replayed model returned what the step itself had, bit for bit; None: not known.
        lost_nonfinite: The step's own output was not finite, the replay's is.
        reproducibility: The verdict on that; None: no replay.
        reproducibility_reason: Why, in words.
        operations: The first operations of a replay that made a non-finite value from finite ones.
        kept: The file that the step can be replayed from, or why there is none.
        float64_finite: Whether the step is finite with `float64_modules` computed in float64; None: not tried.
        float64_modules: Those modules.
        uncovered: Which micro steps were not replayed, or why the replay was given up.
        absent: What the step had that no replay contains, each in words that follow "of".
        aborted: `refused` or `failed` if a replay was given up before its end; "".
        complete: False: the writer was killed, or lost an entry or a file to an error.
        bytes_written: Bytes of lines and tensors.
        over_quota: Number of tensors that were not written for lack of quota.
        errors: Number of entries that were lost to an error.
        first_error: The first of these errors.
        pipeline_stage: Which stage of a pipeline the rank has.
        pipeline_size: Number of stages.
        replica: Ranks with the same number pass activations to one another; None: to nobody.
        joint: All ranks replayed together.
        bad_shards: Parameters of which the part that only this rank holds was not finite.
        notes: Sentences for the reader.
        skipped_steps: How many steps before it were not dumped, as `max_pending` others waited; of this process.
        layout: What part of the whole model the rank has.
    """

    id: str = ""
    step: int | None = None
    attempt: int | None = None
    rank: int | None = None
    reason: str = ""
    replay: bool = False
    micro_steps: int = 0
    reproduced: bool | None = None
    lost_nonfinite: bool = False
    reproducibility: Reproducibility | None = None
    reproducibility_reason: str = ""
    operations: tuple[OperationVerdict, ...] = ()
    kept: str = ""
    float64_finite: bool | None = None
    float64_modules: tuple[str, ...] = ()
    uncovered: str = ""
    absent: tuple[str, ...] = ()
    aborted: str = ""
    complete: bool = True
    bytes_written: int = 0
    over_quota: int = 0
    errors: int = 0
    first_error: str = ""
    pipeline_stage: int = 0
    pipeline_size: int = 1
    replica: int | None = None
    joint: bool = False
    bad_shards: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    skipped_steps: int = 0
    layout: RankLayout = dataclasses.field(default_factory=RankLayout)

    @property
    def cut_off(self) -> bool:
        """Whether the process ended before the dump did."""
        return not self.complete and not self.errors


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """A dump of one rank and one step, as read from its folder.

    Attributes:
        directory: The folder.
        task: What was recorded: `statistics`, `tensor` …
        level: `L0` modules, `L1` functions, `mix` both.
        info: Facts about the dump as a whole.
        entries: One per forward or backward of a call, in the order in which they became known.
        root: Likewise, those of the model as a whole; msprobe's dumps have none.
    """

    directory: Path
    task: str
    level: str
    info: DumpInfo
    entries: tuple[EntryRecord, ...]
    root: tuple[EntryRecord, ...] = ()

    def vital(self) -> Iterator[TensorRecord]:
        """Yield the tensors that must be finite in a sound step: parameters, their gradients, and the model's output.

        Others may well hold infinities on purpose, as an attention mask does.
        """
        for entry in self.entries:
            yield from entry.outputs if entry.direction == PARAMETERS_GRAD else entry.parameters
        for entry in self.root:
            yield from entry.inputs if entry.direction == BACKWARD else entry.outputs
            yield from entry.parameters

    @property
    def nonfinite(self) -> bool:
        """Whether a parameter, a parameter's gradient, or what the model returned holds NaN or Inf in this step."""
        return any(tensor.nonfinite for tensor in self.vital())
