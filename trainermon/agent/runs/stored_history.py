"""The steps of a run as its page shows them, from the segments of all nodes; of a large run the newest ones first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainermon.agent.runs.model_order import ModelOrder
from trainermon.core.errors import StoreError
from trainermon.core.values import Coordinates, Kind
from trainermon.exporters.step_reader import ChosenSegment, read_steps
from trainermon.exporters.store.blocks import read_rows
from trainermon.exporters.store.segments import SegmentMetadata, read_ends
from trainermon.exporters.stored_steps import StoredStep
from trainermon.exporters.views import RunHistory

WHOLE_ROWS = 16_000_000
"""So many of the newest rows are shown with all that they say; of earlier ones the lines and reduced gradients."""
PREVIEW_ROWS = 1_500_000
"""Of a run with more rows the newest segments are shown first; of these all, unless they have more rows themselves."""
NUMBERS = f"kind IN ('{Kind.LOSS}', '{Kind.STEP}')"
SLIM = f"{NUMBERS} OR kind = '{Kind.GRAD_REDUCED}' AND in_global_norm"


class StoredHistory:
    """What was read of a run's steps: the history that answers for them, and whose they are.

    Args:
        run_dir: The run directory.

    Attributes:
        history: Gives the page's answers.
        attempt: The newest start of the job; 0: nothing was read.
        steps: By rank, its newest step.
        coordinates: By rank, its place in the job.
        damaged: What could not be read.
        is_preview: Whether only the newest segments were read, as the run has many rows.
    """

    def __init__(self, run_dir: Path) -> None:
        self.history = RunHistory(order=ModelOrder(run_dir))
        self.attempt = 0
        self.steps: dict[int, int] = {}
        self.coordinates: dict[int, Coordinates] = {}
        self.damaged: set[str] = set()
        self.is_preview = False

    @property
    def world_size(self) -> int:
        """Number of ranks of the job; 0 before anything is known."""
        return max((self.coordinates[rank].world_size for rank in self.steps), default=0)

    def fill(self, segments: Sequence[Sequence[Path]], *, may_preview: bool) -> None:
        """Read segments by node, oldest first; where `may_preview`, of many rows only the newest segments."""
        ends = self._read_ends(segments)
        num_rows = sum(end.num_rows for end in ends.values())
        if may_preview and num_rows > PREVIEW_ROWS and any(len(of_node) > 1 for of_node in segments):
            self.is_preview = True
            segments = [of_node[-1:] for of_node in segments]
        for step in self._steps(segments, ends):
            self.add(step)

    def read_more(self, segments: Sequence[Sequence[Path]]) -> list[StoredStep]:
        """Return the steps of further segments, which are to be added."""
        return list(self._steps(segments, self._read_ends(segments)))

    def add(self, step: StoredStep) -> None:
        """Add a step that comes after those that were read."""
        self.history.add_stored(step, self.coordinates)
        self.attempt = max(self.attempt, step.attempt)
        self.steps.update(dict.fromkeys(step.ranks.tolist(), step.step))

    def _read_ends(self, segments: Sequence[Sequence[Path]]) -> dict[Path, SegmentMetadata]:
        ends = self._sound(read_ends([path for of_node in segments for path in of_node]))
        for of_node in segments:
            newest = next((ends[path] for path in reversed(of_node) if path in ends), SegmentMetadata())
            self.coordinates |= {rank: Coordinates(**places) for rank, places in newest.coordinates.items()}
        return ends

    def _steps(self, segments: Sequence[Sequence[Path]], ends: Mapping[Path, SegmentMetadata]) -> Iterator[StoredStep]:
        """Yield the steps of the segments of all nodes together; damaged ones are left out and noted."""
        chosen = self._chosen(segments, ends)
        try:
            yield from read_steps(chosen)
        except StoreError:  # nothing was read: it is raised before the first step
            sound = self._sound({segment.path: _try_out(segment.path) for segment in chosen})
            if len(sound) == len(chosen):
                raise
            yield from read_steps([segment for segment in chosen if segment.path in sound])

    def _chosen(self, segments: Sequence[Sequence[Path]], ends: Mapping[Path, SegmentMetadata]) -> list[ChosenSegment]:
        """Return the segments with what is read of each."""
        sound = [[path for path in of_node if path in ends] for of_node in segments]
        if self.is_preview and sum(ends[path].num_rows for of_node in sound for path in of_node) > PREVIEW_ROWS:
            return [ChosenSegment(path, NUMBERS) for of_node in sound for path in of_node]
        chosen = []
        for of_node in sound:
            num_rows = 0
            for path in reversed(of_node):
                chosen.append(ChosenSegment(path, "true" if num_rows <= WHOLE_ROWS // len(sound) else SLIM))
                num_rows += ends[path].num_rows
        return chosen

    def _sound(self, found: Mapping[Path, SegmentMetadata | StoreError]) -> dict[Path, SegmentMetadata]:
        """Return what was found of segments that can be read; note the others."""
        for path, error in found.items():
            if (
                isinstance(error, StoreError) and path.exists()
            ):  # else it was merged, and is read with the next segments
                self.damaged.add(f"{path.name} of {path.parts[-3]} is damaged and left out ({first_line(error)})")
        return {path: end for path, end in found.items() if isinstance(end, SegmentMetadata)}


def _try_out(path: Path) -> SegmentMetadata | StoreError:
    try:
        read_rows(path)
    except StoreError as error:
        return error
    return SegmentMetadata()


def first_line(error: Exception) -> str:
    """Return the first line of an error, of at most 200 characters; its class where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
