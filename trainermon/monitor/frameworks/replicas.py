"""Which of several equal copies of an element stands for all of them in sums over the job."""

from __future__ import annotations

from trainermon.core.errors import AttachError
from trainermon.core.values import Coordinates


def is_first_copy(name: str, *, num_ranks: int, coordinates: Coordinates) -> bool:
    """Return whether this rank's group of `num_ranks` ranks is the one whose elements of parameter `name` count.

    `num_ranks` ranks hold the parameter by the framework's own account. Other ranks of the job are other pipeline
    stages, with other parameters, or tensor-parallel neighbours that hold equal copies: then the first one's counts.

    Raises:
        AttachError: What the other ranks hold is not known.
    """
    others = coordinates.world_size // num_ranks
    if others == coordinates.pp_size:
        return True
    if others == coordinates.pp_size * coordinates.tp_size:
        return coordinates.tp == 0
    raise AttachError(
        f"model: parameter {name} lives on {num_ranks} of {coordinates.world_size} ranks, and what the others hold is "
        f"not known (pipeline stages {coordinates.pp_size}, tensor-parallel size {coordinates.tp_size}); pass tp_group "
        "to set_monitor, and the pipeline group as process_group to TrainerMon"
    )
